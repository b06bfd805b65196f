"""What a RequestActor asks of its stream, message by message."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pykka
import pytest

from llama_worker.actors.base import LiveSet
from llama_worker.actors.request import RequestActor
from llama_worker.mailbox import Mailbox
from llama_worker.request import messages
from llama_worker.request.prompt import write_bios
from llama_worker.request.request import Request
from llama_worker.request.submission import validate_submit
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.server.roll_call import Member
from llama_worker.stream.events import Done, TextDelta
from llama_worker.types.request import RequestFailReason
from tests.unit.request.playbook import CALLS, WITH_TOOLS, call
from tests.unit.runtime.test_host_code import Told


class Bench:
    """The actor, without a thread, and its runtime, whose clock stands still."""

    def __init__(self) -> None:
        self.actor: RequestActor
        self.transport, self.tools, self.worker = Told(), Told(), Told()
        runtime: Any = self
        member = Member(1, "request", 0)
        parts: Any = (self.worker, member, {}, LiveSet(), runtime, WITH_TOOLS)
        asked = {"transport": self.transport, "tools": self.tools, "process": Told()}
        started = RequestActor.start(*parts, **asked)
        pykka.ActorRegistry.unregister(started)

    def run_actor(self, start_thread: Callable[[], None], actor: RequestActor) -> None:
        self.actor = actor

    def now(self) -> float:
        return 0.0

    def call_at(self, at: float, call: Callable[[], object]) -> Mock:
        return Mock()

    def unix(self, at: float) -> float:
        return at

    def write_bios(self, order: messages.WriteBios, reply_to: Mailbox[Any]) -> None:
        self.actor.handle(write_bios(order, WITH_TOOLS, 0.0))

    def begin(self, request_id: int) -> None:
        asked = validate_submit("j", "", "Hi", None, None)
        order = messages.Begin(
            request_id=request_id, submission=asked, prompted=False, opens_thinking=False
        )
        self.actor.handle(order)

    def opened(self, request_id: int) -> None:
        """The stream of its first turn."""
        self.actor.handle(messages.StreamOpened(turn_id=(request_id, 1), at=0.0))

    def report(self) -> Told:
        asker = Told()
        order = messages.ReportProgress(liveness_at=None, for_verdict=True, reply_to=asker)
        self.actor.handle(order)
        return asker

    def cancel(self, request_id: int) -> None:
        reply: WorkerFuture[bool] = WorkerFuture()
        self.actor.handle(messages.CancelRequest(request_id=request_id, reply=reply))


def test_late_stream_does_not_reach_next_request() -> None:
    bench = Bench()
    bench.begin(1)
    bench.cancel(1)  # while its headers are on their way
    bench.begin(2)
    bench.opened(2)
    bench.opened(1)
    closed = messages.StreamClosed(turn_id=(1, 1), failure=None, at=0.0, is_aborted=True)
    bench.actor.handle(closed)
    bench.cancel(2)
    assert isinstance(bench.transport[-1], messages.FlushStream)
    assert bench.transport[-1].turn_id == (2, 1)


def test_progress_is_reported_after_pending_output() -> None:
    bench = Bench()
    bench.begin(1)
    bench.opened(1)
    watchdog = bench.report()
    assert isinstance(bench.transport[-1], messages.FlushStream)
    text = messages.StreamEvents(turn_id=(1, 1), events=(TextDelta("a"),), at=7.0)
    bench.actor.handle(text)
    assert watchdog == []
    bench.actor.handle(messages.StreamFlushed(turn_id=(1, 1)))
    (reported,) = watchdog
    assert reported.progress.last_data_at == 7.0


@pytest.mark.parametrize("canceled_id", [1, 0])
def test_call_unread_at_cancel_is_not_begun(canceled_id: int) -> None:
    """That of an earlier request, which comes late, changes nothing."""
    bench = Bench()
    bench.begin(1)
    bench.opened(1)
    bench.cancel(canceled_id)
    events = (call("add"), CALLS, Done())
    bench.actor.handle(messages.StreamEvents(turn_id=(1, 1), events=events, at=0.0))
    bench.actor.handle(messages.StreamFlushed(turn_id=(1, 1)))
    closed = messages.StreamClosed(turn_id=(1, 1), failure=None, at=0.0, is_aborted=True)
    bench.actor.handle(closed)
    begun = [order for order in bench.tools if isinstance(order, messages.RunTool)]
    assert len(begun) == (canceled_id == 0)


def test_an_ended_request_reports_no_progress() -> None:
    bench = Bench()
    bench.begin(1)
    bench.opened(1)
    watchdog = bench.report()
    bench.actor.handle(messages.Abandon(reason=RequestFailReason.SERVER_DIED, detail="it died"))
    bench.actor.handle(messages.StreamClosed(turn_id=(1, 1), failure=None, at=0.0))
    assert watchdog == bench.report() == []


def test_request_ends_although_its_step_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.begin(1)
    monkeypatch.setattr(Request, "step", Mock(side_effect=RuntimeError))
    bench.actor.release("it crashed")
    ended = bench.worker[-1]
    assert isinstance(ended, messages.RequestEnded)
    assert ended.record.result["fail_detail"] == "it crashed"
