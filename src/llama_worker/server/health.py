"""When failed health probes mean a restart. Pure; instants are monotonic seconds."""

from __future__ import annotations

from msgspec import Struct

from llama_worker.config.profiles import TimeoutProfile

PROBE_TIMEOUT_S = 10.0  # a loaded server answers within 10 ms (b11434)
_PROBE_TIMEOUT_MIN_S = 1.0


def probe_timeout_s(profile: TimeoutProfile) -> float:
    """How long one readiness probe may take: until the next is due, within bounds."""
    interval_s = profile.health_probe_interval_s
    if interval_s is None:
        return PROBE_TIMEOUT_S
    return min(PROBE_TIMEOUT_S, max(_PROBE_TIMEOUT_MIN_S, interval_s))


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
