"""Return values for a test double of LlamaWorker: resolved futures and complete results."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.types.request import RequestFinishReason, RequestResult, RequestState

T = TypeVar("T")


def resolved(value: T) -> WorkerFuture[T]:
    """A future that is resolved. For one that resolves later, make a `WorkerFuture()` and call its
    `answer(value)` or `fail(error)` from any thread."""
    future: WorkerFuture[T] = WorkerFuture()
    future.answer(value)
    return future


def failed(error: BaseException) -> WorkerFuture[Any]:
    """A future whose `get` raises the error."""
    future: WorkerFuture[Any] = WorkerFuture()
    future.fail(error)
    return future


def request_result(text: str = "", **changes: Any) -> RequestResult:
    """The result of a completed request with this text; `changes` are other keys of it."""
    usual: RequestResult = {
        "ok": True,
        "request_id": 1,
        "job_name": "job",
        "state": RequestState.COMPLETED,
        "finish_reason": RequestFinishReason.STOP,
        "text": text,
        "reasoning": "",
        "signals": [],
        "tool_trace": [],
        "fail_reason": None,
        "conversation": [],
    }
    return cast("RequestResult", {**usual, **changes})
