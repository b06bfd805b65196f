"""What a client sends on its connection, as whole requests, and what it gets, as bytes. Pure; one thread at a time.

`h11` knows the protocol. Stricter than it: one Content-Length at most, and none beside chunks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum, auto
from http import HTTPStatus

import h11
from msgspec import Struct

from llama_worker.responses.refusal import RequestRefused

MAX_HEAD_BYTES = 65536
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_LENGTH = re.compile(rb"^content-length[ \t]*:", re.IGNORECASE | re.MULTILINE)


class Phase(Enum):
    """What the connection waits for."""

    SILENT = auto()  # the first byte of a request
    HEAD = auto()  # the rest of a head
    BODY = auto()  # the rest of a body
    BUSY = auto()  # its reply


class Request(Struct, frozen=True, kw_only=True):
    """A whole request. `target`: path and query, beginning with a slash; `headers` as they were sent."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str:
        """The header's value; where it was sent several times, all of them with commas between; "" for none."""
        return ", ".join(value for key, value in self.headers if key.lower() == name)


class ClientConnection:
    """`check_head` is called with each request before its body is read, and raises RequestRefused."""

    def __init__(self, *, max_body_bytes: int, check_head: Callable[[Request], object]) -> None:
        self.phase = Phase.SILENT
        self._body_bytes = 0
        self._max_body_bytes = max_body_bytes
        self._check_head = check_head
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._head_bytes = bytearray()
        self._head: Request | None = None
        self._wants_body = True
        self._is_chunked = False
        self._body: list[bytes] = []

    # ------------------------------------------------------------ requests

    @property
    def pending_bytes(self) -> int:
        """What has come of a request that is not whole."""
        return len(self._head_bytes) + self._body_bytes

    def receive(self, data: bytes) -> Request | None:
        """The request that `data` completes, if it does; then nothing more is read before `next_request`.

        Raises RequestRefused for what is malformed, too large or not allowed: the connection is of no further use.
        """
        try:
            if data:
                self._h11.receive_data(data)
            if self.phase in (Phase.SILENT, Phase.HEAD):
                self._head_bytes += data
                self.phase = Phase.HEAD if self._head_bytes else Phase.SILENT
            while True:
                match self._h11.next_event():
                    case h11.Request() as head:
                        self._begin(head)
                    case h11.Data(data=piece):
                        self._grow(bytes(piece))
                    case h11.EndOfMessage():
                        return self._complete()
                    case _:  # it needs more
                        return None
        except h11.RemoteProtocolError as error:
            raise RequestRefused(error.error_status_hint, f"malformed HTTP request: {error}") from None

    def next_request(self) -> Request | None:
        """The reply is complete: the request that has come meanwhile, if it is whole."""
        self._head_bytes = bytearray(self._h11.trailing_data[0])
        self._h11.start_next_cycle()
        self.phase = Phase.SILENT
        return self.receive(b"")

    def wanted_continue(self) -> bytes:
        """What a client must be sent that waits for a "100 Continue" before it sends its body; b"" for others."""
        if self.phase is Phase.BODY and self._h11.they_are_waiting_for_100_continue:
            return self._h11.send(h11.InformationalResponse(status_code=100, headers=[])) or b""
        return b""

    def _begin(self, head: h11.Request) -> None:
        if len(_LENGTH.findall(_END_OF_HEAD.split(self._head_bytes, 1)[0])) > 1:
            raise RequestRefused(400, "the request has more than one Content-Length")
        if head.http_version not in (b"1.0", b"1.1"):
            raise RequestRefused(505, "the request is not HTTP/1.1")
        self._head_bytes.clear()
        self.phase = Phase.BODY
        request = Request(
            method=head.method.decode("ascii"),
            target=head.target.decode("ascii"),
            headers=tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in head.headers.raw_items()),
            body=b"",
        )
        self._wants_body = request.method != "HEAD"
        if not request.target.startswith("/"):
            raise RequestRefused(400, "the request's target must be a path")
        length = request.header("content-length")
        if length and request.header("transfer-encoding"):
            raise RequestRefused(400, "the request has a Content-Length beside its Transfer-Encoding")
        self._check_head(request)
        if length:
            self._check_size(int(length))
        self._head = request

    def _grow(self, piece: bytes) -> None:
        self._body_bytes += len(piece)
        self._check_size(self._body_bytes)
        self._body.append(piece)

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise RequestRefused(413, f"the request's body is larger than {self._max_body_bytes} bytes")

    def _complete(self) -> Request:
        assert self._head is not None
        head, body = self._head, b"".join(self._body)
        self._head = None
        self._body.clear()
        self._body_bytes = 0
        self.phase = Phase.BUSY
        return Request(method=head.method, target=head.target, headers=head.headers, body=body)

    # ------------------------------------------------------------ replies

    @property
    def can_begin(self) -> bool:
        """Whether a reply can be begun: none has been."""
        return self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def can_go_on(self) -> bool:
        """After a whole reply: whether the connection may have another request."""
        return self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE

    @property
    def is_complete(self) -> bool:
        return self._h11.our_state in (h11.DONE, h11.MUST_CLOSE)

    def begin(self, status: int, headers: Iterable[tuple[str, str]], reason: str = "") -> bytes:
        """The reply's head; without a Content-Length among the headers it is framed as the client understands it."""
        sent = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
        reply = h11.Response(status_code=status, headers=sent, reason=(reason or _phrase(status)).encode("latin-1"))
        head = self._h11.send(reply) or b""
        self._is_chunked = _CHUNKED in head.lower()
        return head

    def data(self, data: bytes) -> bytes:
        """A piece of its body, as it goes over the wire: not at all in reply to HEAD."""
        if not self._wants_body:
            return b""
        if self._is_chunked and data:  # as h11 writes it, which takes a tenth of what an event costs
            return b"%x\r\n%b\r\n" % (len(data), data)
        return self._h11.send(h11.Data(data=data)) or b""

    def end(self) -> bytes:
        """The end of its body. Raises h11.LocalProtocolError where it is shorter than its Content-Length."""
        return self._h11.send(h11.EndOfMessage()) or b""


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
