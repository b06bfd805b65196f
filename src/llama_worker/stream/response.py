"""The body of a chat reply, from bytes to events. Sans-IO; one per exchange, one thread at a time.

Its framing is read by `httptools`, the parser of Node.js behind a thin Python layer: a chunk costs
it a fiftieth of what it costs a parser in Python.
"""

from __future__ import annotations

from collections.abc import Mapping

import httptools

from llama_worker.stream.decoder import StreamDecoder
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure, disconnected
from llama_worker.types.request import RequestFailReason

_MAX_LENGTH_DIGITS = 18  # httptools counts in 64 bits


class ChatBody:
    """Feed it what arrives, then `end` once the connection is over. It never raises: what went
    wrong is `failure`.

    `over` turns True when nothing more can come of it: the body is complete, cannot be read, or the
    connection has ended. `failure` is None then for a stream that ended in the regular way.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        """Of a reply with status 200; `headers` takes names in any case."""
        self.decoder = StreamDecoder()
        self.bytes_read = 0  # chunked framing left out
        self.over = False
        self.failure: StreamFailure | None = None
        self._content_type = headers.get("Content-Type", "")
        framing = _framing(headers)
        self._ends_with_connection = not framing
        self._pieces: list[bytes] = []  # parsed, not decoded yet
        self._complete = False
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(f"HTTP/1.1 200 OK\r\n{framing}\r\n".encode())

    def feed(self, data: bytes) -> list[StreamEvent]:
        """The events that these bytes complete."""
        if self.over:
            return []
        broken: StreamFailure | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            broken = disconnected("in mid-stream", f"it is not HTTP any more: {error}")
        events = self._decode()
        if self.decoder.error is not None:
            broken = StreamFailure(
                reason=RequestFailReason.PROTOCOL_ERROR, detail=self.decoder.error
            )
        if self._complete and broken is None:
            self._ends_with_connection = True  # nothing is missing
            self.end()
        if broken is not None and not self.over:
            self.over, self.failure = True, broken
        return events

    def end(self, cause: str | None = None) -> None:
        """The connection is over: closed by the server, or broken, as `cause` says."""
        if self.over:
            return
        self.over = True
        if cause is not None or not self._ends_with_connection:
            self.failure = disconnected("in mid-stream", cause or "the server closed it")
        elif not self.decoder.data_records and "text/event-stream" not in self._content_type:
            detail = f"the reply is {self._content_type or 'of no type'}, not text/event-stream"
            self.failure = StreamFailure(reason=RequestFailReason.PROTOCOL_ERROR, detail=detail)
        elif self.decoder.partial:
            self.failure = disconnected("in the middle of a record")

    # ---------------------------------------------------------------- called by httptools

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._complete = True

    # ----------------------------------------------------------------

    def _decode(self) -> list[StreamEvent]:
        if not self._pieces:
            return []
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self.bytes_read += len(data)
        return self.decoder.feed(data)


def _framing(headers: Mapping[str, str]) -> str:
    """The header that tells where the body ends; "": the connection's end does."""
    if "chunked" in headers.get("Transfer-Encoding", "").lower():
        return "Transfer-Encoding: chunked\r\n"
    length = headers.get("Content-Length", "")
    is_length = length.isascii() and length.isdecimal() and len(length) <= _MAX_LENGTH_DIGITS
    return f"Content-Length: {length}\r\n" if is_length else ""
