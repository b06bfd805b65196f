"""What a worker says about a request: its state, why it failed, its output and its result. Pure.

Instants (`*_at`) are Unix seconds that never run backwards within a worker, durations (`*_s`) are
seconds.
"""

# No `from __future__ import annotations` here: with it Python 3.11 does not see `NotRequired`, and
# the classes' `__required_keys__` are wrong.

from enum import StrEnum
from typing import Any, Literal, NotRequired, Required, TypeAlias, TypedDict

from llama_worker.types.chat import ChatMessage


class RequestState(StrEnum):
    """The state of a request; the last three are terminal."""

    RUNNING = "running"
    TOOL_RUNNING = "tool_running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended: nothing changes any more."""
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


SubmitErrorCode: TypeAlias = Literal[
    "NO_SLOT_AVAILABLE", "WORKER_NOT_READY", "WORKER_DRAINING", "WORKER_FAILED"
]


class SubmitOk(TypedDict):
    """The request was admitted and holds a slot.

    Attributes:
        ok: True.
        request_id: names the request in every other call; 1, 2, 3, ... for the life of the worker.
    """

    ok: Literal[True]
    request_id: int


class SubmitErr(TypedDict):
    """The request was refused and took nothing.

    Attributes:
        ok: False.
        error: why: NO_SLOT_AVAILABLE, WORKER_NOT_READY, WORKER_DRAINING or WORKER_FAILED.
    """

    ok: Literal[False]
    error: SubmitErrorCode


SubmitResult: TypeAlias = SubmitOk | SubmitErr


class NotFound(TypedDict):
    """There is no such request, or no longer.

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
        error: the request still runs.
    """

    ok: Literal[False]
    error: Literal["NOT_READY"]


class ExitSignal(TypedDict):
    """A call of an exit tool: one-way, recorded and never answered.

    Attributes:
        tool_name: the exit tool that was called.
        arguments: as the model wrote them; empty if they are malformed.
        emitted_at: when the call was complete.
        malformed: the raw text, if it did not parse.
    """

    tool_name: str
    arguments: dict[str, Any]
    emitted_at: float
    malformed: NotRequired[str]


class ToolTraceEntry(TypedDict):
    """One call of a normal tool; `error` says why, if it failed or was not run (cut off, unknown,
    over the budget, after one that failed).

    Attributes:
        tool_call_id: the worker's own id, as the server gets it; "" or the server's own id if the
            call was not run.
        tool_name: as the model wrote it.
        arguments: the parsed object; if the call was not run, the text as it came.
        iteration: the number, from 1, of the turn with calls that it belongs to.
        started_at: when it began.
        duration_s: how long it took.
        ok: whether the tool returned a result.
        error: why there is no result.
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
    """How much of the prompt has been read, in tokens.

    Attributes:
        processed: read so far, cached ones included.
        total: of the whole prompt.
        cached: taken from the server's prompt cache.
    """

    processed: int
    total: int
    cached: int


class Usage(TypedDict):
    """Tokens of all turns, as the server counted them.

    Attributes:
        prompt_tokens: of the prompts, cached ones included.
        completion_tokens: generated.
        cached_tokens: of the prompts, those taken from the server's prompt cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class ContextUse(TypedDict):
    """The size of a prompt that did not fit, in tokens.

    Attributes:
        n_prompt_tokens: of the prompt.
        n_ctx: the context of a slot.
    """

    n_prompt_tokens: int
    n_ctx: int


class OutputLoop(TypedDict, total=False):
    """Output that kept repeating: whole lines, or text without line ends.

    Attributes:
        line: the repeated line, or the last one of the repeated block; up to 200 characters.
        text: the repeated text, up to 200 characters of it.
        repeats: how often it came in a row.
    """

    line: str
    text: str
    repeats: Required[int]


class Timings(TypedDict, total=False):
    """How long a request took, without the time in which this program did not run.

    Attributes:
        ttft_s: seconds from admission to the first token, if one came.
        total_s: seconds from admission to the end.
        tokens_per_second: the speed of the last turn, if it is known.
    """

    ttft_s: float
    total_s: Required[float]
    tokens_per_second: float


class RequestStatus(TypedDict):
    """The state and progress of a request.

    Attributes:
        ok: True.
        request_id: as returned by `submit`.
        job_name: as given to `submit`.
        state: running, or how it ended.
        phase: what it is doing: waiting, reading the prompt, generating, running a tool.
        created_at: when it was admitted.
        output_chars: length of the text so far.
        reasoning_chars: length of the reasoning so far.
        tool_iters_remaining: how many more turns may call tools.
        tool_calls_count: calls of normal tools so far.
        signals: calls of exit tools so far.
        fail_reason: why it failed; None while it runs, and on success.
        dispatched_at: when work on it began, which is when it was admitted.
        first_token_at: when the first token came.
        completed_at: when it ended.
        last_progress_at: when it last received data, or the server showed a sign of work.
        last_stream_byte_at: when the last byte of any kind came, keepalives included.
        last_liveness_at: when the server's processes last showed a sign of work.
        prompt_progress: how much of the prompt has been read.
        tokens_received: as the server counts them, else the deltas received.
        tokens_per_second: the speed of the present turn so far.
        tail: the last 200 characters of the text.
        running_tool: the tool that runs now.
        fail_detail: why it failed, for a person.
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
    """The size of a prompt, and whether it fits.

    Attributes:
        ok: True.
        n_prompt_tokens: of the prompt as it would be sent, with BIOS and tools.
        n_ctx: the context of a slot.
        n_left: left for the answer; negative if the prompt does not fit.
    """

    ok: Literal[True]
    n_prompt_tokens: int
    n_ctx: int
    n_left: int


class OutputChunk(TypedDict):
    """The output after the requested offsets.

    Attributes:
        ok: True.
        text: the text that was added.
        reasoning: the reasoning that was added.
        text_offset: to pass to the next read, in characters.
        reasoning_offset: to pass to the next read, in characters.
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
        request_id: as returned by `submit`.
        job_name: as given to `submit`.
        state: how it ended.
        finish_reason: why the output ends.
        text: all text that was received, of every turn.
        reasoning: all reasoning that was received, of every turn.
        signals: calls of exit tools.
        tool_trace: calls of normal tools.
        fail_reason: why it failed; None on success.
        conversation: the messages from the user prompt on, as the server last saw them, and the
            last answer. After `submit(..., messages=earlier + conversation)` the server finds all
            of it in its prompt cache.
        usage: tokens, as the server counted them.
        timings: how long it took.
        fail_detail: why it failed, for a person; 2,000 characters at most.
        context: with `context_exceeded`, if the server gave the numbers.
        loop: with `repeated_line_loop` and `repeated_text_loop`.
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
    loop: NotRequired[OutputLoop]
