"""The configuration of a Responses proxy, checked on construction. Pure."""

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
    names_near_fields,
    shown,
)
from llama_worker.errors import ConfigError

_MIB = 1024 * 1024
_LOCAL_NAMES = ("localhost", "0.0.0.0", "::")  # all of them lead to this machine


@names_near_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesProxyConfig:
    """The configuration of a Responses proxy; docs/responses.md says what each field does."""

    upstream: Annotated[str, _check_upstream] | None = None
    host: Annotated[str, partial(checked_str, empty=False, nul=False)] = "127.0.0.1"
    port: Annotated[int, partial(checked_int, at_least=0, at_most=65535)] = 9998
    api_key: Annotated[str, checked_api_key] | None = field(default=None, repr=False)
    max_concurrent: Count | None = None
    allow_origins: Annotated[Sequence[str], _checked_origins] = ()
    ca_file: Annotated[str, partial(checked_str, empty=False, nul=False)] | None = None
    connect_timeout_s: Seconds = 10.0
    client_timeout_s: Seconds = 120.0
    heartbeat_s: Seconds = 10.0
    max_body_bytes: Count = 64 * _MIB
    max_responses: CountOrZero = 1000
    max_stored_bytes: CountOrZero = 64 * _MIB
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)

    def __post_init__(self) -> None:
        check_fields(self)
        upstream = urlsplit(self.upstream or "")
        port = upstream.port or {"http": 80, "https": 443}.get(upstream.scheme)
        there = _address(upstream.hostname or ""), port
        if self.port and there == (_address(self.host), self.port):
            raise ConfigError(
                f"upstream {self.upstream} is the address on which the proxy itself listens: "
                "give the server's address, or another port"
            )

    @property
    def base_url(self) -> str:
        """The upstream without a slash at the end, and without the `/v1` of a client's base URL."""
        return (self.upstream or "").rstrip("/").removesuffix("/v1")


def _address(host: str) -> str:
    return "127.0.0.1" if host.lower() in _LOCAL_NAMES else host.lower()


def _check_upstream(field: str, upstream: Any) -> None:
    checked_str(field, upstream)
    parts = _parts_of(upstream)
    if parts is None or parts.query or parts.fragment:
        may_hold_key = "@" in upstream or "?" in upstream
        wrong = "one with a user, password or query" if may_hold_key else repr(upstream)
        raise ConfigError(f"{field} must be a URL like http://127.0.0.1:8080, not {wrong}")
    if "@" in parts.netloc:
        raise ConfigError(f"{field} must not contain a user or password: give the key as api_key")


def _checked_origins(field: str, origins: Any) -> tuple[str, ...]:
    if isinstance(origins, str) or not isinstance(origins, Sequence):
        raise TypeError(f"{field} must be a sequence of str, not {shown(origins)}")
    for origin in origins:
        checked_str(field, origin)
        parts = _parts_of(origin)
        if parts is None or parts.path not in ("", "/") or parts.query:
            raise ConfigError(
                f"{field} must contain origins like http://localhost:3000, not {origin!r}"
            )
    return tuple(origins)


def _parts_of(url: str) -> SplitResult | None:
    """The parts of a server's URL; None if it is not one."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # `urlsplit` drops line breaks, such as that at the end of a file; a request would have it
        good = good and url.isprintable() and " " not in url
    except ValueError:
        return None
    return parts if good else None
