"""Decides how a request ends. Pure."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llama_worker.errors import masked
from llama_worker.stream.calls import Partition
from llama_worker.stream.events import ServerError, encodable
from llama_worker.stream.failure import (
    StreamFailure,
    exceeds_context,
    is_of_shared_context,
    reports_malformed_output,
)
from llama_worker.stream.loops import LoopFound, TextLoopFound
from llama_worker.types.request import (
    ContextUse,
    OutputLoop,
    RequestFailReason,
    RequestFinishReason,
    RequestState,
)

MAX_DETAIL_CHARS = 2000  # a traceback may be long, and a model's context small
_MAX_LOOP_CHARS = 200


class Outcome(Struct, frozen=True, kw_only=True):
    """The terminal state and how it came about: the fields of the result."""

    state: RequestState
    finish_reason: RequestFinishReason
    fail_reason: RequestFailReason | None = None
    fail_detail: str | None = None  # may hold secrets
    http_status: int | None = None  # the server's own error code; for the worker, not for the host
    is_unsent: bool = False  # the request did not reach the server
    context: ContextUse | None = None
    loop: OutputLoop | None = None

    def for_host(self, secret: str | None) -> Outcome:
        """A copy with the secret masked, and the detail bounded in length and in valid Unicode."""
        if self.fail_detail is None:
            return self
        detail = encodable(masked(self.fail_detail, secret))
        return replace(self, fail_detail=detail[:MAX_DETAIL_CHARS])


COMPLETED = Outcome(state=RequestState.COMPLETED, finish_reason=RequestFinishReason.STOP)
TOKEN_LIMIT = Outcome(state=RequestState.COMPLETED, finish_reason=RequestFinishReason.MAX_TOKENS)
CANCELED = Outcome(
    state=RequestState.CANCELED,
    finish_reason=RequestFinishReason.CANCELED,
    fail_reason=RequestFailReason.CANCELED,
)
SERVER_GONE = StreamFailure(
    reason=RequestFailReason.SERVER_DIED, detail="the server's process is gone"
)


def failed(
    reason: RequestFailReason,
    detail: str,
    *,
    http_status: int | None = None,
    context: ContextUse | None = None,
) -> Outcome:
    return Outcome(
        state=RequestState.FAILED,
        finish_reason=RequestFinishReason.FAILED,
        fail_reason=reason,
        fail_detail=detail,
        http_status=http_status,
        context=context,
    )


def after_turn(finish_reason: str | None, calls: Partition, iterations_left: int) -> Outcome | None:
    """The outcome of a request whose turn finished; None if the turn's normal calls run next."""
    if finish_reason == "length":
        return TOKEN_LIMIT  # a call may be cut off: none is run
    if calls.problem is not None:
        return failed(RequestFailReason.TOOL_PARSE_ERROR, calls.problem)
    if not calls.normal:
        return COMPLETED
    if finish_reason is None:
        detail = (
            "the turn ended without a finish reason: its calls may be incomplete and were not run"
        )
        return failed(RequestFailReason.TOOL_PARSE_ERROR, detail)
    if iterations_left <= 0:
        detail = "the tool iteration budget (max_tool_iterations) is exhausted"
        return failed(RequestFailReason.TOOL_EXECUTION_ERROR, detail)
    return None


def after_loop(loop: LoopFound | TextLoopFound) -> Outcome:
    if isinstance(loop, TextLoopFound):
        reason = RequestFailReason.REPEATED_TEXT_LOOP
        detail = (
            f"the last {loop.chars} characters repeat the same {loop.period_chars}, which begin "
            f"with {loop.sample!r}"
        )
        shown: OutputLoop = {
            "text": encodable(loop.sample[:_MAX_LOOP_CHARS]),  # arguments may hold lone surrogates
            "repeats": loop.chars // loop.period_chars,
        }
    else:
        reason, line = RequestFailReason.REPEATED_LINE_LOOP, loop.line[:_MAX_LOOP_CHARS]
        what = f"a block of {loop.period} lines that ends in" if loop.period > 1 else "the line"
        detail = f"{what} {line!r} came {loop.count} times in a row"
        shown = {"line": line, "repeats": loop.count}
    return replace(failed(reason, detail), loop=shown)


def failed_by(cause: ServerError | StreamFailure, *, offers_tools: bool = False) -> Outcome:
    """The outcome after the server's error, or a broken exchange that nothing else explains."""
    if isinstance(cause, StreamFailure):
        reason, detail, status = cause.reason, cause.detail, cause.http_status
    else:
        reason, detail, status = RequestFailReason.SERVER_ERROR, cause.message, cause.code
        if exceeds_context(cause.message, cause.type):
            reason = RequestFailReason.CONTEXT_EXCEEDED
        if cause.type:
            detail += f" ({cause.type})"
        if status is not None:
            detail += f", code {status}"
    # 400: it is one of those that were sent, in `messages`
    is_malformed = status != 400 and reports_malformed_output(detail)
    if is_malformed or is_of_shared_context(detail):
        status = None  # no fault of the server
    if is_malformed and offers_tools:
        return failed(RequestFailReason.TOOL_PARSE_ERROR, detail)
    if isinstance(cause, StreamFailure) and cause.is_unsent:
        return replace(failed(reason, detail), is_unsent=True)
    context = cause.context if reason is RequestFailReason.CONTEXT_EXCEEDED else None
    return failed(reason, detail, http_status=status, context=context)
