"""Programs may use the proxy; web pages only where they were named, and under no foreign name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from llama_worker import ConfigError
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.errors import ApiError
from llama_worker.responses.http.access import AccessPolicy
from llama_worker.responses.http.request_reader import HttpRequest

PAGE = "https://ui.example:8443"
POLICY = AccessPolicy("box.lan", [PAGE])


def head(**headers: str) -> HttpRequest:
    named = {
        "Host": "localhost",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    by_name = {name.lower(): (name, value) for name, value in named.items()}
    return HttpRequest(method="GET", target="/", headers=by_name, body=b"")


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [
        *(
            (host, "127.0.0.1")
            for host in ("127.0.0.1:9998", "127.0.0.2", "localhost:1", "LocalHost.")
        ),
        ("[::1]:9998", "::1"),
        ("192.168.1.5:9998", "192.168.1.5"),
        ("192.168.1.5:9998", "::ffff:192.168.1.5"),
        ("[fe80::1]", "fe80::1%eth0"),
        pytest.param("ui.example:9998", "192.168.1.5", id="the name of a page that was named"),
        pytest.param("box.lan:9998", "192.168.1.5", id="the name that the proxy listens on"),
    ],
)
@pytest.mark.parametrize("site", ["", "same-origin", "none"])
def test_a_program_may_use_this_machines_address(host: str, reached_at: str, site: str) -> None:
    assert POLICY.allowed_origin(head(Host=host, Sec_Fetch_Site=site), reached_at) is None


FOREIGN_HOSTS = (
    "evil.example",
    "evil.example:9998",
    "192.168.1.6",
    "0.0.0.0:9998",
    "[::]",
    "127.0.0.1.nip",
)
OTHER_PAGES = (
    "https://evil.example",
    "http://ui.example:8443",
    "https://ui.example",
    "null",
    "http://localhost:9998",
)


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        *(
            ({"Host": host}, "is not an address of this machine.*--allow-origin")
            for host in FOREIGN_HOSTS
        ),
        *(({"Origin": origin}, "web pages") for origin in OTHER_PAGES),
        *(({"Sec_Fetch_Site": site}, "web pages") for site in ("cross-site", "same-site")),
    ],
)
def test_a_foreign_host_or_page_is_refused(headers: dict[str, str], why: str) -> None:
    with pytest.raises(ApiError, match=why) as refused:
        POLICY.allowed_origin(head(**headers), "192.168.1.5")
    assert refused.value.status == 403


@pytest.mark.parametrize(
    "origin", ["evil", "ftp://a", "http://", "http://a/path", "*", "null", "http://[a"]
)
def test_what_is_no_origin_cannot_be_allowed(origin: str) -> None:
    with pytest.raises(ConfigError, match="allow_origins"):
        ResponsesProxyConfig(upstream="http://127.0.0.1:1", allow_origins=(origin,))


@pytest.mark.parametrize("origins", [None, 1, "http://a"])
def test_origins_are_a_sequence(origins: Any) -> None:
    with pytest.raises(TypeError, match="allow_origins must be a sequence"):
        ResponsesProxyConfig(upstream="http://127.0.0.1:1", allow_origins=origins)


def test_a_callers_list_of_origins_is_copied() -> None:
    origins = ["http://a"]
    config = ResponsesProxyConfig(upstream="http://127.0.0.1:1", allow_origins=origins)
    origins.append("http://b")
    assert config.allow_origins == ("http://a",)


@pytest.mark.parametrize("url", ["", "a:1", "http://[::1", "http://a:b", "http://a?b", "ws://a"])
def test_an_upstream_is_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match="upstream must be a URL"):
        ResponsesProxyConfig(upstream=url)


@pytest.mark.parametrize(
    ("host", "upstream", "is_itself"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/v1", True),
        ("127.0.0.1", "http://LOCALHOST:80", True),
        ("0.0.0.0", "http://localhost:80", True),
        ("::1", "http://[::1]:80", True),
        ("127.0.0.1", "http://127.0.0.2:80", False),
        ("127.0.0.1", "http://127.0.0.1:81", False),
        ("0.0.0.0", "http://gpu:80", False),
    ],
)
def test_a_proxy_is_not_its_own_upstream(host: str, upstream: str, is_itself: bool) -> None:
    refused = pytest.raises(ConfigError, match="another port") if is_itself else nullcontext()
    with refused:
        ResponsesProxyConfig(host=host, port=80, upstream=upstream)
    ResponsesProxyConfig(host=host, port=0, upstream=upstream)


@pytest.mark.parametrize(
    "key", ["hush\r\nX-A: b", "hu\nsh", "hush\u00e9", "hu\0sh", "hush\n", " hush", ""]
)
def test_a_key_unfit_for_a_header_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key must") as refused:
        ResponsesProxyConfig(upstream="http://127.0.0.1:1", api_key=key)
    assert "hu" not in str(refused.value)


def test_a_key_is_taken_as_it_is() -> None:
    config = ResponsesProxyConfig(upstream="http://127.0.0.1:1", api_key="sk-~! 1")
    assert config.api_key == "sk-~! 1"
