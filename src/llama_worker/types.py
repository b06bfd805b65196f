"""The contract: what goes into a worker and what comes out of it. Pure; plain data that serialises
as it is.

Instants (`*_at`) are Unix seconds that never run backwards within a worker, durations (`*_s`) are
seconds.
"""

# No `from __future__ import annotations` here: with it Python 3.11 does not see `NotRequired`, and
# the classes' `__required_keys__` are wrong.

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import (
    Any,
    Literal,
    NotRequired,
    Protocol,
    Required,
    TypeAlias,
    TypedDict,
    runtime_checkable,
)

# ---------------------------------------------------------------- states and reasons


class WorkerState(StrEnum):
    """Where the worker's server is."""

    STOPPED = "stopped"
    RUNNING = "running"
    """The process is started, or about to be again, and not ready yet."""
    READY = "ready"
    FAILED = "failed"


class StartFailReason(StrEnum):
    """Why a `start()` failed."""

    PORT_IN_USE = "port_in_use"
    SPAWN_FAILED = "spawn_failed"
    EXITED = "exited"
    STARTUP_TIMEOUT = "startup_timeout"
    STOPPED = "stopped"
    CANARY_FAILED = "canary_failed"
    UNKILLABLE = "unkillable"


class RequestState(StrEnum):
    """Where a request is; the last three are terminal."""

    RUNNING = "running"
    TOOL_RUNNING = "tool_running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"

    @property
    def is_terminal(self) -> bool:
        """Nothing changes any more."""
        return self in (RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELED)


class RequestPhase(StrEnum):
    """What a request is doing; `waiting`: no response headers yet."""

    WAITING = "waiting"
    PREFILL = "prefill"
    GENERATING = "generating"
    TOOL = "tool"
    DONE = "done"


class RequestFinishReason(StrEnum):
    """How a request ended."""

    STOP = "stop"
    MAX_TOKENS = "max_tokens"
    CANCELED = "canceled"
    FAILED = "failed"


class RequestFailReason(StrEnum):
    """Why a request did not complete."""

    WORKER_RESTARTED = "worker_restarted"
    WORKER_STOPPED = "worker_stopped"
    SERVER_DIED = "server_died"
    CONNECT_FAILED = "connect_failed"
    HEADERS_TIMEOUT = "headers_timeout"
    TTFT_TIMEOUT = "ttft_timeout"
    STALL_TIMEOUT = "stall_timeout"
    ABSOLUTE_TIMEOUT = "absolute_timeout"
    STREAM_DISCONNECTED = "stream_disconnected"
    PROTOCOL_ERROR = "protocol_error"
    HTTP_ERROR = "http_error"
    SERVER_ERROR = "server_error"
    PROMPT_ERROR = "prompt_error"
    TOOL_PARSE_ERROR = "tool_parse_error"
    TOOL_EXECUTION_ERROR = "tool_execution_error"
    REPEATED_LINE_LOOP = "repeated_line_loop"
    REPEATED_TEXT_LOOP = "repeated_text_loop"
    REQUEST_LOST = "request_lost"
    CONTEXT_EXCEEDED = "context_exceeded"
    """The server said that the prompt does not fit into its context."""
    CANCELED = "canceled"
    UNKNOWN_ERROR = "unknown_error"


# ---------------------------------------------------------------- OpenAI shapes, permissive


class ToolFunctionDef(TypedDict):
    """A function as a model is told of it; `parameters` is a JSON schema."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[Mapping[str, Any]]
    strict: NotRequired[bool]


class ToolDef(TypedDict):
    """A tool that a model may call."""

    type: Literal["function"]
    function: ToolFunctionDef


class ToolCallFunction(TypedDict):
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call as it stands in an assistant message."""

    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: ToolCallFunction


ContentPart: TypeAlias = Mapping[str, Any]
"""A part of a message, as OpenAI has it: `{"type": "text", "text": ...}`,
`{"type": "image_url", "image_url": {"url": ...}}` or
`{"type": "input_audio", "input_audio": {"data": ..., "format": ...}}`."""


class ChatMessage(TypedDict, total=False):
    """One message of a conversation; a server may know more keys."""

    role: Required[str]
    content: str | Sequence[ContentPart] | None
    name: str
    reasoning_content: str
    tool_calls: list[ToolCall]
    tool_call_id: str


# ---------------------------------------------------------------- answers to a host

SubmitErrorCode: TypeAlias = Literal[
    "NO_SLOT_AVAILABLE", "WORKER_NOT_READY", "WORKER_DRAINING", "WORKER_FAILED"
]


class SubmitOk(TypedDict):
    """The request was admitted and holds a slot.

    Attributes:
        ok: True.
        request_id: for every call about it; 1, 2, 3, ... for the life of the worker.
    """

    ok: Literal[True]
    request_id: int


class SubmitErr(TypedDict):
    """The request was refused and took nothing.

    Attributes:
        ok: False.
        error: why: no free slot, or no server to send it to.
    """

    ok: Literal[False]
    error: SubmitErrorCode


SubmitResult: TypeAlias = SubmitOk | SubmitErr


class NotFound(TypedDict):
    """No such request, or not any more.

    Attributes:
        ok: False.
        error: the id is unknown, or its result was taken.
    """

    ok: Literal[False]
    error: Literal["NOT_FOUND"]


class NotReady(TypedDict):
    """The request has not ended yet.

    Attributes:
        ok: False.
        error: it has not ended.
    """

    ok: Literal[False]
    error: Literal["NOT_READY"]


class ExitSignal(TypedDict):
    """A call of an exit tool: one-way, recorded and never answered.

    Attributes:
        tool_name: which exit tool.
        arguments: as the model wrote them; empty where they are malformed.
        emitted_at: when the call was complete.
        malformed: the raw text that did not parse.
    """

    tool_name: str
    arguments: dict[str, Any]
    emitted_at: float
    malformed: NotRequired[str]


class ToolTraceEntry(TypedDict):
    """One call of a normal tool, as it went; one that was not run (cut off, unknown, over the
    budget) says why.

    Attributes:
        tool_call_id: the worker's own, as the server is told it.
        tool_name: as the model wrote it.
        arguments: the text as it came, where the call was not run.
        iteration: which turn with calls it belongs to.
        started_at: when.
        duration_s: how long it took.
        ok: whether the model was given a result.
        error: why there is none.
        result: what the model was given: JSON, or with `tool_errors="tell"` the error's text.
    """

    tool_call_id: str
    tool_name: str
    arguments: dict[str, Any] | str
    iteration: int
    started_at: float
    duration_s: float
    ok: bool
    error: NotRequired[str]
    result: NotRequired[str]


class PromptProgress(TypedDict):
    """Prefill, in tokens of the prompt.

    Attributes:
        processed: read so far.
        total: of the whole prompt.
        cached: that need not be read.
    """

    processed: int
    total: int
    cached: int


class Usage(TypedDict):
    """Tokens as the server counted them.

    Attributes:
        prompt_tokens: of the prompts, cached ones included.
        completion_tokens: that were generated.
        cached_tokens: of the prompts, that the server had kept.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class ContextUse(TypedDict):
    """A prompt that did not fit, in tokens.

    Attributes:
        n_prompt_tokens: of the prompt.
        n_ctx: the context of a slot.
    """

    n_prompt_tokens: int
    n_ctx: int


class Timings(TypedDict, total=False):
    """`ttft_s` is absent where no token came, `tokens_per_second` where it is not known.

    Attributes:
        ttft_s: until the first token, where one came.
        total_s: from admission to the end.
        tokens_per_second: where the speed is known.
    """

    ttft_s: float
    total_s: Required[float]
    tokens_per_second: float


class RequestStatus(TypedDict):
    """How far a request is.

    Attributes:
        ok: True.
        request_id: as `submit` gave it.
        job_name: the caller's.
        state: running, or how it ended.
        phase: what it does: waits, reads the prompt, generates, runs a tool.
        created_at: when it was admitted.
        output_chars: of text so far.
        reasoning_chars: of reasoning so far.
        tool_iters_remaining: turns with calls that are left.
        tool_calls_count: calls of normal tools so far.
        signals: calls of exit tools so far.
        fail_reason: None while it runs, and on success.
        dispatched_at: when it was sent to the server.
        first_token_at: when.
        completed_at: when it ended.
        last_progress_at: the latest of data and signs of work.
        last_stream_byte_at: the latest byte of any kind.
        last_liveness_at: the latest sign of work of the server's processes.
        prompt_progress: how much of the prompt is read.
        tokens_received: as the server counts them, else the deltas received.
        tokens_per_second: the speed so far.
        tail: the last 200 characters of the output.
        running_tool: the tool that runs now.
        fail_detail: why, for a person.
    """

    ok: Literal[True]
    request_id: int
    job_name: str
    state: RequestState
    phase: RequestPhase
    created_at: float
    output_chars: int
    reasoning_chars: int
    tool_iters_remaining: int
    tool_calls_count: int
    signals: list[ExitSignal]
    fail_reason: RequestFailReason | None
    dispatched_at: NotRequired[float]
    first_token_at: NotRequired[float]
    completed_at: NotRequired[float]
    last_progress_at: NotRequired[float]
    last_stream_byte_at: NotRequired[float]
    last_liveness_at: NotRequired[float]
    prompt_progress: NotRequired[PromptProgress]
    tokens_received: NotRequired[int]
    tokens_per_second: NotRequired[float]
    tail: NotRequired[str]
    running_tool: NotRequired[str]
    fail_detail: NotRequired[str]


class TokenCount(TypedDict):
    """Whether a prompt fits.

    Attributes:
        ok: True.
        n_prompt_tokens: of the prompt as it would be sent, the BIOS and tools included.
        n_ctx: the context of a slot.
        n_left: for the answer; below zero where the prompt does not fit.
    """

    ok: Literal[True]
    n_prompt_tokens: int
    n_ctx: int
    n_left: int


class OutputChunk(TypedDict):
    """What was added since the offsets asked for; the offsets here are the new ones.

    Attributes:
        ok: True.
        text: that was added.
        reasoning: that was added.
        text_offset: for the next read.
        reasoning_offset: for the next read.
        done: the request has ended; nothing will follow.
    """

    ok: Literal[True]
    text: str
    reasoning: str
    text_offset: int
    reasoning_offset: int
    done: bool


class RequestResult(TypedDict):
    """A request that has ended; `text` holds whatever was received, however it ended.

    Attributes:
        ok: True.
        request_id: as `submit` gave it.
        job_name: the caller's.
        state: how it ended.
        finish_reason: why the output ends.
        text: all that was received, however it ended.
        reasoning: all that was received.
        signals: calls of exit tools.
        tool_trace: calls of normal tools.
        fail_reason: None on success.
        conversation: from the user prompt on, as the server last saw it, and the last answer. With
            `submit(..., messages=earlier + conversation)` the server's prompt cache holds all of
            it.
        usage: tokens, as the server counted them.
        timings: how long it took.
        fail_detail: why, for a person.
        context: with `context_exceeded`, where the server told the numbers.
    """

    ok: Literal[True]
    request_id: int
    job_name: str
    state: RequestState
    finish_reason: RequestFinishReason
    text: str
    reasoning: str
    signals: list[ExitSignal]
    tool_trace: list[ToolTraceEntry]
    fail_reason: RequestFailReason | None
    conversation: list[ChatMessage]
    usage: NotRequired[Usage]
    timings: NotRequired[Timings]
    fail_detail: NotRequired[str]
    context: NotRequired[ContextUse]


class WorkerStatus(TypedDict):
    """How the worker is; `warnings` are lines for a person.

    Attributes:
        name: of its config.
        state: where its server is.
        slots_total: of its config.
        slots_used: requests that run.
        active_request_ids: those.
        active_jobs: their job names.
        finished_request_ids: ended, and neither taken nor released yet, oldest first.
        draining: no request is admitted any more.
        restart_count: automatic restarts since it was constructed.
        config_hash: SHA-256 of its config, without secrets and callables.
        warnings: lines for a person.
        pid: of the server.
        last_error: why it failed or was restarted, the last time.
        last_ready_at: when the server last became READY.
        next_restart_at: when the backoff ends.
        n_ctx: tokens of context of a slot, as the server says it.
        modalities: what the model takes beside text, as the server says it: `{"vision": False,
            "audio": False}`.
        model: as the server names it.
    """

    name: str
    state: WorkerState
    slots_total: int
    slots_used: int
    active_request_ids: list[int]
    active_jobs: dict[int, str]
    finished_request_ids: list[int]
    draining: bool
    restart_count: int
    config_hash: str
    warnings: list[str]
    pid: NotRequired[int]
    last_error: NotRequired[str]
    last_ready_at: NotRequired[float]
    next_restart_at: NotRequired[float]
    n_ctx: NotRequired[int]
    modalities: NotRequired[dict[str, bool]]
    model: NotRequired[str]


class RestartRecord(TypedDict):
    """One restart: automatic, planned or by hand.

    Attributes:
        at: when.
        reason: the cause, as in `WorkerTotals`.
        detail: for a person.
    """

    at: float
    reason: str
    detail: str


class Durations(TypedDict):
    """A histogram. Count number i is of what is above bound i-1 and not above bound i; the last is
    of the rest.

    Attributes:
        bounds_s: upper bounds, ascending.
        counts: one more than the bounds; each duration is counted once.
        sum_s: of all durations.
    """

    bounds_s: list[float]
    counts: list[int]
    sum_s: float


class WorkerTotals(TypedDict):
    """What was counted since the worker was constructed. Counters are monotonic.

    Attributes:
        requests: ended requests by terminal state, then by fail reason, or by finish reason where
            nothing failed.
        restarts: by reason.
        signals: calls of exit tools, by tool, as they come.
        prompt_tokens: of requests whose server told its usage; cached ones included.
        cached_tokens: of those, that the server had kept.
        generated_tokens: of ended requests, however they ended.
        ttft: until the first token.
        duration: from admission to the end, by terminal state.
    """

    requests: dict[str, dict[str, int]]
    restarts: dict[str, int]
    signals: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft: Durations
    duration: dict[str, Durations]


class WorkerDebugInfo(TypedDict):
    """What a person needs to see what happened.

    Attributes:
        recent_logs: the last lines that the server wrote, newest last.
        recent_restarts: newest last.
        recent_events: the last 200, newest last; each has `at`, `event` and `worker`, and the
            event's facts.
        events_dropped_count: those that `on_event` was not told of, since it took too long with
            others.
        server_cmd: with secrets masked.
        evidence: what was seen of the server just before the last kill; empty if there was none.
        seconds_since_progress: the longest that a request in flight has been without progress, as
            the watchdog saw it last; None where none is.
        stuck_tool_threads_count: tool threads that run on although nobody waits for them any more.
        totals: what was counted since the worker was constructed.
    """

    recent_logs: list[str]
    recent_restarts: list[RestartRecord]
    recent_events: list[dict[str, Any]]
    events_dropped_count: int
    server_cmd: list[str]
    evidence: dict[str, Any]
    seconds_since_progress: float | None
    stuck_tool_threads_count: int
    totals: WorkerTotals


# ---------------------------------------------------------------- what a host plugs in

ToolCallMode: TypeAlias = Literal["auto", "native", "prompted"]
ToolErrors: TypeAlias = Literal["fail", "tell"]
SystemPromptMode: TypeAlias = Literal["merged", "separate"]


@dataclass(frozen=True, slots=True)
class BiosText:
    """`stable` is the same for a whole request and stands first; `volatile` ends the last message
    of each turn."""

    stable: str
    volatile: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BiosContext:
    """What a BIOS text may speak of. `now` is aware, in the configured zone."""

    now: datetime
    timezone_name: str
    worker_name: str
    tool_iters_remaining: int
    normal_tools: tuple[ToolDef, ...]
    exit_tools: tuple[ToolDef, ...]
    bios_version: str = "bios-v1"
    tool_call_mode: ToolCallMode = "native"


class BiosProvider(Protocol):
    """Writes the BIOS text: pure and quick. It runs on a thread of its own, for `bios_timeout_s` at
    most."""

    def __call__(self, ctx: BiosContext, /) -> BiosText | str: ...


class EventHandler(Protocol):
    """Hears of the worker's life, one event after the other, each a dict as in
    `recent_events`; it may use the worker, and should not wait long."""

    def __call__(self, event: dict[str, Any], /) -> object: ...


class SignalHandler(Protocol):
    """Hears of exit tools called, one call after the other; it may use the worker, and should not
    wait long."""

    def __call__(self, signal: ExitSignal, /, *, request_id: int, job_name: str) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCall:
    """A tool call as long as somebody waits for it, for a runner that can give up."""

    deadline: float
    """`time.monotonic()` at which `tool_timeout_s` is over."""
    cancelled: threading.Event
    """Set once nobody waits any more: the time is up, or the request has ended."""


@runtime_checkable
class ToolRunner(Protocol):
    """Runs normal tools. Called on a tool thread; several threads may call at once.

    `run_tool` may be `async def`: it then runs in an event loop of its thread's own, and is
    cancelled once nobody waits any more.
    """

    def run_tool(
        self, *, name: str, arguments: dict[str, Any], request_id: int, job_name: str
    ) -> Any:
        """Return any JSON value; for an exception see `tool_errors`."""
        ...


class CancellableToolRunner(Protocol):
    """A ToolRunner that is told how long somebody waits."""

    def run_tool(
        self,
        *,
        name: str,
        arguments: dict[str, Any],
        request_id: int,
        job_name: str,
        call: RunningCall,
    ) -> Any:
        """Return any JSON value; for an exception see `tool_errors`."""
        ...


@dataclass(frozen=True, slots=True)
class LivenessEvidence:
    """One look at the server's processes. `alive`: work was seen since the look before."""

    alive: bool
    detail: str
    """What was seen, with numbers, for a person."""
    reads: bool = False
    """Among that, a model that is paged in from disk: then a batch may take any time."""


@runtime_checkable
class LivenessProbe(Protocol):
    """Looks from outside whether the server works. One thread at a time calls it."""

    def probe(self, root_pid: int, now: float) -> LivenessEvidence | None:
        """Look at the tree of `root_pid`; `now` is monotonic seconds. None is no news, and never a
        failure."""
        ...

    def reset(self) -> None:
        """Forget what was seen: watching begins anew, maybe with another process."""
        ...
