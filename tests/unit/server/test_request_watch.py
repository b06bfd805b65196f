"""What is kept of the requests in flight between two rounds of verdicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.request.progress import Progress
from llama_worker.server.messages import Unwatch
from llama_worker.server.request_watch import RequestWatch
from llama_worker.types.request import RequestPhase
from tests.virtual_watch import generating

IDS = (1, 2, 3, 4, 5, 6)


def watch_of(*request_ids: int) -> RequestWatch:
    watch = RequestWatch(TimeoutProfile(idle_stream_timeout_s=1.0), epoch=1)
    for request_id in request_ids:
        watch.begin(request_id)
    return watch


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
            watch.end(Unwatch(request_id=request_id, data_at=None, completed=False), at)
            running.remove(request_id)
    assert watch.data_at == max((at for _, at in heard), default=None)
    others = max((at for other, at in heard if other != asked), default=None)
    assert watch.data_of_others(asked) == others


def test_a_round_ends_when_all_requests_answered_or_ended() -> None:
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
        order = Unwatch(request_id=request_id, data_at=None, completed=False)
        assert watch.end(order, 9.0) == []
    assert answer(1) == [2, 1]
    assert answer(1) == []


@pytest.mark.parametrize(
    ("ended", "given_up_at"),
    [
        pytest.param(
            {"is_broken_off": True, "ended_in": RequestPhase.PREFILL}, 130.0, id="in a batch"
        ),
        pytest.param({"is_broken_off": True}, 130.0, id="before anybody asked how far it was"),
        pytest.param({"ended_in": RequestPhase.PREFILL}, 30.0, id="by the server"),
        pytest.param(
            {"is_broken_off": True, "ended_in": RequestPhase.PREFILL, "data_at": 10.5},
            40.5,
            id="a sign of work",
        ),
    ],
)
def test_an_aborted_requests_batch_may_delay_headers(
    ended: dict[str, Any], given_up_at: float
) -> None:
    profile = TimeoutProfile(headers_timeout_s=30.0, idle_stream_timeout_s=120.0)
    waiting = Progress(
        request_id=2, phase=RequestPhase.WAITING, dispatched_at=0.0, turn_started_at=0.0
    )
    for now, is_given_up in ((given_up_at - 0.1, False), (given_up_at, True)):
        watch = RequestWatch(profile, epoch=1)
        for request_id in (1, 2):
            watch.begin(request_id)
        watch.end(Unwatch(**{"request_id": 1, "data_at": None, "completed": False, **ended}), 10.0)
        watch.begin_round(now)
        assert bool(watch.record_progress(waiting, now, for_verdict=True)) is is_given_up


def test_an_aborted_reply_in_one_piece_may_delay_headers() -> None:
    profile = TimeoutProfile(headers_timeout_s=30.0, idle_stream_timeout_s=120.0)
    waiting = Progress(
        request_id=2, phase=RequestPhase.WAITING, dispatched_at=0.0, turn_started_at=0.0
    )
    in_one_piece = replace(waiting, request_id=1, in_one_piece=True)
    gone: dict[str, Any] = {"is_broken_off": True, "ended_in": RequestPhase.WAITING}
    for now, is_given_up in ((169.9, False), (170.0, True)):
        watch = RequestWatch(profile, epoch=1)
        for request_id in (1, 2):
            watch.begin(request_id)
        watch.record_progress(in_one_piece, 40.0, for_verdict=False)
        watch.end(Unwatch(request_id=1, data_at=None, completed=False, **gone), 50.0)
        watch.begin_round(now)
        assert bool(watch.record_progress(waiting, now, for_verdict=True)) is is_given_up


@pytest.mark.parametrize(
    ("served_id", "given_up_at"),
    [
        pytest.param(3, 130.0, id="one that was admitted after it: its own turn is over"),
        pytest.param(1, 305.0, id="one that was there before: now it may be its turn"),
    ],
)
def test_a_canceled_queued_request_may_delay_headers(served_id: int, given_up_at: float) -> None:
    profile = TimeoutProfile(headers_timeout_s=30.0, idle_stream_timeout_s=300.0)
    waiting = Progress(
        request_id=2, phase=RequestPhase.WAITING, dispatched_at=0.0, turn_started_at=0.0
    )
    left: dict[str, Any] = {"is_broken_off": True, "ended_in": RequestPhase.WAITING}
    hung = replace(waiting, request_id=4, turn_started_at=100.0)
    for now, is_given_up in ((given_up_at - 0.1, False), (given_up_at, True)):
        watch = RequestWatch(profile, epoch=1)
        for request_id in (2, served_id, 4):
            watch.begin(request_id)
        watch.record_progress(waiting, 0.0, for_verdict=False)
        watch.end(Unwatch(**{"request_id": 2, "data_at": None, "completed": False, **left}), 0.0)
        watch.end(Unwatch(request_id=served_id, data_at=5.0, completed=True), 5.0)
        watch.begin_round(now)
        assert bool(watch.record_progress(hung, now, for_verdict=True)) is is_given_up
