"""A web page is not a client, unless it was named: over the wire, with what the upstream says of
pages."""

from itertools import product

import pytest

from tests.responses.conftest import Client, MakeClient, Through, answer

PAGE = "http://localhost:3000"
EVIL = "https://evil.example"
FOREIGN = [
    {"Origin": EVIL},
    {"Origin": "null"},
    {"Host": "evil.example"},
    {"Sec-Fetch-Site": "cross-site"},
]
ANY_PAGE = b"Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"


@pytest.fixture
def open_to(through: Through) -> tuple[Client, list[bytes]]:
    """A proxy that lets one page in, with a key, in front of a server that lets all pages in; and
    what that got."""
    client, upstream = through(
        answer(b"{}", headers=ANY_PAGE), allow_origins=(PAGE,), api_key="secret"
    )
    return client, upstream.requests


def test_a_foreign_page_gets_nothing_and_moves_nothing(open_to: tuple[Client, list[bytes]]) -> None:
    client, reached_upstream = open_to
    targets = ("/v1/responses", "/v1/chat/completions", "/health", "/v1/responses/resp_1")
    for target, method, headers in product(targets, ("GET", "POST", "OPTIONS", "DELETE"), FOREIGN):
        reply = client.send(
            method, target, b'{"input": "Hi"}' if method == "POST" else None, headers
        )
        assert (reply.status, reply.json["error"]["code"]) == (403, "forbidden"), (
            method,
            target,
            headers,
        )
        assert not [name for name in reply.headers if name.startswith("access-control")]
    assert reached_upstream == []


def test_an_allowed_page_gets_its_preflight(open_to: tuple[Client, list[bytes]]) -> None:
    client, reached_upstream = open_to
    asks = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    preflight = client.send("OPTIONS", "/v1/responses", headers=asks)
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    assert reached_upstream == []


@pytest.mark.parametrize("asks", [{"Origin": PAGE}, {}], ids=["a page", "a program"])
def test_only_an_allowed_page_may_read(
    open_to: tuple[Client, list[bytes]], asks: dict[str, str]
) -> None:
    reply = open_to[0].send("GET", "/v1/models", headers=asks)
    assert reply.status == 200
    assert reply.headers.get("access-control-allow-origin") == asks.get("Origin")
    assert reply.headers.get("vary") == ("Origin" if asks else None)
    assert "access-control-allow-credentials" not in reply.headers


def test_upstream_is_not_asked_again_about_page_permission(
    open_to: tuple[Client, list[bytes]],
) -> None:
    client, reached_upstream = open_to
    for target in ("/v1/responses", "/v1/chat/completions", "/any"):
        client.send("POST", target, b'{"input": "Hi"}', {"Origin": PAGE})
    assert len(reached_upstream) > 3
    assert not any(b"\r\norigin:" in request.lower() for request in reached_upstream)


def test_an_allowed_page_reads_streams_and_refusals(make_fake: MakeClient) -> None:
    client = make_fake(allow_origins=(PAGE,), max_body_bytes=100)
    headers = {"Origin": PAGE}
    bodies = ((b'{"input": "Hi", "stream": true}', 200), (b"{", 400), (b" " * 101, 413))
    for body, status in bodies:
        reply = client.send("POST", "/v1/responses", body, headers)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, PAGE)
