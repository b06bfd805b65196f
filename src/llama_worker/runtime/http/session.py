"""Makes every HTTP request of this library: one `requests` session, whose requests can be aborted
from another thread in every phase.

It uses only documented extension points: a session that follows no redirects, and an adapter that
gives each request its own connection, on our own socket class. `httptools` parses the replies:
http.client parses their heads as e-mail.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import ssl
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

import requests
import requests.adapters
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from llama_worker.config.settings import Endpoint
from llama_worker.errors import described_error, is_shortage
from llama_worker.runtime.host import threads
from llama_worker.runtime.http.abortable_socket import (
    Abort,
    AbortableSocket,
    Aborted,
    Waiter,
    connect,
    secure,
)
from llama_worker.stream.failure import StreamFailure, describe_http_error, disconnected
from llama_worker.stream.response import ChatBody, ReplyParser
from llama_worker.types.request import RequestFailReason

_READ_BYTES = 16384
_MAX_REPLY_BYTES = 4 * 1024 * 1024  # to a small question: /props holds the chat template
_MAX_ERROR_BODY_BYTES = 64 * 1024
_ERROR_BODY_S = 2.0  # to read the body of an error status, from the headers on
_SHOWN_CHARS = 40  # of a reply that is not HTTP
# Told by a send that the connection is closed; the last over TLS by Python 3.11.7 (gh-115627).
_CLOSED_WHILE_SENDING = (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError)


class HttpReply:
    """A reply whose head was received. For one thread, which closes it."""

    def __init__(self, request: _Request, connection: AbortableSocket) -> None:
        """Wait for the head. Raises OSError if none comes, ValueError if the reply is not HTTP."""
        self._abort = request.abort
        self._connection = connection
        self._parser = ReplyParser(str(request.method))
        first_bytes = b""
        while not self._parser.has_head:
            data = connection.read_reply(_READ_BYTES)
            if not data:
                raise ConnectionResetError("the connection was closed within the response headers")
            first_bytes = first_bytes or data[:_SHOWN_CHARS]
            self._parser.feed(data)
            if self._parser.error is not None and not self._parser.has_head:
                shown = first_bytes.decode("latin-1")
                raise ValueError(
                    f"the reply is not HTTP ({self._parser.error}); it begins with {shown!r}"
                )
        self.status = self._parser.status
        self.reason = self._parser.reason
        self.headers = self._parser.headers

    def header(self, name: str) -> str:
        """The header's values, "" for none. `name`: in lower case."""
        return self._parser.header(name)

    @property
    def is_complete(self) -> bool:
        """Whether nothing follows what was read."""
        return self._parser.is_complete

    def read(self, *, until: float | None = None) -> bytes:
        """The next bytes of the body; b"" at its end. Raises OSError if the connection breaks,
        TimeoutError if nothing comes by `until` (of `threads.now`), ValueError if the reply is not
        HTTP any more."""
        parser = self._parser
        if until is not None:
            self._connection.deadline = until
        while not (body := parser.take()) and not parser.is_complete and parser.error is None:
            if data := self._connection.read_reply(_READ_BYTES):
                parser.feed(data)
            elif self._abort.error is None and parser.ends_with_connection:
                break
            else:
                raise self._abort.error or ConnectionResetError("the server closed the connection")
        if not body and parser.error is not None:
            raise ValueError(f"invalid HTTP in the reply: {parser.error}")
        return body

    def failure(self) -> StreamFailure:
        """The failure told by an error status and its body; waits `_ERROR_BODY_S` for the body."""
        body, until = b"", threads.now() + _ERROR_BODY_S
        with contextlib.suppress(OSError, ValueError):
            while len(body) < _MAX_ERROR_BODY_BYTES and (data := self.read(until=until)):
                body += data
        return describe_http_error(self.status, body)

    def take_over(self) -> tuple[AbortableSocket, ChatBody]:
        """Hand the connection and its body over to the caller, who reads it from now on. Some of
        the body may have come with the headers."""
        return self._connection, ChatBody(self._parser)

    def close(self) -> None:
        self._connection.close()


def send(
    abort: Abort,
    endpoint: Endpoint,
    method: str,
    target: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    waiter: Waiter | None = None,
) -> HttpReply:
    """Send a request and wait for the reply's headers, however long that takes; only connecting has
    a timeout.

    Raises Aborted; OSError if the connection cannot be made or breaks, or (TimeoutError) if the
    time is up; ValueError if the reply is not an HTTP response.
    """
    abort.connected = False
    request = _Request()
    request.abort, request.endpoint, request.waiter = abort, endpoint, waiter
    request.prepare_method(method)
    request.url = _server_url(endpoint.base_url).url + target
    sent = {"Accept-Encoding": "identity", "Connection": "close", **(headers or {})}
    sent.update(endpoint.headers())
    request.headers = requests.structures.CaseInsensitiveDict(sent)
    if body is not None:
        request.headers["Content-Length"] = str(len(body))
        request.body = body
    try:
        response = _session.send(request, stream=True, proxies={})
    except HTTPException as error:  # the request cannot be sent
        raise ValueError(str(error)) from None
    except Exception as error:
        raise abort.error or error from None
    reply = response.raw
    assert isinstance(reply, HttpReply)
    return reply


def post_chat(
    abort: Abort,
    endpoint: Endpoint,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    waiter: Waiter | None = None,
) -> HttpReply:
    """Ask for a chat completion as a stream of events. Waits and raises as `send`."""
    own = {"Accept": "text/event-stream", "Content-Type": "application/json"}
    return send(
        abort,
        endpoint,
        "POST",
        "/v1/chat/completions",
        headers={**own, **(headers or {})},
        body=_utf8(json.dumps(body, separators=(",", ":"), ensure_ascii=False)),
        waiter=waiter,
    )


def _utf8(text: str) -> bytes:
    """Half a character, which clients may send, is replaced: llama-server refuses it (b11434)."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def ask(
    endpoint: Endpoint,
    method: str,
    target: str,
    *,
    timeout_s: float,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    abort: Abort | None = None,
    max_bytes: int = _MAX_REPLY_BYTES,
) -> tuple[int, bytes]:
    """Ask a small question, with `body` as JSON; returns the reply's status and body.

    `timeout_s` covers all but name resolution and a TLS handshake. A reply that has come by then is
    read; time in which this program did not run does not count. Raises as `send`, and ValueError if
    the reply's body has more than `max_bytes`.
    """
    abort, received = abort or Abort(), bytearray()
    with abort.within(timeout_s):
        reply = send(
            abort,
            endpoint,
            method,
            target,
            headers={"Content-Type": "application/json", **(headers or {})},
            body=None if body is None else json.dumps(body).encode(),
        )
        with contextlib.closing(reply):
            while data := reply.read():
                received += data
                if len(received) > max_bytes:
                    raise ValueError(f"the reply has more than {max_bytes} bytes")
    return reply.status, bytes(received)


def send_failure(error: Exception, abort: Abort, endpoint: Endpoint) -> StreamFailure:
    """What `send` raised, as the failure of a chat request. A shortage of this machine, or a failed
    name lookup, says nothing about the server."""
    if is_shortage(error) or isinstance(error, socket.gaierror):
        detail = f"cannot open a connection: {described_error(error)}"
        return StreamFailure(
            reason=RequestFailReason.UNKNOWN_ERROR, detail=detail, is_unsent=not abort.connected
        )
    if abort.connected:
        return disconnected("before the response headers", str(error) or type(error).__name__)
    match error:
        case TimeoutError():
            detail = f"no connection within {endpoint.connect_timeout_s:g} s"
        case Aborted():
            detail = str(error)
        case _:
            detail = f"cannot connect: {error}"
    return StreamFailure(reason=RequestFailReason.CONNECT_FAILED, detail=detail)


# ---------------------------------------------------------------- what `requests` is given


class _Request(requests.PreparedRequest):
    """Carries what the adapter needs to make the connection."""

    abort: Abort
    endpoint: Endpoint
    waiter: Waiter | None


class _Session(requests.Session):
    """A session without proxies, .netrc and redirects, which reads no reply's cookies."""

    def __init__(self) -> None:
        super().__init__()
        for scheme in ("http://", "https://"):
            self.mount(scheme, _Adapter())

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Always None: for a redirect `requests` reads the whole body and parses the target."""
        return None


@functools.lru_cache
def _server_url(base_url: str) -> urllib3.util.Url:
    """The URL as `requests` normalizes it. Raises ValueError if it is not the URL of a server."""
    prepared = requests.PreparedRequest()
    prepared.prepare_url(base_url, None)
    return urllib3.util.parse_url(str(prepared.url).rstrip("/"))


class _Adapter(requests.adapters.BaseAdapter):
    """Gives each request a connection of its own, whose socket can be aborted."""

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        """The connect timeout is for connecting, and again for the TLS handshake. Raises OSError,
        and ValueError if the reply is not HTTP."""
        assert isinstance(request, _Request)
        endpoint, server = request.endpoint, _server_url(request.endpoint.base_url)
        kind = HTTPSConnection if server.scheme == "https" else HTTPConnection
        # a port in any case: http.client would look for one in an IPv6 address
        http = kind(str(server.host).strip("[]"), server.port or kind.default_port)
        connection = connect(request.abort, http.host, http.port, endpoint.connect_timeout_s)
        if kind is HTTPSConnection:
            ca_file = endpoint.ca_file or requests.utils.DEFAULT_CA_BUNDLE_PATH
            connection = secure(request.abort, connection, http.host, ca_file)
        request.abort.connected = True
        connection.abort, connection.waiter = request.abort, request.waiter
        connection.body_follows = bool(request.body)
        http.sock = connection
        # No timeout from now on: a busy server may leave a long request unread for minutes.
        http.timeout = None
        try:
            # A server may reply, and close, before it has read the whole request.
            with contextlib.suppress(*_CLOSED_WHILE_SENDING):
                http.request(str(request.method), request.path_url, request.body, request.headers)
            reply = HttpReply(request, connection)
        except BaseException:
            http.close()
            raise
        response = requests.Response()  # without headers and cookies: nobody reads them there
        response.request, response.raw = request, reply
        response.status_code, response.reason = reply.status, reply.reason
        return response


_session = _Session()


def _reset_after_fork() -> None:
    global _session
    _session = _Session()  # the parent's locks may be held by threads that the child lacks


os.register_at_fork(after_in_child=_reset_after_fork)
