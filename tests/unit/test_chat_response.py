"""The HTTP response to a chat request: any framing, any split, any end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.stream.events import Done, StreamEvent, TextDelta
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.response import ChatResponse
from llama_worker.types import RequestFailReason

RECORDS = [
    b": keepalive\n\n",
    (
        'data: {"choices":[{"index":0,"delta":{"content":"naïve 🦙"},"finish_reason":null}]}\n\n'
    ).encode(),
    b"data: [DONE]\n\n",
]
BODY = b"".join(RECORDS)
SAID = [TextDelta("naïve 🦙"), Done()]
TYPE = b"Content-Type: text/event-stream\r\n"


def chunked(body: list[bytes], trailer: bytes = b"") -> bytes:
    return (
        b"".join(b"%X;x=y\r\n%b\r\n" % (len(piece), piece) for piece in body)
        + b"0\r\n"
        + trailer
        + b"\r\n"
    )


WIRES = {
    "chunked": b"HTTP/1.1 200 OK\r\n"
    + TYPE
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + chunked(RECORDS),
    "trailer": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    + chunked(RECORDS, b"X: y\r\n"),
    "length": b"HTTP/1.1 200 OK\r\n" + TYPE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "close": b"HTTP/1.1 200 OK\r\n" + TYPE + b"\r\n" + BODY,
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200\r\n" + TYPE + b"\r\n" + BODY,
}


def feed(response: ChatResponse, pieces: list[bytes]) -> list[StreamEvent]:
    return [event for piece in pieces for event in response.feed(piece)]


@given(st.sampled_from(list(WIRES)), st.sets(st.integers(1, 400)), st.booleans())
def test_events_do_not_depend_on_framing_or_splits(
    name: str, cuts: set[int], every_byte: bool
) -> None:
    wire = WIRES[name]
    edges = sorted(
        range(len(wire) + 1)
        if every_byte
        else {0, len(wire), *(cut for cut in cuts if cut < len(wire))}
    )
    response, ends_itself = ChatResponse(), name in ("chunked", "trailer", "length")
    assert feed(response, [wire[a:b] for a, b in itertools.pairwise(edges)]) == SAID
    assert response.opened
    assert response.over is ends_itself
    if ends_itself:
        assert response.feed(b"HTTP/1.1 500 What\r\n\r\ngarbage \xff") == []
    response.end()
    assert response.over
    assert response.failure is None


@pytest.mark.parametrize("name", list(WIRES))
def test_a_body_that_is_cut_off_is_a_disconnect_with_what_came_before(name: str) -> None:
    wire = WIRES[name]
    response = ChatResponse()
    assert feed(response, [wire[: wire.index(b"data: [DO") + 8]]) == SAID[:1]
    response.end()
    assert response.failure is not None
    assert response.failure.reason is RequestFailReason.STREAM_DISCONNECTED


@pytest.mark.parametrize(
    ("wire", "detail"),
    [
        (b"", "the server sent no response"),
        (b"HTTP/1.1 200 OK\r\nContent-", "the server sent no response"),
        (b"SSH-2.0-x\r\n", r"the reply is not HTTP: it begins with 'SSH-2.0-x\r\n'"),
        (b"x" * 100, f"the reply is not HTTP: it begins with '{'x' * 40}'"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000, "they are longer than 262144 bytes"),
    ],
)
def test_a_reply_without_a_head(wire: bytes, detail: str) -> None:
    for pieces in ([wire], [wire[i : i + 1000] for i in range(0, len(wire), 1000)]):
        response = ChatResponse()
        assert feed(response, pieces) == []
        response.end()
        expected = f"the connection ended before the response headers: {detail}"
        assert response.failure == StreamFailure(
            reason=RequestFailReason.STREAM_DISCONNECTED, detail=expected
        )


@pytest.mark.parametrize("framing", [b"Content-Length: 28\r\n\r\n", b"\r\n"])
def test_an_error_status_says_why_in_its_body_whole_or_cut_off(framing: bytes) -> None:
    response = ChatResponse()
    assert (
        feed(response, [b"HTTP/1.1 503 Busy\r\n" + framing, b'{"error":{"message":', b'"full"}}'])
        == []
    )
    response.end("reset")
    assert response.refused
    assert response.failure is not None
    assert (response.failure.http_status, response.failure.detail) == (503, "HTTP 503: full")


def test_an_endless_error_body_is_not_read_for_ever() -> None:
    response = ChatResponse()
    response.feed(b"HTTP/1.1 500 X\r\n\r\n")
    feed(response, [b"x" * 1024] * 64)
    assert response.over


def test_a_stream_that_is_none_is_a_protocol_error() -> None:
    response = ChatResponse()
    response.feed(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<p>\n")
    assert response.failure is not None
    assert response.failure.reason is RequestFailReason.PROTOCOL_ERROR
    assert response.failure.detail == "the reply is text/html, not text/event-stream"


@given(st.lists(st.binary(max_size=60), max_size=8), st.sampled_from([b"", WIRES["chunked"][:80]]))
def test_no_bytes_make_it_raise(pieces: list[bytes], head: bytes) -> None:
    response = ChatResponse()
    feed(response, [head, *pieces])
    response.end()
    assert response.over
