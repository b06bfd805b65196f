"""A chunked request body, read strictly and in any pieces. Pure.

`httptools` does not tell the size that a chunk announces, only what has come of it: a chunk that is
too large would be read up to the limit before it is refused.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from llama_worker.responses.http.refusal import RequestRefused

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[^\0\r\n]*)?\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\0\r\n]*\r\n")
_MAX_LINE_BYTES = 8192  # of a chunk's size with its extensions, and of a trailer
_FREE_FRAMING_BYTES = 65536
_MAX_FRAMING = 7  # bytes of framing for a byte of content: five where each has a chunk of its own


class _Line(Enum):
    """The line that comes next."""

    SIZE = auto()
    END_OF_CHUNK = auto()
    TRAILER = auto()


class ChunkedBody:
    """`content` grows with what is fed, up to `max_bytes`. Trailers are checked and dropped."""

    def __init__(self, content: bytearray, max_bytes: int) -> None:
        self._content = content
        self._max_bytes = max_bytes
        self._missing = 0  # bytes of the chunk
        self._line = bytearray()  # as far as it has come
        self._expected = _Line.SIZE
        self._framing_bytes = 0

    def feed(self, data: bytes) -> bytes | None:
        """What came behind the body's end; None: that has not come.

        Raises RequestRefused for what is malformed, and for a chunk that is too large as soon as it
        is announced.
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
        """Whether it is the last one."""
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
                raise RequestRefused(400, "malformed HTTP request: a chunk does not end as it must")
        return False

    def _begin_chunk(self, line: bytes) -> None:
        found = _SIZE_LINE.fullmatch(line)
        if found is None:
            raise RequestRefused(400, "malformed HTTP request: a chunk has no valid size")
        self._missing = int(found[1], 16)
        self._expected = _Line.END_OF_CHUNK if self._missing else _Line.TRAILER
        check_body_size(len(self._content) + self._missing, self._max_bytes)

    def _check_framing(self, more_bytes: int) -> None:
        self._framing_bytes += more_bytes
        allowed = _FREE_FRAMING_BYTES + _MAX_FRAMING * len(self._content)
        if len(self._line) > _MAX_LINE_BYTES or self._framing_bytes > allowed:
            raise RequestRefused(400, "the request's body has more framing than content")


def check_body_size(size: int, max_bytes: int) -> None:
    """Raises RequestRefused where a body of this size is too large."""
    if size > max_bytes:
        raise RequestRefused(413, f"the request's body is larger than {max_bytes} bytes")
