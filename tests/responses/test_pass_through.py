"""What is no request for a response passes through as it is, to the configured upstream and no
other."""

import gzip
import http.client
import json
import ssl
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.responses.conftest import (
    HOST,
    Client,
    MakeClient,
    Through,
    Upstream,
    answer,
    request_bytes,
)
from tests.responses.oracle import check_events, read_sse

ODD_JSON = b'{ "n" : 12345678901234567890123, "f":1.10, "s":"\\u00e9\xc3\xa9"}\n'


def test_bodies_pass_through_byte_for_byte(through: Through) -> None:
    client, upstream = through(
        answer(ODD_JSON, headers=b"Content-Type: application/json\r\nX-Own: a\r\n")
    )
    reply = client.send(
        "POST",
        "/v1/chat/completions?x=%2F",
        ODD_JSON,
        {"X-Mine": "b", "Authorization": "Bearer k", "X-Conversation-Id": "c"},
    )
    assert (reply.status, reply.data) == (200, ODD_JSON)
    assert (reply.headers["x-own"], reply.headers["content-type"]) == ("a", "application/json")
    head, _, body = upstream.requests[0].partition(b"\r\n\r\n")
    assert body == ODD_JSON
    assert head.startswith(b"POST /v1/chat/completions?x=%2F HTTP/1.1\r\n")
    assert {b"X-Mine: b", b"Authorization: Bearer k"} <= set(head.split(b"\r\n"))
    # with it, the server would not stop when the client leaves
    assert b"conversation" not in head.lower()


@pytest.mark.parametrize(
    ("status", "header", "body"),
    [
        ("204 No Content", "X-Own: a", b""),
        ("304 Not Modified", "X-Own: a", b""),
        (
            "302 Found",
            "Location: http://127.0.0.1:1/",
            b"",
        ),  # whether to follow it is the client's business
        ("404 File Not Found", "X-Own: a", b"no"),
        ("500 Oh", "X-Own: a", b"no"),
        ("200 OK", "Content-Encoding: gzip", gzip.compress(b"text" * 100)),
    ],
    ids=["no content", "not modified", "redirect", "not found", "failed", "compressed"],
)
def test_replies_pass_through(through: Through, status: str, header: str, body: bytes) -> None:
    client, upstream = through(answer(body, status.encode(), f"{header}\r\n".encode()))
    reply = client.send("GET", "/any", headers={"Accept-Encoding": "gzip"})
    assert (reply.status, reply.data) == (int(status[:3]), body)
    name, _, value = header.partition(": ")
    assert reply.headers[name.lower()] == value
    assert len(upstream.requests) == 1


def test_a_stream_that_is_watched_is_not_compressed(through: Through) -> None:
    client, upstream = through(answer(b"{}"))
    chats = ("/v1/chat/completions", "/v1/chat/%63ompletions")
    for target, encoding in (*((chat, b"identity") for chat in chats), ("/v1/embeddings", b"gzip")):
        client.send("POST", target, b"{}", {"Accept-Encoding": "gzip"})
        assert b"\r\naccept-encoding: %b\r\n" % encoding in upstream.requests[-1].lower()


def test_a_reply_to_head_has_no_body(
    through: Through, make_client: MakeClient, free_port: Callable[[], int]
) -> None:
    client, _ = through(answer(b"hello").removesuffix(b"hello"))
    absent = make_client(upstream=f"http://{HOST}:{free_port()}")
    for one, status in ((client, 200), (absent, 502)):
        with one.connection() as connection:
            for _ in range(2):  # the connection is as good as before
                connection.request("HEAD", "/any")
                response = connection.getresponse()
                assert (response.status, response.read()) == (status, b"")
                assert int(response.headers["Content-Length"]) > 0


def test_hop_by_hop_headers_stay_on_their_hop(through: Through) -> None:
    said = b"Connection: X-Hop\r\nX-Hop: a\r\nKeep-Alive: timeout=5\r\nX-End: b\r\n"
    client, upstream = through(answer(b"a", headers=said))
    sent = {
        "Connection": "X-Secret, X_Secret_2",
        "X-Secret": "a",
        "X_Secret_2": "a",
        "Te": "trailers",
        "Upgrade": "websocket",
        "X-End": "c",
    }
    reply = client.send("GET", "/any", headers=sent)
    assert reply.headers.get("x-end") == "b"
    assert not {"x-hop", "keep-alive"} & reply.headers.keys()
    head = upstream.requests[0].lower()
    assert b"x-end: c" in head
    assert not any(name in head for name in (b"secret", b"\r\nte:", b"upgrade"))


def test_a_chunked_request_body_passes_through(through: Through) -> None:
    client, upstream = through(answer(b"a"))
    with client.connection() as connection:
        connection.request("POST", "/any", iter([b"abc", b"def"]), encode_chunked=True)
        assert connection.getresponse().read() == b"a"
    head, _, body = upstream.requests[0].lower().partition(b"\r\n\r\n")
    assert b"content-length: 6" in head
    assert body == b"abcdef"


def test_expect_continue_is_answered(through: Through) -> None:
    client, upstream = through(answer(b"a"))
    head = (
        b"POST /any HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\nExpect: 100-continue\r\n"
        b"\r\n"
    )
    with client.dial(head) as connection:
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abcdef")
        assert b"200 OK" in connection.recv(65536)
    assert upstream.requests[0].endswith(b"abcdef")


def test_requests_in_one_packet_are_answered_in_turn(fake: Client) -> None:
    request = request_bytes("/v1/responses", {"input": "Hi", "stream": True}, port=fake.proxy.port)
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    said = fake.exchange(request + request + last)
    assert said.count(b"event: response.completed\n") == 2
    assert said.endswith(b'{"status": "ok"}')


def test_a_reply_that_breaks_off_is_seen_to(through: Through) -> None:
    client, _ = through(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    with pytest.raises(http.client.IncompleteRead):
        client.send("GET", "/any")


# ---------------------------------------------------------------- whom it talks to


@pytest.mark.parametrize(
    "target",
    [
        "//127.0.0.1:1/health",
        "http://127.0.0.1:1/health",
        "@127.0.0.1:1/",
        "/\\127.0.0.1:1/",
        "/@127.0.0.1:1/",
        "*",
    ],
)
def test_no_target_chooses_the_upstream(through: Through, target: str) -> None:
    client, upstream = through(answer(b"the configured one"))
    said = client.exchange(
        f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:1\r\nConnection: close\r\n\r\n".encode()
    )
    status = int(said.split()[1])
    assert (status == 400) == (not upstream.requests), said
    assert all(
        f"host: {HOST}:{upstream.port}".encode() in request.lower() for request in upstream.requests
    )
    assert status == 400 or said.endswith(b"the configured one")


def test_an_encoded_path_is_the_same_path(fake: Client) -> None:
    made = fake.create(target="/v1/%72esponses").json
    assert made["object"] == "response"
    assert fake.send("GET", f"/v1/responses/{made['id'].replace('r', '%72')}").json == made


def test_a_target_has_no_fragment(through: Through) -> None:
    client, upstream = through(answer(b"{}"))
    assert client.send("POST", "/v1/chat/completions#a", b"{}").status == 400
    assert upstream.requests == []


def test_a_base_path_comes_first(through: Through) -> None:
    client, upstream = through(answer(b"{}"), base_path="/llm/")
    client.send("GET", "/v1/models")
    client.create()
    assert [request.split()[1] for request in upstream.requests] == [
        b"/llm/v1/models",
        b"/llm/props",
        b"/llm/v1/chat/completions",
    ]


def test_an_https_upstream_is_verified(make_client: MakeClient, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    chunks = [{"delta": {"content": "hello" * 10}}] * 2000 + [
        {"delta": {}, "finish_reason": "stop"}
    ]
    records = [
        json.dumps({"choices": [{"index": 0, "finish_reason": None, **chunk}]}) for chunk in chunks
    ]
    stream = "".join(f"data: {record}\n\n" for record in [*records, "[DONE]"]).encode()
    with Upstream(answer(stream), tls=context) as server:
        upstream = f"https://localhost:{server.port}"
        trusting = make_client(upstream=upstream, ca_file=str(certificate))
        assert trusting.send("GET", "/any").data == stream
        said = check_events(read_sse(trusting.create(stream=True).data))["output"][0]["content"][0][
            "text"
        ]
        assert said == "hello" * 20_000  # more than one read takes out of a record of TLS
        assert make_client(upstream=upstream).send("GET", "/any").status == 502


def test_the_configured_key_replaces_the_clients(through: Through) -> None:
    client, upstream = through(answer(b"{}"), api_key="secret")
    given = [
        {"Authorization": "Bearer other"},
        {"authorization": "Bearer other"},
        dict[str, str](),
    ]  # as node has it
    for target, headers in product(("/v1/models", "/v1/responses"), given):
        client.send("POST", target, b'{"input": "Hi"}', headers)
    assert len(upstream.requests) == 7  # before the first response, /props is asked for
    assert all(b"Authorization: Bearer secret" in request for request in upstream.requests)
    assert not any(b"other" in request for request in upstream.requests)
    assert "secret" not in repr(client.proxy.config)
