"""Begins, gives up and ends a worker's requests. Answers questions about them from their records,
or passes these on to the RequestActor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from llama_worker.actors.children import Children
from llama_worker.actors.messages import AwaitResult, BeginLease, EndLease, GetResult, ReleaseResult
from llama_worker.errors import RequestFailed
from llama_worker.mailbox import Reply
from llama_worker.request.messages import (
    Abandon,
    Begin,
    CancelRequest,
    GetStatus,
    Question,
    ReadOutput,
)
from llama_worker.request.output import OpenQuestions, read_output
from llama_worker.request.table import NOT_FOUND, NOT_READY, Admitted, RequestRecord, RequestTable
from llama_worker.runtime.host.futures import WeakList
from llama_worker.runtime.http.leased_exchange import LeasedExchange
from llama_worker.server.messages import Unwatch, Watch
from llama_worker.types.request import NotFound, RequestFailReason, RequestResult, RequestState

RequestOrder = Question | GetResult | AwaitResult | ReleaseResult | CancelRequest
"""What a host asks or orders about one request that was admitted."""


@dataclass
class _InFlight:
    """A request that runs, and the replies that are waited for."""

    slot: int
    lease: LeasedExchange | None
    asked_by: Reply[RequestResult] | None  # it gets the result, and nobody else after it
    # Held weakly: a host may poll with `result(id).get(timeout=...)` and drop one future after the
    # other.
    results: WeakList[Reply[RequestResult | NotFound]] = field(default_factory=WeakList)
    cancels: list[Reply[bool]] = field(default_factory=list)
    questions: OpenQuestions[Question] = field(default_factory=OpenQuestions)  # passed on


class RequestDispatcher:
    """Handles one worker's requests. Only the owning WorkerActor calls this; no call blocks."""

    def __init__(self, table: RequestTable, children: Children) -> None:
        self._table = table
        self._children = children
        self._in_flight: dict[int, _InFlight] = {}

    def handle(self, order: RequestOrder) -> None:
        match order:
            case GetStatus() | ReadOutput():
                self._question(order)
            case GetResult():
                self._get_result(order)
            case AwaitResult():
                self._await_result(order)
            case ReleaseResult():
                self._release(order)
            case CancelRequest():
                self._cancel(order)
            case _:
                assert_never(order)

    def _question(self, question: Question) -> None:
        """Pass it on to the running request, or answer it from the record."""
        running = self._in_flight.get(question.request_id)
        if running is not None:
            running.questions.add(question)
            self._children.requests[running.slot].tell(question)
            return
        record = self._table.record(question.request_id)
        if record is None:
            question.reply.answer(NOT_FOUND.copy())
            return
        match question:
            case GetStatus(reply=reply):
                reply.answer(record.copy_of_status())
            case ReadOutput(
                text_offset=text_offset, reasoning_offset=reasoning_offset, reply=output_reply
            ):
                text, reasoning = record.result["text"], record.result["reasoning"]
                output_reply.answer(
                    read_output(text, reasoning, text_offset, reasoning_offset, done=True)
                )
            case _:
                assert_never(question)

    def _get_result(self, order: GetResult) -> None:
        record = self._table.record(order.request_id)
        if record is not None:
            order.reply.answer(record.copy_of_result())
            self._table.release(order.request_id)
        else:
            runs = order.request_id in self._in_flight
            order.reply.answer(NOT_READY.copy() if runs else NOT_FOUND.copy())

    def _release(self, order: ReleaseResult) -> None:
        """Forget a request that has ended; one that runs goes on."""
        released = self._table.release(order.request_id)
        if order.reply is not None:
            order.reply.answer(released)

    def _await_result(self, order: AwaitResult) -> None:
        record = self._table.record(order.request_id)
        if record is not None:
            order.reply.answer(record.copy_of_result())
        elif order.request_id in self._in_flight:
            self._in_flight[order.request_id].results.add(order.reply)
        else:
            order.reply.answer(NOT_FOUND.copy())

    def _cancel(self, order: CancelRequest) -> None:
        """Cancel the request, if it still runs; answered when its slot is free."""
        running = self._in_flight.get(order.request_id)
        if running is None:
            order.reply.answer(False)
            return
        running.cancels.append(order.reply)
        self._children.requests[running.slot].tell(order)

    def begin(
        self,
        admitted: Admitted,
        order: Begin | BeginLease,
        asked_by: Reply[RequestResult] | None = None,
    ) -> None:
        """Have the slot's actor run the request, or answer questions about the leased exchange, and
        the watchdog watch it."""
        lease = order.exchange if isinstance(order, BeginLease) else None
        self._in_flight[admitted.request_id] = _InFlight(admitted.slot, lease, asked_by)
        request = self._children.requests[admitted.slot]
        request.tell(order)
        self._children.watchdog.tell(Watch(request_id=admitted.request_id, request=request))

    def tell(self, admitted: Admitted, order: Abandon | EndLease) -> None:
        """Pass the order on to the slot's actor. Abandon gives the request up (its record follows);
        after EndLease the actor no longer answers for the exchange."""
        self._children.requests[admitted.slot].tell(order)

    def ended(self, record: RequestRecord, now: float) -> None:
        """Call it when a request is terminal: it is no longer watched, and every reply that waits
        for its end, or that its actor has not answered, is answered."""
        running = self._in_flight.pop(record.request_id)
        self._children.watchdog.tell(Unwatch(record))
        if running.lease is not None and not running.lease.has_ended:
            # Its actor died without ending the lease.
            detail = record.result.get("fail_detail", "")
            running.lease.fail(RequestFailReason.UNKNOWN_ERROR, detail, now)
        for reply in running.cancels:
            reply.answer(record.result["state"] is RequestState.CANCELED)
        for waiter in running.results.alive():
            waiter.answer(record.copy_of_result())
        for question in running.questions.take():
            self._question(question)
        if running.asked_by is not None:
            self._table.release(record.request_id)
            if record.result["state"] is RequestState.COMPLETED:
                running.asked_by.answer(record.copy_of_result())
            else:
                running.asked_by.fail(RequestFailed(record.copy_of_result()))
