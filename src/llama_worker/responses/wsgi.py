"""The WSGI application of the Responses proxy: its routes, and what each of them does.

A request runs on one thread of the server from its first to its last byte: what is read from the upstream is
written to the client before more is read, so a slow reader slows the upstream.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import requests
import urllib3.exceptions

from llama_worker.messages import Mailbox
from llama_worker.responses.body import parse_body
from llama_worker.responses.client_watch import ClientWatch
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.events import ResponseEvents
from llama_worker.responses.exchange import AT_THE_END, Exchange, Run, ask
from llama_worker.responses.http import (
    HOP_BY_HOP,
    READ_BYTES,
    Environ,
    StartResponse,
    body_of,
    check_head,
    forwarded,
    give_body,
    json_reply,
    named,
    status_line,
    warning_headers,
)
from llama_worker.responses.ids import item_id_of, response_id_of
from llama_worker.responses.messages import Fetch, Forget, ProxyMessage, Recall, Remember
from llama_worker.responses.refusal import RequestRefused, error_code, refused_by_server
from llama_worker.responses.request import (
    NOTHING_RECALLED,
    ChatRequest,
    Recalled,
    References,
    normalise,
    references,
)
from llama_worker.responses.store import StoredResponse
from llama_worker.runtime.chat_exchange import ChatExchange, Endpoint, cause, send
from llama_worker.runtime.futures import WorkerFuture
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.response import disconnected
from llama_worker.types import RequestFailReason

# Ours are JSON and a stream; the last one lets llama-server go on working for a client that has left (b11434).
_NOT_FOR_CHAT = frozenset({"accept", "accept-encoding", "content-type", "x-conversation-id"})
_CREATE = re.compile(r"(/v1)?/responses/?")
_STORED = re.compile(r"(?:/v1)?/responses/(?P<id>resp_[^/]+?)(?P<input>/input_items)?/?")
_logger = logging.getLogger("llama_worker.responses")


class ResponsesApp:
    """The WSGI application. Its questions of state go to the actor that `proxy` names."""

    def __init__(self, config: ResponsesProxyConfig, proxy: Mailbox[ProxyMessage], watch: ClientWatch) -> None:
        self._config = config
        self._proxy = proxy
        self._watch = watch
        self._endpoint = Endpoint(
            base_url=config.base_url, connect_timeout_s=config.connect_timeout_s, api_key=config.api_key
        )
        self._numbers = itertools.count(1)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """WSGI's entry."""
        exchange = Exchange(next(self._numbers), environ, self._proxy, self._watch, self._config.ca_file)
        environ[AT_THE_END] = exchange.leave
        try:
            return self._route(exchange, environ, start_response)
        except RequestRefused as error:
            refused = error
        except OSError:  # the client's connection: the server knows what to do
            raise
        except Exception as error:
            _logger.error("a request failed: %s", type(error).__name__)
            refused = RequestRefused(500, f"the proxy failed: {type(error).__name__}")
        exchange.leave()
        return json_reply(start_response, refused.status, refused.body())

    def _route(self, exchange: Exchange, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        check_head(environ)
        method, path = environ["REQUEST_METHOD"], environ["REQUEST_URI"].partition("?")[0]
        stored = _STORED.fullmatch(path)
        if method == "POST" and _CREATE.fullmatch(path):
            return self._create(exchange, environ, start_response)
        if method in ("GET", "DELETE") and stored is not None:
            return json_reply(
                start_response, 200, self._stored(method, stored["id"], input_items=bool(stored["input"]))
            )
        return self._pass_through(exchange, environ, start_response)

    # ------------------------------------------------------------ responses

    def _create(self, exchange: Exchange, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        body = parse_body(body_of(environ, self._config.max_body_bytes))
        request = normalise(body, self._recall(references(body)))
        unique, numbers = uuid.uuid4().hex, itertools.count(1)
        exchange.enter(response_id_of(unique))
        chat = ChatExchange(exchange.abort, self._endpoint, ca_file=self._config.ca_file)
        if not chat.open(request.body, forwarded(environ, exclude=_NOT_FOR_CHAT)):
            assert chat.failure is not None
            raise _no_stream(chat.failure)
        events = ResponseEvents(
            response_id=response_id_of(unique),
            created_at=int(time.time()),
            echo=request.echo,
            new_id=lambda prefix: item_id_of(unique, prefix, next(numbers)),
            tools=request.tools,
            seal=request.seal_reasoning,
        )
        run = Run(chat, exchange, events, lambda: self._remember(request, events))
        warnings = warning_headers(request.warnings)
        if request.stream:
            headers = [("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache"), *warnings]
            start_response(status_line(200), headers)
            return run.stream()
        run.to_the_end()
        if events.failure is not None:
            refused = RequestRefused(502, events.failure, code=error_code(events.failure))
            # What was generated is lost: a retry costs it all again, and is the client's to decide.
            return json_reply(start_response, 502, refused.body(), [("X-Should-Retry", "false"), *warnings])
        return json_reply(start_response, 200, events.response, warnings)

    def _recall(self, wanted: References) -> Recalled:
        if not wanted:
            return NOTHING_RECALLED
        reply: WorkerFuture[Recalled] = WorkerFuture()
        return ask(self._proxy, Recall(wanted=wanted, reply=reply), reply)

    def _remember(self, request: ChatRequest, events: ResponseEvents) -> None:
        if request.store:
            stored = StoredResponse(
                response=events.stored,
                input_items=request.input_items,
                previous_response_id=request.previous_response_id,
            )
            self._proxy.tell(Remember(stored=stored))

    def _stored(self, method: str, response_id: str, *, input_items: bool) -> Mapping[str, Any]:
        if method == "DELETE" and not input_items:
            forgotten: WorkerFuture[bool] = WorkerFuture()
            if ask(self._proxy, Forget(response_id=response_id, reply=forgotten), forgotten):
                return {"id": response_id, "object": "response", "deleted": True}
        else:
            fetched: WorkerFuture[StoredResponse | None] = WorkerFuture()
            stored = ask(self._proxy, Fetch(response_id=response_id, reply=fetched), fetched)
            if stored is not None:
                return _input_list(stored) if input_items else stored.response
        raise RequestRefused(404, f"Response with id {response_id!r} not found.", code="response_not_found")

    # ------------------------------------------------------------ all else

    def _pass_through(self, exchange: Exchange, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        exchange.enter()
        request = requests.Request(environ["REQUEST_METHOD"], self._endpoint.base_url).prepare()
        request.url = self._endpoint.base_url + environ["REQUEST_URI"]
        headers = {**forwarded(environ), **self._endpoint.headers()}
        request.headers = requests.structures.CaseInsensitiveDict({**headers, "Connection": "close"})
        give_body(request, environ)
        answer = send(exchange.http(), exchange.abort, self._endpoint, request)
        if isinstance(answer, StreamFailure):
            raise _no_stream(answer)
        raw = answer.raw
        hop_by_hop = HOP_BY_HOP | named(raw.headers.get("Connection", ""))
        passed = [(name, value) for name, value in raw.headers.items() if name.lower() not in hop_by_hop]
        start_response(status_line(answer.status_code, answer.reason), passed)
        return _pieces(raw)


def _no_stream(failure: StreamFailure) -> RequestRefused:
    if failure.http_status is not None:
        return refused_by_server(failure.http_status, failure.detail)
    code = "upstream_unreachable" if failure.reason is RequestFailReason.CONNECT_FAILED else "upstream_failed"
    return RequestRefused(502, f"the upstream server: {failure.detail}", code=code)


def _pieces(raw: urllib3.response.BaseHTTPResponse) -> Iterator[bytes]:
    """The body as it comes, not decoded. What raises ends the client's connection before the body's end."""
    try:
        while data := raw.read1(READ_BYTES, decode_content=False):
            yield data
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ConnectionAbortedError(disconnected("in mid-stream", cause(error)).detail) from error


def _input_list(stored: StoredResponse) -> dict[str, Any]:
    data = [
        {"id": f"item_{number}", **({"type": "message"} if "role" in item else {}), **item}
        for number, item in enumerate(stored.input_items)
    ]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": False}
