"""Readiness probes: what each counts for, and when failed ones mean a restart. Sans-IO; instants
are monotonic seconds."""

from __future__ import annotations

import math
from enum import Enum, auto

from msgspec import Struct

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.gaps import FORGIVEN_IN_A_ROW
from llama_worker.server.messages import ProbeOutcome

PROBE_TIMEOUT_S = 10.0  # a loaded server answers within 10 ms (b11434)
_PROBE_TIMEOUT_MIN_S = 1.0
# probes so rare are due on whole seconds: those of many workers wake the host once
_TOGETHER_FROM_S = 10.0


def probe_timeout_s(profile: TimeoutProfile) -> float:
    """How long one readiness probe may take: until the next is due, within bounds."""
    interval_s = profile.health_probe_interval_s
    if interval_s is None:
        return PROBE_TIMEOUT_S
    return min(PROBE_TIMEOUT_S, max(_PROBE_TIMEOUT_MIN_S, interval_s))


def next_probe_at(profile: TimeoutProfile, now: float) -> float | None:
    """When a server that is ready is to be probed; None: never."""
    interval_s = profile.health_probe_interval_s
    if interval_s is None:
        return None
    return math.ceil(now + interval_s) if interval_s >= _TOGETHER_FROM_S else now + interval_s


class HealthCounter(Struct, frozen=True, kw_only=True):
    """Failed readiness probes in a row, of one launch while READY."""

    since: float  # the probe before, or the instant of becoming READY
    failures_count: int = 0

    def probed(
        self, *, ok: bool, detail: str, data_at: float | None, profile: TimeoutProfile, now: float
    ) -> tuple[HealthCounter, str | None]:
        """The counter after one probe, and why the server is lost; None while it is not.

        `data_at` is the latest data that any request received. Data since the probe before outdoes
        a failure and ends the row: a server too busy to answer a probe is not ill.
        """
        if ok or (data_at is not None and data_at > self.since):
            return HealthCounter(since=now), None
        count = self.failures_count + 1
        limit = profile.health_failures_before_restart
        lost = None
        if count >= limit:
            told = (
                f"{count} health probes in a row failed (limit: health_failures_before_restart "
                f"{limit})"
            )
            lost = f"{told}: {detail}"
        return HealthCounter(since=now, failures_count=count), lost


class ProbeMeaning(Enum):
    """What a probe that has ended says of the server."""

    NEWS = auto()
    TO_BE_REPEATED = auto()  # this machine did not run, or could not make it
    NOTHING = auto()  # it failed, and was made for its success alone


class ReadinessProbes:
    """The probe under way, and why one is wanted. Not thread-safe."""

    def __init__(self) -> None:
        self.began_at: float | None = None  # the one under way
        self.cause: str | None = None  # why the latest one was made out of turn
        self._wanted: str | None = None  # why another one is wanted
        self._counts = True  # a failure of the one under way
        self._is_outdated = False  # it was begun before a gap
        self._late_in_a_row = 0

    @property
    def is_wanted(self) -> bool:
        """Another one, out of turn."""
        return self._wanted is not None

    def want(self, cause: str | None) -> None:
        """Out of turn; one that is under way had begun before."""
        self._wanted = self._wanted or cause

    def begin(self, now: float, *, counts: bool = True) -> bool:
        """Whether one is to be made; else one is under way, and counts if it had not so far."""
        if self.began_at is not None:
            self._counts = self._counts or counts
            return False
        self.began_at, self._counts = now, counts
        self.cause, self._wanted = self._wanted, None
        return True

    def outdate(self) -> None:
        """The one under way may fail for no fault of the server's."""
        self._is_outdated = self.began_at is not None

    def ended(self, outcome: ProbeOutcome) -> ProbeMeaning:
        """The one under way has. Only so many in a row that fail late are forgiven: on a machine
        that is always late a hang has to be found, too."""
        is_outdated, self._is_outdated, self.began_at = self._is_outdated, False, None
        is_late = outcome is ProbeOutcome.LATE
        self._late_in_a_row = self._late_in_a_row + 1 if is_late else 0
        if outcome is not ProbeOutcome.READY and not self._counts:
            return ProbeMeaning.NOTHING
        if (
            outcome is ProbeOutcome.NO_NEWS
            or (is_late and self._late_in_a_row <= FORGIVEN_IN_A_ROW)
            or (is_outdated and outcome is ProbeOutcome.FAILED)
        ):
            return ProbeMeaning.TO_BE_REPEATED
        return ProbeMeaning.NEWS
