"""The one thread of a host process that waits for the sockets of all its open streams.

A socket that rests does not wake the thread for every token. It is looked at once per tick, together with all others
that rest, and earlier where much lies ready or the connection ends: the kernel counts (SO_RCVLOWAT).
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from typing import Protocol

TICK_S = 0.05
MUCH_BYTES = 32 * 1024  # of a resting socket: so much is read at once


class Channel(Protocol):
    """Who owns a registered socket. All are called on the reader thread, and must not block."""

    def on_ready(self, mask: int) -> None:
        """The socket is ready: epoll's mask."""

    def on_tick(self) -> bool:
        """A tick while the socket rests: read what lies ready; True asks for `on_ticked`."""

    def on_ticked(self) -> None:
        """All resting sockets have been read: now others may be woken."""

    def on_error(self, error: Exception) -> None:
        """One of the above raised."""


class ReaderThread:
    """An epoll set and the daemon thread that waits for it; where no socket rests it never wakes by itself.

    Any thread may call, except for `rest`; of one channel one thread at a time.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._epoll: select.epoll | None = None
        self._channels: dict[int, Channel] = {}
        self._resting: dict[Channel, socket.socket] = {}

    def start(self) -> select.epoll:
        """Start the thread, unless it runs. Raises OSError or RuntimeError where the host cannot."""
        with self._starting:
            if self._epoll is None:
                epoll = select.epoll()
                threading.Thread(target=self._run, args=(epoll,), name="llama_worker-reader", daemon=True).start()
                self._epoll = epoll
            return self._epoll

    def watch(self, connection: socket.socket, channel: Channel, *, writable: bool) -> None:
        """Watch the socket for what arrives, and (`writable`) for room to send."""
        mask = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        if connection.fileno() in self._channels:
            self.start().modify(connection, mask)
        else:
            self._channels[connection.fileno()] = channel
            self.start().register(connection, mask)

    def forget(self, connection: socket.socket, channel: Channel) -> None:
        """Watch it no more, if it is watched. Before it is closed: a forked child may hold a copy open."""
        self._resting.pop(channel, None)
        if self._channels.pop(connection.fileno(), None) is not None:
            self.start().unregister(connection)

    def rest(self, connection: socket.socket, channel: Channel) -> None:
        """Let the socket rest. On the reader thread only, which so learns that ticks are due."""
        if channel not in self._resting:
            self._resting[channel] = connection
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, MUCH_BYTES)

    def rouse(self, channel: Channel) -> None:
        """From now on every byte wakes the thread, also one that lies ready."""
        connection = self._resting.pop(channel, None)
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _run(self, epoll: select.epoll) -> None:
        tick_at = 0.0
        while True:
            had_resting = bool(self._resting)
            wait_s = max(0.0, tick_at - time.monotonic()) if had_resting else None
            for descriptor, mask in epoll.poll(wait_s):
                channel = self._channels.get(descriptor)
                if channel is not None:  # else it was closed meanwhile
                    self._on_ready(channel, mask)
            now = time.monotonic()
            if not had_resting:
                tick_at = now + TICK_S
            elif now >= tick_at:
                tick_at = now + TICK_S
                self._tick()

    def _on_ready(self, channel: Channel, mask: int) -> None:
        try:
            channel.on_ready(mask)
        except Exception as error:
            channel.on_error(error)

    def _tick(self) -> None:
        # In two rounds: an actor that is woken in between would take turns with this thread for every socket.
        read = []
        for channel in tuple(self._resting):
            try:
                if channel.on_tick():
                    read.append(channel)
            except Exception as error:
                channel.on_error(error)
        for channel in read:
            channel.on_ticked()


_reader = ReaderThread()


def reader() -> ReaderThread:
    """The one of this process."""
    return _reader


def _forget_after_fork() -> None:
    global _reader
    _reader = ReaderThread()  # the parent's thread does not exist in the child


os.register_at_fork(after_in_child=_forget_after_fork)
