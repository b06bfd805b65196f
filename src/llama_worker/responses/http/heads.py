"""Headers on their way between clients and the upstream. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from llama_worker.responses.http.request_reader import HttpRequest, header_words

Headers = list[tuple[str, str]]

WARNING_HEADER = "X-Llama-Worker-Warning"
_HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip
_SET_BY_US = frozenset({"host", "content-length", "expect"})
_CORS = "access-control-"


def forwarded(request: HttpRequest, exclude: Iterable[str] = ()) -> dict[str, str]:
    """The client's headers, but those that belong to its connection."""
    dropped = {*_HOP_BY_HOP, *_SET_BY_US, *header_words(request.header("connection")), *exclude}
    return {
        name: value
        for lower, (name, value) in request.headers.items()
        if lower.replace("_", "-") not in dropped
    }


def passed_back(headers: Iterable[tuple[str, str]]) -> Headers:
    """The upstream's headers, likewise. Which pages may read a reply is ours to say."""
    headers = list(headers)
    dropped = {*_HOP_BY_HOP}
    for name, value in headers:
        if name.lower() == "connection":
            dropped |= header_words(value)
    return [
        (name, value)
        for name, value in headers
        if name.lower() not in dropped and not name.lower().startswith(_CORS)
    ]


def warning_headers(warnings: Iterable[str]) -> Headers:
    """What was ignored of the request, in one line."""
    text = "; ".join(warnings)
    safe = "".join(char if " " <= char <= "~" else "?" for char in text)
    return [(WARNING_HEADER, safe[:1000])] if safe else []
