"""The WSGI side of the Responses proxy: routes, replies, and the threaded server (`cheroot`) that runs them.

A request runs on one thread of the server from its first to its last byte: what is read from the upstream is
written to the client before more is read, so a slow reader slows the upstream.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import cheroot.errors
import pykka
import requests
import urllib3.exceptions
from cheroot import wsgi

from llama_worker.actors.chat_exchange import ChatExchange, Endpoint, disconnected, send
from llama_worker.actors.client_watch import ClientWatch
from llama_worker.actors.connections import Abort, session
from llama_worker.actors.futures import WorkerFuture
from llama_worker.actors.timers import Timer, call_at
from llama_worker.messages import Mailbox, StreamFailure
from llama_worker.request_state import SETTLE_S
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.events import ResponseEvents, sse
from llama_worker.responses.messages import Enter, Fetch, Forget, Leave, ProxyMessage, Recall, Remember
from llama_worker.responses.refusal import RequestRefused, error_code, refused_by_server
from llama_worker.responses.request import (
    NOTHING_RECALLED,
    ChatRequest,
    Recalled,
    References,
    normalise,
    parse_body,
    references,
)
from llama_worker.responses.store import StoredResponse
from llama_worker.stream_events import StreamEvent
from llama_worker.types import RequestFailReason

Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], object]
Headers = list[tuple[str, str]]
T = TypeVar("T")

WARNING_HEADER = "X-Llama-Worker-Warning"
KEEPALIVE = b": keepalive\n\n"

_ANSWER_S = 10.0  # for the actor, which answers within milliseconds
_THREADS = 8  # grows with the number of requests that run
_LOOK_UP_S = 30.0  # how often connections that nobody uses are looked for; what comes is noticed at once
_POKE_S = 0.01
_AT_THE_END = "llama_worker.at_the_end"
_CLIENT_SOCKET = "llama_worker.client_socket"
_READ_BYTES = 65536
_HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip
_SET_BY_US = frozenset({"host", "content-length", "expect"})
# Ours are JSON and a stream; the last one lets llama-server go on working for a client that has left (b11434).
_NOT_FOR_CHAT = frozenset({"accept", "accept-encoding", "content-type", "x-conversation-id"})
_CREATE = re.compile(r"(/v1)?/responses/?")
_STORED = re.compile(r"(?:/v1)?/responses/(?P<id>resp_[^/]+?)(?P<input>/input_items)?/?")
_logger = logging.getLogger("llama_worker.responses")


class ResponsesApp:
    """The WSGI application. Its questions of state go to the actor that `desk` names."""

    def __init__(self, config: ResponsesProxyConfig, desk: Mailbox[ProxyMessage], watch: ClientWatch) -> None:
        self._config = config
        self._desk = desk
        self._watch = watch
        self._endpoint = Endpoint(
            base_url=config.base_url, connect_timeout_s=config.connect_timeout_s, api_key=config.api_key
        )
        self._numbers = itertools.count(1)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """WSGI's entry."""
        exchange = _Exchange(next(self._numbers), environ, self._desk, self._watch, self._config.ca_file)
        environ[_AT_THE_END] = exchange.leave
        try:
            return self._route(exchange, environ, start_response)
        except RequestRefused as refused:
            exchange.leave()
            return _json(start_response, refused.status, refused.body())

    def _route(self, exchange: _Exchange, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        method, target = environ["REQUEST_METHOD"], environ["REQUEST_URI"]
        if not target.startswith("/"):
            raise RequestRefused(400, "the request's target must be a path")
        path = target.partition("?")[0]
        stored = _STORED.fullmatch(path)
        if method == "POST" and _CREATE.fullmatch(path):
            return self._create(exchange, environ, start_response)
        if method in ("GET", "DELETE") and stored is not None:
            return _json(start_response, 200, self._stored(method, stored["id"], input_items=bool(stored["input"])))
        return self._pass_through(exchange, environ, start_response)

    # ------------------------------------------------------------ responses

    def _create(self, exchange: _Exchange, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        body = parse_body(_body_of(environ, self._config.max_body_bytes))
        request = normalise(body, self._recall(references(body)))
        exchange.enter(counted=True)
        chat = ChatExchange(exchange.http(), exchange.abort, self._endpoint)
        if not chat.open(_finite(request.body), _forwarded(environ, exclude=_NOT_FOR_CHAT)):
            assert chat.failure is not None
            raise _no_stream(chat.failure)
        events = ResponseEvents(
            response_id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            echo=request.echo,
            new_id=lambda prefix: f"{prefix}_{uuid.uuid4().hex}",
            seal=request.seal_reasoning,
        )
        run = _Run(chat, exchange, events, lambda: self._remember(request, events))
        warnings = _warnings(request.warnings)
        if request.stream:
            headers = [("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache"), *warnings]
            start_response(_status(200), headers)
            return run.stream()
        run.to_the_end()
        if events.failure is not None:
            refused = RequestRefused(502, events.failure, code=error_code(events.failure))
            # What was generated is lost: a retry costs it all again, and is the client's to decide.
            return _json(start_response, 502, refused.body(), [("X-Should-Retry", "false"), *warnings])
        return _json(start_response, 200, events.response, warnings)

    def _recall(self, wanted: References) -> Recalled:
        if not wanted:
            return NOTHING_RECALLED
        reply: WorkerFuture[Recalled] = WorkerFuture()
        return _ask(self._desk, Recall(wanted=wanted, reply=reply), reply)

    def _remember(self, request: ChatRequest, events: ResponseEvents) -> None:
        if request.store:
            stored = StoredResponse(
                response=events.response,
                input_items=request.input_items,
                previous_response_id=request.previous_response_id,
            )
            self._desk.tell(Remember(stored=stored))

    def _stored(self, method: str, response_id: str, *, input_items: bool) -> Mapping[str, Any]:
        if method == "DELETE" and not input_items:
            forgotten: WorkerFuture[bool] = WorkerFuture()
            if _ask(self._desk, Forget(response_id=response_id, reply=forgotten), forgotten):
                return {"id": response_id, "object": "response", "deleted": True}
        else:
            fetched: WorkerFuture[StoredResponse | None] = WorkerFuture()
            stored = _ask(self._desk, Fetch(response_id=response_id, reply=fetched), fetched)
            if stored is not None:
                return _input_list(stored) if input_items else stored.response
        raise RequestRefused(404, f"Response with id {response_id!r} not found.", code="response_not_found")

    # ------------------------------------------------------------ all else

    def _pass_through(self, exchange: _Exchange, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        exchange.enter(counted=False)
        request = requests.Request(environ["REQUEST_METHOD"], self._endpoint.base_url).prepare()
        request.url = self._endpoint.base_url + environ["REQUEST_URI"]
        headers = {**_forwarded(environ), **self._endpoint.headers()}
        request.headers = requests.structures.CaseInsensitiveDict({**headers, "Connection": "close"})
        _give_body(request, environ)
        answer = send(exchange.http(), exchange.abort, self._endpoint, request)
        if isinstance(answer, StreamFailure):
            raise _no_stream(answer)
        raw = answer.raw
        hop_by_hop = _HOP_BY_HOP | _named(raw.headers.get("Connection", ""))
        passed = [(name, value) for name, value in raw.headers.items() if name.lower() not in hop_by_hop]
        start_response(_status(answer.status_code, answer.reason), passed)
        return _pieces(raw)


class _Exchange:
    """One request of a client and what it has open. `cut` is for any thread, the rest for the request's own."""

    def __init__(
        self, number: int, environ: Environ, desk: Mailbox[ProxyMessage], watch: ClientWatch, ca_file: str | None
    ) -> None:
        self.abort = Abort()
        self._ca_file = ca_file
        self._number = number
        self._client: socket.socket | None = environ.get(_CLIENT_SOCKET)
        self._desk = desk
        self._watch = watch
        self._http: requests.Session | None = None
        self._entered = False

    def enter(self, *, counted: bool) -> None:
        """Ask for admission; from now on a client that leaves takes the upstream's work along."""
        self._entered = True
        reply: WorkerFuture[bool] = WorkerFuture()
        entering = Enter(exchange_id=self._number, cut=self.cut, counted=counted, reply=reply)
        if not _ask(self._desk, entering, reply):
            raise RequestRefused(429, "too many requests run at once", code="rate_limit_exceeded")
        if self._client is not None:
            self._watch.watch(self._client, self.abort.abort)

    def http(self) -> requests.Session:
        """The one session."""
        self._http = session(self.abort)
        self._http.verify = self._ca_file or True
        return self._http

    def cut(self) -> None:
        """End both connections now."""
        self.abort.abort()
        if self._client is not None:
            try:
                self._client.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it is gone already

    def leave(self) -> None:
        """Idempotent; a stream that has not ended is ended."""
        if not self._entered:
            return
        self._entered = False
        if self._client is not None:
            self._watch.unwatch(self._client)
        self.abort.abort()
        self.abort.detach()
        if self._http is not None:
            self._http.close()
        self._desk.tell(Leave(exchange_id=self._number))


class _Run:
    """Drives a response from its chat completion, on the thread that wants the bytes."""

    def __init__(
        self, chat: ChatExchange, exchange: _Exchange, events: ResponseEvents, remember: Callable[[], object]
    ) -> None:
        self._chat = chat
        self._exchange = exchange
        self._events = events
        self._remember = remember
        self._settled: Timer | None = None

    def to_the_end(self) -> None:
        """For a reply in one piece."""
        for _ in self.stream():
            pass

    def stream(self) -> Iterator[bytes]:
        """The events, as they come."""
        yield sse(self._events.begin())
        try:
            while not self._events.over:
                told = self._chat.read()
                yield self._written(told) if told is not None else self._ended()
        finally:
            if self._settled is not None:
                self._settled.cancel()
            self._chat.close()

    def _written(self, told: list[StreamEvent]) -> bytes:
        out = [event for said in told for event in self._events.feed(said)]
        if self._events.over:
            self._leave()
        elif self._events.settling and self._settled is None:
            self._settled = call_at(time.monotonic() + SETTLE_S, self._exchange.abort.abort)
        if not told and not self._chat.decoder.partial:
            return KEEPALIVE
        return sse(out)

    def _ended(self) -> bytes:
        failure = self._chat.failure
        out = self._events.end() if failure is None or self._events.settling else self._events.fail(failure.detail)
        self._leave()
        return sse(out)

    def _leave(self) -> None:
        """Before the last event is sent: who has read it may refer to the response, and have its place."""
        self._remember()
        self._exchange.leave()


def _ask(desk: Mailbox[ProxyMessage], question: ProxyMessage, reply: WorkerFuture[T]) -> T:
    """The actor's answer; the calling thread may wait, it is no actor's."""
    try:
        if desk.tell(question):
            return reply.get(timeout=_ANSWER_S)
    except pykka.Timeout:
        pass
    raise RequestRefused(503, "the proxy is going down")


def _no_stream(failure: StreamFailure) -> RequestRefused:
    if failure.http_status is not None:
        return refused_by_server(failure.http_status, failure.detail)
    code = "upstream_unreachable" if failure.reason is RequestFailReason.CONNECT_FAILED else "upstream_failed"
    return RequestRefused(502, f"the upstream server: {failure.detail}", code=code)


def _pieces(raw: urllib3.response.BaseHTTPResponse) -> Iterator[bytes]:
    """The body as it comes, not decoded. What raises ends the client's connection before the body's end."""
    try:
        while data := raw.read1(_READ_BYTES, decode_content=False):
            yield data
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ConnectionAbortedError(disconnected("in mid-stream", error).detail) from error


def _json(
    start_response: StartResponse, status: int, value: Mapping[str, Any], headers: Iterable[tuple[str, str]] = ()
) -> Iterable[bytes]:
    body = json.dumps(value).encode()
    sent = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *headers]
    start_response(_status(status), sent)
    return [body]


def _status(code: int, reason: str = "") -> str:
    try:
        return f"{code} {reason or HTTPStatus(code).phrase}"
    except ValueError:
        return f"{code} Unknown"


def _warnings(warnings: Iterable[str]) -> Headers:
    text = "; ".join(warnings)
    safe = "".join(char if " " <= char <= "~" else "?" for char in text)
    return [(WARNING_HEADER, safe[:1000])] if safe else []


def _input_list(stored: StoredResponse) -> dict[str, Any]:
    data = [
        {"id": f"item_{number}", **({"type": "message"} if "role" in item else {}), **item}
        for number, item in enumerate(stored.input_items)
    ]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": False}


def _finite(body: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        json.dumps(body, allow_nan=False)
    except ValueError:
        raise RequestRefused(400, "a number of the request is beyond the range of a double") from None
    return body


# ---------------------------------------------------------------- requests


def _body_of(environ: Environ, max_bytes: int) -> bytes:
    if environ.get("HTTP_CONTENT_ENCODING", "identity") != "identity":
        raise RequestRefused(415, "the request's body must not be compressed")
    if int(environ.get("CONTENT_LENGTH") or 0) > max_bytes:
        raise RequestRefused(413, f"the request's body is larger than {max_bytes} bytes")
    pieces, size = [], 0
    for piece in _body_pieces(environ):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise RequestRefused(413, f"the request's body is larger than {max_bytes} bytes")
    return b"".join(pieces)


def _body_pieces(environ: Environ) -> Iterator[bytes]:
    try:
        while piece := environ["wsgi.input"].read(_READ_BYTES):
            yield piece
    except cheroot.errors.MaxSizeExceeded:
        raise RequestRefused(413, "the request's body is too large") from None
    except OSError as error:
        if error.errno is not None or isinstance(error, TimeoutError):
            raise
        raise RequestRefused(413, "the request's body is too large") from None  # so does cheroot say it of a chunk
    except ValueError:
        raise RequestRefused(400, "the request's body is not chunked as it should be") from None


def _give_body(request: requests.PreparedRequest, environ: Environ) -> None:
    """The client's body, streaming, framed as the client did."""
    if environ.get("CONTENT_LENGTH"):
        request.headers["Content-Length"] = environ["CONTENT_LENGTH"]
        request.body = environ["wsgi.input"]
    elif environ.get("wsgi.input_terminated"):
        request.headers["Transfer-Encoding"] = "chunked"
        request.body = _body_pieces(environ)  # type: ignore[assignment]  # requests takes any iterable


def _forwarded(environ: Environ, exclude: Iterable[str] = ()) -> dict[str, str]:
    """The client's headers, but those that belong to its connection."""
    dropped = {*_HOP_BY_HOP, *_SET_BY_US, *_named(environ.get("HTTP_CONNECTION", "")), *exclude}
    headers = {
        name.removeprefix("HTTP_").replace("_", "-").title(): value
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }
    if environ.get("CONTENT_TYPE"):
        headers["Content-Type"] = environ["CONTENT_TYPE"]
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


def _named(connection: str) -> set[str]:
    """The headers that a Connection header declares to be the connection's."""
    return {name.strip().lower() for name in connection.split(",")}


# ---------------------------------------------------------------- the server


class _Gateway(wsgi.Gateway_10):
    """Lets the application know the client's socket."""

    def get_environ(self) -> dict[str, Any]:  # type: ignore[override]  # cheroot's types are a sketch
        environ: dict[str, Any] = super().get_environ()  # type: ignore[no-untyped-call]
        environ[_CLIENT_SOCKET] = self.req.conn.socket
        return environ

    def respond(self) -> None:
        self.req.server.more_threads()
        try:
            super().respond()
        finally:  # the application's iterable is not closed where the headers of an empty reply cannot be sent
            self.env.get(_AT_THE_END, lambda: None)()

    def start_response(self, *args: Any) -> Any:
        """Replies that come before the request was read end the connection: the rest is no next request."""
        body = self.req.rfile
        unread = not body.closed if self.req.chunked_read else body.remaining > _READ_BYTES
        if unread:
            self.req.close_connection = True
        return super().start_response(*args)


class _Server(wsgi.Server):
    """Grows its threads with the requests that run: a stream holds one for as long as it lasts."""

    def __init__(self, config: ResponsesProxyConfig, app: ResponsesApp) -> None:
        super().__init__(
            (config.host, config.port),
            app,
            numthreads=_THREADS,
            server_name="llama-worker",
            request_queue_size=128,
            timeout=config.client_timeout_s,
        )
        self.gateway = _Gateway
        self.expiration_interval = _LOOK_UP_S
        self.max_request_body_size = config.max_body_bytes + _READ_BYTES  # ours comes first, and says it in JSON
        self._growing = threading.Lock()

    def more_threads(self) -> None:
        """Called on a thread that is about to be busy."""
        with self._growing:
            if self.ready and self.requests.idle == 0:
                self.requests.grow(_THREADS)

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        """One line; a traceback could show what is nobody's business."""
        _logger.log(level, "%s", msg)


class CherootListener:
    """The server and its threads. The constructor binds the port: OSError where it cannot."""

    def __init__(self, config: ResponsesProxyConfig, desk: Mailbox[ProxyMessage]) -> None:
        self._watch = ClientWatch("llama_worker-responses-watch")
        self._server = _Server(config, ResponsesApp(config, desk, self._watch))
        self._served = threading.Event()
        self._stops: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
        try:
            self._server.prepare()
        except BaseException:
            self._watch.stop()
            raise

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.bind_addr[1])

    def serve(self) -> None:
        """Take connections until stopped. Blocks until every thread has ended."""
        try:
            self._server.serve()
        finally:
            self._served.set()
            if self._stops.empty():  # it ended by itself
                self.stop()
            self._stops.get().join()
            self._watch.stop()

    def stop(self) -> None:
        """Let `serve` return. Never blocks."""
        thread = threading.Thread(target=self._stop, name="llama_worker-responses-stop", daemon=True)
        thread.start()
        self._stops.put(thread)

    def _stop(self) -> None:
        host, port = self._server.bind_addr[:2]
        stopping = threading.Thread(target=self._server.stop, name="llama_worker-responses-join", daemon=True)
        stopping.start()
        while not self._served.wait(_POKE_S):
            try:
                socket.create_connection((host, port), timeout=1.0).close()  # the server looks up when somebody comes
            except OSError:
                continue
        stopping.join()
