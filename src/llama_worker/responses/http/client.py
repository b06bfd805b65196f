"""`Client`: one client's connection. `WaitingClients`: those that the listener waits for.

A Client belongs to the listener's thread while it waits for a request, and to the request's own
thread until the reply is complete. `cut` and `disconnected` are for any thread.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from llama_worker.responses.errors import ApiError
from llama_worker.responses.http.access import page_headers
from llama_worker.responses.http.request_reader import Phase, RequestReader

Headers = Iterable[tuple[str, str]]

LINGER_S = 2.0  # after the last reply: for the client to read it and to close, or to send more
MAX_LINGER_S = 30.0  # for one that goes on sending: many read nothing before they have sent all
# in the order in which clients are evicted to make room for others
_ALLOWED_S = {
    Phase.LINGER: LINGER_S,
    Phase.SILENT: 120.0,  # without a byte of a request, on a new or a kept-alive connection
    Phase.HEAD: 20.0,  # from a head's first byte to its last
    Phase.BODY: 30.0,  # without a byte of a body
}


class Client:
    """A client's connection: its socket and its HTTP state. `write_timeout_s`: how long the client
    may read nothing of its reply."""

    def __init__(
        self, connection: socket.socket, http: RequestReader, write_timeout_s: float
    ) -> None:
        self.socket = connection
        self.http = http
        # for the listener's thread
        self.pending_bytes = 0  # of an incomplete request
        self.lingers_until = 0.0  # monotonic; what it sends until then gives it LINGER_S again
        self._write_timeout_s = write_timeout_s
        self._is_disconnected = False
        self._on_disconnect: Callable[[], object] | None = None
        # called on the request's own thread before each wait for the client to read
        self.on_stall: Callable[[], object] | None = None

    # ------------------------------------------------------------ the request's own thread

    def reply(self, status: int, value: Mapping[str, Any], headers: Headers = ()) -> None:
        """Send a complete JSON reply."""
        self._send(self._json_reply(status, value, headers))
        self.end()

    def refuse(self, refused: ApiError) -> None:
        self.reply(refused.status, refused.body(), refused.headers())

    def begin(self, status: int, headers: Headers, *, reason: str = "", data: bytes = b"") -> None:
        """Send the reply's head, and the first of its body if that is here.

        Raises OSError if the client has left or reads nothing, as `write` and `end` do.
        """
        self._send(self._head(status, headers, reason) + self.http.reply.data(data))

    def write(self, data: bytes) -> None:
        """Send a piece of the body; blocks while the client does not read."""
        self._send(self.http.reply.data(data))

    def send_raw(self, data: bytes) -> None:
        """Send bytes in place of a reply: the connection speaks another protocol from now on, until
        `end`."""
        self.http.reply.has_begun, self.http.reply.keep_alive = True, False
        self._send(data)

    def end(self) -> None:
        if end := self.http.reply.end():  # b"" after a body with a Content-Length
            self._send(end)

    def set_disconnect_callback(self, call: Callable[[], object]) -> None:
        """`call` is called on the listener's thread when the client leaves; at once if it has left.
        It must not block."""
        self._on_disconnect = call
        if self._is_disconnected:
            call()

    def clear_callbacks(self) -> None:
        """Drop `on_stall` and the callback of `set_disconnect_callback`."""
        self._on_disconnect = self.on_stall = None

    def _send(self, data: bytes) -> None:
        try:
            # mostly the socket has room, and to set a timeout costs one more system call
            sent = self.socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            if self.on_stall is not None:
                self.on_stall()
            try:
                self.socket.settimeout(self._write_timeout_s)
                left = memoryview(data)[sent:]
                while left:  # the timeout of `sendall` would be for all of it
                    left = left[self.socket.send(left, socket.MSG_NOSIGNAL) :]
            finally:
                self.socket.setblocking(False)

    def _head(self, status: int, headers: Headers, reason: str = "") -> bytes:
        head, origin = self.http.head, self.http.origin  # of the request that is answered
        for_page = page_headers(head, origin) if head and origin is not None else ()
        return self.http.reply.begin(status, [*headers, *for_page], reason)

    def _json_reply(self, status: int, value: Mapping[str, Any], headers: Headers) -> bytes:
        body = json.dumps(value).encode()
        own = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        return self._head(status, [*own, *headers]) + self.http.reply.data(body)

    # ------------------------------------------------------------ the listener's thread

    def refusal(self, refused: ApiError) -> bytes:
        """The complete reply, as bytes, to a request that is malformed or not allowed to run."""
        headers = [("Connection", "close"), *refused.headers()]
        return self._json_reply(refused.status, refused.body(), headers)

    # ------------------------------------------------------------ any thread

    def disconnected(self) -> None:
        """The client closed its connection, or only its sending side: to llama-server the same."""
        self._is_disconnected = True
        if self._on_disconnect is not None:
            self._on_disconnect()

    def cut(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone already


class WaitingClients:
    """The clients that wait on the listener's thread, by phase: when each times out, and which is
    evicted first if places are short. Instants are monotonic seconds.
    """

    def __init__(self) -> None:
        # Deadlines. The longest-waiting client of each phase comes first: all of a phase may wait
        # equally long.
        self._waiting: dict[Phase, dict[Client, float]] = {phase: {} for phase in _ALLOWED_S}

    def __iter__(self) -> Iterator[Client]:
        return iter([client for kind in self._waiting.values() for client in kind])

    def enter(self, client: Client, phase: Phase, now: float) -> None:
        """The client waits from now on. More bytes of a head do not extend its time."""
        if phase is Phase.HEAD and client in self._waiting[phase]:
            return
        self.leave(client)
        self._waiting[phase][client] = now + _ALLOWED_S[phase]

    def leave(self, client: Client) -> None:
        """The client no longer waits; idempotent."""
        for kind in self._waiting.values():
            kind.pop(client, None)

    def deadline(self) -> float | None:
        """When the next client times out; None: no client waits."""
        return min(
            (next(iter(kind.values())) for kind in self._waiting.values() if kind), default=None
        )

    def expired(self, now: float) -> list[Client]:
        """The clients that have timed out."""
        expired = []
        for kind in self._waiting.values():
            for client, until in kind.items():
                if until > now:
                    break
                expired.append(client)
        return expired

    def next_to_evict(self) -> Client | None:
        """The client whose place is given to another: the longest-waiting one of the first phase in
        `_ALLOWED_S`, so those that linger or are silent go first. None: no client waits."""
        return next((next(iter(kind)) for kind in self._waiting.values() if kind), None)
