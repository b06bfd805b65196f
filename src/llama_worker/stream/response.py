"""The HTTP response to a chat request, from bytes to events. Sans-IO; one per exchange, one thread
at a time.

HTTP is read by `httptools`, the parser of Node.js behind a thin Python layer: a chunk costs it a
fiftieth of what it costs a parser in Python.
"""

from __future__ import annotations

import httptools

from llama_worker.stream.decoder import StreamDecoder
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure, describe_http_error
from llama_worker.types import RequestFailReason

_MAX_HEAD_BYTES = 256 * 1024
_MAX_ERROR_BODY_BYTES = 64 * 1024
_SHOWN_CHARS = 40  # of what is not HTTP


class ChatResponse:
    """Feed it what arrives, then `end` once the connection is over. It never raises: what went
    wrong is `failure`.

    `over` turns True when nothing more can come of it: the body is complete, cannot be read, or the
    connection has ended. `failure` is None then for a stream that ended in the regular way.
    """

    def __init__(self) -> None:
        self.decoder = StreamDecoder()
        self.bytes_read = 0  # of the body, chunked framing left out
        self.status: int | None = None  # once the headers are here
        self.over = False
        self.failure: StreamFailure | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._begin = b""  # of the head
        self._head_bytes = 0
        self._body: list[bytes] = []  # parsed, not decoded yet; of an error status: all of it
        self._content_type = ""
        self._ends_with_connection = True  # neither chunked nor of a stated length
        self._complete = False

    @property
    def opened(self) -> bool:
        """Headers have come, with status 200: what follows is the stream."""
        return self.status == 200

    @property
    def refused(self) -> bool:
        """Headers have come, with another status: what follows says why."""
        return self.status is not None and self.status != 200

    def feed(self, data: bytes) -> list[StreamEvent]:
        """The events that these bytes complete."""
        if self.over:
            return []
        if self.status is None:
            self._count_head(data)
        broken: StreamFailure | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            broken = self._broken(error)
        events = self._decode()
        if broken is not None:
            self._fail(broken)
        return events

    def end(self, cause: str | None = None) -> None:
        """The connection is over: closed by the server, or broken, as `cause` says."""
        if self.over:
            return
        self.over = True
        if self.refused:
            self.failure = describe_http_error(self.status or 0, b"".join(self._body))
        elif self.status is None:
            self.failure = disconnected(
                "before the response headers", cause or "the server sent no response"
            )
        elif cause is not None or not self._ends_with_connection:
            self.failure = disconnected("in mid-stream", cause or "the server closed it")
        else:
            self._judge_end()

    # ---------------------------------------------------------------- called by httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; trailers of a chunked body, too."""
        match name.lower():
            case b"content-type":
                self._content_type = value.decode("latin-1")
            case b"content-length" | b"transfer-encoding":
                self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        """The head is here; that of an interim response (1xx) is not the one waited for."""
        status = self._parser.get_status_code()
        if status >= 200 and self.status is None:
            self.status = status

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """The body is complete, or an interim response is over."""
        self._complete = self.status is not None

    # ----------------------------------------------------------------

    def _count_head(self, data: bytes) -> None:
        self._begin = (
            (self._begin + data)[:_SHOWN_CHARS] if len(self._begin) < _SHOWN_CHARS else self._begin
        )
        self._head_bytes += len(data)

    def _decode(self) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if self.opened and self._body:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
            self.bytes_read += len(body)
            events = self.decoder.feed(body)
            if self.decoder.error is not None:
                self._fail(
                    StreamFailure(
                        reason=RequestFailReason.PROTOCOL_ERROR, detail=self.decoder.error
                    )
                )
        elif self.refused and sum(map(len, self._body)) >= _MAX_ERROR_BODY_BYTES:
            self.end()
        elif self.status is None and self._head_bytes > _MAX_HEAD_BYTES:
            self._fail(
                disconnected(
                    "before the response headers", f"they are longer than {_MAX_HEAD_BYTES} bytes"
                )
            )
        if self._complete:
            self._ends_with_connection = True  # nothing is missing
            self.end()
        return events

    def _fail(self, failure: StreamFailure) -> None:
        if not self.over:
            self.over, self.failure = True, failure

    def _broken(self, error: Exception) -> StreamFailure:
        if self.status is not None:
            return disconnected("in mid-stream", f"it is not HTTP any more: {error}")
        shown = self._begin.decode("latin-1")
        return disconnected(
            "before the response headers", f"the reply is not HTTP: it begins with {shown!r}"
        )

    def _judge_end(self) -> None:
        if not self.decoder.data_records and "text/event-stream" not in self._content_type:
            detail = f"the reply is {self._content_type or 'of no type'}, not text/event-stream"
            self.failure = StreamFailure(reason=RequestFailReason.PROTOCOL_ERROR, detail=detail)
        elif self.decoder.partial:
            self.failure = disconnected("in the middle of a record")


def disconnected(where: str, cause: str | None = None) -> StreamFailure:
    """The connection ended."""
    detail = f"the connection ended {where}" + (f": {cause}" if cause else "")
    return StreamFailure(reason=RequestFailReason.STREAM_DISCONNECTED, detail=detail)
