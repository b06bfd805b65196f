"""One open stream on a socket that never blocks: posts the request, reads the reply, tells what it
parsed.

No thread belongs to it. The caller's thread connects and sends as far as that goes at once; all
that has to wait is done by the loop's thread that all streams of the process share.
"""

from __future__ import annotations

import time

from llama_worker.errors import described_error
from llama_worker.messages import (
    Mailbox,
    OpenStream,
    StreamClosed,
    StreamEvents,
    StreamOpened,
)
from llama_worker.runtime.chat_exchange import ERROR_BODY_S, Endpoint, no_connection
from llama_worker.runtime.connections import shut_down
from llama_worker.runtime.loop_connection import LoopConnection
from llama_worker.runtime.loop_thread import MUCH_BYTES, TICK_S
from llama_worker.runtime.timers import call_at
from llama_worker.stream.events import ReasoningDelta, StreamEvent, TextDelta
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.response import ChatResponse, disconnected
from llama_worker.types import RequestFailReason

_READ_BYTES = 16 * 1024  # to make room for 64 KiB each time takes longer than to read a token
_READS = 64  # at a time; the other streams want their turn
_TEXT = frozenset({TextDelta, ReasoningDelta})


class StreamReader(LoopConnection):
    """One stream; see `ports.Stream`. Thread-safe, and no call takes time.

    Told at once: the first token, everything that is not text, the end, what a `hurry` waits for,
    and text that comes more than 50 ms after what was told before. Other text is told 50 ms after
    that, unless `flush` asks for it.

    Raises OSError or RuntimeError where the host lacks threads, descriptors, ports or memory.
    """

    def __init__(
        self, order: OpenStream, endpoint: Endpoint, *, on_closed: Mailbox[StreamClosed], name: str
    ) -> None:
        super().__init__(endpoint, endpoint.chat_request(order.body))
        self._turn_id = order.turn_id
        self._reply_to = order.reply_to
        self._on_closed = on_closed
        self._response = ChatResponse()
        self._opened = False
        self._events: list[StreamEvent] = []  # not told yet
        self._told_at = 0.0
        self._told_bytes = 0
        self._is_hurried = True  # the first token is waited for
        with self._lock:
            self._begin(name)

    def abort(self) -> None:
        """Close the connection now, in whatever phase it is."""
        with self._lock:
            if not self._closed:
                self._take_in()
            self._close(disconnected("when it was aborted"))

    def flush(self) -> bool:
        """Tell now what has come and was not told yet; False: nothing has."""
        with self._lock:
            if self._closed:
                return False
            self._take_in()
            return self._tell()

    def hurry(self) -> None:
        """Somebody waits: what has come, or else what comes next, is told at once."""
        with self._lock:
            if not self._closed and not self._tell():
                self._is_hurried = True
                self._loop.rouse(self)

    # ---------------------------------------------------------------- called on the loop's thread

    def on_tick(self) -> None:
        """50 ms are over: what has come is told. After anything but text, the socket rests no
        more."""
        with self._lock:
            if not self._closed:
                self._take_in()
                is_text = self._is_text()
                if not self._tell() or not is_text:
                    self._loop.rouse(self)

    def on_error(self, error: Exception) -> None:
        """The host lacks something, or this code is wrong: no news of the server."""
        with self._lock:
            self._close(
                StreamFailure(reason=RequestFailReason.UNKNOWN_ERROR, detail=described_error(error))
            )

    # ---------------------------------------------------------------- from the server

    def _on_readable(self) -> None:
        self._take_in()
        if not self._closed:
            self._tell_or_rest()

    def _on_no_connection(self, error: OSError | None) -> None:
        self._close(no_connection(error, self._endpoint.connect_timeout_s))

    def _take_in(self) -> None:
        """Read and parse what lies ready."""
        if self._socket is None or not self._connected:
            return
        for _ in range(_READS):
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self._response.end(str(error))
                break
            if not data:
                self._response.end()
                break
            self._events += self._response.feed(data)
            if self._response.over or len(data) < _READ_BYTES:
                break
        self._after_reading()

    def _after_reading(self) -> None:
        response = self._response
        if response.opened and not self._opened:
            self._opened = True
            self._reply_to.tell(
                StreamOpened(turn_id=self._turn_id, at=time.monotonic(), stream=self)
            )
        if response.over:
            self._close(response.failure)
        elif response.refused and self._timer is None:
            self._timer = call_at(time.monotonic() + ERROR_BODY_S, self._error_body_is_late)

    def _error_body_is_late(self) -> None:
        with self._lock:
            self._response.end()
            self._close(self._response.failure)

    # ---------------------------------------------------------------- to the actor

    def _has_news(self) -> bool:
        return self._response.bytes_read > self._told_bytes

    def _is_text(self) -> bool:
        return all(type(event) in _TEXT for event in self._events)

    def _tell_or_rest(self) -> None:
        """After reading without a tick: tell what matters; where text comes fast, wait for more of
        it."""
        if not self._has_news():
            return
        is_text = self._is_text()
        is_late = time.monotonic() >= self._told_at + TICK_S
        is_much = self._response.bytes_read - self._told_bytes >= MUCH_BYTES
        if not is_text:
            self._loop.rouse(self)
        if not is_text or is_late or is_much or self._is_hurried:
            self._tell()
        elif self._socket is not None:
            self._loop.rest(self._socket, self)

    def _tell(self) -> bool:
        """Tell what came since the last time; keepalives alone are told too, as bytes without
        events."""
        if not self._has_news():
            return False
        events, self._events = self._events, []
        self._told_at = time.monotonic()
        self._reply_to.tell(
            StreamEvents(turn_id=self._turn_id, events=tuple(events), at=self._told_at)
        )
        self._told_bytes = self._response.bytes_read
        if self._is_hurried and any(type(event) in _TEXT for event in events):
            self._is_hurried = False
        return True

    # ---------------------------------------------------------------- the end

    def _close(self, failure: StreamFailure | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._cancel_timer()
        self._unsent = None
        if self._socket is not None and failure is not None:
            shut_down(self._socket)
        self._drop_socket()
        self._tell()
        closed = StreamClosed(turn_id=self._turn_id, failure=failure, at=time.monotonic())
        self._reply_to.tell(closed)
        self._on_closed.tell(closed)
