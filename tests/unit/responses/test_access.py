"""Programs may use the proxy; web pages only where they were named, and under no foreign name."""

import pytest

from llama_worker.responses.errors import ApiError
from llama_worker.responses.http.access import AccessPolicy
from llama_worker.responses.http.request_reader import HttpRequest

PAGE = "https://ui.example:8443"
POLICY = AccessPolicy("box.lan", [PAGE])


def head(**headers: str) -> HttpRequest:
    named = {"Host": "localhost"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
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
    ("allowed", "sent"),
    [
        ("http://LOCALHOST:80/", "http://localhost"),
        ("https://ui.example:443", "https://ui.example"),
        ("http://ui.example:443", "http://ui.example:443"),
        ("http://[::80]", "http://[::80]"),
    ],
)
def test_a_default_port_may_be_named(allowed: str, sent: str) -> None:
    assert AccessPolicy("box.lan", [allowed]).allowed_origin(head(Origin=sent), "::1") == sent
