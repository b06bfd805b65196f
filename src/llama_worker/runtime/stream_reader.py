"""The thread behind one open stream: posts the request, reads the reply, tells what it parsed."""

from __future__ import annotations

import threading
import time

import requests

from llama_worker.messages import (
    Mailbox,
    OpenStream,
    StreamClosed,
    StreamEvents,
    StreamOpened,
)
from llama_worker.runtime.chat_exchange import ChatExchange, Endpoint
from llama_worker.runtime.connections import Abort, session
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure
from llama_worker.types import RequestFailReason

_MAX_BATCH = 512  # events; a batch is told when it is full or when reading would wait


class StreamReader:
    """One stream. The constructor starts a daemon thread; `abort` may be called from any thread.

    `reply_to` gets StreamOpened, StreamEvents and, last, StreamClosed, which `on_closed` gets, too.
    """

    def __init__(self, order: OpenStream, endpoint: Endpoint, *, on_closed: Mailbox[StreamClosed], name: str) -> None:
        self._turn_id = order.turn_id
        self._endpoint = endpoint
        self._body = order.body
        self._reply_to = order.reply_to
        self._on_closed = on_closed
        self._abort = Abort()
        self._chat: ChatExchange | None = None
        self._events: list[StreamEvent] = []
        self._told_bytes = 0
        threading.Thread(
            target=self._run, name=f"{name}-stream-{order.turn_id[0]}.{order.turn_id[1]}", daemon=True
        ).start()

    def abort(self) -> None:
        """Close the connection now, in whatever phase it is."""
        self._abort.abort()

    def _run(self) -> None:
        failure: StreamFailure | None
        try:
            with session(self._abort, before_waiting=self._flush) as http:
                failure = self._exchange(http)
        except Exception as error:
            failure = StreamFailure(reason=RequestFailReason.PROTOCOL_ERROR, detail=f"{type(error).__name__}: {error}")
        finally:
            self._abort.detach()
        self._flush()
        closed = StreamClosed(turn_id=self._turn_id, failure=failure, at=time.monotonic())
        self._reply_to.tell(closed)
        self._on_closed.tell(closed)

    def _exchange(self, http: requests.Session) -> StreamFailure | None:
        chat = self._chat = ChatExchange(http, self._abort, self._endpoint)
        if not chat.open(self._body):
            return chat.failure
        self._reply_to.tell(StreamOpened(turn_id=self._turn_id, at=time.monotonic()))
        try:
            while not self._abort.aborted and (events := chat.read()) is not None:
                self._events += events
                if len(self._events) >= _MAX_BATCH:
                    self._flush()
        finally:
            chat.close()  # an aborted one, too: what else still refers to the response would keep its descriptor
        return chat.failure

    def _flush(self) -> None:
        """Tell what came since the last time; keepalives alone are told too, as bytes without events."""
        if self._chat is None or self._chat.bytes_read == self._told_bytes:
            return
        events, self._events = self._events, []
        self._reply_to.tell(StreamEvents(turn_id=self._turn_id, events=tuple(events), at=time.monotonic()))
        self._told_bytes = self._chat.bytes_read
