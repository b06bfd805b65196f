"""What a client sends on its connection, as whole requests, and what it gets, as bytes. Pure; one thread at a time.

Requests are read by `httptools`; `h11`, in Python, takes ten times as long, of every first token. Stricter than it: a
request is HTTP/1.0 or 1.1, has one Host, and no transfer encoding but "chunked".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto

import httptools
from msgspec import Struct

from llama_worker.responses.refusal import RequestRefused
from llama_worker.responses.reply import Reply

MAX_HEAD_BYTES = 65536
_END_OF_HEAD = re.compile(rb"\n\r?\n")  # the parser refuses lines that do not end in "\r\n"
_MAX_FRAMING = 8  # bytes of framing for a byte of a chunked body: five where each has a chunk of its own


class Phase(Enum):
    """What the connection waits for."""

    SILENT = auto()  # the first byte of a request
    HEAD = auto()  # the rest of a head
    BODY = auto()  # the rest of a body
    BUSY = auto()  # its reply


class Request(Struct, frozen=True, kw_only=True):
    """A whole request. `target`: path and query, beginning with a slash.

    `headers`: by the name in lower case, as it was sent; of one that was sent several times all values, with commas.
    """

    method: str
    target: str
    headers: Mapping[str, tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        """The header's value, "" for none."""
        return self.headers[name][1] if name in self.headers else ""


class ClientConnection:
    """`check_head` is called with each request before its body is read, and raises RequestRefused.

    `reply` is the one to the request that was read last.
    """

    def __init__(self, *, max_body_bytes: int, check_head: Callable[[Request], object]) -> None:
        self._max_body_bytes = max_body_bytes
        self._check_head = check_head
        self._behind = b""  # what came behind a whole request
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.phase = Phase.SILENT
        self.reply = Reply()
        self._message = _Message()
        self._parser = httptools.HttpRequestParser(self._message)
        self._head_bytes = bytearray()
        self._head: Request | None = None
        self._body_wire_bytes = 0
        self._length: int | None = 0  # of the body; None: it is chunked
        self._awaits_continue = False

    @property
    def pending_bytes(self) -> int:
        """What has come of a request that is not whole."""
        return len(self._head_bytes) + self._message.body_bytes

    @property
    def can_go_on(self) -> bool:
        """Whether the reply is complete and the connection may have another request."""
        return self.reply.is_complete and self.reply.is_kept

    def receive(self, data: bytes) -> Request | None:
        """The request that `data` completes, if it does; then nothing more is read before `next_request`.

        Raises RequestRefused for what is malformed, too large or not allowed: the connection is of no further use.
        """
        if self.phase in (Phase.SILENT, Phase.HEAD):
            behind = self._read_head(data)
            if behind is None:
                return None
            self._begin()
            data = behind
        return self._complete() if self._read_body(data) else None

    def next_request(self) -> Request | None:
        """The reply is complete: the request that has come meanwhile, if it is whole."""
        self._begin_anew()
        behind, self._behind = self._behind, b""
        return self.receive(behind)

    def wanted_continue(self) -> bytes:
        """What a client must be sent that waits for a "100 Continue" before it sends its body; b"" for others."""
        if self.phase is Phase.BODY and self._awaits_continue:
            self._awaits_continue = False
            return b"HTTP/1.1 100 Continue\r\n\r\n"
        return b""

    def _read_head(self, data: bytes) -> bytes | None:
        """What came behind its end; None: that has not come."""
        read = len(self._head_bytes)
        self._head_bytes += data
        found = _END_OF_HEAD.search(self._head_bytes, max(read - 2, 0))
        end = found.end() if found else len(self._head_bytes)
        self._feed(bytes(self._head_bytes[read:end]))
        if end > MAX_HEAD_BYTES:
            raise RequestRefused(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes")
        if found is None:
            self.phase = Phase.HEAD if self._head_bytes else Phase.SILENT
            return None
        behind = bytes(self._head_bytes[end:])
        self._head_bytes.clear()
        return behind

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # which nobody has to do
        except httptools.HttpParserError as error:
            if not self._message.is_complete:
                raise RequestRefused(400, f"malformed HTTP request: {error}") from None

    def _begin(self) -> None:
        self.phase = Phase.BODY
        message, method, version = (
            self._message,
            self._parser.get_method().decode("ascii"),
            self._parser.get_http_version(),
        )
        head = self._head = Request(method=method, target=message.target, headers=message.headers, body=b"")
        self.reply = Reply(method, version)
        if version not in ("1.0", "1.1"):
            raise RequestRefused(505, "the request is not HTTP/1.1")
        if not head.target.startswith("/"):
            raise RequestRefused(400, "the request's target must be a path")
        if message.hosts > 1 or (message.hosts == 0 and version == "1.1"):
            raise RequestRefused(400, "the request must have one Host")
        encoding = head.header("transfer-encoding").lower()
        if encoding not in ("", "chunked"):
            raise RequestRefused(501, "the request's transfer encoding is not known")
        self._check_head(head)
        self._length = None if encoding else int(head.header("content-length") or 0)
        self._check_size(self._length or 0)
        self._awaits_continue = head.header("expect").lower() == "100-continue" and version == "1.1"
        self.reply.is_kept = version == "1.1" and "close" not in header_words(head.header("connection"))

    def _read_body(self, data: bytes) -> bool:
        """Whether it is whole."""
        message = self._message
        self._awaits_continue = self._awaits_continue and not data
        if self._length is not None:
            missing = self._length - message.body_bytes
            message.on_body(data[:missing])
            self._behind = data[missing:]
            return len(data) >= missing
        self._feed(data)
        self._check_size(message.body_bytes)
        self._body_wire_bytes += len(data)
        if self._body_wire_bytes > MAX_HEAD_BYTES + _MAX_FRAMING * message.body_bytes:
            raise RequestRefused(400, "the request's body has more framing than content")
        return message.is_complete

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise RequestRefused(413, f"the request's body is larger than {self._max_body_bytes} bytes")

    def _complete(self) -> Request:
        assert self._head is not None
        self.phase = Phase.BUSY
        if self._message.is_followed:
            self.reply.is_kept = False
        head, message = self._head, self._message
        self._message = _Message()
        return Request(method=head.method, target=head.target, headers=head.headers, body=b"".join(message.body))


class _Message:
    """What `httptools` reads of one request: it calls the methods."""

    def __init__(self) -> None:
        self.target = ""
        self.headers: dict[str, tuple[str, str]] = {}
        self.hosts = 0
        self.body: list[bytes] = []
        self.body_bytes = 0
        self.is_complete = False
        self.is_followed = False  # behind a chunked body, whose end only the parser knows: what it has read is lost
        self._has_head = False

    def on_message_begin(self) -> None:
        self.is_followed = self.is_complete

    def on_url(self, url: bytes) -> None:
        """A piece of it."""
        if not self._has_head:
            self.target += url.decode("ascii")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; trailers of a chunked body, too."""
        if self._has_head:
            return
        sent, said = name.decode("ascii"), value.decode("latin-1").strip(" \t")
        lower = sent.lower()
        self.hosts += lower == "host"
        self.headers[lower] = (sent, f"{self.headers[lower][1]}, {said}" if lower in self.headers else said)

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        """A piece of it."""
        if not self.is_complete:
            self.body.append(body)
            self.body_bytes += len(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


def header_words(value: str) -> set[str]:
    """The words of a header that is a list of them, in lower case."""
    return {word.strip().lower() for word in value.split(",")}
