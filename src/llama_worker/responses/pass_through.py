"""Forwards requests to the upstream, and its replies to the client byte for byte, as they come."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from http import HTTPStatus

from llama_worker.config.validation import json_of
from llama_worker.request.params import answers_requested
from llama_worker.responses.errors import ApiError
from llama_worker.responses.exchange import Exchange
from llama_worker.responses.http.client import Client
from llama_worker.responses.http.reply import MalformedReply
from llama_worker.responses.http.request_reader import HttpRequest, header_words
from llama_worker.runtime.host import threads
from llama_worker.runtime.http import session
from llama_worker.runtime.http.session import HttpReply
from llama_worker.stream.decoder import StreamDecoder
from llama_worker.stream.events import Done
from llama_worker.stream.failure import StreamFailure, describe_http_error, disconnected

_CHAT = re.compile(r"(/v1)?/chat/completions/?")
_HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
# origin: the proxy has allowed the page, but an upstream that checks origins might refuse it
_NOT_FORWARDED = frozenset({"host", "content-length", "expect", "origin"})
# A chat's stream is decoded here, too: compressed, it would look silent and be given up. And with
# `x-conversation-id` llama-server would go on working for a client that has left (b11434).
NOT_FOR_CHAT = frozenset({"accept-encoding", "x-conversation-id"})
_CORS = "access-control-"
_MAX_REFUSAL_BYTES = 64 * 1024  # of the body of an error reply, kept to tell the worker


def forwarded(request: HttpRequest, exclude: Iterable[str] = ()) -> dict[str, str]:
    """The client's headers for the upstream, without those of its connection and `exclude`."""
    dropped = {*_HOP_BY_HOP, *_NOT_FORWARDED, *exclude}
    dropped |= {word.replace("_", "-") for word in header_words(request.header("connection"))}
    return {
        name: value
        for lower, (name, value) in request.headers.items()
        if lower.replace("_", "-") not in dropped
    }


def passed_back(reply: HttpReply) -> list[tuple[str, str]]:
    """The upstream's headers for the client, without those of its connection and of CORS: the proxy
    decides which pages may read a reply."""
    dropped = _HOP_BY_HOP | header_words(reply.header("connection"))
    return [
        (name, value)
        for name, value in reply.headers
        if name.lower() not in dropped and not name.lower().startswith(_CORS)
    ]


def pass_through(exchange: Exchange, request: HttpRequest, client: Client) -> None:
    """Forward the request and its reply. Raises ApiError if there is no valid reply, OSError if the
    client's connection is broken or must be cut."""
    is_chat = request.method == "POST" and _CHAT.fullmatch(request.path)
    if is_chat:
        chat = json_of(request.body)
        chat = chat if isinstance(chat, Mapping) else {}
        exchange.lease(f"responses:chat_{uuid.uuid4().hex}", chat, answers=answers_requested(chat))
    leased, endpoint = exchange.leased, exchange.upstream.endpoint
    has_body = (
        request.body or request.header("content-length") or request.header("transfer-encoding")
    )
    leased.started_waiting()
    try:
        reply = session.send(
            exchange.abort,
            endpoint,
            request.method,
            request.target,
            headers=forwarded(request, exclude=NOT_FOR_CHAT if is_chat else ()),
            body=request.body if has_body else None,
            waiter=leased,
        )
    except (OSError, ValueError) as error:
        failure = session.send_failure(error, exchange.abort, endpoint)
        failure = leased.closed(failure) or failure
        raise exchange.error_for_client(failure) from error
    with contextlib.closing(reply):
        if reply.status == HTTPStatus.OK:
            leased.opened(threads.now())
        _pass_back(reply, exchange, client)


def _pass_back(reply: HttpReply, exchange: Exchange, client: Client) -> None:
    try:
        client.begin(reply.status, passed_back(reply), reason=reply.reason)
    except MalformedReply:
        raise ApiError(
            502, "upstream server error: the reply is malformed", code="upstream_failed"
        ) from None
    leased = exchange.leased
    is_refused, refusal_body = reply.status != HTTPStatus.OK, bytearray()

    def refusal() -> StreamFailure | None:
        return describe_http_error(reply.status, refusal_body) if is_refused else None

    is_stream = "text/event-stream" in reply.header("content-type")
    decoder = StreamDecoder(every_choice=True) if is_stream and leased.request_id else None
    while True:
        settled_at = leased.settled_at
        is_late = settled_at is not None and threads.now() >= settled_at
        try:
            piece = _next_piece(reply, settled_at)
        except OSError as error:
            failure = leased.closed(refusal() or disconnected("in mid-stream", str(error)))
            if not (leased.is_given_up and failure is not None and decoder is not None):
                raise
            # The form in which llama-server reports an error within a stream.
            last = {"error": {"message": failure.detail, "type": "server_error", "code": 503}}
            client.write(f"\n\ndata: {json.dumps(last)}\n\n".encode())
            break
        if is_refused and len(refusal_body) < _MAX_REFUSAL_BYTES:
            refusal_body += piece
        events = decoder.feed(piece) if decoder is not None else ()
        if piece:
            leased.received(events, threads.now())
        # `is_late`: what had come by then was read just now; more is not awaited, even from a flood
        is_whole = not piece or is_late or reply.is_complete
        if is_whole:
            leased.closed(refusal())
        is_over = is_whole or Done() in events
        if is_over:
            exchange.close()  # before the client reads the end: it may then use the slot again
        if piece:
            client.write(piece)  # an error here is the client's, not the server's
        if is_over:
            break
    client.end()


def _next_piece(reply: HttpReply, settled_at: float | None) -> bytes:
    """The next bytes of the body, not decoded; b"" at its end, or if nothing comes until
    `settled_at`, since nothing has to follow by then. Raises OSError if the body breaks off: the
    client's connection then breaks off, too, unless an error record ends the stream."""
    try:
        return reply.read(until=settled_at)
    except TimeoutError:
        return b""
    except ValueError as error:
        raise ConnectionAbortedError(disconnected("in mid-stream", str(error)).detail) from error
