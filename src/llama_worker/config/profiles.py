"""Parts of a worker's config: timeouts, restarts, recycling, canary and loop detection. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, Self, TypeAlias, get_args

from llama_worker.config.validation import (
    Count,
    CountOrZero,
    Seconds,
    SecondsOrZero,
    check_callback,
    check_fields,
    checked_int,
    checked_number,
    checked_str,
    names_near_fields,
)
from llama_worker.errors import ConfigError

TimeoutPreset: TypeAlias = Literal["slow_prefill", "normal", "fast", "debug"]
"""The names of TimeoutProfile's class methods."""
_NEVER_S = 10 * 365 * 86400.0
Repeats: TypeAlias = Annotated[int, partial(checked_int, at_least=2)]


@names_near_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutProfile:
    """The time limits of a worker, in seconds; None, if the field allows it, turns a limit off.

    The defaults are for slow hardware. docs/how-to/slow-hardware.md says what each limit is for,
    docs/hung-or-slow.md what those of a request measure.
    """

    connect_timeout_s: Seconds = 3.0
    headers_timeout_s: Seconds = 30.0
    ttft_timeout_s: Seconds | None = None
    prefill_liveness_timeout_s: Seconds | None = 3600.0
    idle_stream_timeout_s: Seconds | None = 300.0
    absolute_timeout_s: Seconds | None = None
    silent_work_timeout_s: Seconds | None = 3600.0
    liveness_probe_interval_s: Seconds = 5.0
    startup_timeout_s: Seconds = 120.0
    load_timeout_s: Seconds | None = None
    suspect_after_s: Seconds | None = 60.0
    bios_timeout_s: Seconds = 5.0
    stop_grace_s: SecondsOrZero = 10.0
    kill_timeout_s: Seconds = 10.0
    health_probe_interval_s: Seconds | None = 30.0
    health_failures_before_restart: Count = 3

    def __post_init__(self) -> None:
        check_fields(self)

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
        """Limits on the server's work are off, or ten years: for a server under a debugger."""
        return cls(
            headers_timeout_s=_NEVER_S,
            prefill_liveness_timeout_s=None,
            idle_stream_timeout_s=None,
            silent_work_timeout_s=None,
            startup_timeout_s=_NEVER_S,
            suspect_after_s=None,
            health_probe_interval_s=None,
        )

    def without_evidence(self) -> Self:
        """The same limits for a server whose processes cannot be seen.

        Some builds hold the response headers back until the prompt is read: missing headers are
        then no sign of a hang. Only `/slots` may show work.
        """
        return replace(self, headers_timeout_s=self.silent_work_timeout_s or _NEVER_S)


TIMEOUT_PRESETS: dict[str, Callable[[], TimeoutProfile]] = {
    name: getattr(TimeoutProfile, name) for name in get_args(TimeoutPreset)
}


@names_near_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Recycle:
    """When an idle server is replaced: it leaks memory (`max_anon_mib`), has served many requests,
    or is old. None: no such limit; at least one must be set."""

    max_anon_mib: Count | None = None
    max_requests: Count | None = None
    max_age_s: Seconds | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_anon_mib is self.max_requests is self.max_age_s is None:
            raise ConfigError("recycle needs one of max_anon_mib, max_requests and max_age_s")


@names_near_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """One greedy completion that a server has to get right before it is READY.

    `check` gets the answer's text and returns whether it is good; it runs on a thread that the
    probes of all workers share. An exception counts as False.
    """

    prompt: Annotated[str, partial(checked_str, empty=False)]
    check: Annotated[Callable[[str], bool], _check_canary]
    max_tokens: Count = 32

    def __post_init__(self) -> None:
        check_fields(self)


def _check_canary(field: str, check: object) -> None:
    instead = "; it gets a str and returns a bool"
    check_callback(f"canary {field}", check, "text", instead=instead)


@names_near_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a server is started again, how soon, and how often before the worker gives up.
    docs/configuration.md says what each field does."""

    restart_backoff_s: SecondsOrZero = 5.0
    backoff_factor: Annotated[float, partial(checked_number, at_least=1)] = 2.0
    backoff_max_s: SecondsOrZero = 60.0
    restart_window_s: Seconds = 120.0
    max_restarts_per_window: CountOrZero = 5
    stable_after_s: SecondsOrZero = 600.0
    restart_on_stall: bool = True
    transport_failures_before_restart: Count = 2
    server_errors_before_restart: Count = 5
    degenerate_outputs_before_restart: Count | None = None
    recycle: Recycle | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def never(cls) -> Self:
        """No restarts: what would cause one leaves the worker FAILED."""
        return cls(max_restarts_per_window=0)


@names_near_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDetector:
    """When output that repeats itself is a loop: by its lines, or by any repeated piece at its end.
    docs/configuration.md says what each number counts."""

    min_line_chars: Count = 32
    long_line_chars: Count = 64
    short_line_repeats: Repeats = 12
    long_line_repeats: Repeats = 8
    min_output_chars: CountOrZero = 256
    max_period: Annotated[int, partial(checked_int, at_least=1, at_most=1000)] = 8
    max_period_chars: Annotated[int, partial(checked_int, at_least=1, at_most=1 << 20)] = 8192
    min_repeated_chars: Annotated[int, partial(checked_int, at_least=1, at_most=1 << 24)] = 8192
    min_text_repeats: Repeats = 4

    def __post_init__(self) -> None:
        check_fields(self)
        if self.long_line_chars < self.min_line_chars:
            raise ConfigError(
                f"long_line_chars {self.long_line_chars} must be at least min_line_chars "
                f"{self.min_line_chars}"
            )
