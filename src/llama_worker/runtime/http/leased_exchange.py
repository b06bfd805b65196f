"""A proxied exchange that holds a slot of a worker: its thread reports what comes, and the worker's
actors ask for it. Locked; any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from llama_worker.clock import ToUnix
from llama_worker.request.leased import LeasedRequest
from llama_worker.request.states import LONGEST_END_S
from llama_worker.request.table import Admitted
from llama_worker.runtime.host import threads
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure

UNWATCHED_WAIT_S = 0.01  # a shorter wait for the server needs no watching
_NOT_ADMITTED = Admitted(0, 0, "", 0.0)


P = ParamSpec("P")
R = TypeVar("R")


def _locked(
    method: Callable[Concatenate[LeasedRequest, P], R],
) -> Callable[Concatenate[LeasedExchange, P], R]:
    """The request's method, under the lock. If it ends the request, the connection is closed."""

    def call(self: LeasedExchange, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            result = method(self._request, *args, **kwargs)
            self._abort_if_ended()
        return result

    return call


class LeasedExchange:
    """One exchange, made by the thread that serves a client. Without a lease (`begin` was never
    called) nobody asks for what the thread reports.

    Args:
        abort: aborts the request to the server.
        tell_end: tells the watching actor `EndLease`; False if that has been closed.
        tell_lease: tells the watching actor of a lease granted without it; None: it knows.
        new: makes the request.
    """

    silence_s: float | None = None  # as a `Waiter`: called once before a wait, however long

    def __init__(
        self,
        abort: Abort,
        tell_end: Callable[[], bool] = lambda: False,
        *,
        tell_lease: Callable[[], object] | None = None,
        new: Callable[..., LeasedRequest] = LeasedRequest,
    ) -> None:
        self._tell_end = tell_end
        self._abort = abort
        self._lock = threading.RLock()  # guards the request
        self._over = threading.Condition(self._lock)
        self._new = new
        self._request = self._new(_NOT_ADMITTED, api_key=None, unix=lambda at: at)
        # for the exchange's thread
        self._tell_lease = tell_lease
        self._unwatched_until: float | None = None  # None: it has not waited yet
        self._is_paused = False

    @property
    def request_id(self) -> int:
        """The request's id; 0 without a lease."""
        return self._request.request_id

    # ------------------------------------------------------------ the exchange's thread

    started_waiting = _locked(LeasedRequest.started_waiting)  # the request is about to be sent
    opened = _locked(LeasedRequest.opened)

    def stopped_waiting(self) -> None:
        """The client reads nothing: until `before_reading` nobody waits for the server."""
        self._is_paused = True
        with self._lock:
            self._request.stopped_waiting()

    def before_reading(self) -> None:
        """Call it before each wait for the reply. The watching actor is told of the lease if the
        waits take longer than `UNWATCHED_WAIT_S` in all: before that there is nothing to watch, and
        to wake an actor costs more than a short reply."""
        if self._tell_lease is not None:
            now = threads.now()
            self._unwatched_until = self._unwatched_until or now + UNWATCHED_WAIT_S
            left_s = self._unwatched_until - now
            if left_s <= 0.0 or not self._abort.wait_readable(left_s):
                self.ensure_watched()
        # Bytes that have long been in the socket must not look like a stall until they are read.
        if self._is_paused and not self._abort.wait_readable(0.0):
            self._is_paused = False
            self.started_waiting()

    @property
    def is_watched(self) -> bool:
        """Whether the watching actor knows of the lease."""
        return self._tell_lease is None

    def ensure_watched(self) -> None:
        """Tell the watching actor of the lease, unless it knows. Idempotent."""
        if self._tell_lease is not None:
            self._tell_lease()
            self._tell_lease = None

    # Called before each wait for the server to take the request, and tells the watching actor at
    # once: that the socket is readable, as after a TLS handshake, does not end this wait.
    before_sending = ensure_watched

    def received(self, events: Sequence[StreamEvent], at: float) -> None:
        """Report that something came; no events if it was keepalives only."""
        with self._lock:
            self._request.received(events, at)

    @property
    def settled_at(self) -> float | None:
        """The instant (`threads.now`) until which to wait for more; None: the server has not come
        to an end."""
        return self._request.settled_at

    def closed(self, failure: StreamFailure | None) -> StreamFailure | None:
        """Report that the exchange with the server is over. Returns what to tell the client: the
        worker's own reason if it gave the request up, or does so now that the connection broke."""
        if self.record_closed(failure) and self._tell_end():
            with self._lock:
                self._over.wait_for(lambda: self._request.has_ended, LONGEST_END_S)
        return self.failure_for_client(failure)

    def record_closed(self, failure: StreamFailure | None) -> bool:
        """Report that the exchange is over. Returns whether the reason why it broke may still come:
        then send `EndLease`, and wait for the request's end before `failure_for_client`."""
        request = self._request
        with self._lock:
            if request.has_finished or self._abort.error is None:
                request.closed(failure)
            return request.is_broken and not request.has_ended

    failure_for_client = _locked(LeasedRequest.failure_for_client)

    @property
    def is_given_up(self) -> bool:
        """Whether the worker gave the request up, and will have a slot or a server for it again."""
        return self._request.given_up is not None

    # ------------------------------------------------------------ the WorkerActor

    def begin(self, admitted: Admitted, *, api_key: str | None, unix: ToUnix) -> None:
        """Give the exchange its slot."""
        self._request = self._new(admitted, api_key=api_key, unix=unix)

    end = _locked(LeasedRequest.end)

    # ---------------------------------------------------------- the slot's actor, as of a `Request`

    step = _locked(LeasedRequest.step)
    fail = _locked(LeasedRequest.fail)
    await_cause = _locked(LeasedRequest.await_cause)
    saw_liveness = _locked(LeasedRequest.saw_liveness)
    progress = _locked(LeasedRequest.progress)
    status = _locked(LeasedRequest.status)
    read_output = _locked(LeasedRequest.read_output)
    output_chars = (0, 0)  # the output is not kept

    @property
    def has_ended(self) -> bool:
        return self._request.has_ended

    @property
    def deadline(self) -> float | None:
        return self._request.deadline

    def _abort_if_ended(self) -> None:
        self._over.notify_all()
        if self._request.has_ended:
            self._abort.abort()
