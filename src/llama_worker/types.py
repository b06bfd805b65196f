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
"""A part of a message, as OpenAI has it: `{"type": "text", "text": ...}`, `{"type": "image_url", "image_url": {"url":
...}}` or `{"type": "input_audio", "input_audio": {"data": ..., "format": ...}}`."""


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
    """The request was admitted and holds a slot."""

    ok: Literal[True]
    request_id: int


class SubmitErr(TypedDict):
    """The request was refused and took nothing."""

    ok: Literal[False]
    error: SubmitErrorCode


SubmitResult: TypeAlias = SubmitOk | SubmitErr


class NotFound(TypedDict):
    """No such request, or not any more."""

    ok: Literal[False]
    error: Literal["NOT_FOUND"]


class NotReady(TypedDict):
    """The request has not ended yet."""

    ok: Literal[False]
    error: Literal["NOT_READY"]


class ExitSignal(TypedDict):
    """A call of an exit tool: one-way, recorded and never answered."""

    tool_name: str
    arguments: dict[str, Any]
    emitted_at: float
    malformed: NotRequired[str]
    """The raw text that did not parse; `arguments` is then empty."""


class ToolTraceEntry(TypedDict):
    """One call of a normal tool, as it went; one that was not run (cut off, unknown, over the
    budget) says why."""

    tool_call_id: str
    tool_name: str
    arguments: dict[str, Any] | str  # the text as it came, where the call was not run
    iteration: int
    started_at: float
    duration_s: float
    ok: bool
    error: NotRequired[str]
    result: NotRequired[str]
    """What the model was given: JSON, or with `tool_errors="tell"` the error's text."""


class PromptProgress(TypedDict):
    """Prefill, in tokens of the prompt."""

    processed: int
    total: int
    cached: int


class Usage(TypedDict):
    """Tokens as the server counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class ContextUse(TypedDict):
    """A prompt that did not fit, in tokens."""

    n_prompt_tokens: int
    n_ctx: int
    """The context of a slot."""


class Timings(TypedDict, total=False):
    """`ttft_s` is absent where no token came, `tokens_per_second` where it is not known."""

    ttft_s: float
    total_s: Required[float]
    tokens_per_second: float


class RequestStatus(TypedDict):
    """How far a request is."""

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
    """None while it runs, and on success."""
    dispatched_at: NotRequired[float]
    first_token_at: NotRequired[float]
    completed_at: NotRequired[float]
    last_progress_at: NotRequired[float]
    last_stream_byte_at: NotRequired[float]
    last_liveness_at: NotRequired[float]
    prompt_progress: NotRequired[PromptProgress]
    tokens_received: NotRequired[int]
    """As the server counts them, else the deltas received."""
    tokens_per_second: NotRequired[float]
    tail: NotRequired[str]
    """The last 200 characters of the output."""
    running_tool: NotRequired[str]
    """The tool that runs now."""
    fail_detail: NotRequired[str]


class TokenCount(TypedDict):
    """Whether a prompt fits."""

    ok: Literal[True]
    n_prompt_tokens: int
    n_ctx: int
    """The context of a slot."""
    n_left: int
    """For the answer; below zero where the prompt does not fit."""


class OutputChunk(TypedDict):
    """What was added since the offsets asked for; the offsets here are the new ones."""

    ok: Literal[True]
    text: str
    reasoning: str
    text_offset: int
    reasoning_offset: int
    done: bool


class RequestResult(TypedDict):
    """A request that has ended; `text` holds whatever was received, however it ended."""

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
    """None on success."""
    conversation: list[ChatMessage]
    """From the user prompt on, as the server last saw it, and the last answer. With
    `submit(..., messages=earlier + conversation)` the server's prompt cache holds all of it."""
    usage: NotRequired[Usage]
    timings: NotRequired[Timings]
    fail_detail: NotRequired[str]
    context: NotRequired[ContextUse]
    """With `context_exceeded`, where the server told the numbers."""


class WorkerStatus(TypedDict):
    """How the worker is; `warnings` are lines for a person."""

    name: str
    state: WorkerState
    slots_total: int
    slots_used: int
    active_request_ids: list[int]
    active_jobs: dict[int, str]
    finished_request_ids: list[int]
    """Ended, and neither taken nor released yet, oldest first."""
    draining: bool
    restart_count: int
    config_hash: str
    warnings: list[str]
    pid: NotRequired[int]
    last_error: NotRequired[str]
    last_ready_at: NotRequired[float]
    next_restart_at: NotRequired[float]
    n_ctx: NotRequired[int]
    """Tokens of context of a slot, as the server says it; so are the two below."""
    modalities: NotRequired[dict[str, bool]]
    """What the model takes beside text, such as `{"vision": False, "audio": False}`."""
    model: NotRequired[str]


class RestartRecord(TypedDict):
    """One restart: automatic, planned or by hand."""

    at: float
    reason: str
    detail: str


class Durations(TypedDict):
    """A histogram. Count number i is of what is above bound i-1 and not above bound i; the last is
    of the rest."""

    bounds_s: list[float]
    counts: list[int]
    """One more than the bounds; each duration is counted once."""
    sum_s: float


class WorkerTotals(TypedDict):
    """What was counted since the worker was constructed. Counters are monotonic."""

    requests: dict[str, dict[str, int]]
    """Ended requests by terminal state, then by fail reason, or by finish reason where nothing failed."""
    restarts: dict[str, int]
    """By reason."""
    signals: dict[str, int]
    """Calls of exit tools, by tool, as they come."""
    prompt_tokens: int
    """Of requests whose server told its usage; cached ones included."""
    cached_tokens: int
    generated_tokens: int
    """Of ended requests, however they ended."""
    ttft: Durations
    duration: dict[str, Durations]
    """From admission to the end, by terminal state."""


class WorkerDebugInfo(TypedDict):
    """What a person needs to see what happened."""

    recent_logs: list[str]
    """The last lines that the server wrote, newest last."""
    recent_restarts: list[RestartRecord]
    recent_events: list[dict[str, Any]]
    """The last 200, newest last; each has `at`, `event` and `worker`, and the event's facts."""
    events_dropped_count: int
    """Those that `on_event` was not told of, since it took too long with others."""
    server_cmd: list[str]
    """With secrets masked."""
    evidence: dict[str, Any]
    """What was seen of the server just before the last kill; empty if there was none."""
    seconds_since_progress: float | None
    """The longest that a request in flight has been without progress, as the watchdog saw it last;
    None where none is."""
    stuck_tool_threads_count: int
    """Tool threads that run on although nobody waits for them any more."""
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
