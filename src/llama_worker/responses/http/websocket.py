"""The Responses API on a WebSocket: each request and each event is one message.

`wsproto` implements the protocol; this module adds limits and the socket. Everything is for the
request's own thread, which the connection keeps for as long as it is open.
"""

from __future__ import annotations

import contextlib
import json
import select
import time
from collections import deque

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, TextMessage
from wsproto.events import Event as SocketEvent
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from llama_worker.responses.api.events import Event, to_json
from llama_worker.responses.errors import ApiError
from llama_worker.responses.http.client import Client
from llama_worker.responses.http.request_reader import HttpRequest

_READ_BYTES = 65536
_MESSAGE_BYTES = 64  # what a message counts as at least, even if it is empty
_IDLE_S = 600.0  # between two requests: a client's tools may take minutes


class ClientSocket:
    """A WebSocket with its client. The constructor accepts the handshake, or raises ApiError.

    It and any method raise OSError if the connection is over; the client was told why if possible.
    """

    def __init__(self, client: Client, request: HttpRequest, max_message_bytes: int) -> None:
        self._client = client
        self._max_bytes = max_message_bytes
        self._protocol = WSConnection(ConnectionType.SERVER)
        self._unfinished = bytearray()  # a list of tiny pieces would take far more memory
        self._messages: deque[bytes] = deque()
        self._messages_bytes = 0
        headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in request.headers.values()
        ]
        if "host" not in request.headers:  # HTTP/1.0, which has no upgrade
            raise ApiError(400, "not a WebSocket handshake: it has no Host")
        try:
            self._protocol.initiate_upgrade_connection(headers, request.target)
            list(self._protocol.events())
        except (RemoteProtocolError, LocalProtocolError) as error:
            raise ApiError(400, f"not a WebSocket handshake: {error}") from None
        self._send(AcceptConnection())
        self._receive(self._client.http.take_unread())

    def next_message(self) -> bytes:
        """Wait for the client's next message, at most `_IDLE_S`."""
        poll = select.poll()
        poll.register(self._client.socket, select.POLLIN)
        until = time.monotonic() + _IDLE_S  # pings do not extend it: many clients send them
        while not self._messages:
            left_s = until - time.monotonic()
            if left_s <= 0.0 or not poll.poll(left_s * 1000):
                self._end(CloseReason.GOING_AWAY, f"no message for {_IDLE_S:g} s")
            self.read()
        message = self._messages.popleft()
        self._messages_bytes -= max(len(message), _MESSAGE_BYTES)
        return message

    def read(self) -> None:
        """Read what has come, without waiting: so pings are answered during a response, too."""
        try:
            data = self._client.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionAbortedError("the client has disconnected")
        self._receive(data)

    def encode(self, events: list[Event]) -> bytes:
        """The events as messages. A failure's `error` event is left out: here clients take it for
        the whole answer, and would not wait for the terminal event."""
        if len(events) > 1 and events[-2]["type"] == "error":
            *events, error, failed = events
            events.append({**failed, "sequence_number": error["sequence_number"]})
        texts = [to_json(event).decode() for event in events]
        return b"".join(self._protocol.send(TextMessage(data=text)) for text in texts)

    def refuse(self, refused: ApiError) -> None:
        """Send an error in place of a response."""
        error = refused.body()["error"]
        error["code"] = error["code"] or error["type"]
        message = {"type": "error", "status": refused.status, "error": error}
        self._send(TextMessage(data=json.dumps(message)))

    def _receive(self, data: bytes) -> None:
        try:
            self._protocol.receive_data(data)
            for event in self._protocol.events():
                self._take(event)
        except RemoteProtocolError as error:
            self._end(CloseReason.PROTOCOL_ERROR, str(error), error.event_hint)

    def _take(self, event: SocketEvent) -> None:
        match event:
            case TextMessage(data=text, message_finished=is_whole):
                self._unfinished += text.encode()
                if self._messages_bytes + len(self._unfinished) > self._max_bytes:
                    why = f"more than {self._max_bytes} bytes of messages at once"
                    self._end(CloseReason.MESSAGE_TOO_BIG, why)
                if is_whole:
                    self._messages_bytes += max(len(self._unfinished), _MESSAGE_BYTES)
                    self._messages.append(bytes(self._unfinished))
                    self._unfinished.clear()
            case BytesMessage():
                self._end(CloseReason.UNSUPPORTED_DATA, "messages must be text")
            case Ping():
                self._send(event.response())
            case CloseConnection():
                self._end(CloseReason.NORMAL_CLOSURE, "the client has closed", event.response())

    def _end(self, code: CloseReason, why: str, goodbye: SocketEvent | None = None) -> None:
        """Send the closing frame. Always raises ConnectionAbortedError."""
        with contextlib.suppress(LocalProtocolError, OSError):
            self._send(goodbye or CloseConnection(code=code, reason=why))
            self._client.end()  # lets a client that still sends read it
        raise ConnectionAbortedError(why)

    def _send(self, event: SocketEvent) -> None:
        self._client.send_raw(self._protocol.send(event))
