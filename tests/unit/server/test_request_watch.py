"""What is kept of the requests in flight between two rounds of verdicts."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.request.progress import Batch, Progress
from llama_worker.server.pace import PACE_MIN_S
from llama_worker.server.request_watch import RequestWatch
from llama_worker.types.request import RequestPhase
from tests.tables import cases
from tests.virtual_watch import generating, unwatch

IDS = (1, 2, 3, 4, 5, 6)
AT_ONCE = TimeoutProfile(idle_stream_timeout_s=1.0)
LIMITS = TimeoutProfile(headers_timeout_s=30.0, idle_stream_timeout_s=120.0)
WAITS = Progress(request_id=2, phase=RequestPhase.WAITING, dispatched_at=0.0, turn_started_at=0.0)
IN_ONE_PIECE = replace(WAITS, request_id=1, in_one_piece=True)
QUEUED = replace(WAITS, request_id=1)
SERVED = replace(QUEUED, phase=RequestPhase.PREFILL)
ABORTED: dict[str, Any] = {"is_broken_off": True, "ended_in": RequestPhase.WAITING}


def watch_of(*request_ids: int, profile: TimeoutProfile = AT_ONCE) -> RequestWatch:
    watch = RequestWatch(profile)
    for request_id in request_ids:
        watch.begin(request_id)
    return watch


def is_given_up(watch: RequestWatch, progress: Progress, now: float) -> bool:
    """In a round of verdicts that begins now, if it ends with this answer."""
    watch.begin_round(now)
    return bool(watch.record_progress(progress, now, for_verdict=True))


@given(
    st.lists(st.tuples(st.sampled_from(IDS), st.floats(0.0, 100.0), st.booleans()), max_size=40),
    st.sampled_from((*IDS, 7)),
)
def test_data_of_ended_requests_still_counts(
    news: list[tuple[int, float, bool]], asked: int
) -> None:
    watch, heard, running = watch_of(*IDS), [], set(IDS)
    for request_id, at, ends in news:
        if request_id not in running:
            continue
        watch.record_progress(generating(at, request_id), at, for_verdict=False)
        heard.append((request_id, at))
        if ends and request_id != asked:
            watch.end(unwatch(request_id).record, at)
            running.remove(request_id)
    assert watch.data_at == max((at for _, at in heard), default=None)
    others = max((at for other, at in heard if other != asked), default=None)
    assert watch.data_of_others(asked) == others


def test_a_stream_that_completes_late_is_no_newer_data() -> None:
    watch = watch_of(1)
    watch.record_progress(generating(5.0), 5.0, for_verdict=False)
    watch.end(unwatch(1, completed=True).record, 9.0)
    assert watch.data_at == 5.0


@pytest.mark.parametrize("served_id", [3, 4, None])
def test_a_new_request_that_is_served_clears_the_server(served_id: int | None) -> None:
    watch, found = watch_of(1, 2, 3), []
    for request_id, now in ((1, 9.0), (2, 10.0)):
        watch.record_progress(generating(now, 3), now, for_verdict=False)
        watch.begin_round(now)
        watch.record_progress(generating(now, 3), now, for_verdict=True)
        for silent_id in {1, 2} & watch.ids:
            at = 0.0 if silent_id == request_id else now
            found += watch.record_progress(generating(at, silent_id), now, for_verdict=True)
        watch.end(unwatch(request_id, is_broken_off=True).record, now)
        if served_id is not None and request_id == 1:
            watch.begin(served_id)
            watch.end(unwatch(served_id, completed=True).record, now)
    assert [(each.request_id, each.restarts_server) for each in found] == [
        (1, False),
        (2, served_id != 4),
    ]


def test_only_a_launchs_first_batch_is_a_cold_one() -> None:
    watch = watch_of(1)
    for batch in (Batch(0.0, 1.0, 512, 512), Batch(1.0, 61.0, 7, 519)):
        watch.record_progress(replace(SERVED, batches=(batch,)), 61.0, for_verdict=False)
    assert watch.pace.longest_standstill_s(512, 512, is_cold=True) == PACE_MIN_S


def test_round_ends_when_all_requests_answered_or_ended() -> None:
    def answer(request_id: int) -> list[int]:
        """Whose verdicts follow."""
        silent: Progress = generating(0.0, request_id)
        return [
            stalled.request_id for stalled in watch.record_progress(silent, 9.0, for_verdict=True)
        ]

    watch = watch_of(1, 2, 3, 4)
    assert watch.begin_round(9.0) == []
    assert (answer(2), answer(4), answer(2)) == ([], [], [])
    for request_id in (3, 4):
        assert watch.end(unwatch(request_id).record, 9.0) == []
    assert answer(1) == [2, 1]
    assert answer(1) == []


IN_A_BATCH: dict[str, Any] = {"is_broken_off": True, "ended_in": RequestPhase.PREFILL}


@cases(
    "reported, ended, given_up_at",
    {
        "in a batch": (None, IN_A_BATCH, 130.0),
        "in a batch, without headers when it was asked": (QUEUED, IN_A_BATCH, 130.0),
        "its actor died, which does not say where": (SERVED, {"is_broken_off": True}, 130.0),
        "before anybody asked how far it was": (None, {"is_broken_off": True}, 130.0),
        "by the server": (None, {"ended_in": RequestPhase.PREFILL}, 30.0),
        "a sign of work": (None, IN_A_BATCH | {"last_data_at": 10.5}, 40.5),
    },
)
def test_an_aborted_requests_batch_may_delay_headers(
    reported: Progress | None, ended: dict[str, Any], given_up_at: float
) -> None:
    for now, is_due in ((given_up_at - 0.1, False), (given_up_at, True)):
        watch = watch_of(1, 2, profile=LIMITS)
        if reported is not None:
            watch.record_progress(reported, 9.0, for_verdict=False)
        watch.end(unwatch(1, **ended).record, 10.0)
        assert is_given_up(watch, WAITS, now) is is_due


@cases(
    "one, ended, given_up_at",
    {
        "aborted": (IN_ONE_PIECE, ABORTED, 170.0),
        "complete: a sign of work": (IN_ONE_PIECE, {"completed": True}, 80.0),
        "aborted when nothing was left to do": (
            replace(IN_ONE_PIECE, concluding=True),
            {**ABORTED, "ended_in": RequestPhase.DONE},
            75.0,
        ),
    },
)
def test_request_waiting_beside_one_piece_reply_has_time(
    one: Progress, ended: dict[str, Any], given_up_at: float
) -> None:
    waits = replace(WAITS, turn_started_at=45.0)
    for now, is_due in ((given_up_at - 0.1, False), (given_up_at, True)):
        watch = watch_of(1, 2, profile=LIMITS)
        watch.record_progress(one, 49.0, for_verdict=False)
        watch.end(unwatch(1, **ended).record, 50.0)
        assert is_given_up(watch, waits, now) is is_due


def test_only_one_that_is_awaited_excuses_others() -> None:
    for one, is_due in ((IN_ONE_PIECE, False), (replace(IN_ONE_PIECE, concluding=True), True)):
        watch = watch_of(1, 2, profile=LIMITS)
        watch.record_progress(one, 30.0, for_verdict=False)
        watch.begin_round(30.0)
        watch.record_progress(WAITS, 30.0, for_verdict=True)
        assert bool(watch.record_progress(one, 30.0, for_verdict=True)) is is_due


def test_consecutive_aborts_hide_no_dead_server() -> None:
    watch = watch_of(2, profile=LIMITS)
    watch.record_progress(WAITS, 0.0, for_verdict=False)
    found: list[float] = []
    for number in range(3, 10):  # clients that give up after 60 s, and try again
        watch.begin(number)
        sent_at = 60.0 * (number - 3)
        one = replace(IN_ONE_PIECE, request_id=number, turn_started_at=sent_at)
        watch.record_progress(one, sent_at + 59.0, for_verdict=False)
        gone_at = sent_at + 60.0
        watch.end(unwatch(number, **ABORTED).record, gone_at)
        found += [gone_at] * is_given_up(watch, WAITS, gone_at)
    assert found[0] == 60.0 + 120.0


@cases(
    "served_id, given_up_at",
    {
        "one that was admitted after it: its own turn is over": (3, 130.0),
        "one that was there before: now it may be its turn": (1, 305.0),
    },
)
def test_a_canceled_queued_request_may_delay_headers(served_id: int, given_up_at: float) -> None:
    profile = TimeoutProfile(headers_timeout_s=30.0, idle_stream_timeout_s=300.0)
    hung = replace(WAITS, request_id=4, turn_started_at=100.0)
    for now, is_due in ((given_up_at - 0.1, False), (given_up_at, True)):
        watch = watch_of(2, served_id, 4, profile=profile)
        watch.record_progress(WAITS, 0.0, for_verdict=False)
        watch.end(unwatch(2, **ABORTED).record, 0.0)
        watch.end(unwatch(served_id, completed=True, last_data_at=5.0).record, 5.0)
        assert is_given_up(watch, hung, now) is is_due
