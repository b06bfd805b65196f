"""Chat requests on connections of their own: where they go, and one that its thread waits for."""

from __future__ import annotations

import functools
import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from http.client import BadStatusLine, RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import certifi
import requests
import urllib3.exceptions
from msgspec import Struct

from llama_worker.config import WorkerConfig
from llama_worker.runtime.connections import MAX_WAIT_S, Abort, Aborted, connect
from llama_worker.runtime.timers import call_at
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.response import ChatResponse, disconnected
from llama_worker.types import RequestFailReason

ERROR_BODY_S = 2.0  # for what an error status says, from the headers on
_READ_BYTES = 65536
_SHOWN_CHARS = 40  # of what is not HTTP


class Endpoint(Struct, frozen=True, kw_only=True):
    """Where a server listens, and what it wants to be shown."""

    base_url: str
    connect_timeout_s: float
    api_key: str | None = None

    @classmethod
    def of(cls, config: WorkerConfig) -> Endpoint:
        """Where the config's server is reached from this machine."""
        host = config.connect_host
        return cls(
            base_url=f"http://[{host}]:{config.port}"
            if ":" in host
            else f"http://{host}:{config.port}",
            connect_timeout_s=config.timeouts.connect_timeout_s,
            api_key=config.api_key,
        )

    def headers(self) -> dict[str, str]:
        """For every request to the server."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def address(self) -> tuple[str, int]:
        url = urlsplit(self.base_url)
        return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)

    def chat_request(
        self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> bytes:
        """A chat completion's HTTP request. By hand: `requests` takes half a millisecond to build
        one."""
        url = urlsplit(self.base_url)
        content = json.dumps(body, separators=(",", ":")).encode()
        lines = [f"POST {url.path}/v1/chat/completions HTTP/1.1"]
        lines += [
            f"{name}: {value}"
            for name, value in {
                "Host": url.netloc.rpartition("@")[2],
                "Accept": "text/event-stream",
                "Accept-Encoding": "identity",
                "Connection": "close",
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                **(headers or {}),
                **self.headers(),
            }.items()
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


def send(
    http: requests.Session, abort: Abort, endpoint: Endpoint, request: requests.PreparedRequest
) -> requests.Response | StreamFailure:
    """The response once its headers are here, however long that takes, or why there is none."""
    timeout = (endpoint.connect_timeout_s, None)
    try:
        # Not by `http.send`, which reads the body of a redirect and parses where it leads, if it is
        # followed or not.
        url = request.url or ""
        settings: Any = http.merge_environment_settings(
            url, {}, stream=True, verify=None, cert=None
        )
        return http.get_adapter(url).send(request, timeout=timeout, **settings)
    except (
        OSError,
        urllib3.exceptions.HTTPError,
    ) as error:  # what requests raises is an OSError; Aborted is not
        if abort.connected:
            return disconnected("before the response headers", cause(error))
        return _connect_failed(cause(error))


class ChatExchange:
    """A chat completion as a stream of events, for a thread that waits for them; only the Abort is
    for others.

    `ca_file`: the certificates that an https server's is checked with; None: those of `certifi`.
    `silence_s`: how long a read waits for something; None: for ever.
    """

    def __init__(
        self,
        abort: Abort,
        endpoint: Endpoint,
        *,
        ca_file: str | None = None,
        silence_s: float | None = None,
    ) -> None:
        self.failure: StreamFailure | None = None
        self._abort = abort
        self._endpoint = endpoint
        self._ca_file = ca_file
        self._before_reading: Callable[[], object] = lambda: None
        self._silence_s = None if silence_s is None else min(silence_s, MAX_WAIT_S)
        self._socket: socket.socket | None = None
        self._response = ChatResponse()
        self._events: list[StreamEvent] = []  # that came along with the headers

    def post(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """Send it, on a connection of its own; `open` says how that went."""
        try:
            self._socket = self._connect()
        except (OSError, Aborted) as error:
            self.failure = no_connection(error, self._endpoint.connect_timeout_s)
            return
        try:
            self._socket.sendall(self._endpoint.chat_request(body, headers))
        except OSError:
            pass  # the server hung up; it may have said why
        self._socket.settimeout(self._silence_s)

    def open(self, *, before_reading: Callable[[], object] = lambda: None) -> bool:
        """Wait for the headers; False where `failure` says why there is no stream.

        `before_reading` is called each time, and again after each silence; what it raises, this and
        `read` raise.
        """
        if self._socket is None:
            return False
        self._before_reading = before_reading
        while self._response.status is None and not self._response.over:
            self._events += self._receive()
        if self._response.refused:
            limit = call_at(time.monotonic() + ERROR_BODY_S, self._abort.abort)
            while not self._response.over:
                self._receive()
            limit.cancel()
        if not self._response.opened:
            self.failure = self._response.failure
            self.close()
        return self._response.opened

    @property
    def can_read(self) -> bool:
        """Whether `read` has something that came along with the headers."""
        return bool(self._events)

    def read(self) -> list[StreamEvent] | None:
        """What comes next, [] for a keepalive or a silence; None at the end: `failure` says whether
        a good one."""
        events, self._events = self._events, []
        if not events and not self._response.over:
            events = self._receive()
        if self._response.over:
            self.failure = self._response.failure
            self.close()
            return events or None
        return events

    def close(self) -> None:
        self._abort.detach()
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _receive(self) -> list[StreamEvent]:
        if self._socket is None:
            self._response.end()
            return []
        self._before_reading()
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return []
        except OSError as error:
            self._response.end(str(error))
            return []
        if data:
            return self._response.feed(data)
        self._response.end()
        return []

    def _connect(self) -> socket.socket:
        """A blocking socket, with TLS if there is to be. Raises Aborted or OSError."""
        host, port = self._endpoint.address
        connection = connect(self._abort, host, port, self._endpoint.connect_timeout_s)
        try:
            if self._endpoint.base_url.startswith("https:"):
                context = _tls_context(self._ca_file or certifi.where())
                connection = context.wrap_socket(connection, server_hostname=host)
                self._abort.attach(
                    connection
                )  # another object: the first one has let go of the descriptor
            connection.settimeout(
                None
            )  # from now on: a busy server may leave a long request unread for minutes
        except BaseException:
            self._abort.detach()
            connection.close()
            raise
        return connection


@functools.cache
def _tls_context(ca_file: str) -> ssl.SSLContext:
    if not Path(ca_file).exists():
        raise FileNotFoundError(f"there is no file {ca_file} with certificates")
    return ssl.create_default_context(cafile=ca_file)


def no_connection(error: Exception | None, timeout_s: float) -> StreamFailure:
    """Why there is none; None: the host has no address."""
    match error:
        case TimeoutError():
            return _connect_failed(f"no connection within {timeout_s} s")
        case socket.gaierror():
            return _connect_failed(f"cannot resolve the host: {error}")
        case None | OSError():
            return _connect_failed(f"cannot connect: {error or 'the host has no address'}")
        case _:
            return _connect_failed(str(error))


def _connect_failed(detail: str) -> StreamFailure:
    return StreamFailure(reason=RequestFailReason.CONNECT_FAILED, detail=detail)


def cause(error: BaseException) -> str:
    """The innermost error in words: the layers above it only repeat addresses, and show their
    classes."""
    while (inner := _within(error)) is not None:
        error = inner
    match error:
        case urllib3.exceptions.NewConnectionError(conn=connection):
            return str(error).removeprefix(f"{connection}: ")
        case BadStatusLine() if not isinstance(error, RemoteDisconnected):
            return f"the reply is not HTTP: it begins with {str(error)[:_SHOWN_CHARS]!r}"
        case _:
            return str(error) or type(error).__name__


def _within(error: BaseException) -> BaseException | None:
    """The error that this one wraps, as requests and urllib3 do it."""
    wrapped = (getattr(error, "reason", None), *error.args)
    return next((each for each in wrapped if isinstance(each, BaseException)), None)
