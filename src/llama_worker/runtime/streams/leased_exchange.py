"""A proxied exchange that holds a slot of a worker: what its thread tells, and the worker's actors
ask. Locked; any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus

from llama_worker.request.leased import LeasedRequest, LeaseEffects
from llama_worker.request.messages import RequestInput
from llama_worker.request.progress import Progress
from llama_worker.request.states import DEATH_NEWS_S, LATE_NEWS_S
from llama_worker.request.table import Admitted, RequestRecord
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure, describe_http_error
from llama_worker.types.request import OutputChunk, RequestFailReason, RequestStatus

_NEWS_S = DEATH_NEWS_S + 2 * LATE_NEWS_S + 1.0  # the request has ended by then


class LeasedExchange:
    """Made by the thread that serves a client; `abort` is of its request to the server, `tell_end`
    tells the worker `EndLease`, and is False where that has been closed.

    Without a lease (`begin` was never called) what the thread tells is dropped: nobody watches.
    """

    def __init__(
        self,
        abort: Abort,
        tell_end: Callable[[LeasedExchange], bool] = lambda exchange: False,
        *,
        has_media: bool = False,
        in_one_piece: bool = False,
    ) -> None:
        self.request_id = 0
        self._tell_end = tell_end
        self._abort = abort
        self._has_media = has_media
        self._in_one_piece = in_one_piece
        self._lock = threading.RLock()  # guards the request
        self._over = threading.Condition(self._lock)
        self._request: LeasedRequest | None = None
        self._is_paused = False  # for the exchange's thread

    # ------------------------------------------------------------ the exchange's thread

    def sends(self) -> None:
        """The request is about to be sent."""
        if self._request is not None:
            with self._lock:
                self._request.waits()

    def pauses(self) -> None:
        """The client takes nothing: until `waits` nobody waits for the server."""
        if self._request is not None:
            self._is_paused = True
            with self._lock:
                self._request.pauses()

    def waits(self) -> None:
        """To be told before each wait for the server."""
        # What lies ready since long must not look like a stall until it is read.
        if self._is_paused and not self._abort.wait_readable(0.0):
            self._is_paused = False
            self.sends()

    def opened(self, at: float) -> None:
        """The headers of a good reply have come."""
        if self._request is not None:
            with self._lock:
                self._request.opened(at)

    def replied(self, status: int, at: float) -> None:
        """The headers have come, of a reply that is passed on as it is."""
        if status == HTTPStatus.OK:
            self.opened(at)
        else:
            self.closed(describe_http_error(status, b""))

    def heard(self, events: Sequence[StreamEvent], at: float) -> None:
        """Something came; no events where it was keepalives only."""
        if self._request is not None:
            with self._lock:
                self._request.heard(events, at)

    def closed(self, failure: StreamFailure | None) -> StreamFailure | None:
        """The exchange with the server is over. What to tell the client of it: the worker's own
        reason where it gave the request up, or does so now that the connection broke."""
        if self.breaks(failure) and self._tell_end(self):
            with self._lock:
                self._over.wait_for(lambda: self._leased.has_ended, _NEWS_S)
        return self.explained(failure)

    def breaks(self, failure: StreamFailure | None) -> bool:
        """The exchange is over. Whether why it broke may still be told: then `EndLease` is to be
        told, and the end of the request to be waited for, before `explained`."""
        request = self._request
        if request is None:
            return False
        with self._lock:
            if request.has_finished or (request.given_up is None and self._abort.error is None):
                request.closed(failure)
            return request.is_broken and not request.has_ended

    def explained(self, failure: StreamFailure | None) -> StreamFailure | None:
        """The worker's own reason for the failure, where it has one."""
        request = self._request
        given_up = None if request is None else request.given_up
        if failure is None or request is None or given_up is None or request.has_finished:
            return failure
        reason = given_up.fail_reason or RequestFailReason.UNKNOWN_ERROR
        detail = f"{reason}: {given_up.fail_detail or 'the request was canceled'}"
        return StreamFailure(reason=reason, detail=detail)

    @property
    def is_given_up(self) -> bool:
        """The worker gave the request up, and will have a slot for it again or a server."""
        return self._request is not None and self._request.given_up is not None

    # ------------------------------------------------------------ the WorkerActor

    def begin(self, admitted: Admitted, *, api_key: str | None, unix_offset: float) -> None:
        """The slot is the exchange's."""
        self.request_id = admitted.request_id
        self._request = LeasedRequest(
            admitted,
            api_key=api_key,
            unix_offset=unix_offset,
            has_media=self._has_media,
            in_one_piece=self._in_one_piece,
        )

    def end(self, now: float) -> RequestRecord | None:
        """The record; None where it has one already, or never had a slot."""
        with self._lock:
            return None if self._request is None else self._request.end(now)

    # ---------------------------------------------------------- the slot's actor, as of a `Request`

    def step(self, message: RequestInput, now: float) -> LeaseEffects:
        with self._lock:
            effects = self._leased.step(message, now)
            self._cut_if_over()
        return effects

    def hear_out(self, now: float) -> None:
        with self._lock:
            self._leased.hear_out(now)

    def fail(self, reason: RequestFailReason, detail: str, now: float) -> LeaseEffects:
        with self._lock:
            effects = self._leased.fail(reason, detail, now)
            self._cut_if_over()
        return effects

    @property
    def has_ended(self) -> bool:
        return self._leased.has_ended

    @property
    def deadline(self) -> float | None:
        return self._leased.deadline

    def saw_liveness(self, at: float | None) -> None:
        with self._lock:
            self._leased.saw_liveness(at)

    def progress(self) -> Progress:
        with self._lock:
            return self._leased.progress()

    def status(self) -> RequestStatus:
        with self._lock:
            return self._leased.status()

    @property
    def output_chars(self) -> tuple[int, int]:
        return self._leased.output_chars

    def read_output(self, text_offset: int, reasoning_offset: int) -> OutputChunk:
        return self._leased.read_output(text_offset, reasoning_offset)

    @property
    def _leased(self) -> LeasedRequest:
        assert self._request is not None  # its slot's actor has it only then
        return self._request

    def _cut_if_over(self) -> None:
        self._over.notify_all()
        if self._leased.has_ended:
            self._abort.abort()
