"""The one thread of a host process that reads all open streams, and runs the actors that a token
passes.

A token that arrives goes through them without waking any other thread: on a busy host each wake-up
costs more than the work that it is for. A worker's other actors have threads of their own.

A socket that rests does not wake the thread for every token. It is looked at once per tick,
together with all others that rest, and earlier where much lies ready or the connection ends: the
kernel counts (SO_RCVLOWAT).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from typing import Any, Protocol

from llama_worker.errors import described_error
from llama_worker.runtime.futures import write_log

TICK_S = 0.05
MUCH_BYTES = 32 * 1024  # of a resting socket: so much is read at once

_logger = logging.getLogger("llama_worker.loop")


class Channel(Protocol):
    """Who owns a registered socket. All are called on the loop's thread, and must not block."""

    def on_ready(self, mask: int) -> None:
        """The socket is ready: epoll's mask."""

    def on_tick(self) -> None:
        """A tick, while the socket rests."""

    def on_error(self, error: Exception) -> None:
        """One of the above raised."""


class LoopThread:
    """An epoll set, actors, and the daemon thread that serves both; where no socket rests it never
    wakes by itself.

    Any thread may call, except for `rest`; of one channel one thread at a time.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._epoll: select.epoll | None = None
        self._wake_fd = -1
        self._thread_id: int | None = None
        self._is_woken = False
        self._ready: deque[_Inbox] = deque()
        self._channels: dict[int, Channel] = {}
        self._resting: dict[Channel, socket.socket] = {}

    def start(self) -> select.epoll:
        """Start the thread, unless it runs. Raises OSError or RuntimeError where the host
        cannot."""
        with self._starting:
            if self._epoll is None:
                with contextlib.ExitStack() as undo:
                    epoll = undo.enter_context(select.epoll())
                    self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                    undo.callback(os.close, self._wake_fd)
                    epoll.register(self._wake_fd, select.EPOLLIN)
                    threading.Thread(
                        target=self._run, args=(epoll,), name="llama_worker-loop", daemon=True
                    ).start()
                    undo.pop_all()
                self._epoll = epoll
            return self._epoll

    # ---------------------------------------------------------------- sockets

    def watch(self, connection: socket.socket, channel: Channel, *, writable: bool) -> None:
        """Watch the socket for what arrives, and (`writable`) for room to send."""
        mask = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        if connection.fileno() in self._channels:
            self.start().modify(connection, mask)
        else:
            self._channels[connection.fileno()] = channel
            self.start().register(connection, mask)

    def forget(self, connection: socket.socket, channel: Channel) -> None:
        """Watch it no more, if it is watched. Before it is closed: a forked child may hold a copy
        open."""
        self._resting.pop(channel, None)
        if self._channels.pop(connection.fileno(), None) is not None:
            self.start().unregister(connection)

    def rest(self, connection: socket.socket, channel: Channel) -> None:
        """Let the socket rest. On this thread only, which so learns that ticks are due."""
        if channel not in self._resting:
            self._resting[channel] = connection
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, MUCH_BYTES)

    def rouse(self, channel: Channel) -> None:
        """From now on every byte wakes the thread, also one that lies ready."""
        connection = self._resting.pop(channel, None)
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    # ---------------------------------------------------------------- actors

    def run_actor(self, actor: Any) -> None:
        """Live this Pykka actor's life, beside others. Its handlers must not block."""
        self.start()
        inbox = _Inbox(self, actor)
        told_before, actor.actor_inbox = actor.actor_inbox, inbox
        actor.actor_ref.actor_inbox = inbox
        while not told_before.empty():
            inbox.put(told_before.get())
        self.schedule(inbox)

    def schedule(self, inbox: _Inbox) -> None:
        self._ready.append(inbox)
        if not self._is_woken and threading.get_ident() != self._thread_id:
            self._is_woken = True
            os.eventfd_write(self._wake_fd, 1)

    # ---------------------------------------------------------------- the thread

    def _run(self, epoll: select.epoll) -> None:
        self._thread_id = threading.get_ident()
        tick_at = 0.0
        while True:
            had_resting = bool(self._resting)
            wait_s = max(0.0, tick_at - time.monotonic()) if had_resting else None
            for descriptor, mask in epoll.poll(0.0 if self._ready else wait_s):
                self._serve(descriptor, mask)
            now = time.monotonic()
            if not had_resting:
                tick_at = now + TICK_S
            elif now >= tick_at:
                tick_at = now + TICK_S
                self._tick()
            for _ in range(len(self._ready)):
                self._ready.popleft().run()

    def _serve(self, descriptor: int, mask: int) -> None:
        """A function of its own: while the thread sleeps it must not hold on to the channel that it
        served last."""
        if descriptor == self._wake_fd:
            os.eventfd_read(descriptor)
            self._is_woken = False  # before what is ready is looked at: what comes later wakes anew
        elif (
            channel := self._channels.get(descriptor)
        ) is not None:  # else it was closed meanwhile
            self._on_ready(channel, mask)

    def _on_ready(self, channel: Channel, mask: int) -> None:
        try:
            channel.on_ready(mask)
        except Exception as error:
            self._forgive(channel, error)

    def _tick(self) -> None:
        for channel in tuple(self._resting):
            try:
                channel.on_tick()
            except Exception as error:
                self._forgive(channel, error)

    def _forgive(self, channel: Channel, error: Exception) -> None:
        """One stream's mistake is not the others'."""
        try:
            channel.on_error(error)
        except Exception as another:
            write_log(
                _logger, logging.ERROR, f"a stream could not be ended: {described_error(another)}"
            )


class _Empty(Exception):
    """Nothing is in the mailbox."""


class _Inbox:
    """What Pykka takes for the queue of an actor's thread."""

    __slots__ = ("_actor", "_envelopes", "_is_scheduled", "_is_set_up", "_loop")

    def __init__(self, loop: LoopThread, actor: Any) -> None:
        self._loop = loop
        self._actor = actor
        self._envelopes: deque[Any] = deque()
        self._is_scheduled = False
        self._is_set_up = False

    def put(self, envelope: Any) -> None:
        """Any thread."""
        self._envelopes.append(envelope)
        if not self._is_scheduled:  # two threads may both find it so: to run twice does no harm
            self._is_scheduled = True
            self._loop.schedule(self)

    def get(self) -> Any:
        """Raises what takes Pykka's loop back to `run`."""
        if not self._envelopes:
            raise _Empty
        return self._envelopes.popleft()

    def empty(self) -> bool:
        return not self._envelopes

    def run(self) -> None:
        """Let the actor handle what is in its mailbox."""
        self._is_scheduled = False  # before it is looked at: what comes later is scheduled anew
        actor = self._actor
        if actor is None:
            self._envelopes.clear()  # it has stopped
            return
        if not self._is_set_up:
            self._is_set_up = True
            actor._actor_loop_setup()
        try:
            actor._actor_loop_running()
        except _Empty:
            return
        actor._actor_loop_teardown()  # it has stopped
        self._actor = None  # an address outlives its actor, and must not keep it


_loop = LoopThread()


def loop_thread() -> LoopThread:
    """The one of this process."""
    return _loop


def _forget_after_fork() -> None:
    global _loop
    _loop = LoopThread()  # the parent's thread does not exist in the child


os.register_at_fork(after_in_child=_forget_after_fork)
