"""A proxy's configuration is checked when it is made."""

from contextlib import nullcontext
from typing import Any

import pytest

from llama_worker import ConfigError
from llama_worker.responses.config import ResponsesProxyConfig


@pytest.mark.parametrize(
    "origin",
    ["evil", "ftp://a", "http://", "http://a/path", "*", "null", "http://[a", "http://a\n"],
)
def test_what_is_no_origin_cannot_be_allowed(origin: str) -> None:
    with pytest.raises(ConfigError, match="allow_origins"):
        ResponsesProxyConfig(upstream="http://127.0.0.1:1", allow_origins=(origin,))


def test_a_misspelt_field_is_told_its_name() -> None:
    with pytest.raises(TypeError, match="did you mean 'upstream'"):
        ResponsesProxyConfig(upsteam="http://127.0.0.1:1")  # type: ignore[call-arg]


@pytest.mark.parametrize("origins", [None, 1, "http://a"])
def test_origins_are_a_sequence(origins: Any) -> None:
    with pytest.raises(TypeError, match="allow_origins must be a sequence"):
        ResponsesProxyConfig(upstream="http://127.0.0.1:1", allow_origins=origins)


def test_a_callers_list_of_origins_is_copied() -> None:
    origins = ["http://a"]
    config = ResponsesProxyConfig(upstream="http://127.0.0.1:1", allow_origins=origins)
    origins.append("http://b")
    assert config.allow_origins == ("http://a",)


@pytest.mark.parametrize(
    "url",
    [
        *("", "a:1", "http://[::1", "http://a:b", "http://a?b", "ws://a"),
        *("http://a:1\n", "http://a/v1\n", " http://a", "http://a b", "http://a\t"),
    ],
)
def test_an_upstream_is_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match="upstream must be a URL"):
        ResponsesProxyConfig(upstream=url)


@pytest.mark.parametrize("url", ["http://me:hush@a", "http://me:hush@a:b", "http://a?key=hush"])
def test_a_key_in_an_upstream_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="user") as refused:
        ResponsesProxyConfig(upstream=url)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_a_clients_base_url_is_an_upstream_too(path: str) -> None:
    for server in ("http://gpu:80", "http://gpu/a"):
        assert ResponsesProxyConfig(upstream=server + path).base_url == server


@pytest.mark.parametrize(
    ("host", "upstream", "is_itself"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/v1", True),
        ("127.0.0.1", "http://LOCALHOST:80", True),
        ("127.0.0.1", "http://localhost", True),
        ("127.0.0.1", "https://localhost", False),
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
