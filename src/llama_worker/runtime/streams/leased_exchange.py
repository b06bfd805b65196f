"""A proxied exchange that holds a slot of a worker: what its thread tells, and the worker's actors
ask. Locked; any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from llama_worker.request.leased import LeasedRequest
from llama_worker.request.states import DEATH_NEWS_S, LATE_NEWS_S
from llama_worker.request.table import Admitted
from llama_worker.runtime.host import timers
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure

SOON_S = 0.01  # a server that replies within it is not waited for
_NOT_ADMITTED = Admitted(0, 0, "", 0.0)
_NEWS_S = DEATH_NEWS_S + 2 * LATE_NEWS_S + 1.0  # the request has ended by then


P = ParamSpec("P")
R = TypeVar("R")


def _locked(
    method: Callable[Concatenate[LeasedRequest, P], R],
) -> Callable[Concatenate[LeasedExchange, P], R]:
    """The request's, one thread at a time. If it ends the request, its connection is closed."""

    def call(self: LeasedExchange, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            result = method(self._request, *args, **kwargs)
            self._cut_if_over()
        return result

    return call


class LeasedExchange:
    """Made by the thread that serves a client; `abort` is of its request to the server, `tell_end`
    tells the worker `EndLease`, and is False where that has been closed. `tell_lease` tells whoever
    watches of a lease that was granted without them; None: they know. `new` makes the request.

    Without a lease (`begin` was never called) nobody asks for what the thread tells.
    """

    silence_s: float | None = None  # as a `Waiter`: told once before a wait, however long

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
        self._request = self._new(_NOT_ADMITTED, api_key=None, unix_offset=0.0)
        # for the exchange's thread
        self._tell_lease = tell_lease
        self._soon_until: float | None = None  # None: nothing was waited for
        self._is_paused = False

    @property
    def request_id(self) -> int:
        """0: it has no lease."""
        return self._request.request_id

    # ------------------------------------------------------------ the exchange's thread

    sends = _locked(LeasedRequest.waits)  # the request is about to be sent
    opened = _locked(LeasedRequest.opened)

    def pauses(self) -> None:
        """The client takes nothing: until `before_reading` nobody waits for the server."""
        self._is_paused = True
        with self._lock:
            self._request.pauses()

    def before_reading(self) -> None:
        """To be told before each wait for the server. Whoever watches is told of the lease where it
        takes longer than `SOON_S` in all: there is nothing to watch before, and to wake an actor
        costs more than a short reply."""
        if self._tell_lease is not None:
            now = timers.now()
            self._soon_until = self._soon_until or now + SOON_S
            left_s = self._soon_until - now
            if left_s <= 0.0 or not self._abort.wait_readable(left_s):
                self.be_watched()
        # What lies ready since long must not look like a stall until it is read.
        if self._is_paused and not self._abort.wait_readable(0.0):
            self._is_paused = False
            self.sends()

    @property
    def is_watched(self) -> bool:
        """Whether they know who watch."""
        return self._tell_lease is None

    def be_watched(self) -> None:
        """From now on; idempotent."""
        if self._tell_lease is not None:
            self._tell_lease()
            self._tell_lease = None

    def heard(self, events: Sequence[StreamEvent], at: float) -> None:
        """Something came; no events where it was keepalives only."""
        with self._lock:
            self._request.heard(events, at)

    @property
    def settled_at(self) -> float | None:
        """The instant (`timers.now`) at which nothing more is to be waited for; None: the server
        has not come to an end."""
        return self._request.settled_at

    def closed(self, failure: StreamFailure | None) -> StreamFailure | None:
        """The exchange with the server is over. What to tell the client of it: the worker's own
        reason where it gave the request up, or does so now that the connection broke."""
        if self.breaks(failure) and self._tell_end():
            with self._lock:
                self._over.wait_for(lambda: self._request.has_ended, _NEWS_S)
        return self.explained(failure)

    def breaks(self, failure: StreamFailure | None) -> bool:
        """The exchange is over. Whether why it broke may still be told: then `EndLease` is to be
        told, and the end of the request to be waited for, before `explained`."""
        request = self._request
        with self._lock:
            if request.has_finished or (request.given_up is None and self._abort.error is None):
                request.closed(failure)
            return request.is_broken and not request.has_ended

    explained = _locked(LeasedRequest.explained)

    @property
    def is_given_up(self) -> bool:
        """The worker gave the request up, and will have a slot for it again or a server."""
        return self._request.given_up is not None

    # ------------------------------------------------------------ the WorkerActor

    def begin(self, admitted: Admitted, *, api_key: str | None, unix_offset: float) -> None:
        """The slot is the exchange's."""
        self._request = self._new(admitted, api_key=api_key, unix_offset=unix_offset)

    end = _locked(LeasedRequest.end)

    # ---------------------------------------------------------- the slot's actor, as of a `Request`

    step = _locked(LeasedRequest.step)
    fail = _locked(LeasedRequest.fail)
    hear_out = _locked(LeasedRequest.hear_out)
    saw_liveness = _locked(LeasedRequest.saw_liveness)
    progress = _locked(LeasedRequest.progress)
    status = _locked(LeasedRequest.status)
    read_output = _locked(LeasedRequest.read_output)

    @property
    def has_ended(self) -> bool:
        return self._request.has_ended

    @property
    def deadline(self) -> float | None:
        return self._request.deadline

    @property
    def output_chars(self) -> tuple[int, int]:
        return self._request.output_chars

    def _cut_if_over(self) -> None:
        self._over.notify_all()
        if self._request.has_ended:
            self._abort.abort()
