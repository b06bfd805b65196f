"""A reply is read by its client as it was meant."""

import pytest

from llama_worker.responses.http.reply import MalformedReply, ReplyFramer


@pytest.mark.parametrize(
    ("status", "headers"),
    [(200, [("X-A", "a\r\nX-B: b")]), (101, []),
     (200, [("Content-Length", "1"), ("Content-Length", "2")]),
     (200, [("Content-Length", "-1")]), (200, [("Content-Length", "0" * 5000)]),
     (200, [("X-A : b\r\nX-B", "c")]),
     *((200, [(name, "chunked")]) for name in ("Transfer-Encoding ", "A B", "", "X\u00e9"))],
)  # fmt: skip
def test_an_ambiguous_reply_is_not_begun(status: int, headers: list[tuple[str, str]]) -> None:
    reply = ReplyFramer()
    with pytest.raises(MalformedReply):
        reply.begin(status, headers)
    assert not reply.has_begun
    assert reply.begin(502, [("Content-Length", "2")]).startswith(
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n"
    )
    assert reply.data(b"ok") + reply.end() == b"ok"


def test_a_reply_is_as_long_as_it_says() -> None:
    for body in (b"a", b"abc"):
        reply = ReplyFramer()
        reply.begin(200, [("Content-Length", "2")])
        with pytest.raises(MalformedReply):
            assert reply.data(body) + reply.end()
        assert not reply.is_complete


def test_head_is_replied_to_without_a_body() -> None:
    reply = ReplyFramer("HEAD", keep_alive=True)
    assert (
        reply.begin(200, [("Content-Length", "2")])
        == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
    )
    assert reply.data(b"ok") + reply.end() == b""
    assert reply.is_complete
