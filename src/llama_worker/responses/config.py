"""What a Responses proxy is configured with, checked on construction. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.config.validation import checked_int, checked_seconds, checked_str, optional
from llama_worker.errors import ConfigError
from llama_worker.responses.http.access import is_origin

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesProxyConfig:
    """`upstream`: the URL of a llama-server, http or https, with or without a base path; None for
    a proxy around a worker: it is the worker's server.

    `port` 0: any free one. `api_key` is shown to the upstream; without one the client's own passes
    through. It is printable ASCII, taken as it is: white space around it is an error. `ca_file`:
    whom to trust for an https upstream; None: the public authorities. `max_concurrent`: requests
    for a response that run at once; more are refused with 503. None: no bound. `allow_origins`: web
    pages that may use the proxy, e.g. `http://localhost:3000`, and names that it may be called by.
    `timeouts`: when a silent `upstream` is given up; a worker has limits of its own.
    """

    upstream: str | None = None
    host: str = "127.0.0.1"
    port: int = 9998
    api_key: str | None = field(default=None, repr=False)
    max_concurrent: int | None = None
    allow_origins: tuple[str, ...] = ()
    ca_file: str | None = None
    connect_timeout_s: float = 10.0
    client_timeout_s: float = 120.0  # in which a client takes no byte of its reply
    # without an event for the client, before `response.in_progress` comes again
    heartbeat_s: float = 10.0
    max_body_bytes: int = 64 * _MIB  # of a request; it is held in memory
    max_responses: int = 1000
    max_stored_bytes: int = 64 * _MIB
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)

    def __post_init__(self) -> None:
        if self.upstream is not None:
            _check_upstream(self.upstream)
        checked_str("host", self.host, empty=False, nul=False)
        checked_int("port", self.port, at_least=0, at_most=65535)
        if self.api_key is not None:
            _check_api_key(self.api_key)
        optional(checked_int, "max_concurrent", self.max_concurrent, at_least=1)
        optional(checked_str, "ca_file", self.ca_file, empty=False, nul=False)
        checked_seconds("connect_timeout_s", self.connect_timeout_s, above=0)
        checked_seconds("client_timeout_s", self.client_timeout_s, above=0)
        checked_seconds("heartbeat_s", self.heartbeat_s, above=0)
        for origin in self.allow_origins:
            checked_str("allow_origins", origin)
            if not is_origin(origin):
                raise ConfigError(
                    f"allow_origins must hold origins like http://localhost:3000, not {origin!r}"
                )
        checked_int("max_body_bytes", self.max_body_bytes, at_least=1)
        checked_int("max_responses", self.max_responses, at_least=0)
        checked_int("max_stored_bytes", self.max_stored_bytes, at_least=0)
        if not isinstance(self.timeouts, TimeoutProfile):
            raise TypeError(
                f"timeouts must be a TimeoutProfile, not {type(self.timeouts).__name__}"
            )

    @property
    def base_url(self) -> str:
        """The upstream without a slash at the end."""
        return (self.upstream or "").rstrip("/")


def _check_upstream(upstream: object) -> None:
    checked_str("upstream", upstream)
    assert isinstance(upstream, str)
    parts = urlsplit(upstream)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise ConfigError(f"upstream must be a URL like http://127.0.0.1:8080, not {upstream!r}")
    if "@" in parts.netloc:
        raise ConfigError("upstream must hold no user or password: give the key as api_key")


def _check_api_key(key: object) -> None:
    """It travels in an HTTP header: a line break in it would begin another one."""
    checked_str("api_key", key, empty=False, secret=True)
    assert isinstance(key, str)
    if key != key.strip():
        raise ConfigError(
            "api_key must not begin or end with white space: a key file ends with a line break, "
            "so read it with Path(...).read_text().strip()"
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigError("api_key must be printable ASCII: it travels in an HTTP header")
