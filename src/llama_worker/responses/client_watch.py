"""One thread that notices clients that have left, also while nothing is sent to them."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable

_LEFT = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class ClientWatch:
    """Thread-safe. A client that closes its sending side only counts as having left, as with llama-server."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, Callable[[], object]] = {}
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._stopped = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def watch(self, client: socket.socket, on_left: Callable[[], object]) -> None:
        """Call `on_left` once, on the watching thread, when the client has left. It must not block."""
        with self._lock:
            if not self._stopped:
                self._watched[client.fileno()] = on_left
                self._epoll.register(client, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def unwatch(self, client: socket.socket) -> None:
        """Call this before the socket is closed; idempotent."""
        with self._lock:
            if self._watched.pop(client.fileno(), None) is not None and not self._stopped:
                self._epoll.unregister(client)

    def stop(self) -> None:
        """End the thread; idempotent."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while not self._stopped:
            for fd, _ in self._epoll.poll():
                with self._lock:
                    # Meanwhile the descriptor may have become another client's, who has not left.
                    on_left = self._watched.get(fd) if fd != self._wake and _has_left(fd) else None
                if on_left is not None:
                    on_left()
        with self._lock:
            self._epoll.close()
            os.close(self._wake)


def _has_left(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return any(events & _LEFT for _, events in poll.poll(0))
