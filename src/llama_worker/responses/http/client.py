"""A connection of a client: the socket, and what is spoken on it.

It belongs to the listener's thread while it waits for a request, and to the request's own thread
until the reply is complete. `cut` and `left` are for any thread.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llama_worker.responses.api.reply import Reply
from llama_worker.responses.http.access import page_headers
from llama_worker.responses.http.client_connection import ClientConnection, Request
from llama_worker.responses.http.refusal import RequestRefused

Headers = Iterable[tuple[str, str]]


class Client:
    """`write_timeout_s`: how long a client may take nothing of its reply."""

    def __init__(
        self,
        connection: socket.socket,
        http: ClientConnection,
        local_address: str,
        write_timeout_s: float,
    ) -> None:
        self.socket = connection
        self.http = http
        self.local_address = local_address
        self.origin: str | None = None  # the allowed page that sent the request
        self.pending_bytes = 0  # of a request that is not whole; for the listener's thread
        self._write_timeout_s = write_timeout_s
        self._has_left = False
        self._on_left: Callable[[], object] | None = None

    # ------------------------------------------------------------ the request's own thread

    def reply(
        self, request: Request, status: int, value: Mapping[str, Any], headers: Headers = ()
    ) -> None:
        """A whole reply in JSON."""
        body = json.dumps(value).encode()
        self.begin(request, status, [*_json_headers(body), *headers], data=body)
        self.end()

    def begin(
        self,
        request: Request,
        status: int,
        headers: Headers,
        *,
        reason: str = "",
        data: bytes = b"",
    ) -> None:
        """The reply's head, and the first of its body if that is here.

        Raises OSError where the client has left or takes nothing, as `write` and `end` do.
        """
        own = page_headers(request, self.origin) if self.origin is not None else []
        head = self.http.reply.begin(status, [*headers, *own], reason)
        self._send(head + self.http.reply.data(data) if data else head)

    def write(self, data: bytes) -> None:
        """A piece of its body; blocks while the client does not take it."""
        self._send(self.http.reply.data(data))

    def send_raw(self, data: bytes) -> None:
        """In the place of a reply, on a connection that speaks another protocol from now on."""
        self.http.reply.has_begun = True
        self._send(data)

    def end(self) -> None:
        if end := self.http.reply.end():  # nothing follows a body whose length was stated
            self._send(end)

    def when_left(self, call: Callable[[], object]) -> None:
        """Call it, on the listener's thread, when the client has left; at once where it has. It
        must not block."""
        self._on_left = call
        if self._has_left:
            call()

    def _send(self, data: bytes) -> None:
        try:
            # mostly there is room, and a timeout would cost a system call more
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            try:
                self.socket.settimeout(self._write_timeout_s)
                self.socket.sendall(data[sent:])
            finally:
                self.socket.setblocking(False)

    # ------------------------------------------------------------ any thread

    def left(self) -> None:
        """The client has closed its connection, or its sending side, which counts as much with
        llama-server."""
        self._has_left = True
        if self._on_left is not None:
            self._on_left()

    def cut(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone already


def refusal_bytes(reply: Reply, refused: RequestRefused) -> bytes:
    """The whole reply to a request that could not be read, or was not to be."""
    body = json.dumps(refused.body()).encode()
    headers = [*_json_headers(body), ("Connection", "close"), *refused.headers()]
    return reply.begin(refused.status, headers) + reply.data(body) + reply.end()


def _json_headers(body: bytes) -> list[tuple[str, str]]:
    return [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
