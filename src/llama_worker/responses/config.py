"""What a Responses proxy is configured with, checked on construction. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.config.validation import (
    Count,
    CountOrZero,
    Seconds,
    check_fields,
    checked_api_key,
    checked_int,
    checked_str,
    shown,
)
from llama_worker.errors import ConfigError

_MIB = 1024 * 1024
_LOCAL_NAMES = ("localhost", "0.0.0.0", "::")  # who connects to one of these gets here


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesProxyConfig:
    """`upstream`: the URL of a llama-server, http or https, with or without a base path; None for
    a proxy around a worker: it is the worker's server.

    `port` 0: any free one. `api_key` is shown to the upstream; None: the worker's, and where there
    is none the client's own passes through. It is printable ASCII, taken as it is: white space
    around it is an error. `ca_file`: whom to trust for an https upstream; None: the public
    authorities. `max_concurrent`: requests for a response that run at once; more are refused with
    503. None: no bound. `allow_origins`: web pages that may use the proxy, e.g.
    `http://localhost:3000`, and names that it may be called by. `timeouts`: when a silent
    `upstream` is given up; a worker has limits of its own.
    """

    upstream: Annotated[str, _check_upstream] | None = None
    host: Annotated[str, partial(checked_str, empty=False, nul=False)] = "127.0.0.1"
    port: Annotated[int, partial(checked_int, at_least=0, at_most=65535)] = 9998
    api_key: Annotated[str, checked_api_key] | None = field(default=None, repr=False)
    max_concurrent: Count | None = None
    allow_origins: Annotated[Sequence[str], _checked_origins] = ()
    ca_file: Annotated[str, partial(checked_str, empty=False, nul=False)] | None = None
    connect_timeout_s: Seconds = 10.0
    client_timeout_s: Seconds = 120.0  # in which a client takes no byte of its reply
    # without an event for the client, before `response.in_progress` comes again
    heartbeat_s: Seconds = 10.0
    max_body_bytes: Count = 64 * _MIB  # of a request; it is held in memory
    max_responses: CountOrZero = 1000
    max_stored_bytes: CountOrZero = 64 * _MIB
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)

    def __post_init__(self) -> None:
        check_fields(self)
        upstream = urlsplit(self.upstream or "")
        there = _address(upstream.hostname or ""), upstream.port
        if self.port and there == (_address(self.host), self.port):
            raise ConfigError(
                f"upstream {self.upstream} is where the proxy itself is to listen: give the "
                "server's address, or another port"
            )

    @property
    def base_url(self) -> str:
        """The upstream without a slash at the end."""
        return (self.upstream or "").rstrip("/")


def _address(host: str) -> str:
    return "127.0.0.1" if host.lower() in _LOCAL_NAMES else host.lower()


def _check_upstream(field: str, upstream: Any) -> None:
    checked_str(field, upstream)
    parts = _parts_of(upstream)
    if parts is None or parts.query or parts.fragment:
        raise ConfigError(f"{field} must be a URL like http://127.0.0.1:8080, not {upstream!r}")
    if "@" in parts.netloc:
        raise ConfigError(f"{field} must hold no user or password: give the key as api_key")


def _checked_origins(field: str, origins: Any) -> tuple[str, ...]:
    if isinstance(origins, str) or not isinstance(origins, Sequence):
        raise TypeError(f"{field} must be a sequence of str, not {shown(origins)}")
    for origin in origins:
        checked_str(field, origin)
        parts = _parts_of(origin)
        if parts is None or parts.path not in ("", "/") or parts.query:
            raise ConfigError(
                f"{field} must hold origins like http://localhost:3000, not {origin!r}"
            )
    return tuple(origins)


def _parts_of(url: str) -> SplitResult | None:
    """None for what is not the URL of a server."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if good else None
