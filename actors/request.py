"""RequestActor, one per slot: carries out one request at a time, from prompt to record.

Receives Begin, BeginLease, EndLease, CancelRequest, Abandon, GetStatus, ReadOutput, ReportProgress,
its stream's news, and the outcomes of tool calls, BIOS texts and checks of the server. Carries out
the request's orders: sends the TransportActor OpenStream, CloseStream, FlushStream and HurryStream,
the ToolLoopActor RunTool and DropTool, the ProcessActor CheckServer, the WatchdogActor
ProgressReported, the WorkerActor SignalEmitted, ToolsRefused and RequestEnded. Owns the request's
record until the request ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar, assert_never

from msgspec.structs import asdict

from llama_worker.actors.base import Child, message_types
from llama_worker.actors.messages import BeginLease, EndLease, RequestMessage
from llama_worker.errors import described_error
from llama_worker.mailbox import Mailbox
from llama_worker.request import messages
from llama_worker.request.output import OpenQuestions, can_answer
from llama_worker.request.request import Request
from llama_worker.runtime.http.leased_exchange import LeasedExchange
from llama_worker.stream.lazy_reading import HURRY_S
from llama_worker.types.request import RequestFailReason

M = TypeVar("M")
# messages that are handled only after a flush of the stream
AfterFlush = messages.Question | messages.CancelRequest | messages.Abandon | messages.ReportProgress


class RequestActor(Child[RequestMessage]):
    """Carries out one request after the other. If this actor crashes, its request fails, and keeps
    its output."""

    role = "request"
    accepts = message_types(RequestMessage)

    def __init__(
        self,
        *args: Any,
        transport: Mailbox[messages.TransportMessage],
        tools: Mailbox[messages.ToolMessage],
        process: Mailbox[messages.CheckServer],
    ) -> None:
        super().__init__(*args)
        self._transport = transport
        self._tools = tools
        self._process = process
        self._request: Request | LeasedExchange | None = None
        self._stream: messages.TurnId | None = None  # the open stream, if there is one
        self._hurried_at = -math.inf
        # messages that wait for a flush, each with the stream that is flushed
        self._awaiting_flush: deque[tuple[messages.TurnId, AfterFlush]] = deque()
        self._waiting_reads = OpenQuestions[messages.ReadOutput]()
        self._is_launch_over = False

    def handle(self, message: RequestMessage) -> None:
        """Step the request, and carry out its effects. A message for a request that has ended is
        dropped."""
        try:
            self._dispatch(message)
        except MemoryError as error:  # a shortage of this machine must not end other requests
            if self._request is None:
                raise
            self.release(described_error(error))
            if self._request is not None:  # there was no memory for its record, either
                raise

    def _dispatch(self, message: RequestMessage) -> None:
        match message:
            case messages.StreamEvents():  # nearly all messages
                if self._request is not None:
                    self._send(self._request.step(message, message.at))
            case messages.Begin():
                self._begin(message)
            case BeginLease():
                self._request = message.exchange
            case EndLease():
                self._end_lease(message)
            case (
                messages.GetStatus()
                | messages.ReadOutput()
                | messages.CancelRequest()
                | messages.ReportProgress()  # a verdict must count what the stream has not told yet
            ):
                self._flush_and_answer(message)
            case messages.Abandon(reason=reason) if reason is not RequestFailReason.SERVER_DIED:
                self._flush_and_answer(message)  # a dead server's stream is read to its end instead
            case messages.StreamFlushed(turn_id=turn_id):
                if self._awaiting_flush and self._awaiting_flush[0][0] == turn_id:
                    self._answer(self._awaiting_flush.popleft()[1])
            case messages.StreamClosed(turn_id=turn_id):
                if self._stream == turn_id:
                    self._stream = None
                self._step(message)
                # The stream is complete; the TransportActor's own answer may come much later.
                while self._awaiting_flush and self._awaiting_flush[0][0] == turn_id:
                    self._answer(self._awaiting_flush.popleft()[1])
            case messages.StreamOpened(turn_id=turn_id):
                # That of a cancelled request may come late.
                if self._request is not None and self._request.request_id == turn_id[0]:
                    self._stream, self._hurried_at = turn_id, -math.inf
                self._step(message)
            case _:
                self._step(message)

    def release(self, failure: str | None) -> None:
        request, now = self._request, self._runtime.now()
        if request is None:
            return
        reason = RequestFailReason.UNKNOWN_ERROR if failure else RequestFailReason.WORKER_STOPPED
        detail = failure or "the worker was closed"
        stopped = messages.Abandon(reason=reason, detail=detail)
        given_up = (each for _, each in self._awaiting_flush if isinstance(each, messages.Abandon))
        effects: Sequence[messages.RequestOutput]
        try:
            effects = request.step(next(given_up, stopped), now)
        except Exception:  # `step` runs the code that has just raised
            effects = request.fail(reason, detail, now)
        self._send(effects)

    def abandon(self, detail: str) -> None:
        """End the request with the output that it has shown, without code that may be stuck."""
        if self._request is not None:
            now, reason = self._runtime.now(), RequestFailReason.UNKNOWN_ERROR
            for effect in self._request.fail(reason, detail, now):
                if isinstance(effect, messages.SignalEmitted | messages.RequestEnded):
                    self.tell_worker(effect)

    def _begin(self, order: messages.Begin) -> None:
        now = self._runtime.now()
        self._request = Request(order, config=self._config, unix=self._runtime.unix, now=now)
        self._send(self._request.begin(now))

    def _end_lease(self, order: EndLease) -> None:
        if self._request is order.exchange:
            order.exchange.await_cause(self._runtime.now())
            if order.exchange.has_ended:
                self._forget_request()
            self._send([])

    def _step(self, message: messages.RequestInput) -> None:
        if self._request is not None:
            self._send(self._request.step(message, self._runtime.now()))

    def _flush_and_answer(self, question: AfterFlush) -> None:
        """Answer, or end the request, after everything that the stream has received by now. A read
        that waits needs no flush: it gets new output at once."""
        waits = isinstance(question, messages.ReadOutput) and question.wait
        if self._stream is not None and not waits:
            # A TransportActor that has ended has closed the stream: StreamClosed follows.
            self._transport.tell(messages.FlushStream(turn_id=self._stream, reply_to=self.me()))
            self._awaiting_flush.append((self._stream, question))
        else:
            self._answer(question)

    def _answer(self, question: AfterFlush) -> None:
        request = self._request
        if request is None:
            return  # the request has ended: the WorkerActor answers from its record
        match question:
            case messages.Abandon() | messages.CancelRequest():
                self._step(question)
            case messages.ReportProgress(liveness_at=liveness_at, for_verdict=for_verdict):
                request.saw_liveness(liveness_at)
                progress = request.progress()
                question.reply_to.tell(
                    messages.ProgressReported(progress=progress, for_verdict=for_verdict)
                )
            case _ if question.request_id != request.request_id:
                pass  # about a request that has ended
            case messages.GetStatus():
                question.reply.answer(request.status())
            case messages.ReadOutput():
                if can_answer(question, *request.output_chars):
                    self._answer_read(question, request)
                else:
                    self._waiting_reads.add(question)
                    self._hurry()
            case _:
                assert_never(question)

    def _answer_read(
        self, question: messages.ReadOutput, request: Request | LeasedExchange
    ) -> None:
        question.reply.answer(request.read_output(question.text_offset, question.reasoning_offset))

    def _answer_waiting(self) -> None:
        """Answer the waiting reads for which there is output."""
        if self._request is not None:
            chars = self._request.output_chars
            for question in self._waiting_reads.take(lambda read: can_answer(read, *chars)):
                self._answer_read(question, self._request)
            self._hurry()

    def _hurry(self) -> None:
        """Send HurryStream, unless the last one still holds: a reader asks again for each token."""
        now = self._runtime.now()
        is_hurried = now < self._hurried_at + HURRY_S / 2
        if self._waiting_reads and self._stream is not None and not is_hurried:
            self._hurried_at = now
            self._transport.tell(messages.HurryStream(turn_id=self._stream))

    def _is_to_end(self) -> bool:
        """Whether the request is canceled or given up as soon as its stream is flushed."""
        request_id = self._request.request_id if self._request is not None else None
        return any(
            isinstance(order, messages.Abandon | messages.CancelRequest)
            and order.request_id in (None, request_id)
            for _, order in self._awaiting_flush
        )

    def _forget_request(self) -> None:
        """Call it once the request has its record: the WorkerActor answers what is left from it."""
        self._request = self._stream = None
        self._awaiting_flush.clear()
        self._waiting_reads = OpenQuestions()

    def _send(self, effects: Sequence[messages.RequestOutput]) -> None:
        for effect in effects:
            self._carry_out(effect)
        if self._waiting_reads:
            self._answer_waiting()
        request = None if self._is_launch_over else self._request
        self._alarm.set(request.deadline if request is not None else None)

    def _tell(self, actor: Mailbox[M], order: M) -> None:
        """Send an order to another of the launch's actors. If that has ended, or this one was given
        up, the launch is over: until the WorkerActor says why, however late, nothing else is begun
        or concluded."""
        if self.is_given_up or not actor.tell(order):
            self._is_launch_over = True

    def _carry_out(self, effect: messages.RequestOutput) -> None:
        me = self.me()
        match effect:
            case messages.PostChat():
                self._tell(self._transport, messages.OpenStream(**asdict(effect), reply_to=me))
            case messages.CloseStream():
                self._tell(self._transport, effect)
            case messages.CallTool():
                if not self._is_to_end():  # else an answer to the flush ends it before any call
                    self._tell(self._tools, messages.RunTool(**asdict(effect), reply_to=me))
            case messages.DropTool():
                self._tell(self._tools, effect)
            case messages.WriteBios(turn_id=turn_id):
                try:
                    self._runtime.write_bios(effect, me)
                except RuntimeError as error:  # the system has no thread left
                    me.tell(messages.BiosWritten(turn_id=turn_id, bios="", error=str(error)))
            case messages.AskIfServerDied(request_id=request_id):
                self._tell(self._process, messages.CheckServer(request_id=request_id, reply_to=me))
            case messages.SignalEmitted() | messages.ToolsRefused() | messages.RequestEnded():
                self.tell_worker(effect)
                if isinstance(effect, messages.RequestEnded):
                    self._forget_request()
            case _:
                assert_never(effect)
