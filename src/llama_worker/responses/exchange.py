"""One request of a client: what it has open, who may end it, and the response that it makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import pykka
from msgspec import Struct

from llama_worker.messages import EndLease, Lease, Mailbox
from llama_worker.responses.api.events import Event, ResponseEvents
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.errors import ApiError
from llama_worker.responses.http.client import Client
from llama_worker.responses.messages import Enter, Leave, ProxyMessage
from llama_worker.responses.upstream import ChatExchange
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.http.session import Abort
from llama_worker.runtime.streams.leased_exchange import LeasedExchange
from llama_worker.types import SubmitErrorCode, SubmitResult

M = TypeVar("M")
T = TypeVar("T")

_NO_LEASE: dict[SubmitErrorCode, tuple[str, int]] = {
    "NO_SLOT_AVAILABLE": ("every slot of the server is in use", 2),
    "WORKER_NOT_READY": ("the server is not ready: it is being started, or stopped", 5),
    "WORKER_DRAINING": ("the server takes no more requests before it is stopped", 30),
    "WORKER_FAILED": ("the server has failed, and is not started again by itself", 30),
}
_ANSWER_S = 10.0  # for the actor, which answers within milliseconds
# the first text mostly comes right behind the headers: both to the client at once
_TOGETHER_S = 0.002


class Exchange:
    """One request of a client and what it has open, for the request's own thread. A client that has
    left, or was cut by the listener, aborts what is open.

    `watch`: whoever watches over the upstream, and gives leases.
    """

    def __init__(
        self,
        number: int,
        client: Client,
        proxy: Mailbox[ProxyMessage],
        config: ResponsesProxyConfig,
        watch: Mailbox[Lease | EndLease],
    ) -> None:
        self.abort = Abort()
        self.leased = LeasedExchange(self.abort)  # no lease so far
        self._watch = watch
        self._wants_lease = False
        self._number = number
        self._client = client
        self._proxy = proxy
        self._config = config
        self._has_entered = False
        self._unannounced: Enter | None = None

    def enter(self, response_id: str | None = None) -> None:
        """Ask for admission, for the response of that id if it makes one. Raises ApiError.

        From now on a client that leaves takes the upstream's work along.
        """
        self._has_entered = True
        is_bounded = self._config.max_concurrent is not None
        reply: WorkerFuture[bool] | None = WorkerFuture() if is_bounded else None
        entering = Enter(exchange_id=self._number, response_id=response_id, reply=reply)
        if reply is None:  # nothing to wait for
            self._unannounced = entering
        elif not ask(self._proxy, entering, reply):
            raise ApiError(503, "too many requests run at once", code="overloaded", retry_after_s=2)
        self._client.when_left(self.abort.abort)

    def lease(self, job_name: str, *, has_media: bool = False, in_one_piece: bool = False) -> None:
        """Be watched from now on; a worker's server gives one of its slots. Raises ApiError
        where there is none."""
        self.leased = LeasedExchange(
            self.abort,
            lambda exchange: self._watch.tell(EndLease(exchange=exchange)),
            has_media=has_media,
            in_one_piece=in_one_piece,
        )
        self._wants_lease = True
        reply: WorkerFuture[SubmitResult] = WorkerFuture()
        order = Lease(job_name=job_name, exchange=self.leased, reply=reply)
        answer = ask(self._watch, order, reply)
        if not answer["ok"]:
            why, retry_after_s = _NO_LEASE[answer["error"]]
            raise ApiError(503, why, code="overloaded", retry_after_s=retry_after_s)

    def announce(self) -> None:
        """Tell the actor of an exchange that needed no admission: once the upstream has work, and
        this thread none."""
        if self._unannounced is not None:
            self._proxy.tell(self._unannounced)
            self._unannounced = None

    def leave(self) -> None:
        """Idempotent; a stream that has not ended is ended."""
        if not self._has_entered:
            return
        self._has_entered = False
        self.abort.abort()
        if self._wants_lease:
            self._watch.tell(EndLease(exchange=self.leased))
        self._proxy.tell(Leave(exchange_id=self._number))


class Output(Struct, frozen=True, kw_only=True):
    """Where events go as they come. `before_reading` is called before the upstream is waited for."""

    send: Callable[[bytes], None]
    encode: Callable[[list[Event]], bytes]
    before_reading: Callable[[], object] | None = None


class Run:
    """Makes a response from its chat completion, on the request's thread: what is read is written
    before more is read.

    `output` gets the events as they come; None: nobody wants them. `heartbeat_s`: after so long
    without an event there is one nevertheless, also while the upstream has not sent its headers: it
    may be busy for minutes.
    """

    def __init__(
        self,
        events: ResponseEvents,
        abort: Abort,
        *,
        output: Output | None,
        heartbeat_s: float,
        over: Callable[[], None],
    ) -> None:
        self._events = events
        self._abort = abort
        self._output = output
        self._heartbeat_s = heartbeat_s
        self._over = over
        self._first = output.encode(events.begin()) if output is not None else b""  # until sent
        self._sent_at = time.monotonic()

    @property
    def has_begun(self) -> bool:
        """Whether the client has been sent anything."""
        return not self._first and self._output is not None

    def before_reading(self) -> None:
        """Keep the client that has waited for long. What may follow a finish is not awaited for
        ever."""
        if self._output is not None and self._output.before_reading is not None:
            self._output.before_reading()
        self._beat()
        deadline = self._events.deadline
        if deadline is not None and not self._abort.wait_readable(
            max(deadline - time.monotonic(), 0.0)
        ):
            self._abort.abort()

    def begin(self) -> None:
        self._write([])

    def to_the_end(self, chat: ChatExchange) -> None:
        """Drive it. Raises OSError where the client has left; the response is over in any case."""
        try:
            while not self._events.over:
                if self._first and not chat.can_read and not self._abort.wait_readable(_TOGETHER_S):
                    self.begin()
                read = chat.read()
                now = time.monotonic()
                if read is None:
                    self._send(self._events.closed(chat.failure))
                else:
                    self._send([event for each in read for event in self._events.feed(each, now)])
        finally:
            chat.close()
            if not self._events.over:  # the client may go on from what it has got
                self._events.fail("the client has left")
                self._over()

    def fail(self, refused: ApiError) -> None:
        """The upstream refused, after the client was sent the first events."""
        self._send(self._events.fail(refused.message, code=refused.code))

    def _beat(self) -> None:
        if self._output is not None and time.monotonic() >= self._sent_at + self._heartbeat_s:
            self.begin()
            self._send(self._events.heartbeat())

    def _send(self, events: list[Event]) -> None:
        # first: who has read the end may refer to the response, and have its place
        if self._events.over:
            self._over()
        if events:
            self._write(events)

    def _write(self, events: list[Event]) -> None:
        if self._output is not None and (self._first or events):
            first, self._first = self._first, b""
            self._output.send(first + self._output.encode(events))
            self._sent_at = time.monotonic()


def ask(actor: Mailbox[M], question: M, reply: WorkerFuture[T]) -> T:
    """The actor's answer; the calling thread may wait, it is no actor's."""
    try:
        if actor.tell(question):
            return reply.get(timeout=_ANSWER_S)
    except pykka.Timeout:
        pass
    raise ApiError(
        503, "the proxy is going down, or waits for a response that still runs", retry_after_s=2
    )


def has_media(messages: object) -> bool:
    """Whether there are images or sounds among the messages of a chat, whatever their form."""
    return isinstance(messages, Sequence) and any(
        isinstance(message, Mapping) and _is_media(message.get("content")) for message in messages
    )


def _is_media(content: object) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") != "text" for part in content
    )
