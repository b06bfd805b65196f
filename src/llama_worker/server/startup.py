"""How a launch is watched until it is ready. Pure; instants are monotonic seconds."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llama_worker.config.profiles import TimeoutProfile

_FIRST_PROBE_S = 0.1
_EARLY_S, _EARLY_INTERVAL_S, _LATE_INTERVAL_S = 30.0, 0.5, 2.0


class StartupWatch(Struct, frozen=True, kw_only=True):
    """One launch that is not ready yet."""

    began_at: float
    worked_at: float  # the latest evidence of work, or the beginning

    @classmethod
    def begin(cls, now: float) -> StartupWatch:
        """The launch was ordered just now."""
        return cls(began_at=now, worked_at=now)

    def saw_work(self, at: float) -> StartupWatch:
        """CPU time by rate, or reads from disk: the time that counts starts anew."""
        return replace(self, worked_at=max(at, self.worked_at))

    def after_gap(self, lost_s: float) -> StartupWatch:
        """This machine did not run for so long: that time does not count."""
        return replace(self, began_at=self.began_at + lost_s, worked_at=self.worked_at + lost_s)

    def first_probe_at(self, now: float) -> float:
        """When to look for the first time, with the process started just now."""
        return now + _FIRST_PROBE_S

    def next_probe_at(self, now: float) -> float:
        """When to look again: every 0.5 s, less often once the start has taken 30 s."""
        return now + (_EARLY_INTERVAL_S if now - self.began_at < _EARLY_S else _LATE_INTERVAL_S)

    def overdue(self, profile: TimeoutProfile, now: float) -> str | None:
        """Why the launch is to be given up; None while it is not."""
        if now - self.worked_at >= profile.startup_timeout_s:
            idle = (
                "not ready, and no sign of work for startup_timeout_s "
                f"{profile.startup_timeout_s:g} s"
            )
            return (
                f"{idle}; {now - self.began_at:.1f} s since the launch; give it longer, or see "
                "its last lines"
            )
        last_resort_s = profile.silent_work_timeout_s  # a load that spins shows work for ever
        if (
            profile.load_timeout_s is None
            and last_resort_s is not None
            and now - self.began_at >= last_resort_s
        ):
            return (
                f"not ready within silent_work_timeout_s {last_resort_s:g} s; load_timeout_s "
                "would allow more"
            )
        if profile.load_timeout_s is not None and now - self.began_at >= profile.load_timeout_s:
            return f"not ready within load_timeout_s {profile.load_timeout_s:g} s"
        return None
