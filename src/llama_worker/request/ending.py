"""How a request may end, and what decides it. Pure."""

from __future__ import annotations

from msgspec import Struct

from llama_worker.stream.calls import Partition
from llama_worker.stream.events import ServerError
from llama_worker.stream.failure import StreamFailure, exceeds_context, reports_malformed_call
from llama_worker.stream.loops import LoopFound, TextLoopFound
from llama_worker.types import ContextUse, RequestFailReason, RequestFinishReason, RequestState


class Ending(Struct, frozen=True, kw_only=True):
    """The terminal state and how it came about: the fields of the result."""

    state: RequestState
    finish_reason: RequestFinishReason
    fail_reason: RequestFailReason | None = None
    fail_detail: str | None = None  # may hold secrets
    http_status: int | None = None  # the server's own error code; for the worker, not for the host
    context: ContextUse | None = None


COMPLETED = Ending(state=RequestState.COMPLETED, finish_reason=RequestFinishReason.STOP)
TOKEN_LIMIT = Ending(state=RequestState.COMPLETED, finish_reason=RequestFinishReason.MAX_TOKENS)
CANCELED = Ending(
    state=RequestState.CANCELED,
    finish_reason=RequestFinishReason.CANCELED,
    fail_reason=RequestFailReason.CANCELED,
)


def failed(
    reason: RequestFailReason,
    detail: str,
    *,
    http_status: int | None = None,
    context: ContextUse | None = None,
) -> Ending:
    """A failure; `detail` is for a person."""
    return Ending(
        state=RequestState.FAILED,
        finish_reason=RequestFinishReason.FAILED,
        fail_reason=reason,
        fail_detail=detail,
        http_status=http_status,
        context=context,
    )


def after_turn(finish_reason: str | None, found: Partition, iterations_left: int) -> Ending | None:
    """What a turn that came to its regular end makes of its request; None: its normal calls are to
    be run."""
    if finish_reason == "length":
        return TOKEN_LIMIT  # a call may be cut off: none is run
    if found.problem is not None:
        return failed(RequestFailReason.TOOL_PARSE_ERROR, found.problem)
    if not found.normal:
        return COMPLETED
    if finish_reason is None:
        detail = (
            "the turn ended without a finish reason: its calls may be incomplete and are not run"
        )
        return failed(RequestFailReason.TOOL_PARSE_ERROR, detail)
    if iterations_left <= 0:
        return failed(RequestFailReason.TOOL_EXECUTION_ERROR, "tool iteration budget exhausted")
    return None


def after_loop(loop: LoopFound | TextLoopFound) -> Ending:
    """The output repeats itself."""
    if isinstance(loop, TextLoopFound):
        what = (
            f"the last {loop.chars} characters repeat {loop.period_chars} of them, which begin "
            f"with {loop.sample!r}"
        )
        return failed(RequestFailReason.REPEATED_TEXT_LOOP, what)
    what = f"the line {loop.line!r}"
    if loop.period > 1:
        what = f"a block of {loop.period} lines that ends in {loop.line!r}"
    return failed(RequestFailReason.REPEATED_LINE_LOOP, f"{what} came {loop.count} times in a row")


def after_server_error(error: ServerError, *, offers_tools: bool) -> Ending:
    """An error record came in the stream."""
    detail = error.message + (f" ({error.type})" if error.type else "")
    if error.code is not None:
        detail = f"{detail}, code {error.code}"
    if offers_tools and reports_malformed_call(error.message):
        return failed(RequestFailReason.TOOL_PARSE_ERROR, detail)
    if exceeds_context(error.message, error.type):
        return failed(
            RequestFailReason.CONTEXT_EXCEEDED,
            detail,
            http_status=error.code,
            context=error.context,
        )
    return failed(RequestFailReason.SERVER_ERROR, detail, http_status=error.code)


def after_failure(failure: StreamFailure, *, offers_tools: bool) -> Ending:
    """The exchange failed, and nothing else explains or mends that."""
    refused = failure.reason is RequestFailReason.HTTP_ERROR
    if refused and offers_tools and reports_malformed_call(failure.detail):
        return failed(RequestFailReason.TOOL_PARSE_ERROR, failure.detail)
    return failed(
        failure.reason, failure.detail, http_status=failure.http_status, context=failure.context
    )
