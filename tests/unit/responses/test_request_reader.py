"""Requests are read whole, in any pieces, and strictly."""

import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_worker.responses.errors import ApiError
from llama_worker.responses.http.request_reader import (
    MAX_HEAD_BYTES,
    HttpRequest,
    Phase,
    RequestReader,
)
from tests.tables import cases

T = TypeVar("T")
HEAD = b"POST /v1/responses?a=%2F HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
# of Java's client
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"


def connection(max_body_bytes: int = 100) -> Any:
    return RequestReader(max_body_bytes=max_body_bytes, allowed_origin=lambda _: None)


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 5\r\n\r\nhello",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nTrailer: a\r\n\r\n",
        UPGRADE + b"Content-Length: 5\r\n\r\nhello",
        UPGRADE + CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
    ],
)
@settings(max_examples=50)
@given(data=st.data())
def test_a_request_in_any_pieces_is_one_request(rest: bytes, data: st.DataObject) -> None:
    whole = b"\r\n" + HEAD + rest  # an empty line before it is ignored
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=6))})
    client = connection()
    *early, request = [client.receive(whole[a:b]) for a, b in pairwise(cuts)]
    assert not any(early)
    line = (request.method, request.target)
    assert (line, request.body) == (("POST", "/v1/responses?a=%2F"), b"hello")
    assert request.header("host") == "localhost"
    client.reply.begin(204, [])
    client.reply.end()
    assert client.reply.keep_alive
    again = client.next_request() or client.receive(whole)
    assert again.body == b"hello"


MALFORMED_LINES = (
    b"Content-Length : 5",
    b"Host: a",
    b"X-A: a\0b",
    b"X-A: a\rX-B: b",
    b"X-A: a\r\n b",
)


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        *(
            (b"Content-Length: %b\r\n\r\n" % length, 400)
            for length in (b"-5", b"+5", b"1_0", b"0x5", b"5, 6")
        ),
        (b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"Content-Length: 5\r\n" + CHUNKED, 400),
        (b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        *(
            (CHUNKED + b"%b\r\nhello\r\n0\r\n\r\n" % size, 400)
            for size in (b"+5", b"-5", b"0x5", b"1_0")
        ),
        (CHUNKED + b"5\r\nhello!\r\n0\r\n\r\n", 400),
        (CHUNKED + b"5\nhello\r\n0\r\n\r\n", 400),
        (CHUNKED + b"5\r\nhello\r\n0\r\nTrailer\r\n\r\n", 400),
        (CHUNKED + b"1\r\nx\r\n" * 3 + b"1;" + b"x" * 9000 + b"\r\n", 400),
        *((line + b"\r\n\r\n", 400) for line in MALFORMED_LINES),
        (b"Content-Length: 101\r\n\r\n", 413),
        (b"Content-Length: 9999999999999999999\r\n\r\n", 413),
        (b"Content-Length: 99999999999999999999\r\n\r\n", 400),  # beyond 64 bits
        (b"Content-Length: " + b"0" * 5000 + b"5\r\n\r\n", 400),  # beyond what Python reads
        (UPGRADE + CHUNKED + HEAD + b"\r\n", 400),
        (CHUNKED + b"1;" + b"x" * MAX_HEAD_BYTES, 400),
        (CHUNKED + b"0\r\nTrailer: " + b"x" * MAX_HEAD_BYTES, 400),
        (b"X-A: a\n\n", 400),
        # once such a chunk is announced
        (CHUNKED + b"65\r\n", 413),
        (CHUNKED + b"32\r\n" + b"x" * 50 + b"\r\n33\r\n", 413),
        (CHUNKED + b"ffffffffffffffff\r\n", 413),
        (b"X-A: " + b"a" * MAX_HEAD_BYTES, 431),
        (b"".join(b"X-%d:\r\n" % number for number in range(300)), 431),
    ],
)
def test_what_another_server_might_read_differently_is_refused(rest: bytes, status: int) -> None:
    early = connection()
    early.receive(HEAD + b"\r\n" + HEAD + rest)  # behind another request it is read as strictly
    early.reply.begin(200, [("Content-Length", "0")])
    early.reply.end()
    with pytest.raises(ApiError) as refused:
        connection().receive(HEAD + rest)
    with pytest.raises(ApiError) as refused_later:
        early.next_request()
    assert refused.value.status == refused_later.value.status == status


OTHER_TARGETS = (
    b"GET http://a/ HTTP/1.1",
    b"GET * HTTP/1.1",
    b"CONNECT / HTTP/1.1",
    b"GET  / HTTP/1.1",
)
OTHER_PROTOCOLS = (
    b"GET / HTTP/2.0",
    b"GET / RTSP/1.0",
    b"SOURCE / ICE/1.0",
    b"GET /",
    b"G@T / HTTP/1.1",
    b"\r\n",
)


@pytest.mark.parametrize(
    "request_",
    [
        *(line + b"\r\nHost: localhost\r\n\r\n" for line in (*OTHER_TARGETS, *OTHER_PROTOCOLS)),
        pytest.param(b"\x16\x03\x01\x02", id="TLS: at once"),
    ],
)
def test_a_request_line_of_another_kind_is_refused(request_: bytes) -> None:
    with pytest.raises(ApiError):
        connection().receive(request_)


def test_the_head_is_checked_before_the_body() -> None:
    def check(request: HttpRequest) -> None:
        raise ApiError(403, request.target)

    client = RequestReader(max_body_bytes=100, allowed_origin=check)
    with pytest.raises(ApiError, match="/v1/responses"):
        client.receive(HEAD + b"Content-Length: 50\r\n\r\n")


def test_what_follows_a_request_waits_for_its_reply() -> None:
    client = connection()
    post = HEAD + CHUNKED + b"2\r\nok\r\n0\r\n\r\n"
    get = b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n"
    first = client.receive(post + get % 2 + get % 3 + b"GET /4")
    assert first.body == b"ok"
    targets: list[str] = []
    for _ in range(3):
        assert client.reply.begin(200, [("Content-Length", "2")]).startswith(b"HTTP/1.1 200 OK\r\n")
        assert client.reply.data(b"ok") + client.reply.end() == b"ok"
        assert client.reply.keep_alive
        request = client.next_request()
        targets += [request.target] if request else []
    assert (targets, client.phase) == (["/2", "/3"], Phase.HEAD)


def test_a_body_may_look_like_a_head() -> None:
    body = b"\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"
    request = connection().receive(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert request.body == body


@pytest.mark.parametrize("begin", [HEAD + b"X-A: ", b"GET /"], ids=["a header", "a target"])
def test_a_large_head_costs_only_its_limit(begin: bytes) -> None:
    client, data = connection(), begin + b"a" * 16_000_000

    def refused() -> tuple[int, int]:
        with pytest.raises(ApiError) as raised:
            client.receive(data)
        return raised.value.status, tracemalloc.get_traced_memory()[1]

    (status, peak), _ = measured(refused)
    assert status == 431
    assert peak < 10 * MAX_HEAD_BYTES


def measured(action: Callable[[], T]) -> tuple[T, int]:
    """What it returns, and the bytes that are held then."""
    tracemalloc.start()
    try:
        return action(), tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@cases(
    "rest, pieces, counted",
    {
        "tiny chunks": (CHUNKED, [b"2\r\nab\r\n" * 8192] * 4, 2 * 8192 * 4),
        "tiny pieces": (b"Content-Length: 1000000\r\n\r\n", [b"ab"] * 5000, 10_000),
        "trailers": (
            CHUNKED,
            [
                b"80000\r\n" + b"x" * 0x80000 + b"\r\n0\r\n",
                *[b"X-A: " + b"a" * 4000 + b"\r\n"] * 800,
            ],
            0x80000,
        ),
        "head": (b"X-A: ", [b"a" * 10] * 2000, 20_000),
    },
)
def test_counted_bytes_are_close_to_held_bytes(
    rest: bytes, pieces: list[bytes], counted: int
) -> None:
    client = connection(max_body_bytes=1_000_000)
    is_whole, held = measured(
        lambda: any(client.receive(piece) for piece in [HEAD + rest, *pieces])
    )
    assert not is_whole
    assert counted <= client.pending_bytes < counted + 1000
    assert held < 2.5 * counted


def test_a_running_requests_body_is_held_once() -> None:
    client = connection(max_body_bytes=1_000_000)
    client.receive(HEAD + b"Content-Length: 1000000\r\n\r\n" + b"x" * 500_000)
    request, held = measured(lambda: client.receive(b"x" * 500_000))
    assert request is not None
    assert held < 1_100_000


def test_continue_is_sent_once() -> None:
    client = connection()
    assert client.receive(HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n") is None
    assert client.wanted_continue() == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert client.wanted_continue() == b""


def test_framing_follows_the_clients_http_version() -> None:
    for version, framed in ((b"1.1", b"2\r\nok\r\n"), (b"1.0", b"ok")):
        client = connection()
        client.receive(b"GET / HTTP/%b\r\nHost: localhost\r\n\r\n" % version)
        client.reply.begin(200, [])
        assert client.reply.data(b"ok") == framed
        client.reply.end()
        assert client.reply.is_complete
        assert client.reply.keep_alive is (version == b"1.1")
