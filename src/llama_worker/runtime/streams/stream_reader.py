"""One open stream: a thread that posts the request with `requests`, waits for the headers, and then
reads the socket itself, rarely, since each time a thread wakes costs more than a token."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time

from llama_worker.errors import described_error
from llama_worker.mailbox import Mailbox
from llama_worker.request.messages import OpenStream, StreamClosed, StreamEvents, StreamOpened
from llama_worker.runtime.host.threads import run_on_thread
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.runtime.http.session import Endpoint, HttpReply, no_reply, post_chat
from llama_worker.runtime.ports import HURRY_LASTS_S
from llama_worker.stream.events import ReasoningDelta, StreamEvent, TextDelta
from llama_worker.stream.failure import StreamFailure, disconnected
from llama_worker.stream.response import ChatBody
from llama_worker.types.request import RequestFailReason

TICK_S = 0.28  # text that comes fast is told so often: within 0.3 s, as promised
MUCH_BYTES = 32 * 1024  # are read and told at once
_READ_BYTES = 16 * 1024  # to make room for 64 KiB each time takes longer than to read a token
_READS = 64  # at a time; whoever flushes waits for them
_TEXT = frozenset({TextDelta, ReasoningDelta})


class StreamReader:
    """One stream; see `ports.Stream`. Thread-safe, and no call takes time.

    Told at once: the first token, everything that is not text, the end, what a `hurry` waits for,
    32 KiB, and text that comes more than a tick after what was told before. Where text comes faster
    the thread sleeps for a tick while the kernel collects it (SO_RCVLOWAT); `flush` does not wait.

    Raises RuntimeError where the host has no thread for it.
    """

    def __init__(
        self, order: OpenStream, endpoint: Endpoint, *, on_closed: Mailbox[StreamClosed], name: str
    ) -> None:
        self._order = order
        self._endpoint = endpoint
        self._on_closed = on_closed
        self._abort = Abort()
        self._lock = threading.Lock()  # guards what follows
        self._connection: socket.socket | None = None  # while there is a body to read
        self._body: ChatBody  # from then on
        self._events: list[StreamEvent] = []  # not told yet
        self._told_at = 0.0
        self._told_bytes = 0
        self._is_hurried = True  # the first token is waited for
        self._hurried_at = -math.inf
        self._is_batching = False
        run_on_thread(f"{name}-stream", self._run)

    def abort(self) -> None:
        self._abort.abort()

    def flush(self) -> bool:
        with self._lock:
            if self._connection is None:
                return False
            self._take_in()
            if self._body.over:  # the thread may sleep on: there is nothing left that wakes it
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
            return self._tell(time.monotonic())

    def hurry(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._hurried_at = time.monotonic()
                self._is_hurried = True
                self._tell(self._hurried_at)
                self._stop_batching()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            failure = self._live()
        except Exception as error:  # the host lacks something, or this code is wrong
            failure = StreamFailure(
                reason=RequestFailReason.UNKNOWN_ERROR, detail=described_error(error)
            )
        closed = StreamClosed(
            turn_id=self._order.turn_id,
            failure=failure,
            at=time.monotonic(),
            is_aborted=self._abort.error is not None,
        )
        self._order.reply_to.tell(closed)
        self._on_closed.tell(closed)

    def _live(self) -> StreamFailure | None:
        try:
            reply = post_chat(self._abort, self._endpoint, self._order.body)
        except (OSError, ValueError) as error:
            if self._abort.error is not None:
                return disconnected("when it was aborted")
            return no_reply(error, self._abort, self._endpoint)
        with contextlib.closing(reply):
            return self._read(reply) if reply.status == 200 else reply.failure()

    def _read(self, reply: HttpReply) -> StreamFailure | None:
        poll = select.poll()
        try:
            with self._lock:
                self._connection, self._body = reply.take_over()
                self._connection.setblocking(False)
                poll.register(self._connection, select.POLLIN)
                self._order.reply_to.tell(
                    StreamOpened(turn_id=self._order.turn_id, at=time.monotonic())
                )
                self._events += self._body.feed(b"")
            while True:
                with self._lock:
                    self._take_in()
                    wait_ms = self._tell_or_batch(time.monotonic())
                    if self._body.over:
                        return self._body.failure
                poll.poll(wait_ms)
        finally:
            with self._lock:
                self._connection = None

    # ---------------------------------------------------------------- with the lock held

    def _take_in(self) -> None:
        """Read and decode what lies ready."""
        assert self._connection is not None
        for _ in range(_READS):
            if self._body.over:
                return
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._body.end(str(self._abort.error or error))
                return
            if not data:
                aborted = self._abort.error
                self._body.end(None if aborted is None else str(aborted))
                return
            self._events += self._body.feed(data)
            if len(data) < _READ_BYTES:
                return  # that was all; the connection's end wakes the thread

    def _tell_or_batch(self, now: float) -> float | None:
        """Tell what matters; where text comes fast, wait for more of it.

        Returns the milliseconds until the thread is to look again; None: not before something came.
        """
        is_due = now >= self._told_at + TICK_S
        is_text = all(type(event) in _TEXT for event in self._events)
        untold_bytes = self._body.bytes_read - self._told_bytes
        if not is_text or (is_due and not untold_bytes):
            self._stop_batching()
        if (
            is_due
            or not is_text
            or self._is_hurried
            or self._body.over
            or untold_bytes >= MUCH_BYTES
        ):
            self._tell(now)
        elif untold_bytes and not self._is_batching:
            self._is_batching = True
            self._set_low_water(MUCH_BYTES)
        return max(self._told_at + TICK_S - now, 0.0) * 1000 if self._is_batching else None

    def _stop_batching(self) -> None:
        """From now on every byte wakes the thread, also one that lies ready."""
        if self._is_batching:
            self._is_batching = False
            self._set_low_water(1)

    def _set_low_water(self, size_bytes: int) -> None:
        assert self._connection is not None
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    def _tell(self, now: float) -> bool:
        """Tell what came since the last time; keepalives alone are told too, as bytes without
        events."""
        if self._body.bytes_read == self._told_bytes:
            return False
        events, self._events = self._events, []
        self._told_at, self._told_bytes = now, self._body.bytes_read
        if self._is_hurried and now >= self._hurried_at + HURRY_LASTS_S:
            self._is_hurried = not any(type(event) in _TEXT for event in events)
        # Last: whom it wakes needs the interpreter's lock.
        self._order.reply_to.tell(
            StreamEvents(turn_id=self._order.turn_id, events=tuple(events), at=now)
        )
        return True
