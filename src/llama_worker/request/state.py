"""One request from prompt to record: what it waits for, and what follows from what it hears. Sans-IO.

A `Request` is driven by one actor. Every entry takes `now` or `at` (monotonic seconds) and returns effects to carry
out, in order. The last effect of a request is `Finished`; after it nothing changes any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, assert_never, cast

from llama_worker.config import WorkerConfig
from llama_worker.messages import BatchId, StreamFailure, StreamId
from llama_worker.request.body import begin_conversation, keeps_prompt_end, request_body, write_bios
from llama_worker.request.conversation import Conversation, PromptError
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
from llama_worker.request.ending import (
    CANCELED,
    Ending,
    after_failure,
    after_loop,
    after_server_error,
    after_turn,
    failed,
)
from llama_worker.request.output import Output, read_output
from llama_worker.request.report import Tally, build_progress, build_record, build_status
from llama_worker.request.submission import Submission
from llama_worker.request.tool_batch import ToolBatch
from llama_worker.request.turn import Turn
from llama_worker.server.command import masked
from llama_worker.server.timeouts import Progress, last_progress_at
from llama_worker.stream.calls import ParsedCall, Partition, partition
from llama_worker.stream.events import Done, Finish, ServerError, StreamEvent
from llama_worker.stream.http_errors import refuses_tools
from llama_worker.types import BiosText, OutputChunk, RequestFailReason, RequestPhase, RequestStatus

SETTLE_S = 2.0  # after a finish reason: usage, [DONE] or an error may still follow
DEATH_NEWS_S = 0.29  # after a disconnect: news of the process's death may follow; with the rest, 0.3 s
LAST_WORDS_S = 2.0  # after news of the process's death: what it sent may still be on its way through the reader

# ---------------------------------------------------------------- what a request waits for


@dataclass(frozen=True, slots=True)
class _Streaming:
    """For the server."""


@dataclass(frozen=True, slots=True)
class _Settling:
    """For what may follow a finish reason."""

    until: float


@dataclass(frozen=True, slots=True)
class _Broken:
    """For news that would explain a broken connection better."""

    failure: StreamFailure
    until: float


@dataclass(frozen=True, slots=True)
class _HearingOut:
    """For the end of what a dead server had sent."""

    ending: Ending
    until: float


@dataclass(frozen=True, slots=True)
class _InTools:
    """For the results of a turn's calls."""

    batch_id: BatchId
    batch: ToolBatch


@dataclass(frozen=True, slots=True)
class _Ended:
    """For nothing."""


_LastWord = Finish | ServerError | Done
_LAST_WORDS = frozenset({Finish, ServerError, Done})


class Request:
    """See the module. Not thread-safe: one actor at a time."""

    def __init__(
        self,
        *,
        request_id: int,
        submission: Submission,
        config: WorkerConfig,
        prompted: bool,
        opens_thinking: bool,
        unix_offset: float,
        now: float,
    ) -> None:
        self.request_id = request_id
        self.job_name = submission.job_name
        self._submission = submission
        self._config = config
        self._offers_tools = bool(config.normal_tools or config.exit_tools)
        self._prompted = prompted
        self._opens_thinking = opens_thinking and keeps_prompt_end(config, submission.params)
        self._waiting: _Streaming | _Settling | _Broken | _HearingOut | _InTools | _Ended = _Streaming()
        self._exchanges_count = 0
        self._turn = self._new_turn(now)
        self._conversation: Conversation | None = None
        self._tally = Tally(
            request_id=request_id,
            job_name=submission.job_name,
            created_at=now,
            unix_offset=unix_offset,
            output=Output(config.loop_detector),
            iterations_left=config.max_tool_iterations,
        )

    # ------------------------------------------------------------ entries

    def begin(self, now: float) -> Effects:
        """The first turn."""
        try:
            bios = self._write_bios(now)
        except PromptError as error:
            return self._end(failed(RequestFailReason.PROMPT_ERROR, str(error)), now)
        self._conversation = begin_conversation(self._config, self._submission, bios, prompted=self._prompted)
        return self._open_turn(self._conversation, now)

    def stream_opened(self, stream_id: StreamId, at: float) -> Effects:
        """Response headers have come."""
        if self._is_current(stream_id):
            self._turn.headers_at = at
        return []

    def stream_events(
        self, stream_id: StreamId, events: Sequence[StreamEvent], *, carried_data: bool, at: float
    ) -> Effects:
        """What the server said."""
        if not self._is_current(stream_id):
            return []
        self._turn.last_stream_byte_at = at
        if carried_data:
            self._turn.last_data_at = at
        output = self._tally.output
        runs = cast("Iterator[tuple[type[Any], Iterator[Any]]]", groupby(events, type))
        for kind, run in runs:
            if kind not in _LAST_WORDS:
                output.add(*self._turn.take(kind, run, at))
                if output.loop is not None:
                    return self._end(after_loop(output.loop), at)
                continue
            for event in run:
                effects = self._last_word(event, at)
                if effects is not None:
                    return effects
        if isinstance(self._waiting, _Settling):
            return [WakeAt(at=self._waiting.until)]
        return []

    def _last_word(self, event: _LastWord, at: float) -> Effects | None:
        """What may end the turn; what follows where it does, else None."""
        match event:
            case Finish(reason=reason):
                self._turn.finish_reason = reason
                if isinstance(self._waiting, _Streaming):  # said again, it gives no more time
                    self._waiting = _Settling(at + SETTLE_S)
            case ServerError():
                return self._end(after_server_error(event, offers_tools=self._offers_tools), at)
            case Done():
                return self._conclude_turn(at)
            case _:
                assert_never(event)
        return None

    def stream_closed(self, stream_id: StreamId, failure: StreamFailure | None, at: float) -> Effects:
        """The connection is over; `failure` None: the server ended the body in the regular way."""
        if not self._is_current(stream_id):
            return []
        if isinstance(self._waiting, _Settling):
            return self._conclude_turn(at)
        if isinstance(self._waiting, _HearingOut):
            return self._give_up(self._waiting.ending, at)
        if failure is None:
            detail = "the stream ended without a finish reason"
            failure = StreamFailure(reason=RequestFailReason.STREAM_DISCONNECTED, detail=detail)
        match failure.reason:
            case RequestFailReason.CONNECT_FAILED | RequestFailReason.STREAM_DISCONNECTED:
                self._waiting = _Broken(failure, at + DEATH_NEWS_S)
                return [WakeAt(at=at + DEATH_NEWS_S)]
            case RequestFailReason.HTTP_ERROR if self._can_try_prompted(failure):
                shown = masked(failure.detail, self._config.api_key)
                self._prompted = True
                return [ReportToolsRefused(detail=shown), *self.begin(at)]  # again, with the tools in its text
            case _:
                return self._end(after_failure(failure, offers_tools=self._offers_tools), at)

    def call_ended(self, batch_id: BatchId, *, ok: bool, text: str, at: float) -> Effects:
        """The next call of the batch returned a JSON text, or failed; after the last one the next turn begins."""
        waiting = self._waiting
        if not isinstance(waiting, _InTools) or waiting.batch_id != batch_id:
            return []
        if not ok:
            return self._call_failed(waiting.batch, text, at)
        batch = waiting.batch.returned(text, at)
        if not batch.done:
            self._waiting = _InTools(batch_id, batch)
            return [WakeAt(at=batch.deadline)]
        self._leave_tools(batch)
        return self._continue(batch, at)

    def cancel(self, now: float) -> Effects:
        """The host wants no more of it."""
        if isinstance(self._waiting, _Ended):
            return []
        return self._end(CANCELED, now)

    def abandon(self, reason: RequestFailReason, detail: str, now: float) -> Effects:
        """Give up: the worker says why. What a server that died had sent is heard out first."""
        match self._waiting:
            case _Ended():
                return []
            case _Streaming() | _Settling() if reason is RequestFailReason.SERVER_DIED:
                self._waiting = _HearingOut(failed(reason, detail), now + LAST_WORDS_S)
                return [WakeAt(at=now + LAST_WORDS_S)]
            case _HearingOut(ending=ending):
                return self._give_up(ending, now)
            case _:
                return self._give_up(failed(reason, detail), now)

    def break_off(self, reason: RequestFailReason, detail: str, now: float) -> Effects:
        """End where `abandon` itself raised: what was shown is kept, what was held back is lost with its turn."""
        if isinstance(self._waiting, _Ended):
            return []
        return self._finish(failed(reason, detail), now)

    def tick(self, now: float) -> Effects:
        """The alarm: carry out what has come due."""
        match self._waiting:
            case _Settling(until=at) if now >= at:
                return self._conclude_turn(now)
            case _Broken(until=at, failure=failure) if now >= at:
                return self._end(failed(failure.reason, failure.detail), now)
            case _HearingOut(until=at, ending=ending) if now >= at:
                return self._give_up(ending, now)
            case _InTools(batch_id=batch_id, batch=batch) if now >= batch.deadline:
                return [ForgetTools(batch_id=batch_id), *self._call_failed(batch, batch.timeout_text(), now)]
            case _:
                return []

    def saw_liveness(self, at: float | None) -> None:
        """Evidence that the server works; for the status."""
        self._tally.liveness_at = at

    # ------------------------------------------------------------ questions

    @property
    def phase(self) -> RequestPhase:
        """What the request is doing."""
        match self._waiting:
            case _Ended():
                return RequestPhase.DONE
            case _InTools():
                return RequestPhase.TOOL
            case _:
                if self._turn.headers_at is None:
                    return RequestPhase.WAITING
                return RequestPhase.PREFILL if self._turn.first_token_at is None else RequestPhase.GENERATING

    def progress(self) -> Progress:
        """For the watchdog's verdict."""
        concluding = isinstance(self._waiting, _Settling | _Broken | _HearingOut)
        return build_progress(self._tally, self._turn, self.phase, concluding=concluding)

    def status(self) -> RequestStatus:
        """A snapshot."""
        return build_status(self._tally, self._turn, self.progress())

    def read_output(self, text_offset: int, reasoning_offset: int) -> OutputChunk:
        """What was added since the offsets."""
        output, done = self._tally.output, isinstance(self._waiting, _Ended)
        return read_output(output.text, output.reasoning, text_offset, reasoning_offset, done=done)

    # ------------------------------------------------------------ turns

    def _is_current(self, stream_id: StreamId) -> bool:
        listening = isinstance(self._waiting, (_Streaming, _Settling, _HearingOut))
        return listening and stream_id == (self.request_id, self._exchanges_count)

    def _new_turn(self, now: float) -> Turn:
        return Turn(
            started_at=now,
            prompted=self._prompted,
            with_tools=self._offers_tools,
            opens_thinking=self._opens_thinking,
            loop_detector=self._config.loop_detector,
        )

    def _write_bios(self, now: float) -> BiosText | str:
        return write_bios(
            self._config,
            prompted=self._prompted,
            iterations_left=self._tally.iterations_left,
            unix_now=self._tally.unix(now),
        )

    def _open_turn(self, conversation: Conversation, now: float) -> Effects:
        self._exchanges_count += 1
        self._opens_thinking = self._opens_thinking and not self._turn.had_reasoning_deltas
        self._turn = self._new_turn(now)
        tools = [] if self._prompted else [*self._config.normal_tools, *self._config.exit_tools]
        body = request_body(self._config, self._submission.params, conversation.messages(), tools)
        return [OpenTurn(stream_id=(self.request_id, self._exchanges_count), body=body)]

    def _can_try_prompted(self, failure: StreamFailure) -> bool:
        may = self._config.tool_call_mode == "auto" and not self._prompted and self._exchanges_count == 1
        return may and self._offers_tools and refuses_tools(failure)

    def _conclude_turn(self, now: float) -> Effects:
        """The turn came to a regular end: to the tools, or to the end of the request."""
        judged = self._judge_turn(now)
        if isinstance(judged, Ending):
            return self._end(judged, now)
        if isinstance(self._waiting, _HearingOut):
            return self._end(self._waiting.ending, now)  # its calls are not begun any more
        return self._start_tools(judged, now)

    def _give_up(self, ending: Ending, now: float) -> Effects:
        """End so, unless a turn without calls had come to its regular end before."""
        if not isinstance(self._waiting, _InTools) and self._turn.finish_reason is not None:
            judged = self._judge_turn(now)
            if isinstance(judged, Ending):
                ending = judged
        return self._end(ending, now)

    def _judge_turn(self, now: float) -> Ending | tuple[ParsedCall, ...]:
        """What becomes of a turn that came to its regular end: the end of the request, or else calls to run."""
        turn, output = self._turn, self._tally.output
        output.add(*turn.finish(cut_off=turn.finish_reason == "length"))
        if output.loop is not None:
            return after_loop(output.loop)
        found = self._take_calls(now)
        return after_turn(turn.finish_reason, found, self._tally.iterations_left) or found.normal

    def _take_calls(self, now: float) -> Partition:
        """Tell the turn's calls apart, once. Exit calls are recorded whatever becomes of turn and request."""
        self._turn.calls_taken = True
        found = partition(
            self._turn.calls(),
            [tool["function"]["name"] for tool in self._config.normal_tools],
            [tool["function"]["name"] for tool in self._config.exit_tools],
            emitted_at=self._tally.unix(now),
            first_number=self._tally.calls_count + 1,
        )
        self._tally.signals += found.exits
        return found

    def _start_tools(self, calls: tuple[ParsedCall, ...], now: float) -> Effects:
        closing = self._close_turn()
        self._tally.iterations_left -= 1
        self._tally.calls_count += len(calls)
        batch_id = (self.request_id, self._exchanges_count)
        batch = ToolBatch(
            calls=calls,
            iteration=self._config.max_tool_iterations - self._tally.iterations_left,
            timeout_s=self._config.tool_timeout_s,
            unix_offset=self._tally.unix_offset,
            started_at=now,
        )
        self._waiting = _InTools(batch_id, batch)
        return [closing, StartTools(batch_id=batch_id, calls=calls), WakeAt(at=batch.deadline)]

    def _leave_tools(self, batch: ToolBatch) -> None:
        """The batch is over, whatever follows."""
        self._tally.trace += batch.trace
        self._waiting = _Streaming()

    def _call_failed(self, batch: ToolBatch, text: str, at: float) -> Effects:
        self._leave_tools(batch.failed(text, at))
        return self._end(failed(RequestFailReason.TOOL_EXECUTION_ERROR, text), at)

    def _continue(self, batch: ToolBatch, now: float) -> Effects:
        """The next turn, with what the calls returned."""
        try:
            bios = self._write_bios(now)
        except PromptError as error:
            return self._end(failed(RequestFailReason.PROMPT_ERROR, str(error)), now)
        assert self._conversation is not None
        self._conversation = self._conversation.after_tools(
            bios,
            text=self._turn.said_text,
            reasoning=self._turn.said_reasoning,
            calls=batch.calls,
            results=batch.results,
        )
        return self._open_turn(self._conversation, now)

    def _close_turn(self) -> CloseTurn:
        """The exchange is over: add up what is kept of it."""
        self._tally.add_turn(self._turn, last_progress_at(self.progress(), None))
        return CloseTurn(stream_id=(self.request_id, self._exchanges_count))

    # ------------------------------------------------------------ the end

    def _end(self, ending: Ending, now: float) -> Effects:
        """End, with all that the turn under way has brought."""
        self._tally.output.add_rest(*self._turn.finish())  # what was held back is output, too
        if not self._turn.calls_taken:
            self._take_calls(now)
        return self._finish(ending, now)

    def _finish(self, ending: Ending, now: float) -> Effects:
        """The record, as things are; what the request holds is let go."""
        effects: Effects = []
        if isinstance(self._waiting, _InTools):
            effects.append(ForgetTools(batch_id=self._waiting.batch_id))
            self._leave_tools(self._waiting.batch.failed(f"given up while it ran: {ending.fail_reason}", now))
        elif self._exchanges_count and not self._turn.is_over:
            effects.append(self._close_turn())
        if ending.fail_detail is not None:
            ending = replace(ending, fail_detail=masked(ending.fail_detail, self._config.api_key))
        record = build_record(self._tally, self._turn, self.progress(), ending, now)
        self._waiting = _Ended()
        return [*effects, Finished(record=record)]
