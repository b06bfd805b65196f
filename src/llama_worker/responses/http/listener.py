"""Accepts the clients' connections: one thread for all that wait, and one more for each request
that runs.

A connection costs a thread only from a request's last byte to its reply's last byte. A client that
is silent, slow or stops halfway costs a descriptor and the bytes that it has sent; if descriptors
run out, those that have waited longest are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from llama_worker.errors import is_shortage
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.errors import ApiError
from llama_worker.responses.http.access import AccessPolicy
from llama_worker.responses.http.client import LINGER_S, MAX_LINGER_S, Client, WaitingClients
from llama_worker.responses.http.request_reader import HttpRequest, Phase, RequestReader
from llama_worker.runtime.host.threads import run_on_thread

REQUEST_THREAD = "llama_worker-response"
Serve = Callable[[HttpRequest, Client], None]
"""Answers a request, on its own thread. Raises OSError if the client's connection is broken."""

_READ_BYTES = 65536
# by default the kernel buffers megabytes before a slow client slows the upstream
_SEND_BUFFER_BYTES = 128 * 1024
_BACKLOG = 1024
_MAX_CLIENTS = 10_000
_MAX_BUSY = 512
_PENDING_BODIES = 4  # all incomplete bodies together may take as much as so many of full size
_PENDING_HEADS_BYTES = 64 * 1024 * 1024
_PAUSE_S = 0.25  # before the next accept, if descriptors are short and no client can be evicted
_logger = logging.getLogger("llama_worker.responses")


class SocketListener:
    """Listens on a port, and runs each request on a thread. The constructor binds the port; it
    raises OSError if it cannot."""

    def __init__(self, config: ResponsesProxyConfig, serve: Serve) -> None:
        self._config = config
        self._answer = serve
        self._access = AccessPolicy(config.host, config.allow_origins)
        self._waiting_clients = WaitingClients()
        self._clients: dict[int, Client] = {}  # by descriptor; only the listener's thread closes
        self._busy: set[Client] = set()
        self._complete_requests: list[tuple[Client, HttpRequest]] = []  # about to run
        self._returned: queue.SimpleQueue[Client] = queue.SimpleQueue()
        self._pending_bytes = 0
        self._stopped = False
        self._accept_at: float | None = None  # when to accept again; None: it does accept
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = (
            4 * _MAX_CLIENTS if descriptors == resource.RLIM_INFINITY else max(descriptors, 8)
        )
        self._max_clients = min(_MAX_CLIENTS, descriptors // 2)
        self._max_busy = min(_MAX_BUSY, descriptors // 4)  # each needs a second for its upstream
        try:
            family, _, _, _, address = socket.getaddrinfo(
                config.host, config.port, type=socket.SOCK_STREAM
            )[0]
        except UnicodeError as error:  # IDNA does not allow the name
            raise OSError(f"{config.host!r} is not a host name: {error}") from error
        self._wake_lock = threading.Lock()
        self._is_closed = False
        with contextlib.ExitStack() as opened:
            # "::" is every address, those of IPv4 too
            dual = address[0] == "::" and socket.has_dualstack_ipv6()
            self._socket = socket.create_server(
                address, family=family, backlog=_BACKLOG, dualstack_ipv6=dual
            )
            opened.callback(self._socket.close)
            self._socket.setblocking(False)
            # accepted connections inherit both
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(os.close, self._wake)
            self._epoll = select.epoll()
            opened.callback(self._epoll.close)
            self._epoll.register(self._socket, select.EPOLLIN)
            self._epoll.register(self._wake, select.EPOLLIN)
            opened.pop_all()
        _listeners.add(self)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def serve(self) -> None:
        """Accept connections until stopped. Blocks until no request runs any more."""
        try:
            while not self._stopped:
                self._handle_events()
        finally:
            self._close()

    def stop(self) -> None:
        """Cut every exchange, and let `serve` return. Any thread; never blocks."""
        self._stopped = True
        self._wake_up()

    def _wake_up(self) -> None:
        with self._wake_lock:
            if not self._is_closed:  # else the descriptor may have been reused
                os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------ the listener's thread

    def _handle_events(self) -> None:
        wait_s = self._wait_s()
        # last before the wait, which releases the GIL: the threads that start need it
        self._start_complete_requests()
        has_new = False
        for descriptor, _ in self._epoll.poll(wait_s):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor == self._socket.fileno():
                has_new = True
            elif (client := self._clients.get(descriptor)) is not None:
                self._on_ready(client)
        # after the other events: a new client may get the descriptor of one evicted for it
        if has_new:
            self._accept()
        while not self._returned.empty():
            self._return_client(self._returned.get())
        now = time.monotonic()
        for client in self._waiting_clients.expired(now):
            self._drop(client)
        if self._accept_at is not None and now >= self._accept_at:
            self._accept_at = None
            self._epoll.modify(self._socket, select.EPOLLIN)

    def _wait_s(self) -> float | None:
        due = [at for at in (self._waiting_clients.deadline(), self._accept_at) if at is not None]
        return max(min(due) - time.monotonic(), 0.0) if due else None

    def _accept(self) -> None:
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if is_shortage(error) and not self._evict_one():
                    self._epoll.modify(self._socket, 0)
                    self._accept_at = time.monotonic() + _PAUSE_S
                    return
                continue  # that client has left, or there is room now
            while len(self._clients) >= self._max_clients and self._evict_one():
                pass
            self._register(connection)

    def _evict_one(self) -> bool:
        """Drop a client that waits. False: there is none."""
        client = self._waiting_clients.next_to_evict()
        if client is not None:
            self._drop(client)
        return client is not None

    def _register(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            local_address = str(connection.getsockname()[0])
            self._epoll.register(connection, select.EPOLLIN)
        except OSError:  # the client has left, or epoll takes no more: max_user_watches, memory
            connection.close()
            return
        http = RequestReader(
            max_body_bytes=self._config.max_body_bytes,
            allowed_origin=partial(self._access.allowed_origin, local_address=local_address),
        )
        client = Client(connection, http, self._config.client_timeout_s)
        self._clients[connection.fileno()] = client
        self._waiting_clients.enter(client, Phase.SILENT, time.monotonic())
        self._on_ready(client)  # its request is mostly here already

    def _on_ready(self, client: Client) -> None:
        """A client has sent something, or has left."""
        if client in self._busy:
            client.disconnected()
            return
        try:
            data = client.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except (OSError, MemoryError):  # MemoryError must not end the others' requests
            data = b""
        if not data:
            self._drop(client)
        elif client.http.phase is not Phase.LINGER:
            self._read(client, lambda: client.http.receive(data))
        elif (now := time.monotonic()) < client.lingers_until:
            self._waiting_clients.enter(client, Phase.LINGER, now)

    def _read(self, client: Client, receive: Callable[[], HttpRequest | None]) -> None:
        """Take what has come of a request; run it once it is complete."""
        try:
            request = receive()
            if request is not None:
                self._run(client, request)
                return
            self._send(client, client.http.wanted_continue())
        except ApiError as refused:
            self._refuse(client, refused)
            return
        except Exception as error:  # one client's request must not end the others'
            _logger.error("a request could not be read: %s", type(error).__name__)
            self._drop(client)
            return
        self._waiting_clients.enter(client, client.http.phase, time.monotonic())
        self._count_pending(client, client.http.pending_bytes)

    def _count_pending(self, client: Client, pending_bytes: int) -> None:
        """Count the bytes of incomplete requests. If all of them exceed the limit, the largest is
        refused."""
        self._pending_bytes += pending_bytes - client.pending_bytes
        client.pending_bytes = pending_bytes
        if (
            self._pending_bytes
            > _PENDING_BODIES * self._config.max_body_bytes + _PENDING_HEADS_BYTES
        ):
            largest = max(self._waiting_clients, key=lambda waiting: waiting.pending_bytes)
            self._refuse(
                largest, ApiError(503, "too many requests are being sent at once", retry_after_s=1)
            )

    def _refuse(self, client: Client, refused: ApiError) -> None:
        self._send(client, client.refusal(refused))
        self._linger(client)

    def _send(self, client: Client, data: bytes) -> None:
        """Send a few bytes, without blocking. If the socket has no room they are lost: its client
        has not read what came before."""
        if data:
            with contextlib.suppress(OSError):
                client.socket.send(data, socket.MSG_NOSIGNAL)

    def _linger(self, client: Client) -> None:
        """Let the client read to the end: to close with unread data would destroy what is sent."""
        client.http.linger()
        self._count_pending(client, 0)
        try:
            client.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(client)
            return
        now = time.monotonic()
        client.lingers_until = now + MAX_LINGER_S - LINGER_S
        self._waiting_clients.enter(client, Phase.LINGER, now)

    def _drop(self, client: Client) -> None:
        self._stop_waiting(client)
        del self._clients[client.socket.fileno()]
        # a child that was forked just after the accept has a copy, which would stay in epoll, and
        # keep the connection open
        self._epoll.unregister(client.socket)
        client.cut()
        client.socket.close()

    # ------------------------------------------------------------ requests

    def _stop_waiting(self, client: Client) -> None:
        self._waiting_clients.leave(client)
        self._count_pending(client, 0)

    def _run(self, client: Client, request: HttpRequest) -> None:
        self._stop_waiting(client)
        if len(self._busy) >= self._max_busy:
            raise ApiError(503, "too many requests are running", retry_after_s=2)
        self._busy.add(client)
        self._epoll.modify(client.socket, select.EPOLLRDHUP | select.EPOLLONESHOT)
        self._complete_requests.append((client, request))

    def _start_complete_requests(self) -> None:
        complete, self._complete_requests = self._complete_requests, []
        for client, request in complete:
            try:
                run_on_thread(REQUEST_THREAD, partial(self._run_request, client, request))
            except RuntimeError:
                self._busy.discard(client)
                self._epoll.modify(client.socket, select.EPOLLIN)
                self._refuse(
                    client, ApiError(503, "no more threads can be started", retry_after_s=2)
                )

    def _run_request(self, client: Client, request: HttpRequest) -> None:
        try:
            self._answer(request, client)
        except Exception as error:  # the client has left, or the reply broke off
            _logger.debug("a reply ended early: %s", type(error).__name__)
        finally:
            self._returned.put(client)
            self._wake_up()

    def _return_client(self, client: Client) -> None:
        """Take it from its request's thread: read its next request, or close it."""
        self._busy.discard(client)
        client.clear_callbacks()
        if not client.http.reply.is_complete:
            self._drop(client)
            return
        self._epoll.modify(client.socket, select.EPOLLIN)
        if client.http.reply.keep_alive and not self._stopped:
            self._read(client, client.http.next_request)
        else:
            self._linger(client)

    def _close(self) -> None:
        self._epoll.unregister(self._socket)
        self._socket.shutdown(socket.SHUT_RDWR)  # for a forked child's copy, too
        self._socket.close()
        for client in tuple(self._waiting_clients):
            self._drop(client)
        for client, _ in self._complete_requests:
            self._busy.discard(client)
            self._drop(client)
        for client in self._busy:
            client.cut()
            client.disconnected()  # aborts its upstream request, which no actor may know of yet
        while self._busy:
            client = self._returned.get()
            self._busy.discard(client)
            self._drop(client)
        self._epoll.close()
        with self._wake_lock:
            self._is_closed = True
            os.close(self._wake)
        _listeners.discard(self)

    def _close_in_child(self) -> None:
        """Runs in a forked child, whose copies would keep the port and the connections open.

        Nothing is removed from epoll, which both processes share.
        """
        for connection in (self._socket, *(client.socket for client in self._clients.values())):
            connection.close()
        self._epoll.close()
        if not self._is_closed:
            os.close(self._wake)
        self._is_closed = True  # without the lock: a thread of the parent's may hold it for ever


_listeners: weakref.WeakSet[SocketListener] = weakref.WeakSet()


def _close_after_fork() -> None:
    for listener in tuple(_listeners):
        listener._close_in_child()
    _listeners.clear()


os.register_at_fork(after_in_child=_close_after_fork)
