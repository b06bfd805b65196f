"""Makes a response from a chat completion of the upstream, on the thread of the client's request.

What is read from the upstream is written to the client before more is read, so a slow client slows
the upstream.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from llama_worker.responses.api.events import Event, ResponseEvents
from llama_worker.responses.api.request import ChatRequest
from llama_worker.responses.api.store import response_id_of, stored_response
from llama_worker.responses.errors import ApiError, error_code
from llama_worker.responses.exchange import Exchange
from llama_worker.responses.http.request_reader import HttpRequest
from llama_worker.responses.pass_through import NOT_FOR_CHAT, forwarded
from llama_worker.responses.upstream_facts import UpstreamFacts, sampling_echo
from llama_worker.runtime.host import threads
from llama_worker.runtime.http import session
from llama_worker.runtime.http.session import HttpReply
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.response import ChatBody
from llama_worker.types.request import RequestFailReason

_CLIENT_READ_INTERVAL_S = 1.0  # while the server is silent, a WebSocket is read at least this often
# the first text mostly comes right after the headers: wait so long to send both at once
_FIRST_TEXT_WAIT_S = 0.002
# the proxy sends its own: JSON, and a stream as the reply
_REPLACED = NOT_FOR_CHAT | {"accept", "content-encoding", "content-type"}
_REPLACED |= {f"sec-websocket-{name}" for name in ("key", "version", "extensions", "protocol")}
_READ_BYTES = 16384


class EventSink(Struct, frozen=True, kw_only=True):
    """Takes the events made. `before_reading` is called before each wait for the upstream."""

    send: Callable[[bytes], None]
    encode: Callable[[list[Event]], bytes]
    before_reading: Callable[[], object] | None = None


class ResponseRun:
    """Makes a response from its chat completion, on the request's thread: what is read is written
    before more is read. The exchange's lease is told of all that comes from the upstream, and may
    know a better reason for a failure.

    `sink` gets the events as they are made; None: the client does not stream. `heartbeat_s`: after
    so long without an event, `response.in_progress` is sent again, even before the upstream's
    headers, for which it may take minutes. `silence_s`: the longest wait without a look at the
    client.
    """

    def __init__(
        self,
        exchange: Exchange,
        events: ResponseEvents,
        *,
        sink: EventSink | None,
        heartbeat_s: float,
        silence_s: float | None,
        on_end: Callable[[], None],
    ) -> None:
        self.failure: StreamFailure | None = None  # of the chat completion
        self.silence_s = silence_s
        self._exchange = exchange
        self._abort = exchange.abort
        self._leased = exchange.leased
        self._events = events
        self._sink = sink
        self._heartbeat_s = heartbeat_s
        self._on_end = on_end
        self._retry_after = ""  # the Retry-After header of an error reply
        self._reply: HttpReply | None = None
        self._body: ChatBody | None = None
        self._read: list[StreamEvent] = []  # those that came with the headers
        self._client_error: Exception | None = None
        self._first: bytes | None = None  # the first events; None: not made, b"": sent
        self._sent_at = time.monotonic()

    def run(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """Ask the upstream, and drive the response to its end. Raises ApiError if the upstream
        refuses, or the host cancels, before the client was sent anything, and OSError if the client
        has left; the response is over in any case."""
        try:
            is_open = self.open(body, headers)
        except OSError:
            self._abandon()
            raise
        if is_open:
            self.to_the_end()
        failure = self.failure
        if failure is not None and (not is_open or failure.reason is RequestFailReason.CANCELED):
            refused = self._exchange.error_for_client(failure, self._retry_after)
            if self._sink is None or self._first != b"":  # the client was sent nothing
                raise refused
            self._send(self._events.fail(refused.message, code=refused.code))

    def finish_empty(self) -> None:
        """End the response without output: the upstream is not asked."""
        self._prepare()
        self._send(self._events.finish_empty())

    # ------------------------------------------------------------ the upstream

    def open(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
        """Post the body and wait for the headers. False: `failure` says why there is no stream. An
        error of the client, who is looked at meanwhile, says nothing of the server: it is
        raised."""
        endpoint = self._exchange.upstream.endpoint
        self._leased.started_waiting()
        try:
            self._reply = reply = session.post_chat(
                self._abort, endpoint, body, headers=headers, waiter=self
            )
        except (OSError, ValueError) as error:
            if self._client_error is not None:
                raise self._client_error from None
            failure = session.send_failure(error, self._abort, endpoint)
            self.failure = self._leased.closed(failure)
            return False
        if reply.status != 200:
            self._retry_after = reply.header("retry-after")
            self.failure = self._leased.closed(reply.failure())
            self.close()
            if self._client_error is not None:  # found while the refusal's body was read
                raise self._client_error
            return False
        self._leased.opened(threads.now())
        self._connection, self._body = reply.take_over()
        self._connection.set_silence(self.silence_s)
        self._read = self._body.feed(b"")
        if self._read:
            self._leased.received(self._read, threads.now())
        return True

    def before_sending(self) -> None:
        """As a `Waiter`: until the headers, called before each wait."""
        self._look_at_client()
        self._leased.before_sending()

    def before_reading(self) -> None:
        self._look_at_client()
        self._leased.before_reading()

    def _look_at_client(self) -> None:
        try:
            self._exchange.announce()
            self._prepare()
            self._keep_client()
        except Exception as error:
            self._client_error = error
            raise

    def read(self) -> list[StreamEvent] | None:
        """The next events; [] for a keepalive, or if nothing comes within `silence_s`; None at the
        end, with `failure` if it is a bad one."""
        body = self._body
        assert body is not None
        events, self._read = self._read, []
        if not events and not body.is_over:
            if self._first and not self._abort.wait_readable(_FIRST_TEXT_WAIT_S):
                self._write([])
            self._keep_client()
            if (settled_at := self._leased.settled_at) is not None:
                self._await_rest(settled_at)
            self._leased.before_reading()
            try:
                data = self._connection.receive(_READ_BYTES)
            except OSError as error:
                body.end(str(self._abort.error or error))
            else:
                if data is None:
                    return []
                if data:
                    events = body.feed(data)
                else:
                    aborted = self._abort.error
                    body.end(None if aborted is None else str(aborted))
            self._leased.received(events, threads.now())
        if body.is_over and not events:  # events go to the client first
            self.failure = self._leased.closed(body.failure)
            self.close()
            return None
        return events

    def _await_rest(self, until: float) -> None:
        """Wait for what may follow a finish reason. Aborts at the instant `until`, even if the
        server goes on sending."""
        left_s = until - threads.now()
        if left_s <= 0.0 or not self._abort.wait_readable(left_s):
            self._abort.abort()

    def close(self) -> None:
        if self._reply is not None:
            self._reply.close()
        self._reply = None

    # ------------------------------------------------------------ the client

    def _prepare(self) -> None:
        """Make the first events, while the upstream works; idempotent."""
        if self._first is None:
            self._first = b"" if self._sink is None else self._sink.encode(self._events.begin())

    def _keep_client(self) -> None:
        """Let the sink read from its client, and send a heartbeat if one is due."""
        if self._sink is not None:
            if self._sink.before_reading is not None:
                self._sink.before_reading()
            if time.monotonic() >= self._sent_at + self._heartbeat_s:
                self._send(self._events.heartbeat())

    def to_the_end(self) -> None:
        """Drive it to its end, once it is open."""
        self._prepare()
        try:
            while not self._events.is_over:
                read = self.read()
                if read is None:
                    self._send(self._events.closed(self.failure))
                else:
                    self._send(self._events.feed(read))
        finally:
            self.close()
            self._abandon()

    def _abandon(self) -> None:
        """The client has left, and may continue from what it has received; idempotent."""
        if not self._events.is_over:
            self._events.fail("the client has disconnected")
            self._on_end()

    def _send(self, events: list[Event]) -> None:
        # before the end is sent: who has read it may refer to the response and take its place
        if self._events.is_over:
            self._on_end()
        if events:
            self._write(events)

    def _write(self, events: list[Event]) -> None:
        if self._sink is not None and (self._first or events):
            first, self._first = self._first or b"", b""
            self._sink.send(first + self._sink.encode(events))
            self._sent_at = time.monotonic()


class ResponseGenerator:
    """Generates the responses of one upstream server. Any number of threads may use it."""

    def __init__(self, *, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        # a whole number of these waits ends when a heartbeat is due
        self._silence_s = heartbeat_s / math.ceil(heartbeat_s / _CLIENT_READ_INTERVAL_S)
        self._facts = UpstreamFacts()

    def warnings(self, chat_request: ChatRequest) -> tuple[str, ...]:
        """What is ignored of a request whose response has begun."""
        if self._facts.ignores_tools and "tools" in chat_request.body:
            return (*chat_request.warnings, "the model's chat template does not support tools")
        return chat_request.warnings

    def generate(
        self,
        exchange: Exchange,
        request: HttpRequest,
        chat_request: ChatRequest,
        sink: EventSink | None,
    ) -> ResponseEvents:
        """Make a response to its end. Raises ApiError if none was begun, and for a later failure if
        there is no `sink` to take it as an event."""
        unique = uuid.uuid4().hex
        response_id = response_id_of(unique)
        exchange.enter(response_id, is_stored=chat_request.store)
        if chat_request.generates:
            exchange.lease(f"responses:{response_id}", chat_request.body)
        sampling = self._facts.sampling(exchange, request)
        events = ResponseEvents(
            unique=unique,
            clock=time.time,
            echo={**chat_request.echo, **sampling_echo(chat_request.body, sampling)},
            tools=chat_request.tools,
            seal=chat_request.seal_reasoning,
        )

        def on_end() -> None:
            own, previous_id = chat_request.input_items, chat_request.previous_response_id
            exchange.close(
                stored_response(events.stored, own, previous_id) if chat_request.store else None
            )

        run = ResponseRun(
            exchange,
            events,
            sink=sink,
            heartbeat_s=self._heartbeat_s,
            silence_s=self._silence_s if chat_request.stream else None,
            on_end=on_end,
        )
        if chat_request.generates:
            chat = chat_request.body
            messages = self._facts.as_template_takes(chat["messages"], exchange, request)
            # with progress reports, a stalled prompt is found sooner
            body = {**chat, "messages": messages, "return_progress": True}
            run.run(body, forwarded(request, exclude=_REPLACED))
        else:
            run.finish_empty()
        if sink is None and events.failure is not None:
            # The output is lost and a retry would generate it all again: never an automatic one.
            raise ApiError(502, events.failure, code=error_code(events.failure), should_retry=False)
        return events
