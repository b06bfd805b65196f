"""Parses the bytes of a client's connection into complete HTTP requests. Sans-IO; one thread at a
time.

Heads are parsed by `httptools`: a parser in Python would delay every first token. This reader is
stricter: a request is HTTP/1.0 or 1.1, has one Host, and no transfer encoding but "chunked". It
parses bodies itself: `httptools` would take the body of a request for an upgrade for the next
request, and does not tell the announced size of a chunk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from urllib.parse import unquote

import httptools
from msgspec import Struct
from msgspec.structs import replace

from llama_worker.responses.errors import ApiError
from llama_worker.responses.http.reply import ReplyFramer

MAX_HEAD_BYTES = 65536
_MAX_HEADERS = 256  # of different names: each takes about 200 bytes of memory beyond its own
_MAX_LENGTH_DIGITS = 20
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[^\0\r\n]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\0\r\n]*\r\n")
_MAX_LINE_BYTES = 8192  # of a chunk's size line with its extensions, and of a trailer line
_FREE_FRAMING_BYTES = 65536
_MAX_FRAMING = 7  # bytes of framing for a byte of content; chunks of one byte have five
_REQUEST_LINE = re.compile(rb"(?:\r?\n)?([!-~]+) ([!-~]+) HTTP/(\d\.\d)\r\n")
_END_OF_HEAD = re.compile(rb"\n\r?\n")  # the parser refuses lines that do not end in "\r\n"


class Phase(Enum):
    """What the connection waits for."""

    SILENT = auto()  # the first byte of a request
    HEAD = auto()  # the rest of a head
    BODY = auto()  # the rest of a body, or its reply
    LINGER = auto()  # its end: no more requests are read


class HttpRequest(Struct, frozen=True, kw_only=True):
    """A complete request. `target`: path and query, beginning with a slash.

    `headers`: by lower-case name, the name as it was sent and the value. If a header was sent
    several times, its values are joined with commas.
    """

    method: str
    target: str
    headers: Mapping[str, tuple[str, str]]
    body: bytes

    @property
    def path(self) -> str:
        """The target's path as servers read it: `/v1/%72esponses` is `/v1/responses`."""
        return unquote(self.target.partition("?")[0])

    def header(self, name: str) -> str:
        """The header's value, "" for none. `name`: in lower case."""
        return self.headers[name][1] if name in self.headers else ""


class RequestReader:
    """Reads the requests of one connection. `allowed_origin` is called with each request before its
    body is read; it returns the web page that sent it, None for a program, or raises ApiError.

    `reply` frames the reply to the request that was read last; `origin` is the page that sent it.
    """

    def __init__(
        self, *, max_body_bytes: int, allowed_origin: Callable[[HttpRequest], str | None]
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._allowed_origin = allowed_origin
        self._unread = b""  # what came after a complete request
        self._reset()

    def _reset(self) -> None:
        self.phase = Phase.SILENT
        self.reply = ReplyFramer()
        self._headers = _Headers()
        self._parser = httptools.HttpRequestParser(self._headers)
        self._head_bytes = bytearray()
        self.head: HttpRequest | None = None  # of the request that is being read
        self.origin: str | None = None
        self._body = bytearray()  # a list of tiny pieces would take far more memory
        self._length = 0  # of a body that is not chunked
        self._chunks: ChunkedBody | None = None
        self._awaits_continue = False

    @property
    def pending_bytes(self) -> int:
        """What has come of an incomplete request."""
        return len(self._head_bytes) + len(self._body)

    def receive(self, data: bytes) -> HttpRequest | None:
        """The request that `data` completes; None if it completes none. After a complete one,
        nothing more is read before `next_request`.

        Raises ApiError for a request that is malformed, too large or not allowed: the connection
        cannot be used any more.
        """
        if self.phase in (Phase.SILENT, Phase.HEAD):
            rest = self._read_head(data)
            if rest is None:
                return None
            self._begin()
            data = rest
        return self._complete() if self._read_body(data) else None

    def next_request(self) -> HttpRequest | None:
        """Call it once the reply is complete. The next request, if all of it has come by now."""
        self._reset()
        return self.receive(self.take_unread())

    def take_unread(self) -> bytes:
        """What came after the request: the next one, or another protocol after an upgrade."""
        unread, self._unread = self._unread, b""
        return unread

    def linger(self) -> None:
        """Read no more requests, and forget what has come of one."""
        self._reset()
        self._unread = b""
        self.phase = Phase.LINGER

    def wanted_continue(self) -> bytes:
        """The "100 Continue" for a client that sends its body only after it, once; else b""."""
        if self.phase is Phase.BODY and self._awaits_continue:
            self._awaits_continue = False
            return b"HTTP/1.1 100 Continue\r\n\r\n"
        return b""

    def _read_head(self, data: bytes) -> bytes | None:
        """The bytes after the head's end; None: the end has not come."""
        read = len(self._head_bytes)
        self._head_bytes += data[: MAX_HEAD_BYTES + 1 - read]
        found = _END_OF_HEAD.search(self._head_bytes, max(read - 2, 0))
        end = found.end() if found else len(self._head_bytes)
        if end > MAX_HEAD_BYTES:
            raise ApiError(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes")
        self._feed(bytes(self._head_bytes[read:end]))
        if len(self._headers.values) > _MAX_HEADERS:
            raise ApiError(431, f"the request has more than {_MAX_HEADERS} headers")
        if found is None:
            self.phase = Phase.HEAD if self._head_bytes else Phase.SILENT
            return None
        del self._head_bytes[end:]
        return data[end - read :]

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # raised at the end of a head; an upgrade may be ignored
        except httptools.HttpParserError as error:
            raise ApiError(400, f"malformed HTTP request: {error}") from None

    def _begin(self) -> None:
        self.phase = Phase.BODY
        line = _REQUEST_LINE.match(self._head_bytes)
        if line is None:
            raise ApiError(
                400, "malformed HTTP request: the first line is not an HTTP/1.1 request line"
            )
        method, target, version = (part.decode("ascii") for part in line.groups())
        head = self.head = HttpRequest(
            method=method, target=target, headers=self._headers.values, body=b""
        )
        self.reply = ReplyFramer(method, version)
        if version not in ("1.0", "1.1"):
            raise ApiError(505, "the request is not HTTP/1.1")
        if method == "CONNECT" or not target.startswith("/") or "#" in target:
            raise ApiError(400, "the request's target must be a path")
        if self._headers.hosts > 1 or (self._headers.hosts == 0 and version == "1.1"):
            raise ApiError(400, "the request must have exactly one Host header")
        encoding, length = head.header("transfer-encoding").lower(), head.header("content-length")
        if encoding not in ("", "chunked"):
            raise ApiError(501, "the request's transfer encoding is not supported")
        if len(length) > _MAX_LENGTH_DIGITS:
            raise ApiError(400, "malformed HTTP request: its Content-Length has too many digits")
        self.origin = self._allowed_origin(head)
        self._length = int(length or 0)
        check_body_size(self._length, self._max_body_bytes)
        self._awaits_continue = head.header("expect").lower() == "100-continue" and version == "1.1"
        self.reply.keep_alive = version == "1.1" and "close" not in header_words(
            head.header("connection")
        )
        if encoding:
            self._chunks = ChunkedBody(self._body, self._max_body_bytes)

    def _read_body(self, data: bytes) -> bool:
        """Whether the body is complete."""
        self._awaits_continue = self._awaits_continue and not data
        if self._chunks is not None:
            rest = self._chunks.feed(data)
            self._unread = rest or b""
            return rest is not None
        missing = self._length - len(self._body)
        self._body += data[:missing]
        self._unread = data[missing:]
        return len(data) >= missing

    def _complete(self) -> HttpRequest:
        assert self.head is not None
        body = bytes(self._body)
        self._body.clear()  # else this copy would be held, too, while the request runs
        return replace(self.head, body=body)


class _Headers:
    """Collects the headers of a head: `httptools` calls its methods."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[str, str]] = {}
        self.hosts = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        as_sent, text = name.decode("ascii"), value.decode("latin-1").strip(" \t")
        lower = as_sent.lower()
        self.hosts += lower == "host"
        if lower in self.values:
            text = f"{self.values[lower][1]}, {text}"
        self.values[lower] = (as_sent, text)


class _Line(Enum):
    """The kind of line that comes next in a chunked body."""

    SIZE = auto()
    END_OF_CHUNK = auto()
    TRAILER = auto()


class ChunkedBody:
    """A strict parser of a chunked body, fed in any pieces. It appends the content to `content`, up
    to `max_bytes`. Trailers are checked and dropped.

    `httptools` does not tell the announced size of a chunk, only what has come of it: it would read
    a chunk that is too large up to the limit before that is refused.
    """

    def __init__(self, content: bytearray, max_bytes: int) -> None:
        self._content = content
        self._max_bytes = max_bytes
        self._missing = 0  # bytes of the chunk that are still to come
        self._line = bytearray()  # the part of the line that has come
        self._expected = _Line.SIZE
        self._framing_bytes = 0

    def feed(self, data: bytes) -> bytes | None:
        """The bytes after the body's end; None: the end has not come.

        Raises ApiError for a malformed body, and for a chunk that is too large as soon as it is
        announced.
        """
        position = 0
        while position < len(data):
            if self._missing:
                piece = data[position : position + self._missing]
                self._content += piece
                self._missing -= len(piece)
                position += len(piece)
                continue
            end = data.find(b"\n", position) + 1
            piece = data[position : end or len(data)]
            position += len(piece)
            self._line += piece
            self._check_framing(len(piece))
            if end and self._take_line():
                return data[position:]
        return None

    def _take_line(self) -> bool:
        """Handle a complete line. True: it is the body's last one."""
        line = bytes(self._line)
        self._line.clear()
        match self._expected:
            case _Line.SIZE:
                self._begin_chunk(line)
            case _Line.END_OF_CHUNK if line == b"\r\n":
                self._expected = _Line.SIZE
            case _Line.TRAILER if line == b"\r\n":
                return True
            case _Line.TRAILER if _TRAILER_LINE.fullmatch(line):
                pass
            case _:
                raise ApiError(
                    400, "malformed HTTP request: a chunk or trailer is not terminated correctly"
                )
        return False

    def _begin_chunk(self, line: bytes) -> None:
        found = _SIZE_LINE.fullmatch(line)
        if found is None:
            raise ApiError(400, "malformed HTTP request: a chunk has no valid size")
        self._missing = int(found[1], 16)
        self._expected = _Line.END_OF_CHUNK if self._missing else _Line.TRAILER
        check_body_size(len(self._content) + self._missing, self._max_bytes)

    def _check_framing(self, more_bytes: int) -> None:
        self._framing_bytes += more_bytes
        allowed = _FREE_FRAMING_BYTES + _MAX_FRAMING * len(self._content)
        if len(self._line) > _MAX_LINE_BYTES or self._framing_bytes > allowed:
            raise ApiError(400, "the chunked body has too many bytes of framing")


def check_body_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise ApiError(413, f"the request's body is larger than {max_bytes} bytes")


def header_words(value: str) -> set[str]:
    """The items of a comma-separated header, in lower case."""
    return {word.strip().lower() for word in value.split(",")}
