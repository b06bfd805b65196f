"""Decides who may use the proxy: programs, and only those web pages that are allowed, under this
machine's names only. Pure.

A browser lets any page send requests to this machine. It even lets a page read the replies if the
page's owner makes its host name resolve to this machine (DNS rebinding). The headers `Origin`,
`Sec-Fetch-Site` and `Host` tell such requests apart.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from llama_worker.responses.errors import ApiError
from llama_worker.responses.http.request_reader import HttpRequest

_TODO = "Allow each page or host name with --allow-origin."
_PREFLIGHT_S = 600
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class AccessPolicy:
    """Allows or refuses requests by their headers. `host`: where the proxy listens; `origins`: the
    allowed web pages, whose host names are allowed as Host, too."""

    def __init__(self, host: str, origins: Iterable[str]) -> None:
        self._origins = {_as_sent(origin) for origin in origins}
        named = {urlsplit(origin).hostname or "" for origin in self._origins}
        self._hosts = {"localhost", host.lower(), *named} - {""}

    def allowed_origin(self, head: HttpRequest, local_address: str) -> str | None:
        """The origin of the web page that sent the request; None: a program did. Raises ApiError
        (403) if it is not allowed.

        `local_address`: this machine's address to which the client connected.
        """
        host = _host_name(head.header("host"))
        if host and host not in self._hosts and not _is_this_machine(host, local_address):
            raise _refused(f"the Host {host!r} is not an address of this machine")
        origin = head.header("origin")
        if origin:
            if origin.lower() not in self._origins:
                raise _refused(f"web pages may not use this server (Origin {origin!r})")
            return origin
        if head.header("sec-fetch-site") in ("cross-site", "same-site"):
            raise _refused("web pages of another origin may not use this server")
        return None


def page_headers(head: HttpRequest, origin: str) -> list[tuple[str, str]]:
    """The CORS headers that let an allowed page read the reply."""
    headers = [
        ("Access-Control-Allow-Origin", origin),
        ("Vary", "Origin"),
        ("Access-Control-Expose-Headers", "*"),
    ]
    if head.method == "OPTIONS":
        headers += [
            ("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS"),
            ("Access-Control-Allow-Headers", head.header("access-control-request-headers") or "*"),
            ("Access-Control-Allow-Private-Network", "true"),
            ("Access-Control-Max-Age", str(_PREFLIGHT_S)),
        ]
    return headers


def _as_sent(origin: str) -> str:
    """The origin as browsers send it: in lower case, without the scheme's default port."""
    origin = origin.lower().rstrip("/")
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition(":")[0], ""))


def _host_name(host: str) -> str:
    """The name in a Host header, in lower case, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def _is_this_machine(host: str, local_address: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address == _unmapped(local_address)


def _unmapped(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address; the IPv4 address for an IPv4-mapped one, which a dual-stack socket has."""
    local = ipaddress.ip_address(address)
    return (local.ipv4_mapped or local) if isinstance(local, ipaddress.IPv6Address) else local


def _refused(why: str) -> ApiError:
    return ApiError(403, f"{why}. {_TODO}", code="forbidden")
