"""The verdicts on silent requests, with a literal clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.profiles import TimeoutProfile
from llama_worker.request.progress import Progress, last_progress_at
from llama_worker.server.timeouts import DataLedger, Inquiry, Triage, ages, busy_neighbour, describe, verdict
from llama_worker.types import RequestFailReason, RequestPhase

WAITING, PREFILL, GENERATING, TOOL, DONE = (
    RequestPhase.WAITING,
    RequestPhase.PREFILL,
    RequestPhase.GENERATING,
    RequestPhase.TOOL,
    RequestPhase.DONE,
)
PROFILE = TimeoutProfile(
    connect_timeout_s=3.0,
    headers_timeout_s=30.0,
    ttft_timeout_s=None,
    prefill_liveness_timeout_s=600.0,
    idle_stream_timeout_s=120.0,
    absolute_timeout_s=None,
    silent_work_timeout_s=1200.0,
)
STALL = RequestFailReason.STALL_TIMEOUT
HEADERS = RequestFailReason.HEADERS_TIMEOUT


def progress(phase: RequestPhase, **times: Any) -> Progress:
    given_times = {"request_id": 1, "dispatched_at": 1000.0, "turn_started_at": 1000.0} | times
    return Progress(phase=phase, **given_times)


def reason_at(
    now: float,
    at: Progress,
    *,
    liveness_at: float | None = None,
    neighbour_data_at: float | None = None,
    profile: TimeoutProfile = PROFILE,
) -> RequestFailReason | None:
    given = verdict(at, liveness_at=liveness_at, neighbour_data_at=neighbour_data_at, profile=profile, now=now)
    return None if given is None else given.reason


# ------------------------------------------------------------------------------------------- SPEC's table


@pytest.mark.parametrize(
    ("now", "at", "heard", "reason"),
    [
        pytest.param(1029.9, progress(WAITING), {}, None, id="headers not due yet"),
        pytest.param(1030.0, progress(WAITING), {}, HEADERS, id="no headers and no work"),
        pytest.param(1050.0, progress(WAITING), {"liveness_at": 1020.1}, None, id="no headers but work"),
        pytest.param(1050.2, progress(WAITING), {"liveness_at": 1020.1}, HEADERS, id="no headers, work ended"),
        pytest.param(
            1030.0,
            progress(WAITING),
            {"liveness_at": 999.0},
            HEADERS,
            id="work before the turn saves nothing",
        ),
        pytest.param(
            1030.0,
            progress(WAITING),
            {"neighbour_data_at": 1029.0},
            None,
            id="queued behind a neighbour that gets data",
        ),
        pytest.param(1609.9, progress(PREFILL, headers_at=1010.0), {}, None, id="prefill counts from headers"),
        pytest.param(1610.0, progress(PREFILL, headers_at=1010.0), {}, STALL, id="silent prefill"),
        pytest.param(
            1615.0,
            progress(PREFILL, headers_at=1010.0, last_data_at=1016.0),
            {},
            None,
            id="role chunk is data",
        ),
        pytest.param(
            1616.0,
            progress(PREFILL, headers_at=1010.0, last_data_at=1016.0),
            {},
            STALL,
            id="only a role chunk",
        ),
        pytest.param(
            1616.0,
            progress(PREFILL, headers_at=1010.0, last_data_at=1016.0),
            {"liveness_at": 1017.0},
            None,
            id="prefill that works",
        ),
        pytest.param(
            1139.9,
            progress(PREFILL, headers_at=1010.0, prompt_progress_at=1020.0),
            {},
            None,
            id="reported prefill not due yet",
        ),
        pytest.param(
            1140.0,
            progress(PREFILL, headers_at=1010.0, prompt_progress_at=1020.0),
            {},
            STALL,
            id="reported prefill has the stream's limit",
        ),
        pytest.param(
            1140.0,
            progress(PREFILL, headers_at=1010.0, prompt_progress_at=1020.0),
            {"liveness_at": 1021.0},
            None,
            id="reported prefill that works",
        ),
        pytest.param(
            1219.9,
            progress(GENERATING, first_token_at=1050.0, last_data_at=1100.0),
            {},
            None,
            id="generating",
        ),
        pytest.param(1220.0, progress(GENERATING, first_token_at=1050.0, last_data_at=1100.0), {}, STALL, id="stalled"),
        pytest.param(
            1220.0,
            progress(GENERATING, first_token_at=1050.0, last_data_at=1100.0),
            {"liveness_at": 1101.0},
            None,
            id="generating in silence, but working",
        ),
        pytest.param(
            2299.9,
            progress(GENERATING, first_token_at=1050.0, last_data_at=1100.0),
            {"liveness_at": 2299.0},
            None,
            id="silent work not due yet",
        ),
        pytest.param(
            2300.0,
            progress(GENERATING, first_token_at=1050.0, last_data_at=1100.0),
            {"liveness_at": 2299.0},
            STALL,
            id="a server that spins",
        ),
        pytest.param(
            2300.0,
            progress(GENERATING, first_token_at=1050.0, last_data_at=1100.0),
            {"liveness_at": 2299.0, "neighbour_data_at": 2000.0},
            None,
            id="the work is a neighbour's",
        ),
        pytest.param(
            2200.0,
            progress(WAITING),
            {"liveness_at": 2199.0},
            STALL,
            id="silent work counts before the headers too",
        ),
        pytest.param(
            2210.0,
            progress(PREFILL, headers_at=2100.0),
            {"liveness_at": 2209.0},
            STALL,
            id="headers are no data for silent work",
        ),
        pytest.param(
            1219.9,
            progress(PREFILL, prompt_progress_at=1100.0, last_data_at=1100.0, repeats=99),
            {"liveness_at": 1219.0},
            None,
            id="the same again and again, not for long",
        ),
        pytest.param(
            1220.0,
            progress(PREFILL, prompt_progress_at=1100.0, last_data_at=1100.0, repeats=99),
            {"liveness_at": 1219.0},
            STALL,
            id="the same again and again, while it computes",
        ),
        pytest.param(99999.0, progress(TOOL, last_data_at=1100.0), {}, None, id="tools have their own deadline"),
        pytest.param(99999.0, progress(DONE), {}, None, id="a request that ended"),
    ],
)
def test_verdict_by_phase(now: float, at: Progress, heard: dict[str, Any], reason: RequestFailReason | None) -> None:
    assert reason_at(now, at, **heard) is reason


@pytest.mark.parametrize("phase", [WAITING, PREFILL, GENERATING, TOOL])
def test_absolute_timeout_counts_from_dispatch_in_every_phase_and_spares_the_server(
    phase: RequestPhase,
) -> None:
    profile = replace(PROFILE, absolute_timeout_s=500.0)
    at = progress(phase, turn_started_at=1499.0, headers_at=1499.0, last_data_at=1499.0)
    assert reason_at(1499.9, at, profile=profile) is None
    given = verdict(at, liveness_at=1499.9, neighbour_data_at=None, profile=profile, now=1500.0)
    assert given is not None
    assert given.reason is RequestFailReason.ABSOLUTE_TIMEOUT
    assert not given.restart


def test_ttft_timeout_runs_anew_in_each_turn_and_ends_with_the_first_token() -> None:
    profile = replace(PROFILE, ttft_timeout_s=60.0)
    at = progress(PREFILL, turn_started_at=1500.0, headers_at=1501.0, prompt_progress_at=1559.0)
    assert reason_at(1559.9, at, liveness_at=1559.0, profile=profile) is None
    assert reason_at(1560.0, at, liveness_at=1559.0, profile=profile) is RequestFailReason.TTFT_TIMEOUT
    generating = replace(at, phase=GENERATING, first_token_at=1559.5)
    assert reason_at(1560.0, generating, profile=profile) is None
    second_turn = replace(at, first_token_at=1100.0)
    assert reason_at(1560.0, second_turn, profile=profile) is RequestFailReason.TTFT_TIMEOUT


def test_only_headers_ttft_and_stall_ask_for_a_restart() -> None:
    profile = replace(PROFILE, ttft_timeout_s=10.0)
    cases = [
        (progress(WAITING), PROFILE, HEADERS, True),
        (progress(WAITING), profile, RequestFailReason.TTFT_TIMEOUT, True),
        (progress(GENERATING), PROFILE, STALL, True),
    ]
    for at, of, reason, restart in cases:
        given = verdict(at, liveness_at=None, neighbour_data_at=None, profile=of, now=1400.0)
        assert given is not None
        assert (given.reason, given.restart) == (reason, restart)


def test_limits_that_are_none_are_off() -> None:
    for phase in (PREFILL, GENERATING, TOOL):
        assert reason_at(1e9, progress(phase, headers_at=1001.0), profile=TimeoutProfile.debug()) is None
    spinning = progress(WAITING)
    assert reason_at(1e9, spinning, liveness_at=1e9 - 1, profile=TimeoutProfile.debug()) is None


def test_the_limit_that_was_over_first_gives_the_reason_however_late_the_tick() -> None:
    profile = replace(PROFILE, absolute_timeout_s=100.0, ttft_timeout_s=50.0)
    assert reason_at(5000.0, progress(WAITING), profile=profile) is HEADERS
    assert reason_at(5000.0, progress(WAITING), liveness_at=1040.0, profile=profile) is (RequestFailReason.TTFT_TIMEOUT)
    assert reason_at(5000.0, progress(TOOL), profile=profile) is RequestFailReason.ABSOLUTE_TIMEOUT


def test_detail_names_the_limit_and_the_times() -> None:
    at = progress(GENERATING, request_id=7, last_data_at=1100.0, last_stream_byte_at=1245.0)
    given = verdict(at, liveness_at=1110.0, neighbour_data_at=None, profile=PROFILE, now=1250.0)
    assert given is not None
    told = "no data and no sign of work for 140.0 s (limit: idle_stream_timeout_s 120); request 7 in phase "
    assert given.detail.startswith(told + "generating, ")
    for part in ("data 150.0 s ago", "last byte 5.0 s ago", "sign of work 140.0 s ago", "headers never"):
        assert part in given.detail


def test_ages_are_seconds_since_each_instant_and_none_where_there_was_none() -> None:
    at = progress(GENERATING, headers_at=1001.0, first_token_at=1002.0, last_data_at=1003.5)
    assert ages(at, liveness_at=999.0, now=1010.0) == {
        "phase": "generating",
        "turn_began_ago_s": 10.0,
        "headers_ago_s": 9.0,
        "first_token_ago_s": 8.0,
        "prompt_progress_ago_s": None,
        "last_data_ago_s": 6.5,
        "last_byte_ago_s": None,
        "last_sign_of_work_ago_s": 11.0,
    }


@pytest.mark.parametrize("phase", [WAITING, PREFILL, GENERATING])
def test_a_turn_that_has_finished_is_not_judged_while_its_end_is_awaited(phase: RequestPhase) -> None:
    short = replace(PROFILE, idle_stream_timeout_s=1.0, ttft_timeout_s=1.0, absolute_timeout_s=1.0)
    assert reason_at(1_000_000.0, progress(phase, concluding=True), profile=short) is None
    assert reason_at(1_000_000.0, progress(phase), profile=short) is not None


def test_last_progress_is_the_latest_of_data_and_this_turns_evidence() -> None:
    at = progress(PREFILL, last_data_at=1010.0, prompt_progress_at=1020.0)
    assert last_progress_at(at, None) == 1020.0
    assert last_progress_at(at, 1030.0) == 1030.0
    assert last_progress_at(progress(WAITING), 999.0) is None
    assert "last sign of work never" in describe(at, liveness_at=None, now=1021.0)


# ---------------------------------------------------------------------------------------------- scenarios


# --------------------------------------------------------------------------------------------- properties

offsets = st.floats(min_value=0.0, max_value=4000.0)
maybe = st.none() | offsets.map(lambda s: 1000.0 + s)
limits = st.none() | st.floats(min_value=0.1, max_value=4000.0)


@st.composite
def progresses(draw: st.DrawFn, phases: tuple[RequestPhase, ...] = tuple(RequestPhase)) -> Progress:
    turn_started_at = 1000.0 + draw(offsets)
    later = st.none() | offsets.map(lambda s: turn_started_at + s)
    return Progress(
        request_id=1,
        phase=draw(st.sampled_from(phases)),
        dispatched_at=1000.0,
        turn_started_at=turn_started_at,
        headers_at=draw(later),
        first_token_at=draw(later),
        prompt_progress_at=draw(later),
        last_data_at=draw(later),
        last_stream_byte_at=draw(later),
    )


profiles = st.builds(
    TimeoutProfile,
    headers_timeout_s=st.floats(min_value=0.1, max_value=4000.0),
    ttft_timeout_s=limits,
    prefill_liveness_timeout_s=limits,
    idle_stream_timeout_s=limits,
    absolute_timeout_s=limits,
    silent_work_timeout_s=limits,
)


@given(progresses(), profiles, maybe, maybe, offsets, offsets)
def test_a_verdict_once_due_stays_the_same_while_nothing_new_is_heard(
    at: Progress,
    profile: TimeoutProfile,
    liveness_at: float | None,
    neighbour: float | None,
    age: float,
    more: float,
) -> None:
    now = at.turn_started_at + age
    heard: dict[str, Any] = {"liveness_at": liveness_at, "neighbour_data_at": neighbour, "profile": profile}
    reason = reason_at(now, at, **heard)
    if reason is not None:
        assert reason_at(now + more, at, **heard) is reason


@given(progresses(), profiles, maybe, maybe, offsets, offsets)
def test_hearing_more_never_brings_a_verdict_on(
    at: Progress,
    profile: TimeoutProfile,
    liveness_at: float | None,
    neighbour: float | None,
    age: float,
    more: float,
) -> None:
    now = at.turn_started_at + age
    if reason_at(now, at, liveness_at=liveness_at, neighbour_data_at=neighbour, profile=profile) is None:
        better_liveness = max(liveness_at or 0.0, 1000.0 + more)
        better_neighbour = max(neighbour or 0.0, 1000.0 + more)
        heard: dict[str, Any] = {"liveness_at": better_liveness, "neighbour_data_at": better_neighbour}
        assert reason_at(now, at, profile=profile, **heard) is None
        newer = replace(at, last_data_at=max(at.last_data_at or 0.0, at.turn_started_at + more))
        assert reason_at(now, newer, profile=profile, **heard) is None


@given(st.lists(st.tuples(st.integers(1, 6), st.floats(0.0, 100.0)), max_size=40), st.integers(1, 7))
def test_the_data_ledger_answers_as_if_it_kept_everything(news: list[tuple[int, float]], asked: int) -> None:
    ledger = DataLedger()
    for request_id, at in news:
        ledger = ledger.heard(request_id, at).heard(request_id, None)
    assert ledger.of_others(asked) == max((at for other, at in news if other != asked), default=None)
    assert len(ledger.latest) <= 2


# ------------------------------------------------------------------------------------------------- inquiry


def test_an_inquiry_is_over_when_all_have_answered_or_ended() -> None:
    one, two = (progress(PREFILL, request_id=number) for number in (1, 2))
    asked = Inquiry(owing=frozenset({1, 2, 3}))
    heard = asked.answered(two).without(3).answered(one)
    assert heard == Inquiry(frozenset(), (two, one))
    assert heard.without(2) == Inquiry(frozenset(), (one,))


def test_an_answer_that_is_not_owed_changes_no_inquiry() -> None:
    asked = Inquiry(owing=frozenset({1})).answered(progress(PREFILL, request_id=1))
    assert asked.answered(progress(PREFILL, request_id=1, last_data_at=5.0)) == asked
    assert asked.answered(progress(PREFILL, request_id=2)) == asked


# ------------------------------------------------------------------------------------------------- triage


@pytest.mark.parametrize(
    ("interval_s", "age_s", "busy"),
    [(5.0, 10.0, True), (5.0, 10.1, False), (0.1, 1.0, True), (0.1, 1.1, False)],
)
def test_a_neighbour_is_busy_within_twice_the_probe_interval_or_a_second(
    interval_s: float, age_s: float, busy: bool
) -> None:
    profile = TimeoutProfile(liveness_probe_interval_s=interval_s)
    assert busy_neighbour(1000.0, profile=profile, now=1000.0 + age_s) is busy
    assert not busy_neighbour(None, profile=profile, now=1000.0)


def judge(triage: Triage, request_id: int, *, busy: bool, newest: int = 9) -> tuple[Triage, bool]:
    return triage.judge(request_id, busy_neighbour=busy, newest_request_id=newest)


def test_a_stall_with_no_busy_neighbour_restarts_at_once() -> None:
    assert judge(Triage(), 1, busy=False) == (Triage(), True)


def test_a_stall_beside_a_busy_neighbour_ends_alone_and_the_second_restarts() -> None:
    triage, restart = judge(Triage(), 1, busy=True)
    assert not restart
    assert judge(triage, 2, busy=True) == (Triage(), True)


def test_the_same_culprit_told_twice_counts_once() -> None:
    triage, _ = judge(Triage(), 1, busy=True)
    assert judge(triage, 1, busy=False) == (triage, False)


def test_only_a_new_request_that_completes_clears_the_first_verdict() -> None:
    triage, _ = judge(Triage(), 1, busy=True, newest=9)
    assert judge(triage.request_completed(9), 2, busy=True)[1]
    after, restart = judge(triage.request_completed(10), 2, busy=True)
    assert not restart
    assert judge(after, 3, busy=True)[1]
    assert Triage().request_completed(1) == Triage()
