"""When a server is signalled, when it is started again, and how often its slots are looked at: at
the stated instants, neither early nor late. They are computed here from the settings and from what
was seen, and not asked for."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from llama_worker.config.profiles import RestartPolicy
from llama_worker.server.termination import Signal
from tests.simulation.promises import Promise

if TYPE_CHECKING:
    from tests.simulation.invariants import Invariants
    from tests.simulation.runtime import SimServerProcess

LATEST_TIMER_S = 3.0  # how late what is due at an instant may be done, a starved thread included
CLOSING_S = 1.0  # connections are closed before SIGTERM
REPEAT_S = 2.0  # from SIGTERM to the second
FORCE_S = 1.0  # from SIGKILL by the guard to that past it, and to each further one
LOOKS_APART_S = 2.0
REFUSED_S = 60.0
WINDOW_S = 3.0  # over which the use of CPU time is averaged, or over two looks
_EARLY_S = 1e-6
_MAIL_S = 1.0  # what was told longer ago has been handled


class Looks:
    """At the slots of one launch: two seconds apart, since results that they cause keep the server
    from noticing closed connections; a minute behind a refusal."""

    def __init__(self) -> None:
        self._not_before = -math.inf

    def asked(self, now: float) -> None:
        if now < self._not_before - _EARLY_S:
            early_s = self._not_before - now
            raise Promise.HUNG_OR_SLOW(f"/slots is asked for {early_s:.2f} s too soon")
        self._not_before = now + LOOKS_APART_S

    def refused(self, now: float) -> None:
        self._not_before = now + REFUSED_S


class LostShare:
    """Of the time over which the use of CPU time is averaged, what was lost."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, float]] = deque()

    def looked(self, at: float, lost_s: float) -> float:
        """The share, from 0 to 1; `lost_s`: in all so far."""
        looks = self._looks
        looks.append((at, lost_s))
        while len(looks) > 2 and looks[1][0] <= at - WINDOW_S:
            looks.popleft()
        began_at, lost_before_s = looks[0]
        return (lost_s - lost_before_s) / (at - began_at) if at > began_at else 0.0


class Signals:
    """What each process is sent: SIGTERM, once more after 2 s, SIGKILL when the grace is over, and
    then again each second until it is gone, or unkillable."""

    def __init__(self, invariants: Invariants, grace_s: float, kill_timeout_s: float) -> None:
        self._invariants = invariants
        self._grace_s, self._kill_timeout_s = grace_s, kill_timeout_s
        self._sent: dict[SimServerProcess, list[tuple[Signal, float]]] = {}
        self._unkillable: set[SimServerProcess] = set()  # so the worker has said

    def expect_some(self, process: SimServerProcess) -> None:
        """Its launch is to end."""
        self._expect(process, CLOSING_S, "a signal", lambda: bool(self._sent.get(process)))

    def sent(self, process: SimServerProcess, signal: Signal) -> None:
        before = self._sent.setdefault(process, [])
        terms = [at for each, at in before if each is Signal.TERMINATE]
        kills = [at for each, at in before if each is not Signal.TERMINATE]
        now, number = self._invariants.now, len(before) + 1
        before.append((signal, now))

        def more() -> bool:
            return len(before) > number

        def is_killed() -> bool:
            return any(each is not Signal.TERMINATE for each, _ in before)

        match signal:
            case Signal.TERMINATE if not before[:-1]:
                if self._grace_s > REPEAT_S:
                    self._expect(process, REPEAT_S, "the second SIGTERM", more)
                self._expect(process, self._grace_s, "SIGKILL behind SIGTERM", is_killed)
            case Signal.TERMINATE if (
                kills or len(terms) > 1 or now - terms[0] < REPEAT_S - _EARLY_S
            ):
                self._fail(process, f"SIGTERM at {now}, behind {before[:-1]}")
            case Signal.KILL:
                self._expect(process, FORCE_S, "SIGKILL past the guard", more)
            case Signal.FORCE:
                if not kills or now - kills[-1] < FORCE_S - _EARLY_S:
                    self._fail(process, f"SIGKILL past the guard at {now}, behind {before[:-1]}")
                last_at = max(at for each, at in before if each is Signal.KILL)
                if now < last_at + self._kill_timeout_s - FORCE_S:
                    self._expect(
                        process,
                        FORCE_S,
                        "SIGKILL past the guard again",
                        lambda: more() or process in self._unkillable,
                    )

    def called_unkillable(self, epoch: int) -> None:
        """So the worker says of this launch."""
        process = next(each for each in self._sent if each.epoch == epoch)
        self._unkillable.add(process)
        last_at = max(at for each, at in self._sent[process] if each is Signal.KILL)
        waited_s = self._invariants.now - last_at
        if self._invariants.now - process.ended_at > _MAIL_S:
            self._fail(process, "unkillable, it says, and gone")
        if waited_s < self._kill_timeout_s - _EARLY_S:
            self._fail(process, f"unkillable, it says, {waited_s:.1f} s after SIGKILL")

    def _expect(self, process: SimServerProcess, bound_s: float, what: str, done: Any) -> None:
        self._invariants.expect(
            Promise.KILLS_AND_RESTARTS,
            bound_s + LATEST_TIMER_S,
            f"{what} for launch {process.epoch}",
            lambda: _is_gone(process) or done(),
        )

    def _fail(self, process: SimServerProcess, what: str) -> None:
        raise Promise.KILLS_AND_RESTARTS(f"launch {process.epoch}: {what}")


def _is_gone(process: SimServerProcess) -> bool:
    return process.ended or process.is_gone()


class Backoff:
    """How many restarts in a row, and how long the rest before each."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.resume_at = -math.inf  # the next launch, by what was decided last
        self.decided_at = -math.inf
        self._policy = policy
        self._row = 0  # restarts since a request completed or READY lasted
        self._ready_at: float | None = None
        self._was_stable = False
        self._recent: list[float] = []

    def started_by_hand(self) -> None:
        self._row, self._was_stable = 0, False
        self._recent.clear()

    def completed(self) -> None:
        """A request."""
        self._row = 0

    def ready(self, now: float) -> None:
        self._ready_at = now

    def left_ready(self, now: float) -> None:
        if self._ready_at is not None:
            self._was_stable |= now - self._ready_at >= self._policy.stable_after_s
        self._ready_at = None

    def decided(self, reason: str, delay_s: float | None, now: float) -> None:
        """A restart was, or (None) that there is none."""
        self.left_ready(now)
        if reason in ("recycled", "requested"):
            expected_s: float | None = 0.0
        else:
            expected_s = self._next_s(now)
        if delay_s != expected_s:
            raise Promise.KILLS_AND_RESTARTS(
                f"restart for {reason} after {delay_s} s, it should be {expected_s}: number "
                f"{self._row} in a row, {len(self._recent)} lately"
            )
        self.decided_at = now
        self.resume_at = math.inf if delay_s is None else now + delay_s

    def _next_s(self, now: float) -> float | None:
        policy = self._policy
        if self._was_stable:
            self._row = 0
        self._recent = [at for at in self._recent if now - at < policy.restart_window_s]
        most = policy.max_restarts_per_window
        if self._row >= most or len(self._recent) >= most:
            return None
        self._row, self._was_stable = self._row + 1, False
        self._recent.append(now)
        grown_s = policy.restart_backoff_s * policy.backoff_factor ** (self._row - 1)
        return min(grown_s, policy.backoff_max_s)
