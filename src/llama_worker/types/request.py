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
        ok: always True.
        request_id: the id of the request, to be passed to every other call; a worker counts its
            requests from 1.
    """

    ok: Literal[True]
    request_id: int


class SubmitErr(TypedDict):
    """The request was refused and took nothing.

    Attributes:
        ok: always False.
        error: why the request was refused: NO_SLOT_AVAILABLE, WORKER_NOT_READY, WORKER_DRAINING or
            WORKER_FAILED.
    """

    ok: Literal[False]
    error: SubmitErrorCode


SubmitResult: TypeAlias = SubmitOk | SubmitErr


class NotFound(TypedDict):
    """There is no such request, or no longer.

    Attributes:
        ok: always False.
        error: always NOT_FOUND: the id is unknown, or its result was taken, released or has
            expired.
    """

    ok: Literal[False]
    error: Literal["NOT_FOUND"]


class NotReady(TypedDict):
    """The request has not ended yet.

    Attributes:
        ok: always False.
        error: always NOT_READY: the request is still running.
    """

    ok: Literal[False]
    error: Literal["NOT_READY"]


class ExitSignal(TypedDict):
    """A call of an exit tool: one-way, recorded and never answered.

    Attributes:
        tool_name: the name of the exit tool that was called.
        arguments: the arguments that the model wrote; empty if they are malformed.
        emitted_at: when the call was complete.
        malformed: the raw text of the call, if it could not be parsed.
    """

    tool_name: str
    arguments: dict[str, Any]
    emitted_at: float
    malformed: NotRequired[str]


class ToolTraceEntry(TypedDict):
    """One call of a normal tool; `error` says why, if it failed or was not run (cut off, unknown,
    over the budget, after one that failed).

    Attributes:
        tool_call_id: the id that the worker gave to the call and sent to the server (Kimi K2's
            own is kept); if the call was not run, the server's own id, or "".
        tool_name: the name of the tool, as the model wrote it.
        arguments: the arguments as a parsed object; if the call was not run, the text that the
            model wrote.
        iteration: which of the request's turns with tool calls made this call, counted from 1.
        started_at: when the call began.
        duration_s: how long the call took.
        ok: whether the tool returned a result.
        error: why there is no result.
        result: what the model was given: the result as text, or the error's text if
            `tool_errors="tell"`.
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
        processed: the number of prompt tokens read so far, including cached ones.
        total: the number of tokens in the whole prompt.
        cached: the number of prompt tokens taken from the server's prompt cache.
    """

    processed: int
    total: int
    cached: int


class Usage(TypedDict):
    """Tokens of all turns, as the server counted them.

    Attributes:
        prompt_tokens: the number of tokens in the prompts, including cached ones.
        completion_tokens: the number of tokens that were generated.
        cached_tokens: the number of prompt tokens that came from the server's prompt cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class ContextUse(TypedDict):
    """The size of a prompt that did not fit, in tokens.

    Attributes:
        n_prompt_tokens: the number of tokens in the prompt.
        n_ctx: the context size of one slot.
    """

    n_prompt_tokens: int
    n_ctx: int


class OutputLoop(TypedDict, total=False):
    """Output that kept repeating: whole lines, or text without line ends.

    Attributes:
        line: the repeated line, or the last line of the repeated block; at most 200 characters of
            it.
        text: the repeated text; at most 200 characters of it.
        repeats: how many times it came in a row when it was found; of text, at least.
    """

    line: str
    text: str
    repeats: Required[int]


class Timings(TypedDict, total=False):
    """How long a request took, without the time in which this program did not run.

    Attributes:
        ttft_s: the time from admission to the first token, if a token came.
        total_s: the time from admission to the end.
        tokens_per_second: the generation speed of the last turn, if known.
    """

    ttft_s: float
    total_s: Required[float]
    tokens_per_second: float


class RequestStatus(TypedDict):
    """The state and progress of a request.

    Attributes:
        ok: always True.
        request_id: the id that `submit` returned.
        job_name: the name that was given to `submit`.
        state: whether the request is running, or how it ended.
        phase: what the request is doing: waiting for the server, reading the prompt (`prefill`),
            generating, running a tool, or done.
        created_at: when the request was admitted.
        output_chars: the number of characters of text received so far.
        reasoning_chars: the number of characters of reasoning received so far.
        tool_iters_remaining: how many more turns may call tools.
        tool_calls_count: how many calls of normal tools were made so far.
        signals: the calls of exit tools so far.
        fail_reason: why the request failed; None while it runs, and on success.
        dispatched_at: when the worker began to work on the request; the same as `created_at`.
        first_token_at: when the first token came.
        completed_at: when the request ended.
        last_progress_at: when the request last received data, or the server last showed a sign of
            work.
        last_stream_byte_at: when the last byte came from the server, including keepalives.
        last_liveness_at: when the server's processes last showed a sign of work.
        prompt_progress: how much of the prompt the server has read.
        tokens_received: the number of tokens received: the server's count, or else the number of
            deltas.
        tokens_per_second: the generation speed of the current turn so far.
        tail: the last 200 characters of the text.
        running_tool: the name of the tool that is running now.
        fail_detail: the cause of the failure, as text for a person.
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
        ok: always True.
        n_prompt_tokens: the number of tokens in the prompt as it would be sent, including BIOS and
            tools.
        n_ctx: the context size of one slot.
        n_left: the number of tokens left for the answer; negative if the prompt does not fit.
    """

    ok: Literal[True]
    n_prompt_tokens: int
    n_ctx: int
    n_left: int


class OutputChunk(TypedDict):
    """The output after the requested offsets.

    Attributes:
        ok: always True.
        text: the text that was added.
        reasoning: the reasoning that was added.
        text_offset: the offset in the text, in characters, to pass to the next read.
        reasoning_offset: the offset in the reasoning, in characters, to pass to the next read.
        done: whether the request has ended, so that no more output will follow.
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
        ok: always True.
        request_id: the id that `submit` returned.
        job_name: the name that was given to `submit`.
        state: how the request ended: completed, failed or canceled.
        finish_reason: why the output ends where it does.
        text: all text that was received, of all turns.
        reasoning: all reasoning that was received, of all turns.
        signals: the calls of exit tools.
        tool_trace: the calls of normal tools.
        fail_reason: why the request failed; None on success.
        conversation: the messages from the user prompt on, as the server last saw them, and the
            final answer, which ends where `text` and `reasoning` end. If you pass them to the next
            `submit`, as `messages=earlier + conversation`, the server mostly finds all of
            them in its prompt cache. After an empty `user_prompt` it reads `conversation` anew: the
            `<worker_status>` at the end of your last message is not in it. If the request was not
            completed they may end without an answer: append one first, since some chat templates
            refuse a new prompt there.
        usage: token counts, as reported by the server.
        timings: how long the request took.
        fail_detail: the cause of the failure, as text for a person; at most 2,000 characters.
        context: the sizes of the prompt and of the context, if `fail_reason` is `context_exceeded`
            and the server reported them.
        loop: what was repeated, if `fail_reason` is `repeated_line_loop` or `repeated_text_loop`.
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
