"""The HTTP reply to a small question, from bytes to its status and body. Sans-IO; one thread at a
time."""

from __future__ import annotations

import httptools

_MAX_BYTES = 4 * 1024 * 1024  # /props holds the chat template


class PlainReply:
    """Feed it what arrives, then `end` once the connection is over. `over` turns True when the
    reply is whole."""

    def __init__(self) -> None:
        self.status = 0  # once the headers are here
        self.body = bytearray()
        self.over = False
        self._bytes = 0
        self._ends_with_connection = True  # neither chunked nor of a stated length
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """What has arrived. Raises ValueError for what is not an HTTP response, or longer than 4
        MiB."""
        self._bytes += len(data)
        if self._bytes > _MAX_BYTES:
            raise ValueError(f"a reply of more than {_MAX_BYTES} bytes")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.over:  # what follows the reply is nobody's
                raise ValueError(f"not an HTTP response: {error}") from None

    def end(self) -> None:
        """The connection is over. Raises ConnectionResetError where the reply is not whole."""
        if not (self.over or (self.status and self._ends_with_connection)):
            raise ConnectionResetError("the connection ended before the reply")
        self.over = True

    # ---------------------------------------------------------------- called by httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; trailers of a chunked body, too."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        """The head is here; that of an interim response (1xx) is not the one waited for."""
        status = self._parser.get_status_code()
        if status >= 200 and not self.status:
            self.status = status

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if not self.over:
            self.body += body

    def on_message_complete(self) -> None:
        """The body is complete, or an interim response is over."""
        self.over = bool(self.status)
