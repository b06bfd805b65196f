"""RequestActor, one per slot: one request at a time, from prompt to record.

Receives Begin, Cancel, Abandon, Ask, ReportProgress, what the stream's reader thread tells, and what became of
tool calls. Sends the TransportActor OpenStream and CloseStream, the ToolLoopActor RunTools and DropTools, the
WatchdogActor ProgressReported, and the WorkerActor RequestEnded. Owns the request's record until it ends.
"""

from __future__ import annotations

import time
from typing import assert_never

from llama_worker.actors.base import LiveCount, SupervisedActor
from llama_worker.config import WorkerConfig
from llama_worker.messages import (
    Abandon,
    Ask,
    Begin,
    CallEnded,
    Cancel,
    CloseStream,
    DropTools,
    GetStatus,
    Mailbox,
    OpenStream,
    ProgressReported,
    Question,
    ReadOutput,
    ReportProgress,
    RequestEnded,
    RequestMessage,
    RunTools,
    StreamClosed,
    StreamEvents,
    StreamOpened,
    Tick,
    ToolMessage,
    ToolsRefused,
    TransportMessage,
    WorkerMessage,
)
from llama_worker.request.effects import (
    CloseTurn,
    Effects,
    Finished,
    ForgetTools,
    OpenTurn,
    ReportToolsRefused,
    StartTools,
    WakeAt,
)
from llama_worker.request.state import Request
from llama_worker.runtime.timers import Alarm
from llama_worker.types import RequestFailReason


class RequestActor(SupervisedActor[RequestMessage]):
    """Carries out one request after the other. A crash of this actor fails its request, which keeps its output."""

    role = "request"

    def __init__(
        self,
        parent: Mailbox[WorkerMessage],
        live_count: LiveCount,
        config: WorkerConfig,
        *,
        slot: int,
        unix_offset: float,
    ) -> None:
        super().__init__(parent, live_count, slot=slot)
        self._worker = parent
        self._config = config
        self._unix_offset = unix_offset
        self._request: Request | None = None
        self._transport: Mailbox[TransportMessage] | None = None
        self._tools: Mailbox[ToolMessage] | None = None
        me = self.me()
        self._alarm = Alarm(lambda: me.tell(Tick()))

    def handle(self, message: RequestMessage) -> None:
        """See the messages' own docstrings. What belongs to a request that has ended is dropped."""
        if isinstance(message, StreamEvents):  # nearly all of them
            if self._request is not None:
                self._carry_out(
                    self._request.stream_events(
                        message.stream_id, message.events, carried_data=message.carried_data, at=message.at
                    )
                )
            return
        now = time.monotonic()
        if isinstance(message, Begin):
            self._begin(message, now)
            return
        if isinstance(message, Ask):
            self._answer(message.question)
            return
        request = self._request
        if isinstance(message, ReportProgress):
            if request is not None:
                request.saw_liveness(message.liveness_at)
            progress = request.progress() if request is not None else None
            message.reply_to.tell(ProgressReported(progress=progress, for_verdict=message.for_verdict))
            return
        if request is None:
            return
        match message:
            case StreamOpened(stream_id=stream_id, at=at):
                self._carry_out(request.stream_opened(stream_id, at))
            case StreamClosed(stream_id=stream_id, failure=failure, at=at):
                self._carry_out(request.stream_closed(stream_id, failure, at))
            case CallEnded(batch_id=batch_id, ok=ok, text=text, at=at):
                self._carry_out(request.call_ended(batch_id, ok=ok, text=text, at=at))
            case Cancel(request_id=request_id):
                if request_id == request.request_id:
                    self._carry_out(request.cancel(now))
            case Abandon(request_id=request_id, reason=reason, detail=detail):
                if request_id == request.request_id:
                    self._carry_out(request.abandon(reason, detail, now))
            case Tick():
                self._carry_out(request.tick(now))
            case _:
                assert_never(message)

    def release(self, failure: str | None) -> None:
        """End the request that is under way."""
        request, now = self._request, time.monotonic()
        if request is None:
            return
        reason = RequestFailReason.UNKNOWN_ERROR if failure else RequestFailReason.WORKER_STOPPED
        detail = failure or "the worker was closed"
        try:
            effects = request.abandon(reason, detail, now)
        except Exception:  # it runs the code that has just raised
            effects = request.break_off(reason, detail, now)
        self._carry_out(effects)

    def _begin(self, order: Begin, now: float) -> None:
        self._transport, self._tools = order.transport, order.tools
        self._request = Request(
            request_id=order.request_id,
            submission=order.submission,
            config=self._config,
            prompted=order.prompted,
            opens_thinking=order.opens_thinking,
            unix_offset=self._unix_offset,
            now=now,
        )
        self._carry_out(self._request.begin(now))

    def _answer(self, question: Question) -> None:
        request = self._request
        if request is None or request.request_id != question.request_id:
            self._worker.tell(question)  # the request has ended: the answer is there, behind its record
            return
        match question:
            case GetStatus():
                question.reply.answer(request.status())
            case ReadOutput(text_offset=text_offset, reasoning_offset=reasoning_offset):
                question.reply.answer(request.read_output(text_offset, reasoning_offset))
            case _:
                assert_never(question)

    def _carry_out(self, effects: Effects) -> None:
        if not effects:
            return
        job_name = self._request.job_name if self._request is not None else ""
        assert self._transport is not None
        assert self._tools is not None
        for effect in effects:
            match effect:
                case OpenTurn(stream_id=stream_id, body=body):
                    self._transport.tell(OpenStream(stream_id=stream_id, body=body, reply_to=self.me()))
                case CloseTurn(stream_id=stream_id):
                    self._transport.tell(CloseStream(stream_id=stream_id))
                case StartTools(batch_id=batch_id, calls=calls):
                    self._tools.tell(RunTools(batch_id=batch_id, job_name=job_name, calls=calls, reply_to=self.me()))
                case ForgetTools(batch_id=batch_id):
                    self._tools.tell(DropTools(batch_id=batch_id))
                case WakeAt(at=at):
                    self._alarm.set(at)
                case ReportToolsRefused(detail=detail):
                    self._worker.tell(ToolsRefused(detail=detail))
                case Finished(record=record):
                    self._request = None
                    self._alarm.set(None)
                    self._worker.tell(RequestEnded(record=record))
                case _:
                    assert_never(effect)
