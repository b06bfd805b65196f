"""Programs may use the proxy; web pages only where they were named, and under no foreign name."""

from __future__ import annotations

import pytest

from llama_worker import ConfigError
from llama_worker.responses.access import access_policy, page_headers
from llama_worker.responses.client_connection import Request
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.http import passed_back
from llama_worker.responses.refusal import RequestRefused

PAGE = "https://ui.example:8443"
POLICY = access_policy("127.0.0.1", [PAGE])


def head(method: str = "GET", **headers: str) -> Request:
    named = {name.replace("_", "-").lower(): (name, value) for name, value in headers.items()}
    return Request(method=method, target="/", headers=named, body=b"")


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [
        ("127.0.0.1:9998", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.1"),
        ("localhost:1", "127.0.0.1"),
        ("LocalHost.", "127.0.0.1"),
        ("[::1]:9998", "::1"),
        ("192.168.1.5:9998", "192.168.1.5"),
        ("192.168.1.5:9998", "::ffff:192.168.1.5"),
        ("[fe80::1]", "fe80::1%eth0"),
        ("ui.example:9998", "192.168.1.5"),
    ],
)
def test_a_program_that_reaches_this_machine_by_its_address_is_let_in(host: str, reached_at: str) -> None:
    assert POLICY.allowed_origin(head(Host=host), reached_at) is None


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9998", "192.168.1.6", "0.0.0.0:9998", "[::]", "127.0.0.1.nip"]
)
def test_a_foreign_host_is_refused(host: str) -> None:
    with pytest.raises(RequestRefused, match="--allow-origin") as refused:
        POLICY.allowed_origin(head(Host=host), "192.168.1.5")
    assert refused.value.status == 403


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://ui.example:8443", "https://ui.example", "null", "http://localhost:9998"]
)
def test_a_page_that_was_not_named_is_refused(origin: str) -> None:
    with pytest.raises(RequestRefused, match="web pages"):
        POLICY.allowed_origin(head(Host="localhost", Origin=origin), "127.0.0.1")


def test_a_page_that_was_named_is_let_in_and_told_so() -> None:
    request = head("OPTIONS", Host="localhost", Origin=PAGE, Access_Control_Request_Headers="content-type")
    assert POLICY.allowed_origin(request, "127.0.0.1") == PAGE
    headers = dict(page_headers(request, PAGE))
    assert headers["Access-Control-Allow-Origin"] == PAGE
    assert headers["Access-Control-Allow-Headers"] == "content-type"
    assert headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    ("site", "refused"), [("cross-site", True), ("same-site", True), ("same-origin", False), ("none", False)]
)
def test_a_pages_request_without_an_origin_is_refused_too(site: str, refused: bool) -> None:
    request = head(Host="localhost", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")
    if refused:
        with pytest.raises(RequestRefused):
            POLICY.allowed_origin(request, "127.0.0.1")
    else:
        assert POLICY.allowed_origin(request, "127.0.0.1") is None


def test_the_name_that_the_proxy_listens_on_is_a_host() -> None:
    assert access_policy("box.lan", []).allowed_origin(head(Host="box.lan:9998"), "192.168.1.5") is None


@pytest.mark.parametrize("origin", ["evil", "ftp://a", "http://", "http://a/path", "*", "null"])
def test_what_is_no_origin_cannot_be_allowed(origin: str) -> None:
    with pytest.raises(ConfigError, match="origin"):
        ResponsesProxyConfig(upstream="http://127.0.0.1:1", allow_origins=(origin,))


def test_what_the_upstream_says_of_pages_is_not_handed_on() -> None:
    said = [("Access-Control-Allow-Origin", "*"), ("access-control-allow-credentials", "true"), ("X-Own", "a")]
    assert passed_back(said) == [("X-Own", "a")]
