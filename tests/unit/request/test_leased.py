"""A request that a proxy sends itself: how it ends, and what is told of it meanwhile."""

from functools import partial
from typing import Any

import pytest

from llama_worker.mailbox import Tick
from llama_worker.request.leased import LeasedRequest, LeaseEffects
from llama_worker.request.messages import (
    Abandon,
    AskIfServerDied,
    CancelRequest,
    RequestEnded,
    RequestInput,
    ServerChecked,
)
from llama_worker.request.states import (
    EXIT_REPORT_WAIT_S,
    LATE_EXIT_REPORT_WAIT_S,
    LONGEST_END_S,
    READ_REST_S,
)
from llama_worker.request.table import Admitted, RequestRecord
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.http.leased_exchange import LeasedExchange
from llama_worker.server.blame import is_degenerate
from llama_worker.stream.events import (
    Done,
    EmptyRecord,
    Finish,
    ReasoningDelta,
    ServerError,
    StreamEvent,
    TextDelta,
    UsageReport,
)
from llama_worker.stream.failure import StreamFailure, disconnected
from llama_worker.types.request import RequestFailReason as Reason
from llama_worker.types.request import RequestResult
from tests.simulation.leases import SimAbort

ADMITTED = Admitted(7, 0, "responses:r", 0.0)
DIED = Abandon(reason=Reason.SERVER_DIED, detail="exit code -9")
STALLED = Abandon(reason=Reason.STALL_TIMEOUT, detail="no data")
BROKEN = disconnected("in mid-stream")
REFUSED = StreamFailure(reason=Reason.HTTP_ERROR, detail="500", http_status=500)


def unix(at: float) -> float:
    return at + 100.0


def leased(**how: Any) -> LeasedRequest:
    """Sent at 0.0."""
    request = LeasedRequest(ADMITTED, api_key="sk", unix=unix, **how)
    request.started_waiting()
    return request


def result(effects: LeaseEffects) -> RequestResult:
    """Of a request whose end is the only effect."""
    (ended,) = effects
    assert isinstance(ended, RequestEnded)
    return ended.record.result


def recorded(request: LeasedRequest, at: float = 4.0) -> RequestRecord:
    """Of a request whose sender is done with it."""
    record = request.end(at)
    assert record is not None
    return record


def speaking() -> LeasedRequest:
    request = leased()
    request.opened(1.0)
    request.received([TextDelta("Once ")], 2.0)
    return request


@pytest.mark.parametrize(
    ("events", "finish", "reason"),
    [
        ((Finish("stop"), Done()), "stop", None),
        ((Finish("length"), Done()), "max_tokens", None),
        ((Finish("stop"),), "stop", None),
        ((ServerError("no memory", 500, None), Done()), "failed", Reason.SERVER_ERROR),
        ((), "canceled", Reason.CANCELED),
    ],
)
def test_its_stream_tells_how_it_ended(
    events: tuple[StreamEvent, ...], finish: str, reason: Reason | None
) -> None:
    request = speaking()
    request.received(events, 3.0)
    record = recorded(request)
    assert (record.result["finish_reason"], record.result["fail_reason"]) == (finish, reason)
    assert (record.status["output_chars"], record.result["text"]) == (5, "")
    assert record.status["tool_iters_remaining"] == 0
    assert record.is_leased
    request.await_cause(5.0)  # of nothing
    assert (request.end(5.0), request.step(STALLED, 5.0)) == (None, [])


@pytest.mark.parametrize("event", [Finish("stop"), Done(), ServerError("no memory", 500, None)])
def test_two_seconds_are_left_after_first_possible_end(event: StreamEvent) -> None:
    request = speaking()
    assert request.settled_at is None
    request.received([event], 3.0)
    assert request.progress().concluding
    request.received([Done()], 4.0)
    assert request.settled_at == 5.0


def test_phases_follow_what_came() -> None:
    request = leased()
    assert request.progress().phase == "waiting"
    request.opened(1.0)
    assert request.progress().phase == "prefill"
    request.received([ReasoningDelta("hm")], 2.0)
    assert request.progress().phase == "generating"
    request.saw_liveness(2.5)
    status = request.status()
    assert (status["reasoning_chars"], status["last_liveness_at"]) == (2, 102.5)
    request.end(3.0)
    assert request.progress().phase == "done"


def test_a_slow_client_is_not_waited_for() -> None:
    """While its thread writes to the client, the server's silence proves nothing."""
    request = speaking()
    request.received([EmptyRecord()], 3.0)
    assert not request.progress().concluding
    request.stopped_waiting()
    assert request.progress().concluding
    request.started_waiting()
    assert not request.progress().concluding


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (STALLED, Reason.STALL_TIMEOUT),
        (CancelRequest(request_id=7, reply=WorkerFuture()), Reason.CANCELED),
        (Abandon(request_id=8, reason=Reason.STALL_TIMEOUT, detail=""), None),
    ],
)
def test_what_ends_it_is_its_reason(order: RequestInput, reason: Reason | None) -> None:
    effects = speaking().step(order, 9.0)
    assert (result(effects)["fail_reason"] if effects else None) == reason


def test_what_was_not_sent_is_not_broken_off() -> None:
    request = LeasedRequest(ADMITTED, api_key=None, unix=unix)
    assert request.progress().concluding
    assert not recorded(request).is_broken_off  # its client has left
    request = leased()
    request.stopped_waiting()
    assert recorded(request).is_broken_off


def test_timestamps_count_time_that_was_lost() -> None:
    lost_s = 0.0
    request = LeasedRequest(ADMITTED, api_key=None, unix=lambda at: at + lost_s)
    request.received([TextDelta("a"), UsageReport(3, 1, 0)], 1.0)
    lost_s = 60.0
    record = recorded(request, 4.0)
    status = record.status
    shown = ("created_at", "first_token_at", "last_stream_byte_at", "completed_at")
    assert [status.get(field) for field in shown] == [0.0, 1.0, 61.0, 64.0]
    assert record.result["usage"]["completion_tokens"] == 1


in_every_order = pytest.mark.parametrize("order", [DIED, STALLED])


@in_every_order
def test_a_regular_end_outlives_its_order(order: Abandon) -> None:
    request = speaking()
    request.received([Finish("stop")], 3.0)
    assert result(request.step(order, 3.5))["state"] == "completed"


@in_every_order
def test_a_bad_end_outlives_its_order(order: Abandon) -> None:
    request = leased()
    request.closed(REFUSED)  # and so its client is told
    assert result(request.step(order, 3.0))["fail_reason"] is Reason.HTTP_ERROR
    assert request.given_up is None


def test_a_finish_behind_the_end_changes_nothing() -> None:
    request = speaking()
    request.step(STALLED, 3.0)
    request.received([Finish("stop")], 3.1)
    assert not request.has_finished


def test_what_a_dead_server_had_sent_is_read() -> None:
    request = speaking()
    assert request.step(DIED, 3.0) == []
    assert request.deadline == 3.0 + READ_REST_S
    request.received([TextDelta("upon"), Finish("stop"), Done()], 3.1)
    record = recorded(request)
    assert (record.result["state"], record.status["output_chars"]) == ("completed", 9)


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ([], Reason.SERVER_DIED),
        ([ServerError("no memory", 500, None)], Reason.SERVER_DIED),
        ([Finish("stop")], None),
    ],
)
def test_a_dead_servers_request_ends_in_time(
    rest: list[StreamEvent], reason: Reason | None
) -> None:
    request = speaking()
    assert request.step(Tick(), 2.0) == []
    request.step(DIED, 3.0)
    request.received(rest, 3.1)
    assert request.step(Tick(), 4.9) == []
    ended = request.step(Tick(), 3.0 + READ_REST_S)
    assert result(ended)["fail_reason"] is reason


@pytest.mark.parametrize(
    ("failure", "reason"), [(None, None), (BROKEN, Reason.SERVER_DIED)], ids=["whole", "broken"]
)
def test_whole_reply_may_be_read_after_server_death(
    failure: StreamFailure | None, reason: Reason | None
) -> None:
    exchange = LeasedExchange(
        SimAbort(),  # type: ignore[arg-type]
        new=partial(LeasedRequest, in_one_piece=True),
    )
    exchange.begin(ADMITTED, api_key=None, unix=unix)
    exchange.started_waiting()
    assert exchange.step(DIED, 3.0) == []
    assert not exchange.record_closed(failure)
    record = exchange.end(3.1)
    assert record is not None
    assert record.result["fail_reason"] is reason


def test_of_several_answers_the_tokens_of_one_count() -> None:
    request = leased(answers=3)
    request.opened(1.0)
    request.received([TextDelta("a", 300)], 2.0)
    assert request.progress().tokens == 100
    assert request.status()["tokens_received"] == 300
    request.received([Finish("stop"), Finish("stop")], 3.0)
    assert not request.has_finished
    request.received([Finish("stop")], 4.0)
    assert request.has_finished


GONE, ALIVE = (ServerChecked(request_id=7, is_gone=gone) for gone in (True, False))


def broken() -> LeasedRequest:
    """Its thread has told that the connection broke."""
    request = speaking()
    request.closed(BROKEN)
    assert request.end(3.0) is None
    request.await_cause(3.0)
    request.await_cause(3.1)  # gives no more time
    assert request.deadline == 3.0 + EXIT_REPORT_WAIT_S
    return request


def test_a_servers_death_is_told_as_reported() -> None:
    request = broken()
    request.step(Tick(), 3.2)
    request.step(GONE, 3.3)
    assert result(request.step(DIED, 3.4))["fail_detail"] == DIED.detail
    request = speaking()
    request.step(DIED, 3.0)
    assert result(request.step(STALLED, 3.1))["fail_detail"] == DIED.detail
    assert result(speaking().fail(Reason.UNKNOWN_ERROR, "a bug", 3.0))["fail_detail"] == "a bug"


@pytest.mark.parametrize(
    ("news", "reason"),
    [
        (ALIVE, Reason.STREAM_DISCONNECTED),
        (DIED, Reason.SERVER_DIED),
        (Tick(), Reason.STREAM_DISCONNECTED),
    ],
)
def test_it_is_asked_whether_the_server_died(news: RequestInput, reason: Reason) -> None:
    request = broken()
    assert request.step(Tick(), 3.0 + EXIT_REPORT_WAIT_S) == [AskIfServerDied(request_id=7)]
    assert request.deadline == 3.0 + EXIT_REPORT_WAIT_S + LATE_EXIT_REPORT_WAIT_S
    assert result(request.step(news, request.deadline))["fail_reason"] is reason


@pytest.mark.parametrize("asked_for_s", [0.1, LATE_EXIT_REPORT_WAIT_S - 0.1])
def test_a_server_that_is_gone_is_the_reason(asked_for_s: float) -> None:
    request = broken()
    request.step(Tick(), 3.0 + EXIT_REPORT_WAIT_S)
    gone_at = 3.0 + EXIT_REPORT_WAIT_S + asked_for_s
    assert request.step(GONE, gone_at) == []
    assert request.deadline == gone_at + LATE_EXIT_REPORT_WAIT_S
    ended = request.step(Tick(), request.deadline)
    assert result(ended)["fail_reason"] is Reason.SERVER_DIED
    assert request.deadline is None
    assert gone_at + LATE_EXIT_REPORT_WAIT_S < 3.0 + LONGEST_END_S


def test_a_reply_in_one_piece_is_complete() -> None:
    request = leased(in_one_piece=True)
    request.opened(600.0)
    request.received([], 600.0)
    request.closed(None)
    assert request.has_finished
    record = recorded(request, 600.0)
    assert record.result["state"] == "completed"
    assert not is_degenerate(record)  # nobody looked into it
    stream = leased()
    stream.closed(None)
    assert stream.is_broken  # it had no end of its own


def test_a_client_is_told_why_it_was_given_up() -> None:
    request = speaking()
    assert request.failure_for_client(BROKEN) is BROKEN
    request.step(STALLED, 3.0)
    assert request.failure_for_client(None) is None
    given_up = StreamFailure(reason=Reason.STALL_TIMEOUT, detail="stall_timeout: no data")
    assert request.failure_for_client(BROKEN) == given_up
    request = speaking()
    request.step(DIED, 3.0)
    request.received([Finish("stop")], 3.1)
    assert request.failure_for_client(BROKEN) is BROKEN


def test_a_refusal_is_told_without_the_key() -> None:
    request = leased()
    request.closed(StreamFailure(reason=Reason.HTTP_ERROR, detail="sk is bad", http_status=401))
    record = recorded(request)
    assert (record.http_status, record.result["fail_detail"]) == (401, "*** is bad")


@pytest.mark.parametrize(("said", "nothing"), [((TextDelta("x"),), False), ((), True)])
def test_output_that_went_to_the_client_is_output(
    said: tuple[StreamEvent, ...], nothing: bool
) -> None:
    request = leased()
    request.opened(1.0)
    request.received([*said, Finish("stop"), Done()], 2.0)
    assert is_degenerate(recorded(request)) is nothing
    nowhere_else = {"text": "", "reasoning": "", "text_offset": 3, "reasoning_offset": 0}
    assert request.read_output(3, 0) == {"ok": True, "done": True, **nowhere_else}
