"""One request from prompt to record: what it waits for, and what follows from what it hears.
Sans-IO.

A `Request` is driven by one actor, which sends the messages that `begin` and `step` return, in
order, and calls `step` with a Tick at `deadline`. The last message of a request is RequestEnded;
after it nothing changes any more.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import masked
from llama_worker.gaps import gap_s
from llama_worker.messages import (
    Abandon,
    Begin,
    BiosWritten,
    CallEnded,
    CancelRequest,
    CloseStream,
    DropTool,
    Mailbox,
    OpenStream,
    RequestEnded,
    RequestMessage,
    RunBios,
    RunTool,
    SignalEmitted,
    StreamClosed,
    StreamEvents,
    StreamOpened,
    Tick,
    ToolsRefused,
)
from llama_worker.request.body import keeps_prompt_end, offered_tools, request_body, runaway_tokens
from llama_worker.request.conversation import Conversation
from llama_worker.request.ending import (
    CANCELED,
    TOKEN_LIMIT,
    Ending,
    after_failure,
    after_loop,
    after_server_error,
    after_turn,
    failed,
)
from llama_worker.request.output import Output, read_output
from llama_worker.request.progress import Progress, last_progress_at
from llama_worker.request.report import Totals, build_progress, build_record, build_status
from llama_worker.request.tool_batch import ToolBatch, unrun_entry
from llama_worker.request.turn import Turn, TurnId
from llama_worker.stream.calls import MalformedCall, ParsedCall, Partition, RawCall, partition
from llama_worker.stream.events import ServerError, encodable
from llama_worker.stream.failure import StreamFailure, refuses_tools
from llama_worker.stream.turn_end import SETTLE_S, Finished, LastWord, Verdict
from llama_worker.types import (
    BiosText,
    ChatMessage,
    ExitSignal,
    OutputChunk,
    RequestFailReason,
    RequestPhase,
    RequestStatus,
    ToolTraceEntry,
)

# after a disconnect: news of the process's death may follow, after 0.03 s (SIGKILL, idle machine)
DEATH_NEWS_S = 0.2
# the process is gone, so that they must follow: the machine is busy, or the guard was stopped
LATE_NEWS_S = 10.0
# after news of the process's death: what it sent may still be on its way through the reader
LAST_WORDS_S = 2.0

# of a tool's error: a model's context is small, and a traceback may be long
_MOST_TOLD_CHARS = 2000

Effect = (
    RunBios
    | OpenStream
    | CloseStream
    | RunTool
    | DropTool
    | SignalEmitted
    | ToolsRefused
    | RequestEnded
)
Effects = list[Effect]

# ---------------------------------------------------------------- what a request waits for


class _Prompting(Struct, frozen=True):
    """For the BIOS provider's text of the next turn, which continues after `batch`, if it is not
    the first."""

    until: float
    batch: ToolBatch | None = None


class _Streaming(Struct, frozen=True):
    """For the server; after a finish reason not for long."""


class _Broken(Struct, frozen=True):
    """For news that would explain a broken connection better."""

    failure: StreamFailure
    until: float
    server_is_gone: bool = False


class _Draining(Struct, frozen=True):
    """For the rest of what a dead server had sent."""

    ending: Ending
    until: float


class _InTools(Struct, frozen=True):
    """For the results of a turn's calls."""

    batch: ToolBatch

    @property
    def until(self) -> float:
        return self.batch.deadline


class _Ended(Struct, frozen=True):
    """Terminal."""


_Waiting = _Prompting | _Streaming | _Broken | _Draining | _InTools | _Ended


class Request:
    """See the module. Not thread-safe: one actor at a time."""

    def __init__(
        self,
        order: Begin,
        *,
        config: WorkerConfig,
        unix_offset: float,
        reply_to: Mailbox[RequestMessage],
        now: float,
    ) -> None:
        self.request_id = order.request_id
        self.job_name = order.submission.job_name
        self._submission = order.submission
        self._config = config
        self._reply_to = reply_to
        self._offers_tools = bool(config.normal_tools or config.exit_tools)
        self._normal_names = [tool["function"]["name"] for tool in config.normal_tools]
        self._exit_names = [tool["function"]["name"] for tool in config.exit_tools]
        self._emitted: list[SignalEmitted] = []  # not told yet
        self._prompted = order.prompted
        self._opens_thinking = order.opens_thinking and keeps_prompt_end(
            config, order.submission.params
        )
        self._waiting: _Waiting = _Streaming()
        self._gap_forgiven: float | None = None  # the deadline that a gap has put off already
        self._turns_count = 0
        self._runaway_tokens: int | None = None  # a turn with more of them keeps to no limit
        self._turn = self._new_turn(now)
        self._conversation: Conversation | None = None
        # the turn's calls, as long as nothing has become of them
        self._unrun: Partition | None = None
        self._totals = Totals(
            request_id=self.request_id,
            job_name=self.job_name,
            created_at=now,
            unix_offset=unix_offset,
            output=Output(config.loop_detector),
            iterations_left=config.max_tool_iterations,
            has_media=bool(order.submission.part_kinds - {"text"}),
        )

    # ------------------------------------------------------------ entries

    def begin(self, now: float) -> Effects:
        return self._ask_for_bios(None, now)

    def step(self, message: RequestMessage, now: float) -> Effects:
        """What follows from a message. One of a turn that is over, or of another request, changes
        nothing."""
        return self._after_signals(self._step(message, now))

    def _after_signals(self, effects: Effects) -> Effects:
        """With the signals that were recorded and not told yet before them."""
        if not self._emitted:
            return effects
        emitted, self._emitted = self._emitted, []
        return [*emitted, *effects]

    def _step(self, message: RequestMessage, now: float) -> Effects:
        match message:
            case StreamEvents():
                return self._stream_events(message) if self._is_current(message.turn_id) else []
            case StreamOpened(turn_id=turn_id, at=at):
                if self._is_current(turn_id):
                    self._turn.headers_at = at
                return []
            case StreamClosed(turn_id=turn_id, failure=failure, at=at):
                return self._stream_closed(failure, at) if self._is_current(turn_id) else []
            case BiosWritten(turn_id=turn_id):
                return self._bios_written(message, now) if turn_id == self._next_turn_id else []
            case CallEnded(turn_id=turn_id):
                return self._call_ended(message) if turn_id == self._turn_id else []
            case CancelRequest(request_id=request_id) if request_id == self.request_id:
                return self._end(CANCELED, now)
            case Abandon(request_id=request_id) if request_id in (None, self.request_id):
                return self._abandon(message.reason, message.detail, now)
            case Tick():
                return self._tick(now)
            case _:
                return []

    @property
    def deadline(self) -> float | None:
        """When a Tick is due; None: none is."""
        match self._waiting:
            case _Ended():
                return None
            case _Streaming():
                return self._turn.end.settled_at
            case waiting:
                return waiting.until

    def break_off(self, reason: RequestFailReason, detail: str, now: float) -> Effects:
        """End where `step` itself raised: what was shown is kept, what was held back is lost with
        its turn."""
        return self._after_signals(self._finish(failed(reason, detail), now))

    @property
    def waits_for_news(self) -> bool:
        """Whether the connection broke and nobody knows yet if the server's process is gone."""
        return isinstance(self._waiting, _Broken) and not self._waiting.server_is_gone

    def saw_server_gone(self, now: float) -> None:
        """To be said while it waits for news: the server's process is gone, how it ended is still
        to be told."""
        gone = StreamFailure(
            reason=RequestFailReason.SERVER_DIED, detail="the server's process is gone"
        )
        self._waiting = _Broken(gone, now + LATE_NEWS_S, server_is_gone=True)

    def saw_liveness(self, at: float | None) -> None:
        """Evidence that the server works; for the status."""
        self._totals.liveness_at = at

    # ------------------------------------------------------------ what is heard

    def _stream_events(self, batch: StreamEvents) -> Effects:
        at = batch.at
        self._turn.last_stream_byte_at = at
        output = self._totals.output
        for event in batch.events:
            if isinstance(event, LastWord):
                self._turn.hear(event, at)
                verdict = self._turn.end.feed(event, at)
                if verdict is not None:
                    return self._turn_ended(verdict, at)
                continue
            output.add(*self._turn.take(event, at))
            if self._exit_names and (exits := self._turn.take_exits(self._exit_names)):
                self._record_exits(self._partition(exits, at).exits)
            loop = output.loop or self._turn.hidden_loop
            if loop is not None:
                return self._end(after_loop(loop), at)
            if self._runaway_tokens is not None and self._generated > self._runaway_tokens:
                return self._end(TOKEN_LIMIT, at)
        return []

    @property
    def _generated(self) -> int:
        """Tokens of this turn, whichever count is higher: a server may report the same for ever."""
        return max(self._turn.tokens, self._turn.deltas)

    def _stream_closed(self, failure: StreamFailure | None, at: float) -> Effects:
        if isinstance(self._waiting, _Draining):
            return self._give_up(self._waiting.ending, at)
        return self._turn_ended(self._turn.end.closed(failure), at)

    def _turn_ended(self, verdict: Verdict, at: float) -> Effects:
        match verdict:
            case Finished():
                return self._conclude_turn(at)
            case ServerError():
                return self._end(after_server_error(verdict, offers_tools=self._offers_tools), at)
            case StreamFailure(
                reason=RequestFailReason.CONNECT_FAILED | RequestFailReason.STREAM_DISCONNECTED
            ):
                self._waiting = _Broken(verdict, at + DEATH_NEWS_S)
                return []
            case StreamFailure(reason=RequestFailReason.HTTP_ERROR) if self._can_try_prompted(
                verdict
            ):
                shown = masked(verdict.detail, self._config.api_key)
                self._prompted = True
                return [
                    ToolsRefused(detail=shown),
                    *self._ask_for_bios(None, at),
                ]  # again, with the tools in its text
            case StreamFailure():
                return self._end(after_failure(verdict, offers_tools=self._offers_tools), at)

    def _call_ended(self, ended: CallEnded) -> Effects:
        """The call under way returned a JSON text, or failed. One that was given up may end late."""
        if not isinstance(self._waiting, _InTools):
            return []
        batch = self._waiting.batch
        if ended.call_id != batch.call.id:
            return []
        if ended.ok:
            return self._after_call(batch.returned(ended.text, ended.at), ended.at)
        return self._call_failed(batch, ended.text, ended.at)

    def _after_call(self, batch: ToolBatch, at: float) -> Effects:
        """The batch's next call; after the last one the next turn begins."""
        if not batch.done:
            return [self._run_call(batch)]
        self._leave_tools(batch)
        return self._ask_for_bios(batch, at)

    def _abandon(self, reason: RequestFailReason, detail: str, now: float) -> Effects:
        """The worker gives the request up. The rest of what a server that died had sent is read
        first."""
        match self._waiting:
            case _Streaming() if reason is RequestFailReason.SERVER_DIED:
                self._waiting = _Draining(failed(reason, detail), now + LAST_WORDS_S)
                return []
            case _Draining(ending=ending):
                return self._give_up(ending, now)
            case _:
                return self._give_up(failed(reason, detail), now)

    def _tick(self, now: float) -> Effects:
        due_at = self.deadline
        if due_at is None or now < due_at:
            return []
        lost_s = gap_s(due_at, now)
        if lost_s and due_at != self._gap_forgiven:  # once
            return self._put_off(now, lost_s)
        match self._waiting:
            case _Streaming():
                return self._conclude_turn(now)
            case _Broken(failure=failure):
                return self._end(failed(failure.reason, failure.detail), now)
            case _Draining(ending=ending):
                return self._give_up(ending, now)
            case _InTools(batch=batch):
                return [
                    DropTool(turn_id=self._turn_id),
                    *self._call_failed(batch, batch.timeout_text(), now),
                ]
            case _Prompting():
                limit_s = self._config.timeouts.bios_timeout_s
                detail = f"the BIOS provider did not return within bios_timeout_s {limit_s:g} s"
                return self._end(failed(RequestFailReason.PROMPT_ERROR, detail), now)
            case _:
                return []

    def _put_off(self, now: float, gap_s: float) -> Effects:
        """Nothing ran in the gap: what is waited for gets the time again that the gap took, at most
        its whole limit."""
        match self._waiting:
            case _InTools(batch=batch):
                more_s = gap_s + min(gap_s, batch.timeout_s)
                self._waiting = _InTools(replace(batch, put_off_s=batch.put_off_s + more_s))
            case _Prompting() as waiting:
                self._waiting = replace(
                    waiting, until=now + min(gap_s, self._config.timeouts.bios_timeout_s)
                )
            case _Streaming():
                self._turn.end.settled_at = now + min(gap_s, SETTLE_S)
            case _Broken() | _Draining() as waiting:
                self._waiting = replace(waiting, until=now + min(gap_s, SETTLE_S))
            case _:
                pass
        self._gap_forgiven = self.deadline
        return []

    # ------------------------------------------------------------ questions

    @property
    def phase(self) -> RequestPhase:
        match self._waiting:
            case _Ended():
                return RequestPhase.DONE
            case _InTools():
                return RequestPhase.TOOL
            case _Prompting():
                return RequestPhase.WAITING
            case _:
                return self._turn.phase

    def progress(self) -> Progress:
        streaming = isinstance(self._waiting, _Streaming) and self._turn.end.finish_reason is None
        concluding = not streaming and not isinstance(self._waiting, _InTools | _Ended)
        return build_progress(self._totals, self._turn, self.phase, concluding=concluding)

    def status(self) -> RequestStatus:
        running = self._waiting.batch.call.name if isinstance(self._waiting, _InTools) else None
        return build_status(self._totals, self._turn, self.progress(), running)

    @property
    def output_chars(self) -> tuple[int, int]:
        """How much text and reasoning there is."""
        return self._totals.output.text_chars, self._totals.output.reasoning_chars

    def read_output(self, text_offset: int, reasoning_offset: int) -> OutputChunk:
        """What was added since the offsets."""
        output, done = self._totals.output, isinstance(self._waiting, _Ended)
        return read_output(output.text, output.reasoning, text_offset, reasoning_offset, done=done)

    # ------------------------------------------------------------ turns

    @property
    def _turn_id(self) -> TurnId:
        return self.request_id, self._turns_count

    @property
    def _next_turn_id(self) -> TurnId:
        return self.request_id, self._turns_count + 1

    def _is_current(self, turn_id: TurnId) -> bool:
        listening = isinstance(self._waiting, (_Streaming, _Draining))
        return listening and turn_id == self._turn_id

    def _new_turn(self, now: float) -> Turn:
        return Turn(
            started_at=now,
            prompted=self._prompted,
            with_tools=self._offers_tools,
            opens_thinking=self._opens_thinking,
            loop_detector=self._config.loop_detector,
        )

    def _ask_for_bios(self, batch: ToolBatch | None, now: float) -> Effects:
        """The next turn begins with its BIOS; it continues after `batch`."""
        self._waiting = _Prompting(now + self._config.timeouts.bios_timeout_s, batch)
        return [
            RunBios(
                turn_id=self._next_turn_id,
                iterations_left=self._totals.iterations_left,
                prompted=self._prompted,
                reply_to=self._reply_to,
            )
        ]

    def _bios_written(self, written: BiosWritten, now: float) -> Effects:
        if not isinstance(self._waiting, _Prompting):
            return []
        if written.error is not None:
            return self._end(failed(RequestFailReason.PROMPT_ERROR, written.error), now)
        conversation = self._converse(written.bios, self._waiting.batch)
        self._waiting = _Streaming()
        return self._open_turn(conversation, now)

    def _converse(self, bios: BiosText | str, batch: ToolBatch | None) -> Conversation:
        """The messages of the turn that begins: the first one's, or with what the calls of `batch`
        returned."""
        if batch is None or self._conversation is None:
            self._conversation = Conversation.begin(
                bios,
                self._submission,
                system_prompt_mode=self._config.system_prompt_mode,
                prompted=self._prompted,
            )
        else:
            self._conversation = self._conversation.after_tools(
                bios,
                text=self._turn.said_text,
                reasoning=self._turn.said_reasoning,
                calls=batch.calls,
                results=batch.results,
            )
        return self._conversation

    def _open_turn(self, conversation: Conversation, now: float) -> Effects:
        self._turns_count += 1
        self._opens_thinking = self._opens_thinking and not self._turn.had_reasoning_deltas
        self._turn = self._new_turn(now)
        tools = offered_tools(self._config, prompted=self._prompted)
        body = request_body(self._config, self._submission.params, conversation.messages(), tools)
        self._runaway_tokens = runaway_tokens(body)
        return [OpenStream(turn_id=self._turn_id, body=body, reply_to=self._reply_to)]

    def _can_try_prompted(self, failure: StreamFailure) -> bool:
        may = (
            self._config.tool_call_mode == "auto" and not self._prompted and self._turns_count == 1
        )
        return may and self._offers_tools and refuses_tools(failure)

    def _conclude_turn(self, now: float) -> Effects:
        """The turn came to a regular end: to the tools, or to the end of the request."""
        judged = self._judge_turn(now)
        if isinstance(judged, Ending):
            return self._end(judged, now)
        if isinstance(self._waiting, _Draining):
            return self._end(self._waiting.ending, now)  # its calls are not begun any more
        return self._start_tools(judged, now)

    def _give_up(self, ending: Ending, now: float) -> Effects:
        """End so, unless a turn without calls had come to its regular end before."""
        if not self._turn.is_over and self._turn.end.finish_reason is not None:
            judged = self._judge_turn(now)
            if isinstance(judged, Ending):
                ending = judged
        return self._end(ending, now)

    def _judge_turn(self, now: float) -> Ending | tuple[ParsedCall, ...]:
        """What becomes of a turn that came to its regular end: the end of the request, or else
        calls to run."""
        turn, output, reason = self._turn, self._totals.output, self._turn.end.finish_reason
        output.add(*turn.finish(cut_off=reason == "length"))
        if output.loop is not None:
            return after_loop(output.loop)
        found = self._take_calls(now)
        return after_turn(reason, found, self._totals.iterations_left) or found.normal

    def _take_calls(self, now: float) -> Partition:
        """Tell the turn's calls apart, once. Exit calls are recorded whatever becomes of turn and
        request."""
        self._turn.calls_taken = True
        found = self._partition(self._turn.calls(), now)
        self._record_exits(found.exits)
        self._unrun = found
        return found

    def _partition(self, calls: Sequence[RawCall | MalformedCall], now: float) -> Partition:
        return partition(
            calls,
            self._normal_names,
            self._exit_names,
            emitted_at=self._totals.unix(now),
            first_number=self._totals.calls_count + 1,
        )

    def _record_exits(self, signals: Sequence[ExitSignal]) -> None:
        for signal in signals:
            self._totals.signals.append(signal)
            emitted = SignalEmitted(
                request_id=self.request_id, job_name=self.job_name, signal=copy.deepcopy(signal)
            )
            self._emitted.append(emitted)

    def _start_tools(self, calls: tuple[ParsedCall, ...], now: float) -> Effects:
        closing = self._close_turn()
        self._totals.iterations_left -= 1
        self._totals.calls_count += len(calls)
        batch = ToolBatch(
            calls=calls,
            iteration=self._config.max_tool_iterations - self._totals.iterations_left,
            timeout_s=self._config.tool_timeout_s,
            unix_offset=self._totals.unix_offset,
            started_at=now,
        )
        self._unrun = None
        return [closing, self._run_call(batch)]

    def _run_call(self, batch: ToolBatch) -> RunTool:
        """The batch's next call, ordered only now: none may begin once the request has given up."""
        self._waiting = _InTools(batch)
        return RunTool(
            turn_id=self._turn_id, job_name=self.job_name, call=batch.call, reply_to=self._reply_to
        )

    def _leave_tools(self, batch: ToolBatch) -> None:
        """The batch is over, whatever follows."""
        self._totals.trace += batch.trace
        self._waiting = _Streaming()

    def _call_failed(self, batch: ToolBatch, text: str, at: float) -> Effects:
        if self._config.tool_errors == "tell":
            told = encodable(masked(text, self._config.api_key))[:_MOST_TOLD_CHARS]
            return self._after_call(batch.returned(told, at, error=text), at)
        self._leave_tools(batch.failed(text, at))
        return self._end(failed(RequestFailReason.TOOL_EXECUTION_ERROR, text), at)

    def _close_turn(self) -> CloseStream:
        """The exchange is over: add up what is kept of it."""
        self._totals.add_turn(self._turn, last_progress_at(self.progress(), None))
        return CloseStream(turn_id=self._turn_id)

    # ------------------------------------------------------------ the end

    def _end(self, ending: Ending, now: float) -> Effects:
        """End, with all that the turn under way has brought."""
        if isinstance(self._waiting, _Ended):
            return []
        self._totals.output.add_rest(*self._turn.finish())  # what was held back is output, too
        if not self._turn.calls_taken:
            self._take_calls(now)
        return self._finish(ending, now)

    def _finish(self, ending: Ending, now: float) -> Effects:
        """The record, as things are; what the request holds is let go."""
        if isinstance(self._waiting, _Ended):
            return []
        effects: Effects = []
        if isinstance(self._waiting, _InTools):
            effects.append(DropTool(turn_id=self._turn_id))
            self._leave_tools(
                self._waiting.batch.failed(f"given up while it ran: {ending.fail_reason}", now)
            )
        elif self._turns_count and not self._turn.is_over:
            effects.append(self._close_turn())
        if self._unrun is not None:
            self._totals.trace += self._unrun_trace(self._unrun, ending, now)
        if ending.fail_detail is not None:
            ending = replace(ending, fail_detail=masked(ending.fail_detail, self._config.api_key))
        conversation = self._conversation_at_end()
        record = build_record(self._totals, self._turn, self.progress(), ending, conversation, now)
        self._waiting = _Ended()
        return [*effects, RequestEnded(record=record)]

    def _conversation_at_end(self) -> list[ChatMessage]:
        if self._conversation is None:  # its BIOS was never written
            return []
        return self._conversation.since_prompt(
            text=self._turn.said_text, reasoning=self._turn.said_reasoning
        )

    def _unrun_trace(self, found: Partition, ending: Ending, now: float) -> list[ToolTraceEntry]:
        """The calls that the model made and that were not run: what they held is output, too."""
        why = f"not run: {ending.fail_reason or ending.finish_reason}"
        iteration = self._config.max_tool_iterations - self._totals.iterations_left + 1
        return [unrun_entry(call, why, iteration, self._totals.unix(now)) for call in found.unrun]
