"""Requests and replies of the Responses proxy as WSGI has them: heads, bodies, headers that may go on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import cheroot.errors
import requests

from llama_worker.responses.refusal import RequestRefused

Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], object]
Headers = list[tuple[str, str]]

READ_BYTES = 65536
WARNING_HEADER = "X-Llama-Worker-Warning"
HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip
_SET_BY_US = frozenset({"host", "content-length", "expect"})
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # of RFC 9110: methods and names of headers
_BREAKS = re.compile(r"[\0\r\n]")


# ---------------------------------------------------------------- requests


def check_head(environ: Environ) -> None:
    """Raises RequestRefused for a head that the server lets through and no other server should be sent."""
    if not environ["REQUEST_URI"].startswith("/"):
        raise RequestRefused(400, "the request's target must be a path")
    if not _TOKEN.fullmatch(environ["REQUEST_METHOD"]):
        raise RequestRefused(400, "the request's method is none")
    length = environ.get("CONTENT_LENGTH") or "0"
    if not (length.isascii() and length.isdigit()):
        raise RequestRefused(400, "the request's Content-Length is no number")
    for name, value in environ.items():
        if name.startswith("HTTP_") and not (_TOKEN.fullmatch(name) and not _BREAKS.search(value)):
            raise RequestRefused(400, "a header of the request is malformed")


def body_of(environ: Environ, max_bytes: int) -> bytes:
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
        while piece := environ["wsgi.input"].read(READ_BYTES):
            yield piece
    except cheroot.errors.MaxSizeExceeded:
        raise RequestRefused(413, "the request's body is too large") from None
    except OSError as error:
        if error.errno is not None or isinstance(error, TimeoutError):
            raise
        raise RequestRefused(413, "the request's body is too large") from None  # so does cheroot say it of a chunk
    except ValueError:
        raise RequestRefused(400, "the request's body is not chunked as it should be") from None


def give_body(request: requests.PreparedRequest, environ: Environ) -> None:
    """The client's body, streaming, framed as the client did."""
    if environ.get("wsgi.input_terminated"):  # a length beside it counts for nothing
        request.headers["Transfer-Encoding"] = "chunked"
        request.body = _body_pieces(environ)  # type: ignore[assignment]  # requests takes any iterable
    elif environ.get("CONTENT_LENGTH"):
        request.headers["Content-Length"] = environ["CONTENT_LENGTH"]
        request.body = environ["wsgi.input"]


def forwarded(environ: Environ, exclude: Iterable[str] = ()) -> dict[str, str]:
    """The client's headers, but those that belong to its connection."""
    dropped = {*HOP_BY_HOP, *_SET_BY_US, *named(environ.get("HTTP_CONNECTION", "")), *exclude}
    headers = {
        name.removeprefix("HTTP_").replace("_", "-").title(): value
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }
    if environ.get("CONTENT_TYPE"):
        headers["Content-Type"] = environ["CONTENT_TYPE"]
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


def named(connection: str) -> set[str]:
    """The headers that a Connection header declares to be the connection's."""
    return {name.strip().lower() for name in connection.split(",")}


# ---------------------------------------------------------------- replies


def json_reply(
    start_response: StartResponse, status: int, value: Mapping[str, Any], headers: Iterable[tuple[str, str]] = ()
) -> Iterable[bytes]:
    body = json.dumps(value).encode()
    sent = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *headers]
    start_response(status_line(status), sent)
    return [body]


def status_line(code: int, reason: str = "") -> str:
    try:
        return f"{code} {reason or HTTPStatus(code).phrase}"
    except ValueError:
        return f"{code} Unknown"


def warning_headers(warnings: Iterable[str]) -> Headers:
    text = "; ".join(warnings)
    safe = "".join(char if " " <= char <= "~" else "?" for char in text)
    return [(WARNING_HEADER, safe[:1000])] if safe else []
