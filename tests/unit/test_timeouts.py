"""The verdicts on silent requests, with a literal clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.profiles import TimeoutProfile
from llama_worker.request.progress import Progress, last_progress_at
from llama_worker.server.timeouts import DataLedger, Inquiry, Triage, Verdict, busy_neighbour, verdict
from llama_worker.types import RequestFailReason, RequestPhase

WAITING, PREFILL, GENERATING = RequestPhase.WAITING, RequestPhase.PREFILL, RequestPhase.GENERATING
TOOL, DONE = RequestPhase.TOOL, RequestPhase.DONE
HEADERS, TTFT = RequestFailReason.HEADERS_TIMEOUT, RequestFailReason.TTFT_TIMEOUT
STALL, ABSOLUTE = RequestFailReason.STALL_TIMEOUT, RequestFailReason.ABSOLUTE_TIMEOUT
PROFILE = TimeoutProfile(
    connect_timeout_s=3.0,
    headers_timeout_s=30.0,
    ttft_timeout_s=None,
    prefill_liveness_timeout_s=600.0,
    idle_stream_timeout_s=120.0,
    absolute_timeout_s=None,
    silent_work_timeout_s=1200.0,
)


def progress(phase: RequestPhase, **times: Any) -> Progress:
    return Progress(phase=phase, **{"request_id": 1, "dispatched_at": 1000.0, "turn_started_at": 1000.0, **times})


def verdict_at(
    now: float,
    at: Progress,
    *,
    liveness_at: float | None = None,
    neighbour_data_at: float | None = None,
    profile: TimeoutProfile = PROFILE,
) -> Verdict | None:
    return verdict(at, liveness_at=liveness_at, neighbour_data_at=neighbour_data_at, profile=profile, now=now)


def reason_at(now: float, at: Progress, **heard: Any) -> RequestFailReason | None:
    found = verdict_at(now, at, **heard)
    return None if found is None else found.reason


# ------------------------------------------------------------------------------------------- SPEC's table

QUEUED = progress(WAITING)
READS = progress(PREFILL, headers_at=1010.0)
HAS_A_ROLE = progress(PREFILL, headers_at=1010.0, last_data_at=1016.0)
REPORTS = progress(PREFILL, headers_at=1010.0, prompt_progress_at=1020.0)
REPEATS = progress(PREFILL, prompt_progress_at=1100.0, last_data_at=1100.0, repeats=99)
WRITES = progress(GENERATING, first_token_at=1050.0, last_data_at=1100.0)


@pytest.mark.parametrize(
    ("at", "liveness_at", "neighbour_data_at", "due_at", "reason"),
    [
        pytest.param(QUEUED, None, None, 1030.0, HEADERS, id="no headers and no work"),
        pytest.param(QUEUED, 1020.0, None, 1050.0, HEADERS, id="no headers, and the work has ended"),
        pytest.param(QUEUED, 999.0, None, 1030.0, HEADERS, id="work before the turn saves nothing"),
        pytest.param(QUEUED, None, 1029.0, 1059.0, HEADERS, id="queued behind a neighbour that gets data"),
        pytest.param(QUEUED, 2199.0, None, 2200.0, STALL, id="silent work counts before the headers too"),
        pytest.param(READS, None, None, 1610.0, STALL, id="silent prefill, from the headers on"),
        pytest.param(READS, 2199.0, None, 2200.0, STALL, id="headers are no data for silent work"),
        pytest.param(HAS_A_ROLE, None, None, 1616.0, STALL, id="a role chunk is data"),
        pytest.param(HAS_A_ROLE, 1017.0, None, 1617.0, STALL, id="prefill that works"),
        pytest.param(REPORTS, None, None, 1140.0, STALL, id="reported prefill has the stream's limit"),
        pytest.param(REPORTS, 1021.0, None, 1141.0, STALL, id="reported prefill that works"),
        pytest.param(REPEATS, 1219.0, None, 1220.0, STALL, id="the same again and again, while it computes"),
        pytest.param(WRITES, None, None, 1220.0, STALL, id="a silent stream"),
        pytest.param(WRITES, 1101.0, None, 1221.0, STALL, id="a silent stream of a server that works"),
        pytest.param(WRITES, 2299.0, None, 2300.0, STALL, id="a server that spins"),
        pytest.param(WRITES, 3199.0, 2000.0, 3200.0, STALL, id="a server whose work is a neighbour's"),
    ],
)
def test_silence_costs_the_server_once_its_limit_is_over(
    at: Progress, liveness_at: float | None, neighbour_data_at: float | None, due_at: float, reason: RequestFailReason
) -> None:
    heard: dict[str, Any] = {"liveness_at": liveness_at, "neighbour_data_at": neighbour_data_at}
    assert verdict_at(due_at - 0.1, at, **heard) is None
    found = verdict_at(due_at, at, **heard)
    assert found is not None
    assert (found.reason, found.restart) == (reason, True)


def test_prefill_that_reports_is_not_measured_by_the_limit_of_one_that_does_not() -> None:
    assert verdict_at(1139.9, REPORTS, profile=replace(PROFILE, prefill_liveness_timeout_s=10.0)) is None


@pytest.mark.parametrize("at", [progress(TOOL, last_data_at=1100.0), progress(DONE)])
def test_tools_have_their_own_deadline_and_what_has_ended_has_none(at: Progress) -> None:
    assert verdict_at(99999.0, at) is None


@pytest.mark.parametrize("phase", [WAITING, PREFILL, GENERATING, TOOL])
def test_absolute_timeout_counts_from_dispatch_in_every_phase_and_spares_the_server(phase: RequestPhase) -> None:
    profile = replace(PROFILE, absolute_timeout_s=500.0)
    at = progress(phase, turn_started_at=1499.0, headers_at=1499.0, last_data_at=1499.0)
    assert verdict_at(1499.9, at, profile=profile) is None
    found = verdict_at(1500.0, at, liveness_at=1499.9, profile=profile)
    assert found is not None
    assert (found.reason, found.restart) == (ABSOLUTE, False)


def test_ttft_timeout_runs_anew_in_each_turn_and_ends_with_the_first_token() -> None:
    heard: dict[str, Any] = {"liveness_at": 1559.0, "profile": replace(PROFILE, ttft_timeout_s=60.0)}
    at = progress(PREFILL, turn_started_at=1500.0, headers_at=1501.0, prompt_progress_at=1559.0)
    assert verdict_at(1559.9, at, **heard) is None
    found = verdict_at(1560.0, at, **heard)
    assert found is not None
    assert (found.reason, found.restart) == (TTFT, True)
    assert reason_at(1560.0, replace(at, phase=GENERATING, first_token_at=1559.5), **heard) is None
    assert reason_at(1560.0, replace(at, first_token_at=1100.0), **heard) is TTFT  # of the turn before


@pytest.mark.parametrize(
    ("phase", "liveness_at"), [(WAITING, 1e9 - 1), (PREFILL, None), (GENERATING, None), (TOOL, None)]
)
def test_limits_that_are_none_are_off(phase: RequestPhase, liveness_at: float | None) -> None:
    assert verdict_at(1e9, progress(phase), liveness_at=liveness_at, profile=TimeoutProfile.debug()) is None


def test_the_limit_that_was_over_first_gives_the_reason_however_late_the_tick() -> None:
    profile = replace(PROFILE, absolute_timeout_s=100.0, ttft_timeout_s=50.0)
    assert reason_at(5000.0, progress(WAITING), profile=profile) is HEADERS
    assert reason_at(5000.0, progress(WAITING), liveness_at=1040.0, profile=profile) is TTFT
    assert reason_at(5000.0, progress(TOOL), profile=profile) is ABSOLUTE


@pytest.mark.parametrize("phase", [WAITING, PREFILL, GENERATING])
def test_a_turn_that_has_finished_is_not_judged_while_its_end_is_awaited(phase: RequestPhase) -> None:
    short = replace(PROFILE, idle_stream_timeout_s=1.0, ttft_timeout_s=1.0, absolute_timeout_s=1.0)
    assert verdict_at(1e6, progress(phase, concluding=True), profile=short) is None
    assert verdict_at(1e6, progress(phase), profile=short) is not None


def test_detail_names_the_limit_and_the_times() -> None:
    at = progress(GENERATING, request_id=7, last_data_at=1100.0, last_stream_byte_at=1245.0)
    found = verdict_at(1250.0, at, liveness_at=1110.0)
    assert found is not None
    assert found.detail == (
        "no data and no sign of work for 140.0 s (limit: idle_stream_timeout_s 120); request 7 in phase generating, "
        "turn began 250.0 s ago, headers never, first token never, prompt progress never, last data 150.0 s ago, "
        "last byte 5.0 s ago, last sign of work 140.0 s ago"
    )


def test_last_progress_is_the_latest_of_data_and_this_turns_evidence() -> None:
    at = progress(PREFILL, last_data_at=1010.0, prompt_progress_at=1020.0)
    assert last_progress_at(at, None) == 1020.0
    assert last_progress_at(at, 1030.0) == 1030.0
    assert last_progress_at(progress(WAITING), 999.0) is None


# --------------------------------------------------------------------------------------------- properties

offsets = st.floats(min_value=0.0, max_value=4000.0)
maybe = st.none() | offsets.map(lambda s: 1000.0 + s)
some = st.floats(min_value=0.1, max_value=4000.0)
profiles = st.builds(
    TimeoutProfile,
    headers_timeout_s=some,
    ttft_timeout_s=st.none() | some,
    prefill_liveness_timeout_s=st.none() | some,
    idle_stream_timeout_s=st.none() | some,
    absolute_timeout_s=st.none() | some,
    silent_work_timeout_s=st.none() | some,
)
what_is_heard = st.fixed_dictionaries({"liveness_at": maybe, "neighbour_data_at": maybe, "profile": profiles})


@st.composite
def progresses(draw: st.DrawFn) -> Progress:
    turn_started_at = 1000.0 + draw(offsets)
    later = st.none() | offsets.map(lambda s: turn_started_at + s)
    instants = ("headers_at", "first_token_at", "prompt_progress_at", "last_data_at", "last_stream_byte_at")
    times = {name: draw(later) for name in instants}
    return progress(draw(st.sampled_from(RequestPhase)), turn_started_at=turn_started_at, **times)


@given(progresses(), what_is_heard, offsets, offsets)
def test_a_verdict_once_due_stays_the_same_while_nothing_new_is_heard(
    at: Progress, heard: dict[str, Any], age: float, more: float
) -> None:
    now = at.turn_started_at + age
    reason = reason_at(now, at, **heard)
    if reason is not None:
        assert reason_at(now + more, at, **heard) is reason


@given(progresses(), what_is_heard, offsets, offsets)
def test_hearing_more_never_brings_a_verdict_on(at: Progress, heard: dict[str, Any], age: float, more: float) -> None:
    now = at.turn_started_at + age
    if verdict_at(now, at, **heard) is None:
        for name in ("liveness_at", "neighbour_data_at"):
            heard[name] = max(heard[name] or 0.0, 1000.0 + more)
        assert verdict_at(now, at, **heard) is None
        newer = replace(at, last_data_at=max(at.last_data_at or 0.0, at.turn_started_at + more))
        assert verdict_at(now, newer, **heard) is None


@given(st.lists(st.tuples(st.integers(1, 6), st.floats(0.0, 100.0)), max_size=40), st.integers(1, 7))
def test_the_data_ledger_answers_as_if_it_kept_everything(news: list[tuple[int, float]], asked: int) -> None:
    ledger = DataLedger()
    for request_id, at in news:
        ledger = ledger.heard(request_id, at).heard(request_id, None)
    assert ledger.of_others(asked) == max((at for other, at in news if other != asked), default=None)
    assert len(ledger.latest) <= 2


# --------------------------------------------------------------------------------------- inquiry and triage


def test_an_inquiry_is_over_when_all_have_answered_once_or_ended() -> None:
    one, two = (progress(PREFILL, request_id=number) for number in (1, 2))
    heard = Inquiry(owing=frozenset({1, 2, 3})).answered(two).without(3).answered(one)
    assert heard == Inquiry(frozenset(), (two, one))
    assert heard.answered(replace(one, last_data_at=5.0)) == heard
    assert heard.without(2) == Inquiry(frozenset(), (one,))


@pytest.mark.parametrize(
    ("interval_s", "age_s", "busy"), [(5.0, 10.0, True), (5.0, 10.1, False), (0.1, 1.0, True), (0.1, 1.1, False)]
)
def test_a_neighbour_is_busy_within_twice_the_probe_interval_or_a_second(
    interval_s: float, age_s: float, busy: bool
) -> None:
    profile = TimeoutProfile(liveness_probe_interval_s=interval_s)
    assert busy_neighbour(1000.0, profile=profile, now=1000.0 + age_s) is busy
    assert not busy_neighbour(None, profile=profile, now=1000.0)


def judge(triage: Triage, request_id: int, *, busy: bool) -> tuple[Triage, bool]:
    return triage.judge(request_id, busy_neighbour=busy, newest_request_id=9)


def test_a_stall_costs_the_server_unless_it_is_the_first_beside_a_busy_neighbour() -> None:
    assert judge(Triage(), 1, busy=False) == (Triage(), True)
    triage, restart = judge(Triage(), 1, busy=True)
    assert not restart
    assert judge(triage, 1, busy=False) == (triage, False)  # the same culprit, told twice
    assert judge(triage, 2, busy=True) == (Triage(), True)


def test_only_a_new_request_that_completes_clears_the_first_verdict() -> None:
    triage, _ = judge(Triage(), 1, busy=True)
    assert judge(triage.request_completed(9), 2, busy=True)[1]
    after, restart = judge(triage.request_completed(10), 2, busy=True)
    assert not restart
    assert judge(after, 3, busy=True)[1]
