"""`Exchange`: what one client's request holds (place, lease, upstream connection) until it ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from llama_worker.actors.messages import EndLease, Lease
from llama_worker.config.settings import Endpoint
from llama_worker.mailbox import Mailbox
from llama_worker.request.leased import LeasedRequest
from llama_worker.request.params import needs_specific_slots
from llama_worker.request.submission import content_parts, is_link
from llama_worker.request.table import Admitted
from llama_worker.responses.api.store import StoredResponse
from llama_worker.responses.errors import ApiError, refused_by_server
from llama_worker.responses.http.client import Client
from llama_worker.responses.messages import ProxyMessage, ResponseBegun, ResponseEnded
from llama_worker.runtime.host import threads
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.runtime.http.leased_exchange import LeasedExchange
from llama_worker.stream.failure import StreamFailure
from llama_worker.types.request import RequestFailReason, SubmitErrorCode, SubmitResult

M = TypeVar("M")
T = TypeVar("T")

# why, and after how many seconds to try again; None: it may take until the host's `start`
_NO_LEASE: dict[SubmitErrorCode, tuple[str, int | None]] = {
    "NO_SLOT_AVAILABLE": ("all slots of the server are in use", 2),
    "WORKER_NOT_READY": ("the server is not ready: it is starting or stopping", 5),
    "WORKER_DRAINING": ("the server is draining before a stop: it takes no new requests", 30),
    "WORKER_FAILED": ("the server has failed and will not be restarted automatically", None),
}
_ANSWER_S = 10.0  # how long an actor may take to answer; it takes milliseconds
_CANCELED = 499  # not standard, but widely used; clients would retry a 5xx
_RESTARTING_S = 5  # roughly, until the worker has a server again after it gave a request up
_lease_ids = itertools.count(1)  # of those that no worker grants


class Upstream(Struct, frozen=True, kw_only=True):
    """The server behind the proxy. `watch`: the actor that watches the requests with a lease.

    `restarts`: `watch` is a worker, which grants or refuses a lease, and has a server again after
    it gave a request up. Else a lease is granted at once, and `watch` is told of it only if the
    server does not reply soon.
    """

    endpoint: Endpoint
    watch: Mailbox[Lease | EndLease]
    restarts: bool


class Exchange:
    """One request of a client and what it holds; for the request's own thread. If the client leaves
    or the listener cuts it, the upstream connection is aborted.

    `places`: a response takes one of them.
    """

    def __init__(
        self,
        client: Client,
        proxy: Mailbox[ProxyMessage],
        upstream: Upstream,
        places: threading.Semaphore,
    ) -> None:
        self.abort = Abort()
        self.leased = LeasedExchange(self.abort)  # it has no lease before `lease`
        self.upstream = upstream
        self._places = places
        self._has_place = False
        self._wants_lease = False
        self._client = client
        self._proxy = proxy
        self._response_id: str | None = None  # of a response that is to be stored
        self._is_announced = False
        client.set_disconnect_callback(self.abort.abort)

    def enter(self, response_id: str, *, is_stored: bool) -> None:
        """Take a place for a response. Raises ApiError (503) if all places are taken."""
        self._has_place = self._places.acquire(blocking=False)
        if not self._has_place:
            raise ApiError(503, "too many requests are running", code="overloaded", retry_after_s=2)
        self._response_id = response_id if is_stored else None

    def lease(self, job_name: str, chat: Mapping[str, Any], *, answers: int = 1) -> None:
        """Get a lease: the request is watched from now on, and holds one of a worker's slots.
        Raises ApiError (503) if there is none. `chat`: the body to send, which may be invalid;
        `answers`: how many of the completion's answers are read."""
        upstream, watch, messages = self.upstream, self.upstream.watch, chat.get("messages")
        parts = [*content_parts(messages)]

        def order(reply: WorkerFuture[SubmitResult]) -> Lease:
            return Lease(job_name=job_name, exchange=self.leased, reply=reply)

        def tell_lease() -> None:
            if not watch.tell(order(WorkerFuture())):  # it has crashed; no request runs unwatched
                self.abort.abort()

        self.leased = LeasedExchange(
            self.abort,
            self._end_lease,
            tell_lease=None if upstream.restarts else tell_lease,
            new=partial(
                LeasedRequest,
                has_media=any(part.get("type") != "text" for part in parts),
                links_media=any(map(is_link, parts)),
                needs_specific_slots=needs_specific_slots(chat),
                in_one_piece=chat.get("stream") is not True,
                answers=answers,
                offers_tools=bool(chat.get("tools")),
                job_key=_job_key(messages),
            ),
        )
        self._client.on_stall = self.leased.stopped_waiting
        self._wants_lease = True
        if not upstream.restarts:
            admitted = Admitted(next(_lease_ids), 0, job_name, threads.now(), is_leased=True)
            # nobody is shown its record, whose instants are Unix seconds
            self.leased.begin(admitted, api_key=upstream.endpoint.api_key, unix=lambda at: at)
            return
        reply: WorkerFuture[SubmitResult] = WorkerFuture()
        answer = ask(watch, order(reply), reply, if_gone="the server's worker is closed")
        if not answer["ok"]:
            why, retry_after_s = _NO_LEASE[answer["error"]]
            raise ApiError(503, why, code="overloaded", retry_after_s=retry_after_s)

    def announce(self) -> None:
        """Tell the proxy's actor of the response. Call it while this thread waits for the upstream
        anyway; idempotent."""
        if self._response_id is not None and not self._is_announced:
            self._is_announced = True
            self._proxy.tell(ResponseBegun(response_id=self._response_id))

    def error_for_client(self, failure: StreamFailure, retry_after: str = "") -> ApiError:
        """The error for the client if the upstream sent no good reply. `retry_after`: the value of
        the Retry-After header, if the upstream sent an error reply."""
        if failure.reason is RequestFailReason.CANCELED:  # by the host: clients must not retry
            return ApiError(_CANCELED, failure.detail, code="canceled", should_retry=False)
        if self.leased.is_given_up and self.upstream.restarts:
            after_s = _RESTARTING_S
            return ApiError(503, failure.detail, code="upstream_failed", retry_after_s=after_s)
        if self.leased.is_given_up:
            return ApiError(504, failure.detail, code="upstream_failed")
        if failure.http_status is not None:
            return refused_by_server(failure.http_status, failure.detail, retry_after)
        is_unreachable = failure.reason is RequestFailReason.CONNECT_FAILED
        code = "upstream_unreachable" if is_unreachable else "upstream_failed"
        return ApiError(502, f"upstream server error: {failure.detail}", code=code)

    def _end_lease(self) -> bool:
        self.leased.ensure_watched()  # else `watch` could not tell why the connection broke
        return self.upstream.watch.tell(EndLease(exchange=self.leased))

    def close(self, stored: StoredResponse | None = None) -> None:
        """Release all that it holds, and abort a stream that has not ended. Idempotent. `stored`:
        the response to keep."""
        self.abort.abort()
        if self._wants_lease and self.leased.is_watched:
            self._wants_lease = False
            self._end_lease()
        if self._response_id is not None and (self._is_announced or stored is not None):
            self._proxy.tell(ResponseEnded(response_id=self._response_id, stored=stored))
        self._response_id = None
        if self._has_place:
            self._has_place = False
            self._places.release()


def ask(actor: Mailbox[M], question: M, reply: WorkerFuture[T], *, if_gone: str | None = None) -> T:
    """Wait for the actor's answer; raises ApiError (503) without one. Not for an actor's thread.
    `if_gone`: why there will be none again, if the actor has ended."""
    unanswered = ApiError(
        503, "the proxy is shutting down, or waits for a running response", retry_after_s=2
    )
    if not actor.tell(question):
        raise ApiError(503, if_gone, code="overloaded") if if_gone else unanswered
    with threads.may_block_this_thread():
        if not reply.wait(_ANSWER_S):
            reply.fail(unanswered)  # what was asked for must not be done later
        return reply.get()


def _job_key(messages: object) -> str:
    """A text that is the same if a client retries its request, as most do after an error."""
    if not isinstance(messages, Sequence):
        return ""
    return f"message {len(messages)}, {hash(repr(messages[-1:])):x}"
