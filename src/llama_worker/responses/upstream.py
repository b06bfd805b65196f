"""A chat completion of the upstream server's, for the thread of a client's request."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.runtime.http.session import Abort, Endpoint, Reply, no_reply, send
from llama_worker.runtime.streams.leased_exchange import LeasedExchange
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.response import ChatBody

_READ_BYTES = 65536


def endpoint_of(config: ResponsesProxyConfig) -> Endpoint:
    """The upstream server."""
    return Endpoint(
        base_url=config.base_url,
        connect_timeout_s=config.connect_timeout_s,
        api_key=config.api_key,
        ca_file=config.ca_file,
    )


class ChatExchange:
    """A stream of events for one thread, which waits for them; only the Abort is for others.

    `leased` is told of all that comes, and may have a better reason for a failure.
    `before_reading` is called each time, and again after `silence_s` in which nothing came.
    """

    def __init__(
        self,
        abort: Abort,
        endpoint: Endpoint,
        leased: LeasedExchange,
        *,
        before_reading: Callable[[], object],
        silence_s: float | None,
    ) -> None:
        self.failure: StreamFailure | None = None
        self.silence_s = silence_s
        self._abort = abort
        self._endpoint = endpoint
        self._leased = leased
        self._before_reading = before_reading
        self._reply: Reply | None = None
        self._body: ChatBody | None = None
        self._events: list[StreamEvent] = []  # that came along with the headers

    def before_reading(self) -> None:
        self._before_reading()
        self._leased.waits()

    def open(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
        """Post it and wait for the headers; False where `failure` says why there is no stream."""
        sent = {
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            **headers,
        }
        data = json.dumps(body, separators=(",", ":")).encode()
        path = "/v1/chat/completions"
        self._leased.sends()
        try:
            self._reply = reply = send(
                self._abort, self._endpoint, "POST", path, headers=sent, body=data, waiter=self
            )
        except (OSError, ValueError) as error:
            failure = no_reply(error, self._abort, self._endpoint)
            self.failure = self._leased.closed(failure)
            return False
        if reply.status != 200:
            self.failure = self._leased.closed(reply.failure())
            self.close()
            return False
        self._leased.opened(time.monotonic())
        self._body = ChatBody(reply.headers)
        self._connection, ahead = reply.take_over()
        self._connection.setblocking(True)
        self._events = self._body.feed(ahead)
        if self._events:
            self._leased.heard(self._events, time.monotonic())
        return True

    @property
    def can_read(self) -> bool:
        """Whether `read` has something that came along with the headers."""
        return bool(self._events)

    def read(self) -> list[StreamEvent] | None:
        """What comes next, [] for a keepalive; None at the end: `failure` says whether a good
        one."""
        assert self._body is not None
        events, self._events = self._events, []
        if not events and not self._body.over:
            events = self._receive(self._body)
            self._leased.heard(events, time.monotonic())
        if self._body.over:
            self.failure = self._leased.closed(self._body.failure)
            self.close()
            return events or None
        return events

    def close(self) -> None:
        if self._reply is not None:
            self._reply.close()
        self._reply = None

    def _receive(self, body: ChatBody) -> list[StreamEvent]:
        self.before_reading()
        while not self._abort.wait_readable(self.silence_s):
            self.before_reading()
        try:
            data = self._connection.recv(_READ_BYTES)
        except OSError as error:
            body.end(str(self._abort.error or error))
            return []
        if data:
            return body.feed(data)
        aborted = self._abort.error
        body.end(None if aborted is None else str(aborted))
        return []
