"""Parses a server's reply into its head, its body and, for a chat, its events. Sans-IO; one per
exchange, one thread at a time.

The parser is `httptools`, that of Node.js behind a thin Python layer: a parser in Python takes much
longer for each chunk.
"""

from __future__ import annotations

import httptools

from llama_worker.stream.decoder import StreamDecoder
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure, disconnected
from llama_worker.types.request import RequestFailReason

_MAX_HEAD_BYTES = 256 * 1024


class ReplyParser:
    """Parses one HTTP reply: feed it what arrives, and take the body. It never raises: `error` says
    why the bytes are not HTTP.

    `has_head`: the other fields are set, `headers` as they were sent.
    `is_complete`: nothing more belongs to the reply. `ends_with_connection`: it is complete, or
    the connection's end completes it.
    """

    def __init__(self, method: str) -> None:
        """`method`: the HTTP method of the request."""
        self.status: int
        self.reason = ""
        self.headers: list[tuple[str, str]] = []
        self.has_head = False
        self.is_complete = False
        self.ends_with_connection: bool
        self.error: str | None = None
        self._has_body = method != "HEAD"
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def header(self, name: str) -> str:
        """The header's values, "" if absent. `name`: in lower case."""
        return ", ".join(value for sent, value in self.headers if sent.lower() == name)

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the reply."""
        if self.error is not None:
            return
        if not self.has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.is_complete:  # what follows the reply is ignored
                self.error = str(error)
        else:
            if not self.has_head and self._head_bytes > _MAX_HEAD_BYTES:
                self.error = f"the head is larger than {_MAX_HEAD_BYTES} bytes"

    def take(self) -> bytes:
        """The part of the body that has come since the last time."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data

    # ---------------------------------------------------------------- called by httptools

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise ValueError("a second reply")  # `feed` ignores it

    def on_status(self, reason: bytes) -> None:
        self.reason += reason.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # else it is a trailer
            self.headers.append((name.decode("latin-1"), value.decode("latin-1").strip(" \t")))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # the reply itself is still to come
            self.reason, self.headers = "", []
            return
        self.has_head = True
        self.is_complete = not self._has_body
        is_chunked = "chunked" in self.header("transfer-encoding").lower()
        is_framed = is_chunked or bool(self.header("content-length"))
        self.ends_with_connection = self.is_complete or not is_framed

    def on_body(self, body: bytes) -> None:
        if not self.is_complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = self.ends_with_connection = self.has_head


class ChatBody:
    """Decodes the body of a reply with status 200: feed it what arrives, then call `end` once the
    connection is over. It never raises: `failure` says what went wrong.

    `over` turns True when nothing more can come: the body is complete, cannot be read, or the
    connection has ended. `failure` is then None if the stream ended regularly.
    """

    def __init__(self, reply: ReplyParser) -> None:
        self.decoder = StreamDecoder()
        self.bytes_read = 0  # without chunked framing
        self.is_over = False
        self.failure: StreamFailure | None = None
        self._reply = reply

    def feed(self, data: bytes) -> list[StreamEvent]:
        """The events that these bytes complete; b"": of those that came along with the head."""
        self._reply.feed(data)
        body = self._reply.take()
        self.bytes_read += len(body)
        events = self.decoder.feed(body) if body else []
        if self.decoder.error is not None:
            reason = (
                RequestFailReason.UNKNOWN_ERROR
                if self.decoder.lacks_memory
                else RequestFailReason.PROTOCOL_ERROR
            )
            self._fail(StreamFailure(reason=reason, detail=self.decoder.error))
        elif self._reply.error is not None:
            why = f"invalid HTTP in the reply: {self._reply.error}"
            self._fail(disconnected("in mid-stream", why))
        elif self._reply.is_complete:
            self.end()
        return events

    def end(self, cause: str | None = None) -> None:
        """The connection is over: closed by the server, or broken if there is a `cause`."""
        if self.is_over:
            return
        self.is_over = True
        content_type = self._reply.header("content-type")
        if cause is not None or not self._reply.ends_with_connection:
            self.failure = disconnected(
                "in mid-stream", cause or "the server closed the connection"
            )
        elif not self.decoder.data_records and "text/event-stream" not in content_type:
            detail = (
                f"the reply's content type is {content_type or 'missing'}, not text/event-stream"
            )
            self.failure = StreamFailure(reason=RequestFailReason.PROTOCOL_ERROR, detail=detail)
        elif self.decoder.partial:
            self.failure = disconnected("in the middle of a record")

    def _fail(self, failure: StreamFailure) -> None:
        self.is_over, self.failure = True, failure
