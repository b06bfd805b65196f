"""One request of a client of the Responses proxy: what it has open, who may end it, and the stream that it gets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pykka
import requests

from llama_worker.messages import Mailbox
from llama_worker.responses.client_watch import ClientWatch
from llama_worker.responses.events import ResponseEvents, sse
from llama_worker.responses.http import Environ
from llama_worker.responses.messages import Enter, Leave, ProxyMessage
from llama_worker.responses.refusal import RequestRefused
from llama_worker.runtime.chat_exchange import ChatExchange
from llama_worker.runtime.connections import Abort, session
from llama_worker.runtime.futures import WorkerFuture
from llama_worker.runtime.timers import Timer, call_at
from llama_worker.stream.events import StreamEvent

T = TypeVar("T")

AT_THE_END = "llama_worker.at_the_end"  # in the environ: what the server is to call when the request is over
CLIENT_SOCKET = "llama_worker.client_socket"
KEEPALIVE = b": keepalive\n\n"
_ANSWER_S = 10.0  # for the actor, which answers within milliseconds


class Exchange:
    """One request of a client and what it has open. `cut` is for any thread, the rest for the request's own."""

    def __init__(
        self, number: int, environ: Environ, proxy: Mailbox[ProxyMessage], watch: ClientWatch, ca_file: str | None
    ) -> None:
        self.abort = Abort()
        self._ca_file = ca_file
        self._number = number
        self._client: socket.socket | None = environ.get(CLIENT_SOCKET)
        self._proxy = proxy
        self._watch = watch
        self._http: requests.Session | None = None
        self._entered = False

    def enter(self, response_id: str | None = None) -> None:
        """Ask for admission, for the response of that id if it makes one.

        From now on a client that leaves takes the upstream's work along.
        """
        self._entered = True
        reply: WorkerFuture[bool] = WorkerFuture()
        entering = Enter(exchange_id=self._number, cut=self.cut, response_id=response_id, reply=reply)
        if not ask(self._proxy, entering, reply):
            raise RequestRefused(429, "too many requests run at once", code="rate_limit_exceeded")
        if self._client is not None:
            self._watch.watch(self._client, self.abort.abort)

    def http(self) -> requests.Session:
        """The one session."""
        self._http = session(self.abort)
        self._http.verify = self._ca_file or True
        return self._http

    def cut(self) -> None:
        """End both connections now."""
        self.abort.abort()
        if self._client is not None:
            try:
                self._client.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it is gone already

    def leave(self) -> None:
        """Idempotent; a stream that has not ended is ended."""
        if not self._entered:
            return
        self._entered = False
        if self._client is not None:
            self._watch.unwatch(self._client)
        self.abort.abort()
        self.abort.detach()
        if self._http is not None:
            self._http.close()
        self._proxy.tell(Leave(exchange_id=self._number))


class Run:
    """Drives a response from its chat completion, on the thread that wants the bytes."""

    def __init__(
        self, chat: ChatExchange, exchange: Exchange, events: ResponseEvents, remember: Callable[[], object]
    ) -> None:
        self._chat = chat
        self._exchange = exchange
        self._events = events
        self._remember = remember
        self._settled: Timer | None = None

    def to_the_end(self) -> None:
        """For a reply in one piece."""
        for _ in self.stream():
            pass

    def stream(self) -> Iterator[bytes]:
        """The events, as they come."""
        try:
            yield sse(self._events.begin())
            while not self._events.over:
                told = self._chat.read()
                yield self._written(told) if told is not None else self._ended()
        finally:
            if self._settled is not None:
                self._settled.cancel()
            self._chat.close()
            if not self._events.over:  # it may go on from what it has got
                self._events.fail("the client has left")
                self._leave()

    def _written(self, told: list[StreamEvent]) -> bytes:
        out = [event for said in told for event in self._events.feed(said, time.monotonic())]
        if self._events.over:
            self._leave()
        elif self._events.deadline is not None and self._settled is None:
            self._settled = call_at(self._events.deadline, self._exchange.abort.abort)
        if not told and not self._chat.in_record:
            return KEEPALIVE
        return sse(out)

    def _ended(self) -> bytes:
        failure = self._chat.failure
        out = self._events.closed(failure.detail if failure else None)
        self._leave()
        return sse(out)

    def _leave(self) -> None:
        """Before the last event is sent: who has read it may refer to the response, and have its place."""
        self._remember()
        self._exchange.leave()


def ask(proxy: Mailbox[ProxyMessage], question: ProxyMessage, reply: WorkerFuture[T]) -> T:
    """The actor's answer; the calling thread may wait, it is no actor's."""
    try:
        if proxy.tell(question):
            return reply.get(timeout=_ANSWER_S)
    except pykka.Timeout:
        pass
    raise RequestRefused(503, "the proxy is going down, or waits for a response that still runs")
