"""What the Responses proxy does with a request, on the request's own thread, from its first to its
last byte.

What is read from the upstream is written to the client before more is read, so a slow reader slows
the upstream.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from llama_worker.messages import EndLease, Lease, Mailbox
from llama_worker.responses.api.compaction import compacted, compaction_request
from llama_worker.responses.api.conversation import TEMPLATE_PROBE, Item, LateRole, late_role_of
from llama_worker.responses.api.echo import sampling_echo, sampling_of
from llama_worker.responses.api.events import ResponseEvents, sse
from llama_worker.responses.api.request import (
    NOTHING_RECALLED,
    ChatRequest,
    Recalled,
    References,
    item_id_of,
    normalise,
    parse_body,
    parse_create,
    references,
    response_id_of,
)
from llama_worker.responses.api.store import Found, StoredResponse, stored_response
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.errors import ApiError, error_code, refused_by_server
from llama_worker.responses.exchange import Exchange, Output, Run, ask, has_media
from llama_worker.responses.http.client import Client
from llama_worker.responses.http.heads import forwarded, passed_back, warning_headers
from llama_worker.responses.http.reply import MalformedReply
from llama_worker.responses.http.request_reader import HttpRequest
from llama_worker.responses.messages import Fetch, Forget, ProxyMessage, Recall, Remember
from llama_worker.responses.upstream import ChatExchange, endpoint_of
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.http import session
from llama_worker.runtime.http.session import Reply
from llama_worker.runtime.streams.leased_exchange import LeasedExchange
from llama_worker.stream.decoder import StreamDecoder
from llama_worker.stream.failure import StreamFailure, disconnected
from llama_worker.types import RequestFailReason

if TYPE_CHECKING:
    from llama_worker.responses.http.websocket import ClientSocket

_QUESTION_S = 2.0  # for a small one, which the server answers within milliseconds
_RESTARTING_S = 5  # until a server that was given up is there again, about
_SAMPLING_S = 60.0  # how long it is taken to go on with the same flags
# Ours are JSON and a stream; the last one lets llama-server go on working for a client that has
# left (b11434).
_NOT_FOR_CHAT = frozenset(
    {"accept", "accept-encoding", "content-encoding", "content-type", "x-conversation-id"}
    | {f"sec-websocket-{name}" for name in ("key", "version", "extensions", "protocol")}
)
_MAX_SOCKETS = 64  # each holds a thread for as long as it is open
_CHAT = re.compile(r"(/v1)?/chat/completions/?")
_COMPACT = re.compile(r"(/v1)?/responses/compact/?")
_CREATE = re.compile(r"(/v1)?/responses/?")
_STORED = re.compile(r"(?:/v1)?/responses/(?P<id>resp_[^/]+?)(?P<input>/input_items)?/?")
_logger = logging.getLogger("llama_worker.responses")


class ResponsesApp:
    """`serve` is the listener's `Serve`. Its questions of state go to the actor that `proxy`
    names. `watch` gives leases, and watches over what holds one; `restarts`: it will also
    have a server again where one is given up."""

    def __init__(
        self,
        config: ResponsesProxyConfig,
        proxy: Mailbox[ProxyMessage],
        watch: Mailbox[Lease | EndLease],
        *,
        restarts: bool,
    ) -> None:
        self._config = config
        self._proxy = proxy
        self._watch = watch
        self._restarts = restarts
        self._endpoint = endpoint_of(config)
        self._not_for_chat = _NOT_FOR_CHAT | {name.lower() for name in self._endpoint.headers()}
        self._numbers = itertools.count(1)
        self._sampling: Mapping[str, float] = {}  # of the server, and until when that counts
        self._sampling_until = -math.inf
        self._sockets = threading.BoundedSemaphore(_MAX_SOCKETS)

    def serve(self, request: HttpRequest, client: Client) -> None:
        """Answer it. Raises OSError where the client's connection is broken, or is to be."""
        exchange = self._exchange(client)
        try:
            self._route(exchange, request, client)
        except ApiError as refused:
            exchange.leave()
            client.reply(request, refused.status, refused.body(), refused.headers())
        except OSError:  # the client's connection
            raise
        except Exception as error:
            _logger.error("a request failed: %s", type(error).__name__)
            if client.http.reply.has_begun:
                raise
            failed = ApiError(500, f"the proxy failed: {type(error).__name__}")
            client.reply(request, failed.status, failed.body())
        finally:
            exchange.leave()

    def _exchange(self, client: Client) -> Exchange:
        number = next(self._numbers)
        return Exchange(number, client, self._proxy, self._config, self._watch)

    def _route(self, exchange: Exchange, request: HttpRequest, client: Client) -> None:
        method, path = request.method, request.target.partition("?")[0]
        stored = _STORED.fullmatch(path)
        if (
            method == "OPTIONS"
            and client.origin is not None
            and request.header("access-control-request-method")
        ):
            client.begin(request, 204, [])  # what an allowed page's browser asks first
            client.end()
        elif method == "POST" and _CREATE.fullmatch(path):
            self._create(exchange, request, client)
        elif request.header("upgrade").lower() == "websocket" and _CREATE.fullmatch(path):
            self._serve_socket(request, client)
        elif method == "POST" and _COMPACT.fullmatch(path):
            self._compact(exchange, request, client)
        elif method in ("GET", "DELETE") and stored is not None:
            client.reply(
                request, 200, self._stored(method, stored["id"], input_items=bool(stored["input"]))
            )
        else:
            self._pass_through(exchange, request, client)

    # ------------------------------------------------------------ responses

    def _create(self, exchange: Exchange, request: HttpRequest, client: Client) -> None:
        body = _json_body(request)
        build = partial(normalise, body, self._recall(references(body)))

        def output(chat_request: ChatRequest) -> Output | None:
            return _sse_output(request, client, chat_request) if chat_request.stream else None

        chat_request, events = self._generate(exchange, request, build, output)
        if chat_request.stream:
            client.end()
        else:
            _check_generated(events)
            client.reply(request, 200, events.response, warning_headers(chat_request.warnings))

    def _compact(self, exchange: Exchange, request: HttpRequest, client: Client) -> None:
        body = _json_body(request)
        build = partial(compaction_request, body, self._recall(references(body)))
        chat_request, events = self._generate(exchange, request, build, lambda _: None)
        _check_generated(events)
        warnings = list(chat_request.warnings)
        if events.response["status"] == "incomplete":
            warnings.append("the summary was cut by the token limit")
        reply = compacted(events.response, f"cmp_{uuid.uuid4().hex}")
        client.reply(request, 200, reply, warning_headers(warnings))

    def _serve_socket(self, request: HttpRequest, client: Client) -> None:
        """One response after the other, for as long as the connection lasts."""
        if not self._sockets.acquire(blocking=False):
            raise ApiError(503, "too many WebSockets are open", retry_after_s=2)
        try:
            # With the first of them: most proxies never see one.
            from llama_worker.responses.http import websocket

            socket = websocket.ClientSocket(client, request, self._config.max_body_bytes)
            socket.accept()
            latest: Conversation | None = None
            while True:
                latest = self._socket_turn(socket, latest, request, client)
        finally:
            self._sockets.release()

    def _socket_turn(
        self,
        socket: ClientSocket,
        latest: Conversation | None,
        request: HttpRequest,
        client: Client,
    ) -> Conversation | None:
        """What the next turn may go on from: not from what this one went on from and failed."""
        message = socket.next_message()
        size_bytes = len(message)
        exchange = self._exchange(client)
        output = Output(send=client.send_raw, encode=socket.encode, before_reading=socket.read)
        kept = latest
        try:
            body = parse_create(message)
            if latest is not None and body.get("previous_response_id") == latest.response_id:
                recalled, kept = latest.recalled(), None
                size_bytes += latest.size_bytes
            else:
                recalled = self._recall(references(body))
            build = partial(normalise, body, recalled)
            chat_request, events = self._generate(exchange, request, build, lambda _: output)
        except ApiError as refused:
            exchange.leave()
            socket.refuse(refused)
            return kept
        finally:
            exchange.leave()
        if events.failure is not None or size_bytes > self._config.max_stored_bytes:
            return kept
        items = (*(recalled.history or ()), *chat_request.input_items, *events.response["output"])
        return Conversation(response_id=events.response["id"], items=items, size_bytes=size_bytes)

    def _generate(
        self,
        exchange: Exchange,
        request: HttpRequest,
        build: Callable[..., ChatRequest],
        output: Callable[[ChatRequest], Output | None],
    ) -> tuple[ChatRequest, ResponseEvents]:
        """Make a response, to its end. Raises ApiError where none was begun.

        `build`: of the late role. `output`: of where the events go as they come; None: nowhere.
        """
        unique, numbers = uuid.uuid4().hex, itertools.count(1)
        chat_request = build()
        exchange.enter(response_id_of(unique))
        exchange.lease(
            f"responses:{response_id_of(unique)}",
            has_media=has_media(chat_request.body["messages"]),
        )
        if chat_request.has_late_instructions and self._late_role(exchange, request) == "system":
            chat_request = build(late_role="system")
        sampling = self._server_sampling(exchange, request)
        events = ResponseEvents(
            response_id=response_id_of(unique),
            clock=time.time,
            echo={**chat_request.echo, **sampling_echo(chat_request.body, sampling)},
            new_id=lambda prefix: item_id_of(unique, prefix, next(numbers)),
            tools=chat_request.tools,
            seal=chat_request.seal_reasoning,
        )

        def over() -> None:
            self._remember(chat_request, events)
            exchange.leave()

        run = Run(
            events,
            exchange.abort,
            output=output(chat_request),
            heartbeat_s=self._config.heartbeat_s,
            over=over,
        )

        def before_reading() -> None:
            exchange.announce()
            run.before_reading()

        chat = ChatExchange(
            exchange.abort,
            self._endpoint,
            exchange.leased,
            before_reading=before_reading,
            silence_s=self._config.heartbeat_s if chat_request.stream else None,
        )
        # the more is told, the sooner a prompt's standstill shows
        body = {**chat_request.body, "return_progress": True}
        if chat.open(body, forwarded(request, exclude=self._not_for_chat)):
            run.to_the_end(chat)
        else:
            assert chat.failure is not None
            refused = self._no_stream(chat.failure, exchange.leased)
            if not run.has_begun:
                raise refused
            run.fail(refused)
        return chat_request, events

    def _late_role(self, exchange: Exchange, request: HttpRequest) -> LateRole:
        """As the server's template has it now; "user", which every template takes, where it does
        not say."""
        told = self._ask_server(exchange, request, "POST", "/apply-template", TEMPLATE_PROBE)
        return late_role_of(told.get("prompt") if isinstance(told, Mapping) else None)

    def _server_sampling(self, exchange: Exchange, request: HttpRequest) -> Mapping[str, float]:
        """What the server samples with where a request does not say."""
        if time.monotonic() >= self._sampling_until:
            self._sampling = sampling_of(self._ask_server(exchange, request, "GET", "/props"))
            self._sampling_until = time.monotonic() + _SAMPLING_S
        return self._sampling

    def _ask_server(
        self,
        exchange: Exchange,
        request: HttpRequest,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
    ) -> object:
        """The answer's JSON; None where there is none."""
        headers = {"Authorization": request.header("authorization")}
        try:
            _, answer = session.ask(
                self._endpoint,
                method,
                path,
                headers=headers,
                body=body,
                timeout_s=_QUESTION_S,
                abort=exchange.abort,
            )
        except (OSError, ValueError):
            return None
        return session.json_of(answer)

    def _recall(self, wanted: References) -> Recalled:
        if not wanted:
            return NOTHING_RECALLED
        reply: WorkerFuture[Found] = WorkerFuture()
        return ask(self._proxy, Recall(wanted=wanted, reply=reply), reply).recalled()

    def _remember(self, request: ChatRequest, events: ResponseEvents) -> None:
        if request.store:
            self._proxy.tell(
                Remember(
                    stored=stored_response(
                        events.stored, request.input_items, request.previous_response_id
                    )
                )
            )

    def _stored(self, method: str, response_id: str, *, input_items: bool) -> Mapping[str, Any]:
        if method == "DELETE" and not input_items:
            forgotten: WorkerFuture[bool] = WorkerFuture()
            if ask(self._proxy, Forget(response_id=response_id, reply=forgotten), forgotten):
                return {"id": response_id, "object": "response", "deleted": True}
        else:
            fetched: WorkerFuture[StoredResponse | None] = WorkerFuture()
            stored = ask(self._proxy, Fetch(response_id=response_id, reply=fetched), fetched)
            if stored is not None:
                return _input_list(stored) if input_items else stored.response()
        raise ApiError(
            404, f"Response with id {response_id!r} not found.", code="response_not_found"
        )

    # ------------------------------------------------------------ all else

    def _pass_through(self, exchange: Exchange, request: HttpRequest, client: Client) -> None:
        exchange.enter()
        is_chat = request.method == "POST" and _CHAT.fullmatch(request.target.partition("?")[0])
        if is_chat:
            chat = session.json_of(request.body)
            chat = chat if isinstance(chat, Mapping) else {}
            exchange.lease(
                f"responses:chat_{uuid.uuid4().hex}",
                has_media=has_media(chat.get("messages")),
                in_one_piece=chat.get("stream") is not True,
            )
        exchange.announce()
        leased = exchange.leased
        has_body = (
            request.body or request.header("content-length") or request.header("transfer-encoding")
        )
        leased.sends()
        try:
            reply = session.send(
                exchange.abort,
                self._endpoint,
                request.method,
                request.target,
                headers=forwarded(request),
                body=request.body if has_body else None,
                waiter=_Waiter(leased) if leased.request_id else None,
            )
        except (OSError, ValueError) as error:
            failure = session.no_reply(error, exchange.abort, self._endpoint)
            failure = leased.closed(failure) or failure
            raise self._no_stream(failure, leased) from error
        with contextlib.closing(reply):
            if leased.request_id:
                leased.replied(reply.status, time.monotonic())
            self._pass_back(reply, leased, request, client)

    def _pass_back(
        self, reply: Reply, leased: LeasedExchange, request: HttpRequest, client: Client
    ) -> None:
        try:
            client.begin(
                request,
                reply.status,
                passed_back(reply.headers.iteritems()),
                reason=reply.reason,
            )
        except MalformedReply:
            raise ApiError(
                502, "the upstream server: its reply is malformed", code="upstream_failed"
            ) from None
        is_stream = "text/event-stream" in reply.headers.get("Content-Type", "")
        decoder = StreamDecoder() if is_stream and leased.request_id else None
        while True:
            try:
                piece = _next_piece(reply)
            except OSError as error:
                failure = leased.closed(disconnected("in mid-stream", str(error)))
                if not (leased.is_given_up and failure is not None and decoder is not None):
                    raise
                # As the server itself tells of an error in a stream.
                last = {"error": {"message": failure.detail, "type": "server_error", "code": 503}}
                client.write(f"\n\ndata: {json.dumps(last)}\n\n".encode())
                break
            if not piece:
                leased.closed(None)
                break
            if leased.request_id:
                events = decoder.feed(piece) if decoder is not None else ()
                leased.heard(events, time.monotonic())
            client.write(piece)  # what this raises says nothing of the server
        client.end()

    def _no_stream(self, failure: StreamFailure, leased: LeasedExchange) -> ApiError:
        if leased.is_given_up and self._restarts:
            return ApiError(
                503, failure.detail, code="upstream_failed", retry_after_s=_RESTARTING_S
            )
        if leased.is_given_up:
            return ApiError(504, failure.detail, code="upstream_failed")
        if failure.http_status is not None:
            return refused_by_server(failure.http_status, failure.detail)
        code = (
            "upstream_unreachable"
            if failure.reason is RequestFailReason.CONNECT_FAILED
            else "upstream_failed"
        )
        return ApiError(502, f"the upstream server: {failure.detail}", code=code)


class _Waiter(Struct):
    """Of an exchange that holds a slot: whether the server is waited for is to be known."""

    leased: LeasedExchange
    silence_s: float | None = None

    def before_reading(self) -> None:
        self.leased.waits()


class Conversation(Struct, frozen=True, kw_only=True):
    """The latest response of a WebSocket: the next may go on from it though it is not stored."""

    response_id: str
    items: tuple[Item, ...]
    size_bytes: int  # of what the client sent for it, about

    def recalled(self) -> Recalled:
        return Recalled(history=self.items, items={})


def _json_body(request: HttpRequest) -> dict[str, Any]:
    if request.header("content-encoding") not in ("", "identity"):
        raise ApiError(415, "the request's body must not be compressed")
    return parse_body(request.body)


def _sse_output(request: HttpRequest, client: Client, chat_request: ChatRequest) -> Output:
    headers = [
        ("Content-Type", "text/event-stream"),
        ("Cache-Control", "no-cache"),
        *warning_headers(chat_request.warnings),
    ]

    def send(data: bytes) -> None:
        if client.http.reply.has_begun:
            client.write(data)
        else:
            client.begin(request, 200, headers, data=data)

    return Output(send=send, encode=lambda events: sse(events))


def _check_generated(events: ResponseEvents) -> None:
    """Raises ApiError where a response in one piece failed."""
    if events.failure is not None:
        # What was generated is lost: a retry costs it all again, and is the client's to decide.
        raise ApiError(502, events.failure, code=error_code(events.failure), should_retry=False)


def _next_piece(reply: Reply) -> bytes:
    """The next of the body, not decoded. What it raises ends the client's connection before the
    body's end."""
    try:
        return reply.read()
    except ValueError as error:
        raise ConnectionAbortedError(disconnected("in mid-stream", str(error)).detail) from error


def _input_list(stored: StoredResponse) -> dict[str, Any]:
    data = [
        {"id": f"item_{number}", **({"type": "message"} if "role" in item else {}), **item}
        for number, item in enumerate(stored.input_items())
    ]
    ends = (
        {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        if data
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": data, **ends, "has_more": False}
