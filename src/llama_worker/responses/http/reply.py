"""Frames the reply to a client's request as HTTP/1.1 bytes. Sans-IO."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\0\r\n]*")
_STATUS_LINE = re.compile(r"[^\0\r\n]+")
_LENGTH = re.compile(r"[0-9]{1,20}")
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_WITHOUT_BODY = frozenset({204, 304})


class MalformedReply(ValueError):
    """The reply cannot be sent: the client would read it as something else."""


class ReplyFramer:
    """Frames one reply: call `begin`, `data` for each piece of the body, `end`.

    `method` and `version` are the request's. `keep_alive`: whether the connection is kept alive
    after the reply, unless the reply's own headers say "close".
    """

    def __init__(self, method: str = "", version: str = "1.1", *, keep_alive: bool = False) -> None:
        self.has_begun = False
        self.is_complete = False
        self.keep_alive = keep_alive
        self._method = method
        self._version = version
        self._is_chunked = False
        self._missing: int | None = None  # bytes of the body to come; None: any number

    def begin(self, status: int, headers: Iterable[tuple[str, str]], reason: str = "") -> bytes:
        """The reply's head. Without a Content-Length the body is chunked, or for an HTTP/1.0 client
        ends with the connection.

        Raises MalformedReply; then the reply has not begun.
        """
        headers = list(headers)
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        if not 200 <= status < 1000 or len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
            raise MalformedReply(f"status {status}, Content-Length {lengths}")
        missing, is_chunked, keep_alive = None, False, self.keep_alive
        if status in _WITHOUT_BODY or self._method == "HEAD":
            missing = 0
        elif lengths:
            missing = int(lengths[0])
        elif self._version == "1.1":
            is_chunked = True
            headers.append(("Transfer-Encoding", "chunked"))
        else:
            keep_alive = False  # the body ends with the connection
        connection = next((value for name, value in headers if name.lower() == "connection"), None)
        keep_alive = keep_alive and (connection or "").lower() != "close"
        if not keep_alive and connection is None:
            headers.append(("Connection", "close"))
        status_line = f"HTTP/1.1 {status} {reason or _PHRASES.get(status, 'Unknown')}"
        lines = [f"{name}: {value}" for name, value in headers]
        if not _STATUS_LINE.fullmatch(status_line) or not all(map(_HEADER.fullmatch, lines)):
            raise MalformedReply("a header has a line break, or a malformed name")
        self.has_begun = True
        self.keep_alive = keep_alive
        self._is_chunked = is_chunked
        self._missing = missing
        return "\r\n".join([status_line, *lines, "", ""]).encode("latin-1", "replace")

    def data(self, data: bytes) -> bytes:
        """A piece of the body as it goes over the wire; b"" in reply to HEAD."""
        if self._is_chunked:
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        if self._method == "HEAD":
            return b""
        if self._missing is not None:
            self._missing -= len(data)
            if self._missing < 0:
                raise MalformedReply("the body is longer than its Content-Length")
        return data

    def end(self) -> bytes:
        """The end of the body. Raises MalformedReply if the body is shorter than its
        Content-Length."""
        if self._missing:
            raise MalformedReply(
                f"the body is {self._missing} bytes shorter than its Content-Length"
            )
        self.is_complete = True
        return b"0\r\n\r\n" if self._is_chunked else b""
