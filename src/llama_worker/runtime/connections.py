"""HTTP connections that can be aborted from another thread in every phase.

Only `requests` and urllib3's documented points of extension are used: an adapter with its own
pools, whose connections make their own socket.
"""

from __future__ import annotations

import errno
import functools
import os
import select
import socket
import ssl
import struct
import threading
from functools import partial
from typing import Any

import requests
import requests.adapters
import urllib3
import urllib3.connection
import urllib3.connectionpool
import urllib3.exceptions

Address = tuple[int, int, int, str, Any]  # as getaddrinfo has it

_BUFFER_BYTES = 65536
MAX_WAIT_S = 2e6  # 23 days: poll counts milliseconds in a C int
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, for 0 s


class Aborted(urllib3.exceptions.HTTPError):
    """The connection was closed by our own side."""


class Abort:
    """The handle of one connection. Thread-safe; `abort` is idempotent and takes no time in any
    phase.

    Name resolution and a TLS handshake are not cut short, only what would follow them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = False
        # a connection was made, with TLS if there is to be; read by the thread that makes it
        self.connected = False

    def abort(self) -> None:
        """Close the connection both ways, which wakes whoever reads, writes or connects; refuse a
        later one."""
        with self._lock:
            self._aborted = True
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
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else min(timeout_s, MAX_WAIT_S) * 1000))

    def attach(self, connection: socket.socket) -> None:
        """Hand over the socket, as soon as it connects. Raises Aborted where `abort` came first."""
        with self._lock:
            if self._aborted:
                raise Aborted("aborted before the connection was made")
            self._socket = connection

    def detach(self) -> None:
        """The socket is about to be closed: its descriptor may soon be somebody else's."""
        with self._lock:
            self._socket = None


@functools.lru_cache
def numeric_addresses(host: str, port: int) -> list[Address]:
    """Where a host is that is named by its address; empty for another name. To be read only."""
    try:
        return addresses(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        return []


def addresses(host: str, port: int, flags: int = 0) -> list[Address]:
    """Resolved, which may take its time. Raises socket.gaierror."""
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))


def session(abort: Abort) -> requests.Session:
    """A session for one request: no proxies, no .netrc, no retries, one connection, closed after
    the reply."""
    made = requests.Session()
    made.trust_env = False
    made.headers["Connection"] = "close"
    made.headers["Accept-Encoding"] = "identity"
    adapter = _Adapter(abort)
    made.mount("http://", adapter)
    made.mount("https://", adapter)
    return made


def connect(abort: Abort, host: str, port: int, timeout_s: float | None) -> socket.socket:
    """A connected socket, which `abort` knows from the moment at which it begins to connect.

    It blocks, for `timeout_s` each time. Raises Aborted, or OSError; TimeoutError after
    `timeout_s`.
    """
    refused: OSError | None = None
    for family, kind, protocol, _, address in numeric_addresses(host, port) or addresses(
        host, port
    ):
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setblocking(False)
            begun = made.connect_ex(address)
            abort.attach(
                made
            )  # not earlier: to shut down a socket that does not connect yet is without effect
            _wait_connected(made, begun, timeout_s)
        except OSError as error:
            abort.detach()
            made.close()
            if isinstance(error, TimeoutError):
                raise
            refused = error
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise refused or OSError(f"{host} has no address")


class _Adapter(requests.adapters.HTTPAdapter):
    def __init__(self, abort: Abort) -> None:
        self._abort = abort
        super().__init__(pool_connections=1, pool_maxsize=1, max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {
            "http": partial(_Pool, abort=self._abort),
            "https": partial(_TlsPool, abort=self._abort),
        }


class _Connection(urllib3.connection.HTTPConnection):
    def __init__(self, *args: Any, abort: Abort, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._abort = abort

    def connect(self) -> None:
        """Connect, and shake hands where it is TLS, within the connect timeout each; sending may
        then take any time."""
        super().connect()
        self._abort.attach(
            self.sock
        )  # of TLS it is another object: the first one has let go of the descriptor
        self._abort.connected = True
        self.timeout = (
            None  # from now on: a busy server may leave a long request unread for minutes
        )
        self.sock.settimeout(None)

    def _new_conn(self) -> socket.socket:
        timeout_s = self.timeout if isinstance(self.timeout, (int, float)) else None
        try:
            return connect(self._abort, self.host, self.port, timeout_s)
        except TimeoutError as late:
            raise urllib3.exceptions.ConnectTimeoutError(
                f"no connection within {timeout_s} s"
            ) from late
        except socket.gaierror as unknown:
            raise urllib3.exceptions.NewConnectionError(
                self, f"cannot resolve the host: {unknown}"
            ) from unknown
        except OSError as error:
            raise urllib3.exceptions.NewConnectionError(self, f"cannot connect: {error}") from error


class _TlsConnection(_Connection, urllib3.connection.HTTPSConnection):
    pass


class _Pool(
    urllib3.connectionpool.HTTPConnectionPool
):  # what it does not know, `abort`, it gives to its connections
    ConnectionCls = _Connection


class _TlsPool(urllib3.connectionpool.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def _wait_connected(connecting: socket.socket, begun: int, timeout_s: float | None) -> None:
    """Wait for the end of a connect that gave `begun` (an errno); the socket then blocks, for
    `timeout_s` each time.

    Raises TimeoutError, or what else of OSError the connection met.
    """
    if begun == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(connecting, select.POLLOUT)
        if not poll.poll(None if timeout_s is None else min(timeout_s, MAX_WAIT_S) * 1000):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        begun = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if begun:
        raise OSError(begun, os.strerror(begun))
    connecting.settimeout(timeout_s)


def shut_down(connection: socket.socket) -> None:
    """Close it both ways: this wakes whoever waits for it, and tells the server at once."""
    try:
        # A server that is blocked in a send, since our window was full, hears no FIN: the close is
        # to be a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it was not connected, or is no longer
