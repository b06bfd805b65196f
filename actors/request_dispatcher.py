"""Requests at the worker: begun, asked about, given up, ended. A question is answered, or passed on
to who can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from llama_worker.actors.children import Children
from llama_worker.messages import (
    Abandon,
    AwaitResult,
    Begin,
    BeginLease,
    CancelRequest,
    EndLease,
    GetResult,
    GetStatus,
    Question,
    ReadOutput,
    ReleaseResult,
    Reply,
    Unwatch,
    Watch,
)
from llama_worker.request.output import read_output
from llama_worker.request.submission import Submission
from llama_worker.request.table import Admitted, RequestRecord, RequestTable
from llama_worker.request.waiting_reads import WaitingReads
from llama_worker.runtime.futures import WeakList
from llama_worker.runtime.leased_exchange import LeasedExchange
from llama_worker.types import (
    NotFound,
    NotReady,
    RequestFailReason,
    RequestResult,
    RequestState,
)

_NOT_FOUND: NotFound = {"ok": False, "error": "NOT_FOUND"}
_NOT_READY: NotReady = {"ok": False, "error": "NOT_READY"}
_MANY_QUESTIONS = 16


class RequestDispatcher:
    """Belongs to one WorkerActor, which alone calls it. Nothing here waits."""

    def __init__(self, table: RequestTable, children: Children, slots: int) -> None:
        self._table = table
        self._children = children
        # Weakly: a host may poll with `result(id).get(timeout=...)` and drop one future after the
        # other.
        self._result_waiters: dict[int, WeakList[Reply[RequestResult | NotFound]]] = {}
        self._cancel_waiters: dict[int, list[Reply[bool]]] = {}
        # by slot: passed on, some answered since
        self._asked: list[list[Question]] = [[] for _ in range(slots)]
        self._leases: dict[int, LeasedExchange] = {}
        # likewise; they may wait for long
        self._waiting_reads = [WaitingReads() for _ in range(slots)]

    def broken(self) -> Iterator[str]:
        """Which invariants do not hold; for a person."""
        active = {admitted.request_id for admitted in self._table.active}
        if waited := (self._result_waiters.keys() | self._cancel_waiters.keys()) - active:
            yield f"somebody waits for the end of requests {sorted(waited)}, which have ended"

    def question(self, question: Question) -> None:
        """Pass it on to the request that can answer it, or answer it from the record."""
        if question.reply.done():
            return
        admitted = self._table.find(question.request_id)
        if admitted is not None:
            self._remember(question, admitted.slot)
            self._children.requests[admitted.slot].tell(question)
            return
        record = self._table.record(question.request_id)
        if record is None:
            question.reply.answer(_NOT_FOUND)
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

    def get_result(self, order: GetResult) -> None:
        """The result, which is then forgotten."""
        record = self._table.record(order.request_id)
        if record is not None:
            order.reply.answer(record.copy_of_result())
            self._table.release(order.request_id)
        elif self._table.find(order.request_id) is not None:
            order.reply.answer(_NOT_READY)
        else:
            order.reply.answer(_NOT_FOUND)

    def release(self, order: ReleaseResult) -> None:
        """Forget a request that has ended; one that runs goes on."""
        released = self._table.release(order.request_id)
        if order.reply is not None:
            order.reply.answer(released)

    def await_result(self, order: AwaitResult) -> None:
        """The result, now or once there is one."""
        record = self._table.record(order.request_id)
        if record is not None:
            order.reply.answer(record.copy_of_result())
        elif self._table.find(order.request_id) is not None:
            self._result_waiters.setdefault(order.request_id, WeakList()).add(order.reply)
        else:
            order.reply.answer(_NOT_FOUND)

    def cancel(self, order: CancelRequest) -> None:
        """Cancel the request, if it still runs; answered when its slot is free."""
        admitted = self._table.find(order.request_id)
        if admitted is None:
            order.reply.answer(False)
            return
        self._cancel_waiters.setdefault(order.request_id, []).append(order.reply)
        self._children.requests[admitted.slot].tell(order)

    def begin(
        self, admitted: Admitted, submission: Submission, *, prompted: bool, opens_thinking: bool
    ) -> None:
        """Let the slot's actor run the request, under the watchdog's eye."""
        slot, request = admitted.slot, self._children.requests[admitted.slot]
        self._asked[slot] = _unanswered(self._asked[slot])  # of the request before
        request.tell(
            Begin(
                request_id=admitted.request_id,
                submission=submission,
                transport=self._children.transport,
                tools=self._children.tools,
                process=self._children.process,
                prompted=prompted,
                opens_thinking=opens_thinking,
            )
        )
        self._children.watchdog.tell(Watch(request_id=admitted.request_id, request=request))

    def begin_lease(self, admitted: Admitted, exchange: LeasedExchange) -> None:
        """Let the slot's actor answer for the exchange, under the watchdog's eye."""
        slot, request = admitted.slot, self._children.requests[admitted.slot]
        self._asked[slot] = _unanswered(self._asked[slot])
        self._leases[admitted.request_id] = exchange
        request.tell(BeginLease(exchange=exchange, process=self._children.process))
        self._children.watchdog.tell(Watch(request_id=admitted.request_id, request=request))

    def end_lease(self, admitted: Admitted, order: EndLease) -> None:
        """The slot's actor has nothing to answer for any more."""
        self._children.requests[admitted.slot].tell(order)

    def abandon(self, admitted: Admitted, order: Abandon) -> None:
        """Give the request up; its record follows."""
        self._children.requests[admitted.slot].tell(order)

    def ended(self, record: RequestRecord, now: float) -> None:
        """A request is terminal: watch it no more, answer those who wait for that."""
        self._children.watchdog.tell(
            Unwatch(
                request_id=record.request_id,
                data_at=record.last_data_at,
                completed=record.result["state"] is RequestState.COMPLETED,
            )
        )
        lease = self._leases.pop(record.request_id, None)
        if lease is not None and not lease.has_ended:  # its actor died without a word
            detail = record.result.get("fail_detail", "")
            lease.break_off(RequestFailReason.UNKNOWN_ERROR, detail, now)
        for reply in self._cancel_waiters.pop(record.request_id, []):
            reply.answer(record.result["state"] is RequestState.CANCELED)
        waiters = self._result_waiters.pop(record.request_id, None)
        for waiter in waiters.alive() if waiters is not None else ():
            waiter.answer(record.copy_of_result())

    def ask_again(self, slot: int) -> None:
        """The slot's actor died: what it did not answer is asked anew."""
        asked, self._asked[slot] = self._asked[slot], []
        for question in (*asked, *self._waiting_reads[slot].take()):
            self.question(question)

    def _remember(self, question: Question, slot: int) -> None:
        """To ask again, should the slot's actor die before it answers."""
        if isinstance(question, ReadOutput) and question.wait:
            self._waiting_reads[slot].add(question)
            return
        if len(self._asked[slot]) > _MANY_QUESTIONS:
            self._asked[slot] = _unanswered(self._asked[slot])
        self._asked[slot].append(question)


def _unanswered(asked: list[Question]) -> list[Question]:
    return [question for question in asked if not question.reply.done()]
