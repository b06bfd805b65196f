"""Connections that another thread can abort in every phase: while they connect, send or wait."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import select
import signal
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from typing import Any, Protocol, cast

from llama_worker.errors import is_shortage
from llama_worker.runtime.host import threads

_MAX_WAIT_S = 2e6  # 23 days: poll counts milliseconds in a C int
_TIMER_LATE_S = 0.05  # how long a timer that is due may take to fire
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, for 0 s


class Aborted(ConnectionAbortedError):
    """The connection was closed by our own side."""


class Abort:
    """Aborts one request. Thread-safe; `abort` is idempotent and takes no time in any phase.

    Name resolution and a TLS handshake are not interrupted; the request ends after them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._error: Aborted | TimeoutError | None = None
        self._limit: object = None  # the current `within`
        # A connection was made, with TLS if that is used; for the thread that makes it.
        self.connected = False
        self.peer_ip = ""  # the address that the last connection reached; for the same thread
        self.until: float | None = None  # when `within` ends what is done; for the same thread

    @property
    def error(self) -> Aborted | TimeoutError | None:
        """What to raise in the thread that waits for the request; None: it goes on. A copy each
        time: what was raised holds its frames, which hold this object."""
        return copy.copy(self._error)

    def abort(self) -> None:
        """Shut the connection down both ways, which wakes a thread that reads, writes or connects,
        and refuse a later one."""
        with self._lock:
            self._end(Aborted("the request was aborted"))

    @contextlib.contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """End what is done inside after `timeout_s`, as by `abort`, but with TimeoutError. Time in
        which this program did not run does not count. A reply that has come is still read."""
        limit = self._limit = object()
        self.until = threads.now() + timeout_s

        def on_timeout() -> None:
            with self._lock:
                if self._limit is limit and self._error is None:
                    self._end(TimeoutError(f"no complete reply within {timeout_s:g} s"))

        timer = threads.call_at(self.until, on_timeout)
        try:
            yield
        finally:
            timer.cancel()
            self.until = None
            with self._lock:
                self._limit = None
                if isinstance(self._error, TimeoutError):
                    self._error = None

    def _end(self, error: Aborted | TimeoutError) -> None:
        self._error = error
        if self._socket is not None:
            shut_down(self._socket)

    def wait_readable(self, timeout_s: float | None) -> bool:
        """Wait until there is something to read, or the connection has ended for whatever reason.
        Returns False on timeout.

        For the thread that reads.
        """
        connection = self._socket
        if connection is None or (isinstance(connection, ssl.SSLSocket) and connection.pending()):
            return True
        return _wait(connection, select.POLLIN, timeout_s)

    def attach(self, connection: socket.socket) -> None:
        """Hand over the socket, as soon as it connects. Raises `error` if the request was ended
        before."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self._socket = connection

    def detach(self) -> None:
        """Forget the socket, which is about to be closed: its descriptor may be reused soon."""
        with self._lock:
            self._socket = None


class Waiter(Protocol):
    """Called by the thread that waits for the server to take the request or to reply: before each
    wait, and again after each `silence_s` in which nothing went on (None: never again)."""

    silence_s: float | None

    def before_sending(self) -> None: ...

    def before_reading(self) -> None: ...


class _Abortable:
    """A socket mixin: `waiter` and `deadline` decide how long it waits for the server."""

    abort = Abort()  # a placeholder, until the request's is set
    waiter: Waiter | None = None
    deadline: float | None = None
    body_follows = False  # the next send is the head of a request that has a body

    def read_reply(self, max_bytes: int) -> bytes:
        """The next bytes; b"" at the connection's end. Raises TimeoutError at the deadline, if no
        bytes are in the socket."""
        self._wait()
        data: bytes = self.recv(max_bytes)  # type: ignore[attr-defined]
        return data

    def _wait(self) -> None:
        silence_s = None
        while True:
            if self.waiter is not None:
                self.waiter.before_reading()
                silence_s = self.waiter.silence_s
            left_s = None if self.deadline is None else max(self.deadline - threads.now(), 0.0)
            if self.abort.wait_readable(_shorter_timeout(left_s, silence_s)):
                return
            if self.deadline is not None and threads.now() >= self.deadline:
                raise TimeoutError("timed out while reading the reply")

    def _wait_to_send(self, event: int = select.POLLOUT) -> bool:
        """Wait until the server takes more of the request; False after a silence."""
        silence_s = None
        if self.waiter is not None:
            self.waiter.before_sending()
            silence_s = self.waiter.silence_s
        return _wait(self, event, silence_s)  # type: ignore[arg-type]

    def close(self) -> None:
        self.abort.detach()
        with contextlib.suppress(OSError):  # it was not connected, or is no longer
            # a forked child of the host may hold a copy, which would keep the connection open
            self.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        super().close()  # type: ignore[misc]


class AbortableSocket(_Abortable, socket.socket):
    def reset(self) -> None:
        """Close it so that its port is free at once: a `shutdown` would keep it for a minute."""
        self.abort.detach()
        self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        socket.socket.close(self)

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Called by http.client, with the head and with the body."""
        flags |= socket.MSG_NOSIGNAL  # the host's SIGPIPE may have its default action
        more = socket.MSG_MORE if self.body_follows else 0  # both in one segment
        self.body_follows = False
        try:
            sent = self.send(data, flags | socket.MSG_DONTWAIT | more)
        except BlockingIOError:
            sent = 0
        left = memoryview(data)[sent:]
        while left:
            if self._wait_to_send():
                with contextlib.suppress(BlockingIOError):
                    left = left[self.send(left, flags | socket.MSG_DONTWAIT) :]

    def set_silence(self, silence_s: float | None) -> None:
        """Set how long `receive` waits from now on; None: for ever."""
        self.setblocking(True)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(silence_s))

    def receive(self, max_bytes: int) -> bytes | None:
        """The next bytes; b"" at the connection's end; None if nothing came in time."""
        try:
            return self.recv(max_bytes)  # one system call; a timeout of Python's would need two
        except BlockingIOError:
            return None


class _TlsSocket(_Abortable, ssl.SSLSocket):
    # Not blocking: a socket may be readable without a byte of the reply, as after the session
    # tickets of TLS 1.3, and a blocking `recv` would then wait for ever.

    def read_reply(self, max_bytes: int) -> bytes:
        self.setblocking(False)
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                return super().read_reply(max_bytes)

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Called by http.client, with the head and with the body."""
        self.setblocking(False)
        left = memoryview(data)
        while left:
            try:
                left = left[self.send(left, flags) :]
            except ssl.SSLWantWriteError:
                self._wait_to_send()
            except ssl.SSLWantReadError:  # a renegotiation
                self._wait_to_send(select.POLLIN)

    def set_silence(self, silence_s: float | None) -> None:
        self.setblocking(False)
        self._silence_s = silence_s

    def receive(self, max_bytes: int) -> bytes | None:
        with contextlib.suppress(ssl.SSLWantReadError):
            if self.abort.wait_readable(self._silence_s):
                return self.recv(max_bytes)
        return None

    def shutdown(self, how: int) -> None:
        """Python's own also forgets the TLS state: what is still read would come encrypted."""
        socket.socket.shutdown(self, how)


# ---------------------------------------------------------------- connecting


def connect(abort: Abort, host: str, port: int, timeout_s: float | None) -> AbortableSocket:
    """A connected socket. `abort` can abort it from the moment at which it begins to connect.
    `timeout_s` is for each of the host's addresses; each only takes its share of what
    `abort.within` leaves."""
    refused: OSError | None = None
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    try:
        for tried, (family, kind, protocol, _, address) in enumerate(addresses):
            share_s = None
            if abort.until is not None:
                share_s = max(abort.until - threads.now(), 0.0) / (len(addresses) - tried)
            try:
                connection = AbortableSocket(family, kind, protocol)
                _connect_to(address, connection, abort, _shorter_timeout(timeout_s, share_s))
                connection.settimeout(timeout_s)  # of a TLS handshake
                return connection
            except OSError as error:
                if abort.error is not None or (refused is None and is_shortage(error)):
                    raise
                # What this machine lacks for an address, as IPv6, hides no answer of another one.
                is_ours = is_shortage(error) or error.errno == errno.EAFNOSUPPORT
                if refused is None or not is_ours:
                    refused = error
        raise refused or OSError(f"{host} has no address")
    finally:
        refused = None  # it holds this frame, which would hold it


def _connect_to(
    address: Any, connection: AbortableSocket, abort: Abort, timeout_s: float | None
) -> None:
    """Connect the new socket; it is closed on failure."""
    connection.abort = abort  # not the shared one, whose lock may be held in a fork
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        code = connection.connect_ex(address)
        # Not earlier: to shut down a socket that does not connect yet has no effect.
        abort.attach(connection)
        _finish_connecting(connection, code, timeout_s)
        abort.peer_ip = connection.getpeername()[0]
    except BaseException:
        connection.close()
        raise


def _finish_connecting(connecting: AbortableSocket, code: int, timeout_s: float | None) -> None:
    """Wait for the end of a connect that returned `code` (an errno)."""
    if code == errno.EINPROGRESS:
        # most servers are on this machine, where a connect ends at once
        if not (_wait(connecting, select.POLLOUT, 0.0) or _wait_by_clock(connecting, timeout_s)):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if not code and connecting.getsockname() == connecting.getpeername():
        # Nobody listens there, and the port is an ephemeral one: the kernel gave it to our own end
        # and connected the socket to itself.
        connecting.reset()
        code = errno.ECONNREFUSED
    if code:
        raise OSError(code, os.strerror(code))


def _wait_by_clock(connecting: socket.socket, timeout_s: float | None) -> bool:
    """Wait for the end of a connect; False on timeout. Time in which this program did not run does
    not count."""
    if timeout_s is None:
        return _wait(connecting, select.POLLOUT, None)
    until, time_is_up = threads.now() + timeout_s, threading.Event()
    # The clock may stand at `until` after a gap: only the timer tells that the time has passed.
    timer = threads.call_at(until, time_is_up.set)
    try:
        while not _wait(connecting, select.POLLOUT, max(until - threads.now(), _TIMER_LATE_S)):
            if time_is_up.is_set():
                return False
        return True
    finally:
        timer.cancel()


def _wait(connection: socket.socket, event: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(None if timeout_s is None else min(timeout_s, _MAX_WAIT_S) * 1000))


def secure(abort: Abort, connection: AbortableSocket, host: str, ca_file: str) -> AbortableSocket:
    """Do the TLS handshake. The returned object takes the descriptor over; it is closed on failure.

    Blocks SIGPIPE in the calling thread, which alone may use the connection: OpenSSL writes without
    MSG_NOSIGNAL, and the host's SIGPIPE may have its default action.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPIPE,))
    abort.detach()
    try:
        secured = _tls_context(ca_file).wrap_socket(connection, server_hostname=host)
        connection = cast(AbortableSocket, secured)  # which has the descriptor now
        connection.abort = abort
        abort.attach(connection)
    except BaseException:
        connection.close()
        raise
    return connection


_tls_contexts: dict[str, tuple[object, ssl.SSLContext]] = {}  # by file, with the file's version


def _tls_context(ca_file: str) -> ssl.SSLContext:
    """The context for the file as it is now: it may be renewed while the host runs. While it is
    missing or invalid, what it held before counts. Raises OSError if that is nothing."""
    known = _tls_contexts.get(ca_file)
    try:
        found = os.stat(ca_file)  # its error names the file
        version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if known is None or known[0] != version:
            context = ssl.create_default_context(cafile=ca_file)
            context.sslsocket_class = _TlsSocket
            known = _tls_contexts[ca_file] = (version, context)
    except OSError:
        if known is None:
            raise
    return known[1]


def shut_down(connection: socket.socket) -> None:
    """Shut it down both ways: wakes a thread that waits for it, and tells the server at once."""
    with contextlib.suppress(OSError):  # it was not connected, or is no longer
        # A server that is blocked in a send, since our window was full, does not notice a FIN: make
        # the close a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        connection.shutdown(socket.SHUT_RDWR)


def _timeval(timeout_s: float | None) -> bytes:
    """The timeout as a struct timeval, for SO_RCVTIMEO."""
    micros = 0 if timeout_s is None else max(round(min(timeout_s, _MAX_WAIT_S) * 1e6), 1)
    return struct.pack("ll", *divmod(micros, 1_000_000))


def _shorter_timeout(one_s: float | None, other_s: float | None) -> float | None:
    return min((each for each in (one_s, other_s) if each is not None), default=None)
