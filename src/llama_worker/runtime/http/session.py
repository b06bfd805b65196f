"""Every HTTP request that this library makes: one `requests` session, whose requests can be aborted
from another thread in every phase.

Only documented points of extension are used: a session that follows no redirect, an adapter that
gives each request a connection of its own, and connections that make their own socket.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from http.cookiejar import DefaultCookiePolicy
from typing import Any, Protocol, cast

import requests
import requests.adapters
import urllib3
import urllib3.connection
import urllib3.connectionpool
import urllib3.exceptions
from msgspec import Struct

from llama_worker.config.settings import WorkerConfig
from llama_worker.runtime.host.shortage import is_shortage
from llama_worker.stream.failure import StreamFailure, describe_http_error, disconnected
from llama_worker.types import RequestFailReason

_READ_BYTES = 65536
_MAX_REPLY_BYTES = 4 * 1024 * 1024  # of a small question: /props holds the chat template
_MAX_ERROR_BODY_BYTES = 64 * 1024
_ERROR_BODY_S = 2.0  # for what an error status says, from the headers on
_SHOWN_CHARS = 40  # of what is not HTTP
_MAX_WAIT_S = 2e6  # 23 days: poll counts milliseconds in a C int
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, for 0 s


class Endpoint(Struct, frozen=True, kw_only=True):
    """Where a server listens, and what it wants to be shown."""

    base_url: str
    connect_timeout_s: float
    api_key: str | None = None
    ca_file: str | None = None  # what an https server's certificate is checked with

    @classmethod
    def of(cls, config: WorkerConfig) -> Endpoint:
        """Where the config's server is reached from this machine."""
        host = f"[{config.connect_host}]" if ":" in config.connect_host else config.connect_host
        return cls(
            base_url=f"http://{host}:{config.port}",
            connect_timeout_s=config.timeouts.connect_timeout_s,
            api_key=config.api_key,
        )

    def headers(self) -> dict[str, str]:
        """For every request to the server."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class Aborted(ConnectionAbortedError):
    """The connection was closed by our own side."""


class Abort:
    """The handle of one request. Thread-safe; `abort` is idempotent and takes no time in any phase.

    Name resolution and a TLS handshake are not cut short, only what would follow them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.error: Aborted | None = None  # what whoever waits for it gets; None: not aborted
        # A connection was made, with TLS if there is to be; for the thread that makes it.
        self.connected = False

    def abort(self) -> None:
        """Close the connection both ways, which wakes whoever reads, writes or connects, and refuse
        a later one."""
        with self._lock:
            self.error = self.error or Aborted("the request was aborted")
            if self._socket is not None:
                shut_down(self._socket)

    def wait_readable(self, timeout_s: float | None) -> bool:
        """Wait until there is something to read, or the connection's end, however it comes; False:
        not in time.

        For the thread that reads.
        """
        connection = self._socket
        if connection is None or (isinstance(connection, ssl.SSLSocket) and connection.pending()):
            return True
        return _wait(connection, select.POLLIN, timeout_s)

    def attach(self, connection: socket.socket) -> None:
        """Hand over the socket, as soon as it connects. Raises Aborted where `abort` came
        first."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self._socket = connection

    def detach(self) -> None:
        """The socket is about to be closed: its descriptor may soon be somebody else's."""
        with self._lock:
            self._socket = None


class Waiter(Protocol):
    """Called by the thread that waits for a reply: each time before it does, and again after each
    `silence_s` (None: for ever) in which nothing came."""

    silence_s: float | None

    def before_reading(self) -> None: ...


class Reply:
    """A reply whose headers are here. For one thread, which closes it."""

    def __init__(self, response: requests.Response, connection: _Socket, abort: Abort) -> None:
        self.status = response.status_code
        self.reason = response.reason or ""
        self.headers: urllib3.HTTPHeaderDict = response.raw.headers
        self._response = response
        self._connection = connection
        self._abort = abort

    def read(self) -> bytes:
        """The next of the body, as it comes; b"" at its end. Raises OSError where it breaks off."""
        with _plain_errors(self._abort):
            data: bytes = self._response.raw.read1(_READ_BYTES, decode_content=False)
        if not data and self._abort.error is not None:
            raise self._abort.error
        return data

    def failure(self) -> StreamFailure:
        """What an error status says in its body, as far as that comes soon."""
        body = b""
        self._connection.deadline = time.monotonic() + _ERROR_BODY_S
        with contextlib.suppress(OSError, ValueError):
            while len(body) < _MAX_ERROR_BODY_BYTES and (data := self.read()):
                body += data
        return describe_http_error(self.status, body)

    def take_over(self) -> tuple[socket.socket, bytes]:
        """The connection, which no longer blocks, and what of the body was read with the headers:
        from now on the caller reads it."""
        self._connection.setblocking(False)
        try:
            return self._connection, self._connection.reader.peek()
        except ssl.SSLWantReadError:
            return self._connection, b""

    def close(self) -> None:
        self._abort.detach()
        self._response.close()
        self._connection.close()  # which a reply without a body leaves open, for another request


def send(
    abort: Abort,
    endpoint: Endpoint,
    method: str,
    target: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    waiter: Waiter | None = None,
    deadline: float | None = None,
) -> Reply:
    """Wait for the reply's headers, however long that takes; only connecting has its time.

    `deadline`, in monotonic seconds, is for all of it, the body too; what lies there then counts.
    Raises Aborted; OSError where there is no connection, where it breaks, or (TimeoutError) where
    the time is up; ValueError for what is not an HTTP response.
    """
    abort.connected = False
    request = _Request(abort, waiter, deadline)
    request.prepare_method(method)
    request.url = _prepared_url(endpoint.base_url) + target
    sent = {"Accept-Encoding": "identity", "Connection": "close", **(headers or {})}
    sent.update(endpoint.headers())
    request.headers = requests.structures.CaseInsensitiveDict(sent)
    if body is not None:
        request.headers["Content-Length"] = str(len(body))
        request.body = body
    with _plain_errors(abort):
        response = _session.send(
            request,
            stream=True,
            timeout=(endpoint.connect_timeout_s, None),
            verify=endpoint.ca_file or True,
            proxies={},
        )
    assert request.connection is not None
    reply = Reply(response, request.connection, abort)
    if request.connection.has_ended:  # which http.client takes for the end of the headers
        reply.close()
        raise abort.error or ConnectionResetError("the connection ended in the headers")
    if not reply.headers.get("Content-Length", "0").isdecimal():
        reply.close()
        raise ValueError("the reply is not HTTP: its length is not a number")
    return reply


def ask(
    endpoint: Endpoint,
    method: str,
    target: str,
    *,
    timeout_s: float,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    abort: Abort | None = None,
) -> tuple[int, bytes]:
    """(status, body) of a small question, all of it within `timeout_s`; `body` goes as JSON.

    Raises as `send`; ValueError for more than 4 MiB.
    """
    reply = send(
        abort or Abort(),
        endpoint,
        method,
        target,
        headers={"Content-Type": "application/json", **(headers or {})},
        body=None if body is None else json.dumps(body).encode(),
        deadline=time.monotonic() + timeout_s,
    )
    received = bytearray()
    with contextlib.closing(reply):
        while data := reply.read():
            received += data
            if len(received) > _MAX_REPLY_BYTES:
                raise ValueError(f"a reply of more than {_MAX_REPLY_BYTES} bytes")
    return reply.status, bytes(received)


def json_of(body: bytes) -> Any:
    """None where it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def no_reply(error: Exception, abort: Abort, endpoint: Endpoint) -> StreamFailure:
    """What `send` raised, as the failure of a chat request."""
    if abort.connected:
        return disconnected("before the response headers", str(error) or type(error).__name__)
    match error:
        case socket.gaierror():
            detail = f"cannot resolve the host: {error}"
        case TimeoutError():
            detail = f"no connection within {endpoint.connect_timeout_s} s"
        case Aborted():
            detail = str(error)
        case _:
            detail = f"cannot connect: {error}"
    return StreamFailure(reason=RequestFailReason.CONNECT_FAILED, detail=detail)


def shut_down(connection: socket.socket) -> None:
    """Close it both ways: this wakes whoever waits for it, and tells the server at once."""
    try:
        # A server that is blocked in a send, since our window was full, hears no FIN: the close is
        # to be a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it was not connected, or is no longer


# ---------------------------------------------------------------- what `requests` is given


class _Request(requests.PreparedRequest):
    """Carries the handle of its connection to where that is made, and the connection back."""

    def __init__(self, abort: Abort, waiter: Waiter | None, deadline: float | None) -> None:
        super().__init__()
        self.abort = abort
        self.waiter = waiter
        self.deadline = deadline
        self.connection: _Socket | None = None


class _Session(requests.Session):
    """No proxies, no .netrc, no cookies, no redirects."""

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        for scheme in ("http://", "https://"):
            self.mount(scheme, _Adapter(max_retries=0))

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """None follows; `requests` reads the whole body of one and parses where it leads."""
        return None


@functools.lru_cache
def _prepared_url(url: str) -> str:
    """As `requests` writes it. Raises ValueError where it is not the URL of a server."""
    prepared = requests.PreparedRequest()
    prepared.prepare_url(url, None)
    return (prepared.url or "").rstrip("/")


class _Adapter(requests.adapters.HTTPAdapter):
    def get_connection_with_tls_context(
        self, request: requests.PreparedRequest, *args: Any, **kwargs: Any
    ) -> urllib3.connectionpool.HTTPConnectionPool:
        """A pool of one connection, for this request alone."""
        host, _ = self.build_connection_pool_key_attributes(request, True)
        pool = _TlsPool if host["scheme"] == "https" else _Pool
        return pool(host["host"], host["port"], request=request)

    def build_response(self, req: requests.PreparedRequest, resp: Any) -> requests.Response:
        """Without its cookies, its encoding and another copy of its headers: nobody reads them."""
        response = requests.Response()
        response.request = req
        response.raw = resp
        response.status_code, response.reason = resp.status, resp.reason
        return response


class _Connection(urllib3.connection.HTTPConnection):
    def __init__(self, *args: Any, request: _Request, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request = request

    def connect(self) -> None:
        """Connect, and shake hands where it is TLS, within the connect timeout each."""
        request = self._request
        timeout_s = _left_s(request.deadline, self.timeout)
        self.sock = made = self._secure(_connect(request.abort, self.host, self.port, timeout_s))
        made.abort, made.waiter, made.deadline = request.abort, request.waiter, request.deadline
        request.abort.attach(made)
        request.abort.connected = True
        request.connection = made
        # From now on: a busy server may leave a long request unread for minutes.
        self.timeout = _left_s(request.deadline, None)
        made.settimeout(self.timeout)

    def _secure(self, connection: _Socket) -> _Socket:
        return connection


class _TlsConnection(_Connection, urllib3.connection.HTTPSConnection):
    def _secure(self, connection: _Socket) -> Any:
        try:
            context = _tls_context(self.ca_certs, self.ca_cert_dir)
            # Another object: the first one lets go of the descriptor.
            secure = context.wrap_socket(connection, server_hostname=self.host)
        except BaseException:
            connection.close()
            raise
        self.is_verified = True
        return secure


class _Pool(urllib3.connectionpool.HTTPConnectionPool):
    ConnectionCls = _Connection  # it is given what the pool does not know: `request`


class _TlsPool(urllib3.connectionpool.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


@functools.cache
def _tls_context(ca_file: str | None, ca_folder: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file, capath=ca_folder)
    context.sslsocket_class = _TlsSocket
    return context


class _KeepsReader:
    """Part of a socket: keeps the reader from which http.client takes the headers."""

    reader: io.BufferedReader
    abort: Abort
    waiter: Waiter | None = None
    deadline: float | None = None
    has_ended = False  # the server has closed it

    def makefile(self, *args: Any, **kwargs: Any) -> io.BufferedReader:
        """Called once, for the headers of the reply."""
        raw: io.RawIOBase = super().makefile("rb", buffering=0)  # type: ignore[misc]
        self.reader = io.BufferedReader(_Waiting(raw, cast(_Socket, self)))
        return self.reader


class _Socket(_KeepsReader, socket.socket):  # type: ignore[misc]  # its makefile is of one kind
    pass


class _TlsSocket(_KeepsReader, ssl.SSLSocket):  # type: ignore[misc]
    pass


class _Waiting(io.RawIOBase):
    """Reads a connection, as long as its waiter and its deadline allow."""

    def __init__(self, raw: io.RawIOBase, connection: _Socket) -> None:
        self._raw = raw
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        if self._connection.gettimeout() != 0.0:  # else it was taken over
            self._wait()
        count = self._raw.readinto(buffer)
        self._connection.has_ended = count == 0
        return count

    def _wait(self) -> None:
        waiter, deadline = self._connection.waiter, self._connection.deadline
        silence_s = None
        while True:
            if waiter is not None:
                waiter.before_reading()
                silence_s = waiter.silence_s
            if self._connection.abort.wait_readable(_left_s(deadline, silence_s)):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError("the time for the reply is up")

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left_s(deadline: float | None, timeout_s: float | None) -> float | None:
    """The shorter of what is left until then and the timeout."""
    if deadline is None:
        return timeout_s
    left_s = max(deadline - time.monotonic(), 0.0)
    return left_s if timeout_s is None else min(left_s, timeout_s)


# ---------------------------------------------------------------- connecting


def _connect(abort: Abort, host: str, port: int, timeout_s: float | None) -> _Socket:
    """A connected socket, which `abort` knows from the moment at which it begins to connect.

    Each of the host's addresses has `timeout_s`.
    """
    refused: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        made = _Socket(family, kind, protocol)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setblocking(False)
            begun = made.connect_ex(address)
            # Not earlier: to shut down a socket that does not connect yet is without effect.
            abort.attach(made)
            _finish_connecting(made, begun, timeout_s)
            return made
        except BaseException as error:
            abort.detach()
            made.close()
            gives_up = isinstance(error, TimeoutError) or error is abort.error
            if gives_up or not isinstance(error, OSError) or is_shortage(error):
                raise
            refused = error
    raise refused or OSError(f"{host} has no address")


def _finish_connecting(connecting: socket.socket, begun: int, timeout_s: float | None) -> None:
    """Wait for the end of a connect that gave `begun` (an errno)."""
    if begun == errno.EINPROGRESS:
        if not _wait(connecting, select.POLLOUT, timeout_s):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        begun = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if not begun and connecting.getsockname() == connecting.getpeername():
        # Nobody listens there, and the port is among those that the kernel hands out: it gave this
        # very one to us, and connected us to ourselves.
        shut_down(connecting)
        begun = errno.ECONNREFUSED
    if begun:
        raise OSError(begun, os.strerror(begun))
    connecting.settimeout(timeout_s)


def _wait(connection: socket.socket, event: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(None if timeout_s is None else min(timeout_s, _MAX_WAIT_S) * 1000))


# ---------------------------------------------------------------- errors


@contextlib.contextmanager
def _plain_errors(abort: Abort) -> Iterator[None]:
    """What `requests`, urllib3 and http.client raise becomes the error that they wrap. Where the
    request was aborted, that is what went wrong, whatever it looked like."""
    try:
        yield
    except Exception as error:
        raise abort.error or _plain_error(error) from None


def _plain_error(error: Exception) -> Exception:
    while (inner := _wrapped_by(error)) is not None:
        error = inner
    match error:
        case requests.RequestException() | urllib3.exceptions.HTTPError():
            return ConnectionResetError(str(error))
        case OSError():
            return error
        case HTTPException():  # and no OSError: a status line, or headers, that are not HTTP's
            begins = str(error)[:_SHOWN_CHARS]
            return ValueError(f"the reply is not HTTP: it begins with {begins!r}")
        case _:
            return error


def _wrapped_by(error: Exception) -> Exception | None:
    if not isinstance(error, requests.RequestException | urllib3.exceptions.HTTPError):
        return None
    wrapped = (getattr(error, "reason", None), *error.args, error.__cause__)
    return next((each for each in wrapped if isinstance(each, Exception)), None)


_session = _Session()


def _forget_after_fork() -> None:
    global _session
    _session = _Session()  # the parent's locks may be held by threads that the child has not got


os.register_at_fork(after_in_child=_forget_after_fork)
