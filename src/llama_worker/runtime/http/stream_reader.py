"""One open stream: a thread that posts the request with `requests`, waits for the headers, and then
reads the socket itself. It reads rarely, since waking a thread costs more than a token."""

from __future__ import annotations

import contextlib
import select
import socket
import threading

from llama_worker.config.settings import Endpoint
from llama_worker.errors import described_error
from llama_worker.mailbox import Mailbox
from llama_worker.request.messages import OpenStream, StreamClosed, StreamEvents, StreamOpened
from llama_worker.runtime.host import threads
from llama_worker.runtime.host.threads import run_on_thread
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.runtime.http.session import HttpReply, post_chat, send_failure
from llama_worker.stream.failure import StreamFailure, disconnected
from llama_worker.stream.lazy_reading import LazyReading, Portion
from llama_worker.stream.response import ChatBody
from llama_worker.types.request import RequestFailReason

_READ_BYTES = 16 * 1024  # to allocate much more each time takes longer than to read a token
_READS = 64  # at a time; a caller of `flush` waits for them


class StreamReader:
    """Reads one stream; see `ports.Stream`. Thread-safe, and no call takes time.

    `stream.lazy_reading` decides when its thread wakes, and when it sends what it has read. While
    the thread sleeps the kernel collects text (SO_RCVLOWAT); `flush` does not wait for the thread.

    Raises RuntimeError if the system has no thread left.
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
        self._lazy = LazyReading(threads.now(), max_hold_s=order.max_hold_s)
        self._low_water_bytes = 1
        run_on_thread(f"{name}-stream", self._run)

    def abort(self) -> None:
        self._abort.abort()

    def flush(self) -> None:
        with self._lock:
            if self._connection is None:
                return
            self._take_in()
            if self._body.is_over:  # nothing else wakes the thread any more
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
            self._tell(self._lazy.all(threads.now()))

    def hurry(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._tell(self._lazy.hurry(threads.now()))
                self._set_low_water()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            failure = self._exchange()
        except Exception as error:  # a shortage of this machine, or a bug here
            failure = StreamFailure(
                reason=RequestFailReason.UNKNOWN_ERROR, detail=described_error(error)
            )
        closed = StreamClosed(
            turn_id=self._order.turn_id,
            failure=failure,
            at=threads.now(),
            is_aborted=self._abort.error is not None,
        )
        self._order.reply_to.tell(closed)
        self._on_closed.tell(closed)

    def _exchange(self) -> StreamFailure | None:
        try:
            reply = post_chat(self._abort, self._endpoint, self._order.body)
        except (OSError, ValueError) as error:
            if self._abort.error is not None:
                return disconnected("when it was aborted")
            return send_failure(error, self._abort, self._endpoint)
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
                    StreamOpened(turn_id=self._order.turn_id, at=threads.now())
                )
                self._feed(b"")
            while True:
                with self._lock:
                    self._take_in()
                    now = threads.now()
                    self._tell(self._lazy.due(now, over=self._body.is_over))
                    if self._body.is_over:
                        return self._body.failure
                    self._set_low_water()
                    wait_s = self._lazy.wait_s(now)
                poll.poll(None if wait_s is None else wait_s * 1000)
        finally:
            with self._lock:
                self._connection = None
                self._tell(self._lazy.all(threads.now()))  # however it ends

    # ---------------------------------------------------------------- with the lock held

    def _take_in(self) -> None:
        """Read and decode the bytes that are already in the socket."""
        assert self._connection is not None
        for _ in range(_READS):
            if self._body.is_over:
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
            self._feed(data)
            if len(data) < _READ_BYTES:
                return  # that was all; the connection's end wakes the thread

    def _feed(self, data: bytes) -> None:
        read_before = self._body.bytes_read
        events = self._body.feed(data)
        if self._body.bytes_read > read_before:
            self._lazy.received(events, self._body.bytes_read - read_before, threads.now())

    def _set_low_water(self) -> None:
        """Set SO_RCVLOWAT, which also holds for bytes that are already in the socket."""
        size_bytes = self._lazy.low_water_bytes
        if size_bytes != self._low_water_bytes:
            assert self._connection is not None
            self._low_water_bytes = size_bytes
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    def _tell(self, portion: Portion | None) -> None:
        if portion is not None:
            self._order.reply_to.tell(
                StreamEvents(turn_id=self._order.turn_id, events=portion.events, at=portion.at)
            )
