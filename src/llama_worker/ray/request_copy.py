"""A fleet's copy of one request: all that was received, so that none of it is lost with a node, and
the futures that wait for its end. Not thread-safe."""

from __future__ import annotations

import copy

from llama_worker.ray.types import RequestUpdate
from llama_worker.request.output import Output, read_output
from llama_worker.runtime.host.futures import WeakList, WorkerFuture
from llama_worker.types.request import (
    NotFound,
    OutputChunk,
    RequestFailReason,
    RequestFinishReason,
    RequestPhase,
    RequestResult,
    RequestState,
    RequestStatus,
)


class RequestCopy:
    """A request as its replica reported it, under the fleet's own id. It only grows, until it has a
    result."""

    def __init__(self, request_id: int, first: RequestUpdate) -> None:
        self.request_id = request_id
        self.remote_id = first["status"]["request_id"]  # its id at the replica
        self._output = Output(None)
        self._status = first["status"]
        self._result: RequestResult | None = None
        self._waiters: WeakList[WorkerFuture[RequestResult | NotFound]] = WeakList()
        self.update(first)

    @property
    def is_over(self) -> bool:
        return self._result is not None

    def update(self, progress: RequestUpdate) -> None:
        output = progress["output"]
        self._output.add(output["reasoning"], output["text"])
        self._status = {**progress["status"], "request_id": self.request_id}
        if "result" in progress:
            self._end({**progress["result"], "request_id": self.request_id})

    def lose(self, detail: str, now: float) -> None:
        """Fail the request, whose replica is gone, and keep what was received. No effect if it is
        over.

        `now` is Unix seconds. The result has no usage and an empty `tool_trace`: a replica sends
        those at the end.
        """
        if self.is_over:
            return
        self._status = {
            **self._status,
            "state": RequestState.FAILED,
            "phase": RequestPhase.DONE,
            "completed_at": max(now, self._status["created_at"]),
            "fail_reason": RequestFailReason.SERVER_DIED,
            "fail_detail": detail,
        }
        self._end(
            {
                "ok": True,
                "request_id": self.request_id,
                "job_name": self._status["job_name"],
                "state": RequestState.FAILED,
                "finish_reason": RequestFinishReason.FAILED,
                "text": self._output.text.read(),
                "reasoning": self._output.reasoning.read(),
                "signals": self._status["signals"],
                "tool_trace": [],
                "fail_reason": RequestFailReason.SERVER_DIED,
                "fail_detail": detail,
                "conversation": [],
            }
        )

    def _end(self, result: RequestResult) -> None:
        self._result = result
        for waiter in self._waiters.alive():
            waiter.answer(copy.deepcopy(result))

    def answer_at_end(self, waiter: WorkerFuture[RequestResult | NotFound]) -> None:
        """Answer the waiter once the request is over. It is dropped if nothing else holds it."""
        result = self.result()
        if result is None:
            self._waiters.add(waiter)
        else:
            waiter.answer(result)

    def status(self) -> RequestStatus:
        """A copy of the status, which the caller may keep and change."""
        return copy.deepcopy(self._status)

    def result(self) -> RequestResult | None:
        """A copy of the result, for the caller to keep; None while the request runs."""
        return copy.deepcopy(self._result)

    def read_output(self, text_offset: int, reasoning_offset: int) -> OutputChunk:
        text, reasoning = self._output.text.read(), self._output.reasoning.read()
        return read_output(text, reasoning, text_offset, reasoning_offset, done=self.is_over)
