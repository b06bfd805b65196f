"""One request from prompt to record: what is sent, what is kept, what follows. Sans-IO.

A `Request` is driven by one actor. Every entry takes `now` (monotonic seconds) and returns effects to carry out,
in order. The last effect of a request is `Finished`; after it nothing changes any more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, assert_never, cast

from llama_worker.config import WorkerConfig, masked
from llama_worker.http_errors import refuses_tools, reports_malformed_call
from llama_worker.loopdetect import LoopFound
from llama_worker.messages import BatchId, RequestRecord, StreamFailure, StreamId, Submission
from llama_worker.output import Output
from llama_worker.prompting import Conversation, PromptError, run_bios
from llama_worker.stream_events import (
    Done,
    Finish,
    PromptProgress,
    ReasoningDelta,
    RoleOnly,
    ServerError,
    StreamEvent,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from llama_worker.timeouts import Progress, last_progress_at
from llama_worker.tooling import ParsedCall, Partition, partition
from llama_worker.turn import Turn
from llama_worker.types import (
    BiosContext,
    BiosText,
    ExitSignal,
    OutputChunk,
    RequestFailReason,
    RequestFinishReason,
    RequestPhase,
    RequestResult,
    RequestState,
    RequestStatus,
    ToolTraceEntry,
)

# With one of these the prompt may end otherwise than the one that the server was asked about.
_TEMPLATE_PARAMS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "enable_thinking",
        "reasoning_budget",
        "reasoning_budget_tokens",
        "reasoning_effort",
        "thinking_budget_tokens",
    }
)
SETTLE_S = 2.0  # after a finish reason: usage, [DONE] or an error may still follow
DEATH_NEWS_S = 0.25  # after a disconnect: news of the process's death may follow; with the rest, 0.3 s
_TAIL_CHARS = 200

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTurn:
    """Send this body to the server."""

    stream_id: StreamId
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseTurn:
    """Close the exchange's connection."""

    stream_id: StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTools:
    """Run these calls, in order."""

    batch_id: BatchId
    iteration: int
    calls: tuple[ParsedCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetTools:
    """Nobody waits for the batch any more."""

    batch_id: BatchId


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Call `tick` at this instant; the request has one alarm, a later WakeAt replaces it."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportToolsRefused:
    """The server does not take tools: later requests need not try."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The terminal state."""

    record: RequestRecord


Effect = OpenTurn | CloseTurn | StartTools | ForgetTools | WakeAt | ReportToolsRefused | Finished
Effects = list[Effect]

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
class _InTools:
    """For the results of a turn's calls."""

    batch_id: BatchId
    calls: tuple[ParsedCall, ...]


@dataclass(frozen=True, slots=True)
class _Ended:
    """For nothing."""

    record: RequestRecord


_OtherEvent = ToolCallDelta | PromptProgress | Usage | Timings | Finish | ServerError | Done | RoleOnly


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
        self._prompted = prompted
        params = config.default_params.keys() | submission.params.keys()
        self._opens_thinking = opens_thinking and _TEMPLATE_PARAMS.isdisjoint(params)
        self._unix_offset = unix_offset
        self._created_at = now
        self._waiting: _Streaming | _Settling | _Broken | _InTools | _Ended = _Streaming()
        self._exchanges = 0
        self._turn = self._new_turn(now)
        self._calls_taken = False  # of this turn
        self._conversation: Conversation | None = None
        self._output = Output(config.loop_detector)
        self._signals: list[ExitSignal] = []
        self._trace: list[ToolTraceEntry] = []
        self._iterations_left = config.max_tool_iterations
        self._calls_made = 0
        self._first_token_at: float | None = None
        self._progress_at: float | None = None  # of turns that are over
        self._stream_byte_at: float | None = None
        self._liveness_at: float | None = None
        self._tokens = 0  # of turns that are over
        self._usage: Usage | None = None
        self._http_status: int | None = None

    # ------------------------------------------------------------ entries

    def begin(self, now: float) -> Effects:
        """The first turn."""
        try:
            self._conversation = self._begin_conversation(now)
        except PromptError as error:
            return self._fail(RequestFailReason.PROMPT_ERROR, str(error), now)
        return self._open_turn(now)

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
        for kind, run in groupby(events, type):  # a batch is mostly one run of text: taken apart once, not each
            if kind is TextDelta:
                texts = [event.text for event in cast("Iterator[TextDelta]", run)]
                self._tokens_came(len(texts), at)
                self._output.add(*self._turn.text("".join(texts)))
            elif kind is ReasoningDelta:
                texts = [event.text for event in cast("Iterator[ReasoningDelta]", run)]
                self._tokens_came(len(texts), at)
                self._output.add(*self._turn.reasoning("".join(texts)))
                self._opens_thinking = False  # this server takes reasoning out of the content itself
            else:
                for event in cast("Iterator[_OtherEvent]", run):
                    effects = self._event(event, at)
                    if effects is not None:
                        return effects
            if self._output.loop is not None:
                return self._fail(RequestFailReason.REPEATED_LINE_LOOP, _describe_loop(self._output.loop), at)
        if isinstance(self._waiting, _Settling):
            return [WakeAt(at=self._waiting.until)]
        return []

    def _event(self, event: _OtherEvent, at: float) -> Effects | None:
        """One event that is no text; what follows where it ends the turn, else None."""
        match event:
            case ToolCallDelta():
                self._tokens_came(1, at)
                self._turn.tool_call(event)
            case PromptProgress():
                self._turn.prompt_progress = event
                self._turn.prompt_progress_at = at
            case Usage():
                self._turn.usage = event
            case Timings():
                self._turn.timings = event
            case Finish(reason=reason):
                self._turn.finish_reason = reason
                if not isinstance(self._waiting, _Settling):  # said again, it gives no more time
                    self._waiting = _Settling(at + SETTLE_S)
            case ServerError():
                return self._server_error(event, at)
            case Done():
                return self._conclude_turn(at)
            case RoleOnly():
                pass  # the model has not said anything yet
            case _:
                assert_never(event)
        return None

    def stream_closed(self, stream_id: StreamId, failure: StreamFailure | None, at: float) -> Effects:
        """The connection is over."""
        if not self._is_current(stream_id):
            return []
        if isinstance(self._waiting, _Settling):
            return self._conclude_turn(at)
        if failure is None:
            detail = "the stream ended without a finish reason"
            failure = StreamFailure(reason=RequestFailReason.STREAM_DISCONNECTED, detail=detail)
        match failure.reason:
            case RequestFailReason.CONNECT_FAILED | RequestFailReason.STREAM_DISCONNECTED:
                self._waiting = _Broken(failure, at + DEATH_NEWS_S)
                return [WakeAt(at=at + DEATH_NEWS_S)]
            case RequestFailReason.HTTP_ERROR if self._can_try_prompted(failure):
                shown = masked(failure.detail, self._config.api_key)
                return [ReportToolsRefused(detail=shown), *self._try_prompted(at)]
            case RequestFailReason.HTTP_ERROR if self._offers_tools and reports_malformed_call(failure.detail):
                return self._fail(RequestFailReason.TOOL_PARSE_ERROR, failure.detail, at)
            case _:
                self._http_status = failure.http_status
                return self._fail(failure.reason, failure.detail, at)

    def tools_done(
        self, batch_id: BatchId, results: tuple[str, ...], trace: tuple[ToolTraceEntry, ...], now: float
    ) -> Effects:
        """Every call of the turn returned: go on with the next turn."""
        waiting = self._waiting
        if not isinstance(waiting, _InTools) or waiting.batch_id != batch_id:
            return []
        self._trace += trace
        assert self._conversation is not None
        try:
            self._conversation = self._conversation.after_tools(
                self._bios(now),
                text=self._turn.said_text,
                reasoning=self._turn.said_reasoning,
                calls=waiting.calls,
                results=results,
            )
        except PromptError as error:
            return self._fail(RequestFailReason.PROMPT_ERROR, str(error), now)
        self._waiting = _Streaming()
        return self._open_turn(now)

    def tools_failed(self, batch_id: BatchId, detail: str, trace: tuple[ToolTraceEntry, ...], now: float) -> Effects:
        """A call failed."""
        waiting = self._waiting
        if not isinstance(waiting, _InTools) or waiting.batch_id != batch_id:
            return []
        self._trace += trace
        self._waiting = _Streaming()  # there is no batch left to forget
        return self._fail(RequestFailReason.TOOL_EXECUTION_ERROR, detail, now)

    def cancel(self, now: float) -> Effects:
        """The host wants no more of it."""
        if isinstance(self._waiting, _Ended):
            return []
        return self._end(RequestState.CANCELED, RequestFinishReason.CANCELED, now, RequestFailReason.CANCELED)

    def abandon(self, reason: RequestFailReason, detail: str, now: float) -> Effects:
        """Give up: the worker says why. A turn that had already come to its regular end still counts."""
        if isinstance(self._waiting, _Settling):
            effects, _ = self._judge_turn(now)  # calls are not begun any more
            if effects:
                return effects
        if isinstance(self._waiting, _Ended):
            return []
        return self._fail(reason, detail, now)

    def tick(self, now: float) -> Effects:
        """The alarm: carry out what has come due."""
        match self._waiting:
            case _Settling(until=at) if now >= at:
                return self._conclude_turn(now)
            case _Broken(until=at, failure=failure) if now >= at:
                return self._fail(failure.reason, failure.detail, now)
            case _:
                return []

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
        turn = self._turn
        return Progress(
            request_id=self.request_id,
            phase=self.phase,
            dispatched_at=self._created_at,
            turn_started_at=turn.started_at,
            headers_at=turn.headers_at,
            first_token_at=turn.first_token_at,
            prompt_progress_at=turn.prompt_progress_at,
            last_data_at=turn.last_data_at,
            last_stream_byte_at=turn.last_stream_byte_at,
            concluding=isinstance(self._waiting, _Settling | _Broken),
        )

    def saw_liveness(self, at: float | None) -> None:
        """Evidence that the server works; for the status."""
        self._liveness_at = at

    def read_output(self, text_offset: int, reasoning_offset: int) -> OutputChunk:
        """What was added since the offsets."""
        return read_output(self._output.text, self._output.reasoning, text_offset, reasoning_offset, done=self._is_over)

    def status(self) -> RequestStatus:
        """A snapshot."""
        turn = self._turn
        in_tools = isinstance(self._waiting, _InTools)
        status: RequestStatus = {
            "ok": True,
            "request_id": self.request_id,
            "job_name": self.job_name,
            "state": RequestState.TOOL_RUNNING if in_tools else RequestState.RUNNING,
            "phase": self.phase,
            "created_at": self._unix(self._created_at),
            "dispatched_at": self._unix(self._created_at),
            "output_chars": self._output.text_chars,
            "reasoning_chars": self._output.reasoning_chars,
            "tool_iters_remaining": self._iterations_left,
            "tool_calls_count": self._calls_made,
            "signals": copy.deepcopy(self._signals),
            "tokens_received": self._tokens + (0 if turn.is_over else turn.tokens),
        }
        latest = last_progress_at(self.progress(), self._liveness_at)
        instants = {
            "first_token_at": self._first_token_at,
            "last_progress_at": _later(latest, self._progress_at),
            "last_stream_byte_at": _later(turn.last_stream_byte_at, self._stream_byte_at),
            "last_liveness_at": self._liveness_at,
        }
        status.update(cast("Any", {key: self._unix(at) for key, at in instants.items() if at is not None}))
        if turn.prompt_progress is not None:
            told = turn.prompt_progress
            status["prompt_progress"] = {
                "processed": told.processed,
                "total": told.total,
                "cached": told.cached,
            }
        speed = turn.tokens_per_second()
        if speed is not None:
            status["tokens_per_second"] = speed
        if self._output.text_chars:
            status["tail"] = self._output.text[-_TAIL_CHARS:]
        return status

    # ------------------------------------------------------------ turns

    @property
    def _is_over(self) -> bool:
        return isinstance(self._waiting, _Ended)

    @property
    def _offers_tools(self) -> bool:
        return bool(self._config.normal_tools or self._config.exit_tools)

    def _is_current(self, stream_id: StreamId) -> bool:
        listening = isinstance(self._waiting, (_Streaming, _Settling))
        return listening and stream_id == (self.request_id, self._exchanges)

    def _new_turn(self, now: float) -> Turn:
        return Turn(
            started_at=now,
            prompted=self._prompted,
            with_tools=self._offers_tools,
            opens_thinking=self._opens_thinking,
        )

    def _begin_conversation(self, now: float) -> Conversation:
        return Conversation.begin(
            self._bios(now),
            system_prompt=self._submission.system_prompt,
            messages=self._submission.messages,
            user_prompt=self._submission.user_prompt,
            system_prompt_mode=self._config.system_prompt_mode,
            prompted=self._prompted,
        )

    def _bios(self, now: float) -> BiosText | str:
        context = BiosContext(
            now=datetime.fromtimestamp(self._unix(now), self._config.timezone),
            timezone_name=self._config.timezone_name,
            worker_name=self._config.name,
            tool_iters_remaining=self._iterations_left,
            normal_tools=tuple(self._config.normal_tools),
            exit_tools=tuple(self._config.exit_tools),
            tool_call_mode="prompted" if self._prompted else "native",
        )
        return run_bios(self._config.bios_provider, context)

    def _open_turn(self, now: float) -> Effects:
        assert self._conversation is not None
        self._exchanges += 1
        self._turn = self._new_turn(now)
        self._calls_taken = False
        tools = [] if self._prompted else [*self._config.normal_tools, *self._config.exit_tools]
        body = request_body(self._config, self._submission.params, self._conversation.messages(), tools)
        return [OpenTurn(stream_id=(self.request_id, self._exchanges), body=body)]

    def _can_try_prompted(self, failure: StreamFailure) -> bool:
        may = self._config.tool_call_mode == "auto" and not self._prompted and self._exchanges == 1
        return may and self._offers_tools and refuses_tools(failure)

    def _try_prompted(self, now: float) -> Effects:
        """The same request again, with the tools in its text."""
        self._prompted = True
        return self.begin(now)

    def _tokens_came(self, count: int, at: float) -> None:
        self._turn.tokens_came(count, at)
        if self._first_token_at is None:
            self._first_token_at = at

    def _server_error(self, error: ServerError, at: float) -> Effects:
        detail = error.message + (f" ({error.type})" if error.type else "")
        if error.code is not None:
            detail = f"{detail}, code {error.code}"
        if self._offers_tools and reports_malformed_call(error.message):
            return self._fail(RequestFailReason.TOOL_PARSE_ERROR, detail, at)
        self._http_status = error.code
        return self._fail(RequestFailReason.SERVER_ERROR, detail, at)

    def _conclude_turn(self, now: float) -> Effects:
        """The turn came to a regular end: to the tools, or to the end of the request."""
        effects, calls = self._judge_turn(now)
        return effects or self._start_tools(calls)

    def _judge_turn(self, now: float) -> tuple[Effects, tuple[ParsedCall, ...]]:
        """What becomes of a turn that came to its regular end: the end of the request, or else calls to run."""
        cut_off = self._turn.finish_reason == "length"
        self._output.add(*self._turn.finish(cut_off=cut_off))
        if self._output.loop is not None:
            return self._fail(RequestFailReason.REPEATED_LINE_LOOP, _describe_loop(self._output.loop), now), ()
        found = self._take_calls(now)
        if cut_off:
            return self._end(RequestState.COMPLETED, RequestFinishReason.MAX_TOKENS, now), ()
        if found.problem is not None:
            return self._fail(RequestFailReason.TOOL_PARSE_ERROR, found.problem.fail_detail, now), ()
        if not found.normal:
            return self._end(RequestState.COMPLETED, RequestFinishReason.STOP, now), ()
        if self._turn.finish_reason is None:
            detail = "the turn ended without a finish reason: its calls may be incomplete and are not run"
            return self._fail(RequestFailReason.TOOL_PARSE_ERROR, detail, now), ()
        if self._iterations_left <= 0:
            detail = "tool iteration budget exhausted"
            return self._fail(RequestFailReason.TOOL_EXECUTION_ERROR, detail, now), ()
        return [], found.normal

    def _take_calls(self, now: float) -> Partition:
        """Tell the turn's calls apart, once. Exit calls are recorded whatever becomes of turn and request."""
        self._calls_taken = True
        found = partition(
            self._turn.calls(),
            [tool["function"]["name"] for tool in self._config.normal_tools],
            [tool["function"]["name"] for tool in self._config.exit_tools],
            emitted_at=self._unix(now),
            first_number=self._calls_made + 1,
        )
        self._signals += found.exits
        return found

    def _start_tools(self, calls: tuple[ParsedCall, ...]) -> Effects:
        closing = self._close_turn()
        self._iterations_left -= 1
        self._calls_made += len(calls)
        batch_id = (self.request_id, self._exchanges)
        self._waiting = _InTools(batch_id, calls)
        iteration = self._config.max_tool_iterations - self._iterations_left
        return [*closing, StartTools(batch_id=batch_id, iteration=iteration, calls=calls)]

    def _close_turn(self) -> Effects:
        """The exchange is over: add up what is kept of it."""
        turn = self._turn
        turn.is_over = True
        self._progress_at = _later(self._progress_at, last_progress_at(self.progress(), None))
        self._stream_byte_at = _later(self._stream_byte_at, turn.last_stream_byte_at)
        self._tokens += turn.tokens
        if turn.usage is not None:
            before = self._usage or Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
            self._usage = Usage(
                prompt_tokens=before.prompt_tokens + turn.usage.prompt_tokens,
                completion_tokens=before.completion_tokens + turn.usage.completion_tokens,
                cached_tokens=(before.cached_tokens or 0) + (turn.usage.cached_tokens or 0),
            )
        return [CloseTurn(stream_id=(self.request_id, self._exchanges))]

    # ------------------------------------------------------------ the end

    def _fail(self, reason: RequestFailReason, detail: str, now: float) -> Effects:
        shown = masked(detail, self._config.api_key)
        return self._end(RequestState.FAILED, RequestFinishReason.FAILED, now, reason, shown)

    def _end(
        self,
        state: RequestState,
        finish_reason: RequestFinishReason,
        now: float,
        fail_reason: RequestFailReason | None = None,
        fail_detail: str | None = None,
    ) -> Effects:
        effects: Effects = []
        match self._waiting:
            case _InTools(batch_id=batch_id):
                effects.append(ForgetTools(batch_id=batch_id))
            case _:
                self._output.add(*self._turn.finish())  # what was held back is output, too
                if not self._calls_taken:
                    self._take_calls(now)
                if self._exchanges and not self._turn.is_over:
                    effects += self._close_turn()
        record = self._record(state, finish_reason, now, fail_reason, fail_detail)
        self._waiting = _Ended(record)
        return [*effects, Finished(record=record)]

    def _record(
        self,
        state: RequestState,
        finish_reason: RequestFinishReason,
        now: float,
        fail_reason: RequestFailReason | None,
        fail_detail: str | None,
    ) -> RequestRecord:
        status = self.status()
        status["state"], status["phase"] = state, RequestPhase.DONE
        status["completed_at"] = self._unix(now)
        result: RequestResult = {
            "ok": True,
            "request_id": self.request_id,
            "job_name": self.job_name,
            "state": state,
            "finish_reason": finish_reason,
            "text": self._output.text,
            "reasoning": self._output.reasoning,
            "signals": status["signals"],
            "tool_trace": self._trace,
            "timings": {"total_s": now - self._created_at},
        }
        if self._first_token_at is not None:
            result["timings"]["ttft_s"] = self._first_token_at - self._created_at
        if "tokens_per_second" in status:
            result["timings"]["tokens_per_second"] = status["tokens_per_second"]
        if self._usage is not None:
            result["usage"] = {
                "prompt_tokens": self._usage.prompt_tokens,
                "completion_tokens": self._usage.completion_tokens,
                "cached_tokens": self._usage.cached_tokens or 0,
            }
        if fail_reason is not None:
            status["fail_reason"] = result["fail_reason"] = fail_reason
        if fail_detail is not None:
            status["fail_detail"] = result["fail_detail"] = fail_detail
        return RequestRecord(
            request_id=self.request_id,
            job_name=self.job_name,
            status=status,
            result=result,
            ended_at=now,
            last_data_at=self._turn.last_data_at,
            http_status=self._http_status,
        )

    def _unix(self, at: float) -> float:
        return at + self._unix_offset


def request_body(config: WorkerConfig, params: Any, messages: Sequence[Any], tools: Sequence[Any]) -> dict[str, Any]:
    """The chat request: the worker's defaults yield to the caller's, but for what the worker owns. Pure."""
    body: dict[str, Any] = {
        "return_progress": True,
        "stream_options": {"include_usage": True},
        "reasoning_format": "deepseek",
        "sse_ping_interval": 10,
    }
    if config.max_tokens is not None:
        body["max_tokens"] = config.max_tokens
    body.update(config.default_params)
    body.update(params)
    for owned in OWNED_PARAMS:
        body.pop(owned, None)
    body["messages"] = list(messages)
    if tools:
        body["tools"] = list(tools)
    body["stream"] = True
    return body


OWNED_PARAMS = ("messages", "tools", "stream")


def read_output(text: str, reasoning: str, text_offset: int, reasoning_offset: int, *, done: bool) -> OutputChunk:
    """What lies behind the offsets. Pure."""
    return {
        "ok": True,
        "text": text[text_offset:],
        "reasoning": reasoning[reasoning_offset:],
        "text_offset": max(text_offset, len(text)),
        "reasoning_offset": max(reasoning_offset, len(reasoning)),
        "done": done,
    }


def _describe_loop(loop: LoopFound) -> str:
    if loop.period > 1:
        return f"a block of {loop.period} lines that ends in {loop.line!r} came {loop.count} times in a row"
    return f"the line {loop.line!r} came {loop.count} times in a row"


def _later(one: float | None, other: float | None) -> float | None:
    return max((at for at in (one, other) if at is not None), default=None)
