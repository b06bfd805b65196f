"""Schedules readiness probes, interprets their replies, and decides when a launch takes too long
and when failed probes mean a restart. Sans-IO; instants are monotonic seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llama_worker.config.profiles import Canary, TimeoutProfile
from llama_worker.errors import described_error
from llama_worker.server.messages import ProbeOutcome

PROBE_TIMEOUT_S = 10.0  # a loaded server answers far sooner (b11434)
_PROBE_TIMEOUT_MIN_S = 1.0
# from this interval on, probes are due on whole seconds: many workers then wake the host once
_ALIGNED_FROM_S = 10.0
FIRST_PROBE_S = 0.1  # after the process was started
_SHOWN_CHARS = 200  # of a canary's answer, in the error
# before READY: how long probes come early in the launch, their interval then, and afterwards
_EARLY_S, _EARLY_INTERVAL_S, _LATE_INTERVAL_S = 30.0, 0.5, 2.0


def probe_timeout_s(profile: TimeoutProfile) -> float:
    """How long one readiness probe may take: until the next is due, within bounds."""
    interval_s = profile.health_probe_interval_s
    if interval_s is None:
        return PROBE_TIMEOUT_S
    return min(PROBE_TIMEOUT_S, max(_PROBE_TIMEOUT_MIN_S, interval_s))


def next_probe_at(profile: TimeoutProfile, now: float) -> float | None:
    """When to probe a READY server next; None: never."""
    interval_s = profile.health_probe_interval_s
    if interval_s is None:
        return None
    return math.ceil(now + interval_s) if interval_s >= _ALIGNED_FROM_S else now + interval_s


class StartupWatch(Struct, frozen=True, kw_only=True):
    """The times of one launch that is not ready yet."""

    began_at: float
    worked_at: float  # the latest evidence of work, or `began_at`
    last_probe: str = "none ended"

    def saw_work(self, at: float) -> StartupWatch:
        """Evidence of work restarts `startup_timeout_s`."""
        return replace(self, worked_at=max(at, self.worked_at))

    def probed(self, detail: str) -> StartupWatch:
        """A probe has ended: the server is not ready."""
        return replace(self, last_probe=detail)

    def next_probe_at(self, now: float) -> float:
        """When to look again: every 0.5 s, less often once the start has taken 30 s."""
        return now + (_EARLY_INTERVAL_S if now - self.began_at < _EARLY_S else _LATE_INTERVAL_S)

    def overdue(self, profile: TimeoutProfile, now: float) -> str | None:
        """Why to give up the launch; None: not yet."""
        why = self._why_overdue(profile, now)
        return None if why is None else f"{why}; the last probe: {self.last_probe}"

    def _why_overdue(self, profile: TimeoutProfile, now: float) -> str | None:
        loading_s, silent_s = now - self.began_at, now - self.worked_at
        if silent_s >= profile.startup_timeout_s:
            return (
                f"not ready, and no sign of work for {silent_s:.1f} s (limit: "
                f"startup_timeout_s {profile.startup_timeout_s:g}); launched {loading_s:.1f} s "
                "ago; raise startup_timeout_s if the model loads slowly"
            )
        # A load that loops shows work for ever: these limits hold regardless of work.
        load_s, last_resort_s = profile.load_timeout_s, profile.silent_work_timeout_s
        if load_s is not None and loading_s >= load_s:
            return f"not ready within load_timeout_s {load_s:g} s"
        if load_s is None and last_resort_s is not None and loading_s >= last_resort_s:
            return (
                f"not ready within silent_work_timeout_s {last_resort_s:g} s; set load_timeout_s "
                "to allow more time"
            )
        return None


class HealthCounter(Struct, frozen=True, kw_only=True):
    """Counts the failed readiness probes in a row of one launch while READY."""

    since: float  # the previous probe, or the instant of becoming READY
    failures_count: int = 0

    def probed(
        self, *, ok: bool, detail: str, data_at: float | None, profile: TimeoutProfile, now: float
    ) -> tuple[HealthCounter, str | None]:
        """The counter after one probe, and why the server is lost; None: it is not.

        `data_at` is when any request last received data. Data since the previous probe overrides
        a failure and ends the row: a server too busy to answer a probe is not unhealthy.
        """
        if ok or (data_at is not None and data_at > self.since):
            return HealthCounter(since=now), None
        count = self.failures_count + 1
        limit = profile.health_failures_before_restart
        lost = None
        if count >= limit:
            failures = f"{count} health probes in a row failed"
            lost = f"{failures} (limit: health_failures_before_restart {limit}): {detail}"
        return HealthCounter(since=now, failures_count=count), lost


class ReadinessProbes:
    """Tracks the probe in progress and whether another one is wanted. Not thread-safe."""

    def __init__(self) -> None:
        self.began_at: float | None = None  # of the probe in progress; None: there is none
        self.cause: str | None = None  # why the latest probe was unscheduled; None: it was due
        self.wanted: str | None = None  # why another probe is wanted
        self._failure_counts: bool  # whether a failure of the probe in progress counts

    def want(self, cause: str | None) -> None:
        """Ask for an unscheduled probe, even if one is in progress: that one began too early."""
        self.wanted = self.wanted or cause

    def begin(self, now: float, *, failure_counts: bool = True) -> bool:
        """Whether to start a probe now; False if one is in progress. With `failure_counts`, or if
        it was wanted, a failure of the one in progress counts from now on."""
        failure_counts = failure_counts or self.wanted is not None
        if self.began_at is not None:
            self._failure_counts = self._failure_counts or failure_counts
            return False
        self.began_at, self._failure_counts = now, failure_counts
        self.cause, self.wanted = self.wanted, None
        return True

    def ended(self) -> bool:
        """The probe in progress is over; returns whether its failure counts."""
        self.began_at = None
        return self._failure_counts


def models_outcome(status: int, answer: Any) -> tuple[ProbeOutcome, str]:
    """What the reply to `GET /v1/models` means. `answer`: its JSON body; None: it is not JSON."""
    asked = "GET /v1/models"
    if status == 503:
        return ProbeOutcome.LOADING, f"{asked}: 503, loading the model"
    if status in (401, 403):  # 503 comes first, while it loads (b11434)
        return ProbeOutcome.UNAUTHORIZED, f"{asked}: {status}"
    if status != 200:
        return ProbeOutcome.FAILED, f"{asked}: {status}"
    if answer is None:
        return ProbeOutcome.FAILED, f"{asked}: 200, but the body is not JSON"
    return ProbeOutcome.READY, f"{asked}: 200"


def canary_body(canary: Canary) -> dict[str, Any]:
    """The request body: greedy sampling, so that the same server gives the same answer."""
    return {
        "messages": [{"role": "user", "content": canary.prompt}],
        "max_tokens": canary.max_tokens,
        "temperature": 0,
        "stream": False,
    }


def canary_problem(check: Callable[[str], bool], status: int, answer: Any) -> str | None:
    """What is wrong with the server's answer; None if the host's `check` accepts it."""
    if status != 200:
        return f"the canary request got HTTP {status}: {str(answer)[:_SHOWN_CHARS]}"
    text = _text_of(answer)
    try:
        fine = bool(check(text))
    except BaseException as error:  # even SystemExit in the host's code only fails the check
        return f"the canary check raised {described_error(error)}"
    return None if fine else f"the canary check rejected the answer {text[:_SHOWN_CHARS]!r}"


def _text_of(answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        return ""
    return content if isinstance(content, str) else ""
