"""A request on its way to the server, on a socket that never blocks and that costs no thread.

The caller's thread connects and sends as far as that goes at once; all that has to wait is done by
the loop's thread.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

from llama_worker.runtime.chat_exchange import Endpoint
from llama_worker.runtime.connections import Address, addresses, numeric_addresses
from llama_worker.runtime.loop_thread import loop_thread
from llama_worker.runtime.timers import Timer, call_at

_HOST_LACKS = frozenset(
    {errno.EAGAIN, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}
)  # ports, memory


class LoopConnection(ABC):
    """Connects and sends; what comes back is for the subclass to read. Thread-safe, and no call
    takes time."""

    def __init__(self, endpoint: Endpoint, request: bytes) -> None:
        """Nothing is done yet. Raises OSError or RuntimeError where the loop's thread cannot be
        started."""
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._loop = loop_thread()
        self._loop.start()
        self._unsent: memoryview | None = memoryview(request)
        self._addresses_left: Iterator[Address] = iter(())
        self._socket: socket.socket | None = None
        self._timer: Timer | None = None  # of the connect, then the subclass's
        self._connected = self._closed = False

    # ---------------------------------------------------------------- the subclass's, with the lock held

    @abstractmethod
    def _on_readable(self) -> None:
        """There is something to read, or the end."""

    @abstractmethod
    def _on_no_connection(self, error: OSError | None) -> None:
        """There is none: refused, the last reason why or None for no address; socket.gaierror;
        TimeoutError."""

    @abstractmethod
    def on_error(self, error: Exception) -> None:
        """The host lacks something, or this code is wrong. Called without the lock."""

    # ---------------------------------------------------------------- called on the loop's thread

    @abstractmethod
    def on_tick(self) -> None:
        """A tick, while the socket rests."""

    def on_ready(self, mask: int) -> None:
        """The socket can be read or written, or has an error, which reading or writing brings
        out."""
        with self._lock:
            if self._unsent is not None and mask & ~select.EPOLLIN:
                self._send()
            if self._connected and not self._closed:
                self._on_readable()

    # ---------------------------------------------------------------- with the lock held

    def _begin(self, name: str) -> None:
        """Connect. Raises OSError or RuntimeError where the host lacks threads, descriptors, ports
        or memory."""
        found = numeric_addresses(*self._endpoint.address)
        if not found:  # a name, which takes its time
            threading.Thread(target=self._resolve, name=f"{name}-resolve", daemon=True).start()
            return
        try:
            self._connect(iter(found))
        except BaseException:
            self._drop_socket()
            raise

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._loop.forget(self._socket, self)
            self._socket.close()
            self._socket = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _resolve(self) -> None:
        try:
            found = addresses(*self._endpoint.address)
            with self._lock:
                if not self._closed:
                    self._connect(iter(found))
        except socket.gaierror as error:
            with self._lock:
                self._on_no_connection(error)
        except Exception as error:
            self.on_error(error)

    def _connect(self, addresses: Iterator[Address], refused: OSError | None = None) -> None:
        """Begin to connect to the next address that lets us, and send what can be sent at once."""
        for family, kind, protocol, _, address in addresses:
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            begun = self._socket.connect_ex(address)
            if begun in (0, errno.EINPROGRESS):
                self._addresses_left = addresses
                self._send()
                return
            self._drop_socket()
            refused = OSError(begun, os.strerror(begun))
            if begun in _HOST_LACKS:
                raise refused
        self._on_no_connection(refused)

    def _send(self) -> None:
        """Send what the socket takes; nothing while it connects."""
        assert self._socket is not None
        assert self._unsent is not None
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            if not self._connected:
                self._drop_socket()
                self._connect(self._addresses_left, error)
                return
            sent = len(self._unsent)  # the server hung up; it may have said why
        if sent:
            self._connected = True
            self._cancel_timer()
            self._unsent = self._unsent[sent:] if sent < len(self._unsent) else None
        elif not self._connected and self._timer is None:
            self._timer = call_at(
                time.monotonic() + self._endpoint.connect_timeout_s, self._connect_is_late
            )
        self._loop.watch(self._socket, self, writable=self._unsent is not None)

    def _connect_is_late(self) -> None:
        with self._lock:
            if not self._connected and not self._closed:
                self._on_no_connection(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
