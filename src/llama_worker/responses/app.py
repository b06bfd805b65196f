"""Serves a request to the Responses proxy, to its last byte, on the request's own thread."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from llama_worker.mailbox import Mailbox
from llama_worker.responses.api.events import sse
from llama_worker.responses.api.request import (
    compacted,
    compaction_request,
    normalise,
    parse_body,
    parse_create,
    references,
)
from llama_worker.responses.api.store import (
    RecalledItems,
    RecalledResponses,
    References,
    StoredResponse,
    input_list,
    stored_response,
)
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.errors import ApiError
from llama_worker.responses.exchange import Exchange, Upstream, ask
from llama_worker.responses.generation import EventSink, ResponseGenerator
from llama_worker.responses.http.client import Client
from llama_worker.responses.http.request_reader import HttpRequest
from llama_worker.responses.messages import Fetch, ProxyMessage, Recall
from llama_worker.responses.pass_through import pass_through
from llama_worker.runtime.host.futures import WorkerFuture

if TYPE_CHECKING:
    from llama_worker.responses.http.websocket import ClientSocket

_MAX_SOCKETS = 64  # each holds a thread for as long as it is open
_COMPACT = re.compile(r"(/v1)?/responses/compact/?")
_CREATE = re.compile(r"(/v1)?/responses/?")
_STORED = re.compile(r"(?:/v1)?/responses/(?P<id>resp_[^/]+?)(?P<input>/input_items)?/?")
_logger = logging.getLogger("llama_worker.responses")


class ResponsesApp:
    """Serves all requests; `serve` is the listener's `Serve`. Stored responses are looked up in the
    actor behind `proxy`."""

    def __init__(
        self, config: ResponsesProxyConfig, proxy: Mailbox[ProxyMessage], upstream: Upstream
    ) -> None:
        self._config = config
        self._proxy = proxy
        self._upstream = upstream
        self._generator = ResponseGenerator(heartbeat_s=config.heartbeat_s)
        self._sockets = threading.BoundedSemaphore(_MAX_SOCKETS)
        self._places = threading.BoundedSemaphore(config.max_concurrent or sys.maxsize)

    def serve(self, request: HttpRequest, client: Client) -> None:
        """Answer it. Raises OSError if the client's connection is broken or must be cut."""
        try:
            # closed before the client is told of a failure: its place is free then
            with contextlib.closing(self._exchange(client)) as exchange:
                self._route(exchange, request, client)
        except ApiError as refused:
            client.refuse(refused)
        except OSError:  # the client's connection
            raise
        except Exception as error:
            _logger.error("a request failed: %s", type(error).__name__)
            if client.http.reply.has_begun:
                raise
            client.refuse(ApiError(500, f"the proxy failed: {type(error).__name__}"))

    def _exchange(self, client: Client) -> Exchange:
        return Exchange(client, self._proxy, self._upstream, self._places)

    def _route(self, exchange: Exchange, request: HttpRequest, client: Client) -> None:
        method, path = request.method, request.path
        stored = _STORED.fullmatch(path)
        if (
            method == "OPTIONS"
            and client.http.origin is not None
            and request.header("access-control-request-method")
        ):
            client.begin(204, [])  # the CORS preflight of an allowed page's browser
            client.end()
        elif method == "POST" and _CREATE.fullmatch(path):
            self._create(exchange, request, client)
        elif (
            method == "GET"
            and request.header("upgrade").lower() == "websocket"
            and _CREATE.fullmatch(path)
        ):
            self._serve_socket(request, client)
        elif method == "POST" and _COMPACT.fullmatch(path):
            self._compact(exchange, request, client)
        elif stored is not None and method == "DELETE" and not stored["input"]:
            forgotten = self._fetch(stored["id"], forget=True)
            client.reply(200, {"id": forgotten.id, "object": "response", "deleted": True})
        elif stored is not None and method == "GET":
            fetched = self._fetch(stored["id"])
            is_list = stored["input"] is not None
            client.reply(200, input_list(fetched.input_items()) if is_list else fetched.response())
        else:
            pass_through(exchange, request, client)

    # ------------------------------------------------------------ responses

    def _create(self, exchange: Exchange, request: HttpRequest, client: Client) -> None:
        body = _json_body(request)
        chat_request = normalise(body, *self._recall(references(body)))

        def warnings() -> list[tuple[str, str]]:
            return _warning_headers(self._generator.warnings(chat_request))

        if chat_request.stream:
            self._generator.generate(exchange, request, chat_request, _sse_sink(client, warnings))
            client.end()
        else:
            events = self._generator.generate(exchange, request, chat_request, None)
            client.reply(200, events.response, warnings())

    def _compact(self, exchange: Exchange, request: HttpRequest, client: Client) -> None:
        body = _json_body(request)
        chat_request = compaction_request(body, *self._recall(references(body)))
        events = self._generator.generate(exchange, request, chat_request, None)
        warnings = list(chat_request.warnings)
        if events.response["status"] == "incomplete":
            warnings.append("the summary was cut by the token limit")
        reply = compacted(events.response, f"cmp_{uuid.uuid4().hex}")
        client.reply(200, reply, _warning_headers(warnings))

    def _serve_socket(self, request: HttpRequest, client: Client) -> None:
        """Serve one response after another until the connection ends."""
        if not self._sockets.acquire(blocking=False):
            raise ApiError(503, "too many WebSockets are open", retry_after_s=2)
        try:
            # Imported with the first WebSocket: most proxies never see one.
            from llama_worker.responses.http import websocket

            socket = websocket.ClientSocket(client, request, self._config.max_body_bytes)
            latest: StoredResponse | None = None
            while True:
                latest = self._socket_turn(socket, latest, request, client)
        finally:
            self._sockets.release()

    def _socket_turn(
        self,
        socket: ClientSocket,
        latest: StoredResponse | None,
        request: HttpRequest,
        client: Client,
    ) -> StoredResponse | None:
        """Returns the response from which the next turn may continue even if it is not stored: the
        new one, with the whole conversation as its input. If this turn failed, or the response is
        too large: `latest`, or None if this turn continued from `latest`."""
        message = socket.next_message()
        sink = EventSink(send=client.send_raw, encode=socket.encode, before_reading=socket.read)
        kept = latest
        try:
            body = parse_create(message)
            wanted = references(body)
            if latest is not None and wanted.previous_response_id == latest.id:
                kept = None
                history, found = self._recall_latest(latest, wanted)
            else:
                history, found = self._recall(wanted)
            chat_request = normalise(body, history, found)
            with contextlib.closing(self._exchange(client)) as exchange:
                events = self._generator.generate(exchange, request, chat_request, sink)
        except ApiError as refused:
            socket.refuse(refused)
            return kept
        if events.failure is not None:
            return kept
        items = (*history, *chat_request.input_items)
        whole = stored_response(events.stored, items, None)
        return whole if whole.size_bytes <= self._config.max_stored_bytes else kept

    def _recall_latest(self, latest: StoredResponse, wanted: References) -> RecalledItems:
        """As `_recall`, for a request that continues from `latest`, which the store may lack."""
        ours = dict.fromkeys({*wanted.item_ids} & {*latest.item_ids}, latest)
        stored = self._find(replace(wanted, previous_response_id=None)).holders
        return RecalledResponses(chain=(latest,), holders={**stored, **ours}).read()

    def _recall(self, wanted: References) -> RecalledItems:
        return self._find(wanted).read()

    def _find(self, wanted: References) -> RecalledResponses:
        if not wanted:
            return RecalledResponses()
        reply: WorkerFuture[RecalledResponses] = WorkerFuture()
        return ask(self._proxy, Recall(wanted=wanted, reply=reply), reply)

    def _fetch(self, response_id: str, *, forget: bool = False) -> StoredResponse:
        reply: WorkerFuture[StoredResponse | None] = WorkerFuture()
        question = Fetch(response_id=response_id, forget=forget, reply=reply)
        stored = ask(self._proxy, question, reply)
        if stored is None:
            message = f"Response with id {response_id!r} not found."
            raise ApiError(404, message, code="response_not_found")
        return stored


def _json_body(request: HttpRequest) -> dict[str, Any]:
    if request.header("content-encoding") not in ("", "identity"):
        raise ApiError(415, "the request's body must not be compressed")
    return parse_body(request.body)


def _sse_sink(client: Client, warnings: Callable[[], list[tuple[str, str]]]) -> EventSink:
    headers = [("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache")]

    def send(data: bytes) -> None:
        if client.http.reply.has_begun:
            client.write(data)
        else:
            client.begin(200, [*headers, *warnings()], data=data)

    return EventSink(send=send, encode=sse)


def _warning_headers(warnings: Iterable[str]) -> list[tuple[str, str]]:
    """A header that says in one line what was ignored of the request; none if nothing was."""
    text = "; ".join(warnings)
    safe = "".join(char if " " <= char <= "~" else "?" for char in text)
    return [("X-Llama-Worker-Warning", safe[:1000])] if safe else []
