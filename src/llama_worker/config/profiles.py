"""What a worker's config is made of: how long to wait, when to restart, what counts as a loop.
Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal, Self, TypeAlias, get_args

from llama_worker.config.validation import (
    check_takes,
    checked_bool,
    checked_int,
    checked_number,
    checked_seconds,
    checked_str,
    names_near_fields,
    optional,
)
from llama_worker.errors import ConfigError

TimeoutPreset: TypeAlias = Literal["slow_prefill", "normal", "fast", "debug"]
"""The names of TimeoutProfile's class methods."""
_NEVER_S = 10 * 365 * 86400.0


@names_near_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutProfile:
    """How long to wait for what, in seconds; None turns off what may be turned off. Defaults: slow
    hardware."""

    connect_timeout_s: float = 3.0
    headers_timeout_s: float = 30.0
    ttft_timeout_s: float | None = None
    prefill_liveness_timeout_s: float | None = 3600.0
    idle_stream_timeout_s: float | None = 300.0
    absolute_timeout_s: float | None = None
    silent_work_timeout_s: float | None = 3600.0
    liveness_probe_interval_s: float = 5.0
    startup_timeout_s: float = 120.0
    load_timeout_s: float | None = None
    suspect_after_s: float | None = 60.0
    bios_timeout_s: float = 5.0
    stop_grace_s: float = 10.0
    kill_timeout_s: float = 10.0
    health_probe_interval_s: float | None = 30.0
    health_failures_before_restart: int = 3

    def __post_init__(self) -> None:
        checked_seconds("stop_grace_s", self.stop_grace_s, at_least=0)
        for each in fields(self):
            if each.type == "float | None":
                optional(checked_seconds, each.name, getattr(self, each.name), above=0)
            elif each.type == "float" and each.name != "stop_grace_s":
                checked_seconds(each.name, getattr(self, each.name), above=0)
        checked_int(
            "health_failures_before_restart", self.health_failures_before_restart, at_least=1
        )

    @classmethod
    def slow_prefill(cls) -> Self:
        """The defaults: prefill may take tens of minutes."""
        return cls()

    @classmethod
    def normal(cls) -> Self:
        """A GPU that reads a prompt within minutes."""
        return cls(
            prefill_liveness_timeout_s=600.0,
            idle_stream_timeout_s=120.0,
            silent_work_timeout_s=1200.0,
        )

    @classmethod
    def fast(cls) -> Self:
        """A GPU that answers within seconds."""
        return cls(
            headers_timeout_s=10.0,
            prefill_liveness_timeout_s=60.0,
            idle_stream_timeout_s=30.0,
            silent_work_timeout_s=300.0,
            startup_timeout_s=60.0,
        )

    @classmethod
    def debug(cls) -> Self:
        """Nothing is given up that need not be: for a server under a debugger."""
        return cls(
            headers_timeout_s=_NEVER_S,
            prefill_liveness_timeout_s=None,
            idle_stream_timeout_s=None,
            silent_work_timeout_s=None,
            suspect_after_s=None,
            health_probe_interval_s=None,
        )

    def without_evidence(self) -> Self:
        """The same for a server whose processes cannot be seen.

        Some builds hold the response headers back until the prompt is read, and every build does
        that for a reply in one piece: that they do not come is then no sign of a hang.
        """
        return replace(self, headers_timeout_s=self.silent_work_timeout_s or _NEVER_S)


TIMEOUT_PRESETS: dict[str, Callable[[], TimeoutProfile]] = {
    name: getattr(TimeoutProfile, name) for name in get_args(TimeoutPreset)
}


@names_near_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Recycle:
    """When an idle server is replaced as planned, because it leaks or ages; at least one limit.
    None: no limit."""

    max_anon_mib: int | None = None
    max_requests: int | None = None
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_anon_mib", "max_requests"):
            optional(checked_int, name, getattr(self, name), at_least=1)
        optional(checked_seconds, "max_age_s", self.max_age_s, above=0)
        if self.max_anon_mib is self.max_requests is self.max_age_s is None:
            raise ConfigError("recycle needs one of max_anon_mib, max_requests and max_age_s")


@names_near_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """One greedy completion that a server has to get right before it is READY.

    `check` gets the answer's text and says whether it will do; it runs on a thread of its own.
    """

    prompt: str
    check: Callable[[str], bool]
    max_tokens: int = 32

    def __post_init__(self) -> None:
        checked_str("canary prompt", self.prompt, empty=False)
        check_takes("canary check", self.check, "text")
        if inspect.iscoroutinefunction(self.check):
            raise TypeError(
                "canary check must not be async: write it with 'def'; it gets a str and "
                "returns a bool"
            )
        checked_int("canary max_tokens", self.max_tokens, at_least=1)


@names_near_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a server is started again, how soon, and how often before the worker gives up."""

    restart_backoff_s: float = 5.0
    backoff_factor: float = 2.0
    backoff_max_s: float = 60.0
    restart_window_s: float = 120.0
    max_restarts_per_window: int = 5
    stable_after_s: float = 600.0
    restart_on_stall: bool = True
    transport_failures_before_restart: int = 2
    server_errors_before_restart: int = 5
    degenerate_outputs_before_restart: int | None = None
    recycle: Recycle | None = None

    def __post_init__(self) -> None:
        for name in ("restart_backoff_s", "backoff_max_s", "stable_after_s"):
            checked_seconds(name, getattr(self, name), at_least=0)
        checked_number("backoff_factor", self.backoff_factor, at_least=1)
        checked_seconds("restart_window_s", self.restart_window_s, above=0)
        checked_int("max_restarts_per_window", self.max_restarts_per_window, at_least=0)
        checked_bool("restart_on_stall", self.restart_on_stall)
        for name in ("transport_failures_before_restart", "server_errors_before_restart"):
            checked_int(name, getattr(self, name), at_least=1)
        name = "degenerate_outputs_before_restart"
        optional(checked_int, name, self.degenerate_outputs_before_restart, at_least=1)
        if self.recycle is not None and not isinstance(self.recycle, Recycle):
            raise TypeError(f"recycle must be a Recycle or None, not {type(self.recycle).__name__}")

    @classmethod
    def never(cls) -> Self:
        """No restart: whatever would ask for one leaves the worker FAILED."""
        return cls(max_restarts_per_window=0)


@names_near_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDetector:
    """When output that repeats itself is a loop: counts of characters and of consecutive repeats.

    By lines, and by any period of the last `min_repeated_chars` characters.
    """

    min_line_chars: int = 32
    long_line_chars: int = 64
    short_line_repeats: int = 12
    long_line_repeats: int = 8
    min_output_chars: int = 256
    max_period: int = 8
    max_period_chars: int = 8192
    min_repeated_chars: int = 8192
    min_text_repeats: int = 4

    def __post_init__(self) -> None:
        for name in ("min_line_chars", "long_line_chars"):
            checked_int(name, getattr(self, name), at_least=1)
        checked_int("max_period", self.max_period, at_least=1, at_most=1000)
        checked_int("max_period_chars", self.max_period_chars, at_least=1, at_most=1 << 20)
        checked_int("min_repeated_chars", self.min_repeated_chars, at_least=1, at_most=1 << 24)
        for name in ("short_line_repeats", "long_line_repeats", "min_text_repeats"):
            checked_int(name, getattr(self, name), at_least=2)
        checked_int("min_output_chars", self.min_output_chars, at_least=0)
        if self.long_line_chars < self.min_line_chars:
            raise ConfigError(
                f"long_line_chars {self.long_line_chars} must be at least min_line_chars "
                f"{self.min_line_chars}"
            )
