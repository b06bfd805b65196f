"""A reply: its head, and its body in any framing, any split, with any end."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.stream.events import Done, StreamEvent, TextDelta
from llama_worker.stream.response import ChatBody, ReplyParser
from llama_worker.types.request import RequestFailReason
from tests.tables import cases

RECORDS = [
    b": keepalive\n\n",
    (
        'data: {"choices":[{"index":0,"delta":{"content":"naïve 🦙"},"finish_reason":null}]}\n\n'
    ).encode(),
    b"data: [DONE]\n\n",
]
BODY = b"".join(RECORDS)
SAID = [TextDelta("naïve 🦙"), Done()]
TYPE = {"Content-Type": "text/event-stream"}
CHUNKED = TYPE | {"Transfer-Encoding": "chunked"}
CLOSED = "in mid-stream: the server closed the connection"
INVALID = "in mid-stream: invalid HTTP in the reply"


def chunked(body: list[bytes], trailer: bytes = b"") -> bytes:
    return (
        b"".join(b"%X;x=y\r\n%b\r\n" % (len(piece), piece) for piece in body)
        + b"0\r\n"
        + trailer
        + b"\r\n"
    )


WIRES = {
    "chunked": (CHUNKED, chunked(RECORDS)),
    "trailer": ({"Transfer-Encoding": "Chunked"}, chunked(RECORDS, b"X: y\r\n")),
    "length": (TYPE | {"Content-Length": str(len(BODY))}, BODY),
    "close": (TYPE, BODY),
}


def chat_body(headers: dict[str, str]) -> ChatBody:
    """Of a reply whose head has come."""
    reply = ReplyParser("POST")
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    reply.feed("".join(["HTTP/1.1 200 OK\r\n", *lines, "\r\n"]).encode())
    return ChatBody(reply)


def feed(body: ChatBody, pieces: list[bytes]) -> list[StreamEvent]:
    return [event for piece in pieces for event in body.feed(piece)]


@given(st.sampled_from(list(WIRES)), st.sets(st.integers(1, 400)), st.booleans())
def test_events_do_not_depend_on_framing_or_splits(
    name: str, cuts: set[int], every_byte: bool
) -> None:
    headers, wire = WIRES[name]
    edges = sorted(
        range(len(wire) + 1)
        if every_byte
        else {0, len(wire), *(cut for cut in cuts if cut < len(wire))}
    )
    body, ends_itself = chat_body(headers), name != "close"
    assert feed(body, [wire[a:b] for a, b in itertools.pairwise(edges)]) == SAID
    assert body.is_over is ends_itself
    if ends_itself:
        assert body.feed(b"HTTP/1.1 500 What\r\n\r\ngarbage \xff") == []
    body.end()
    assert body.is_over
    assert body.failure is None
    assert body.bytes_read == len(BODY)


@cases(
    "headers, wire, said, told",
    {
        **{
            f"cut off, {name}": (headers, wire[: wire.index(b"data: [DO") + 8], SAID[:1], told)
            for name, (headers, wire) in WIRES.items()
            for told in ("in the middle of a record" if name == "close" else CLOSED,)
        },
        "without its last chunk": (CHUNKED, chunked(RECORDS)[:-5], SAID, CLOSED),
        "chunked no longer": (CHUNKED, chunked(RECORDS)[:-5] + b"what?\r\n", SAID, INVALID),
    },
)
def test_a_body_cut_off_is_a_disconnect(
    headers: dict[str, str], wire: bytes, said: list[StreamEvent], told: str
) -> None:
    body = chat_body(headers)
    assert body.feed(wire) == said
    assert body.is_over is (told == INVALID)
    body.end()
    assert body.failure is not None
    assert body.failure.reason is RequestFailReason.STREAM_DISCONNECTED
    assert body.failure.detail.startswith(f"the connection ended {told}")


@cases(
    "headers, wire, detail",
    {
        "another type": (
            {"Content-Type": "text/html", "Content-Length": "4"},
            b"<p>\n",
            "the reply's content type is text/html, not text/event-stream",
        ),
        "no JSON": (TYPE, b"data: {\n\n", "a record of the stream is not JSON: '{'"),
    },
)
def test_non_stream_is_a_protocol_error(headers: dict[str, str], wire: bytes, detail: str) -> None:
    body = chat_body(headers)
    body.feed(wire)
    assert body.failure is not None
    assert body.failure.reason is RequestFailReason.PROTOCOL_ERROR
    assert body.failure.detail == detail


@pytest.mark.parametrize("cause", [None, "reset"])
def test_only_a_broken_connection_is_a_failure_of_an_empty_stream(cause: str | None) -> None:
    body = chat_body(TYPE)
    body.end(cause)
    detail = body.failure and body.failure.detail
    assert detail == (cause and "the connection ended in mid-stream: reset")


@given(
    st.lists(st.binary(max_size=60), max_size=8),
    st.sampled_from([b"", chunked(RECORDS)[:80]]),
    st.sampled_from([TYPE, CHUNKED, {"Content-Length": "9" * 30}]),
)
def test_no_bytes_make_it_raise(pieces: list[bytes], begin: bytes, headers: dict[str, str]) -> None:
    body = chat_body(headers)
    feed(body, [begin, *pieces])
    body.end()
    assert body.is_over


REPLY = b"HTTP/1.1 503 Busy \xe9\r\nX: a\r\nx:  b \r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("step", [1, 1000])
def test_a_reply_is_read_in_any_split(step: int) -> None:
    wire = b"HTTP/1.1 100 Continue\r\nX: no\r\n\r\n" + REPLY + b"2\r\nab\r\n0\r\nX: trailer\r\n\r\n"
    reply, body = ReplyParser("GET"), b""
    wire += b"HTTP/1.1 200 OK\r\nX: c\r\nContent-Length: 1\r\n\r\nc"  # it is ignored
    for begin in range(0, len(wire), step):
        reply.feed(wire[begin : begin + step])
        body += reply.take()
    assert (reply.status, reply.reason, reply.header("x")) == (503, "Busy é", "a, b")
    assert reply.headers == [("X", "a"), ("x", "b"), ("Transfer-Encoding", "chunked")]
    assert (body, reply.is_complete, reply.error) == (b"ab", True, None)


@pytest.mark.parametrize(
    ("method", "head", "told"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", (True, True)),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", (True, True)),
        ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", (False, False)),
        (
            "GET",
            b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000),
            (True, True),
        ),
        ("GET", REPLY, (False, False)),
        ("GET", b"HTTP/1.0 200 OK\r\n\r\n", (False, True)),
    ],
)
def test_a_reply_ends_where_its_head_says(
    method: str, head: bytes, told: tuple[bool, bool]
) -> None:
    reply = ReplyParser(method)
    reply.feed(head)
    assert (reply.has_head, reply.error) == (True, None)
    assert (reply.is_complete, reply.ends_with_connection) == told


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000,
    ],
    ids=["another protocol", "switched", "two framings", "endless head"],
)
def test_what_is_not_http_is_an_error(wire: bytes) -> None:
    reply = ReplyParser("GET")
    reply.feed(wire)
    assert reply.error
    reply.feed(REPLY)
    assert not reply.has_head
