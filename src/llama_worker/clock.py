"""A monotonic clock with timers that stands while this program does not run. Sans-IO.

While the machine is suspended, or the program is stopped, starved or its interpreter held, silence
is no sign of a stall. A timer that fires late shows such a gap. Instants are seconds: `system` on
the system's monotonic clock, `now` and `at` on this one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

LATE_S = 1.0  # while the program runs, no timer is later than this
# How long the clock is paused after a gap, before any timer fires: messages that came meanwhile are
# delivered first, and processes that were stopped with this program go on, too.
PAUSE_AFTER_GAP_S = 1.0
_OWN_TIMER_S = 1.0
_SWEEP_MIN = 64

ToUnix: TypeAlias = Callable[[float], float]  # see `unix` of `ports.Host`


def earliest(*instants: float | None) -> float | None:
    """The first of the instants that are not None; None if all are."""
    return min((at for at in instants if at is not None), default=None)


def latest(*instants: float | None) -> float | None:
    """The last of the instants that are not None; None if all are."""
    return max((at for at in instants if at is not None), default=None)


class ClockTimer:
    """One call that is due at an instant. Thread-safe."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Do not make the call; one that is being made goes on."""
        self._call = None

    def fire(self) -> None:
        """Make the call, unless it was cancelled."""
        call, self._call = self._call, None
        if call is not None:
            call()

    @property
    def is_cancelled(self) -> bool:
        return self._call is None


class PausingClock:
    """A clock with timers, whose reading never passes a timer that has not fired.

    If a timer is more than LATE_S overdue, the time since its instant was lost. The clock then
    pauses at that instant for `pause_s` and goes on from there, so that no reading includes the
    gap, not even the first one after it. Only `now` and `lost_s` are thread-safe.
    """

    def __init__(self, pause_s: float = PAUSE_AFTER_GAP_S) -> None:
        self._pause_s = pause_s
        self._heap: list[tuple[float, int, ClockTimer]] = []
        self._numbers = itertools.count()
        self._sweep_at = _SWEEP_MIN
        self._paused_until: float | None = None  # an instant of `system`
        self._own_timer: ClockTimer | None = None  # this clock's own timer
        # Seconds lost, and the instant where the clock stops; replaced as a whole: threads read it.
        self._reading = (0.0, math.inf)

    @property
    def lost_s(self) -> float:
        """All seconds that were lost so far."""
        return self._reading[0]

    def now(self, system: float) -> float:
        """The reading; it never falls. Any thread."""
        lost_s, max_reading = self._reading
        at = system - lost_s
        return at if at < max_reading else max_reading

    def call_at(self, at: float, call: Callable[[], object], system: float) -> ClockTimer:
        """Add a timer; `due` returns it once `at` is reached."""
        self._sweep()
        timer = ClockTimer(call)
        self._push(at, timer, system)
        return timer

    @property
    def wakes_at(self) -> float | None:
        """When to call `due` next, on the *system's* clock; None: there is no timer."""
        if not self._heap:
            return None
        lost_s, max_reading = self._reading
        system = max_reading + lost_s
        while system - lost_s < max_reading:  # rounding error
            system = math.nextafter(system, math.inf)
        return max(system, self._paused_until or -math.inf)

    def due(self, system: float) -> ClockTimer | None:
        """Remove and return the next timer to fire; None: none is due."""
        self._drop_cancelled(system)
        lost_s, at = self._reading
        if system - lost_s < at:
            return None
        if system - lost_s > at + LATE_S:
            if self._is_paused(system):
                return None
            self._resume_from(at, system)
        timer = self._pop()
        self._paused_until = None
        self._set_own_timer(timer, system)
        return timer

    def _drop_cancelled(self, system: float) -> None:
        """Cancelled timers must wake nobody; but one that is overdue stays: it may show a gap."""
        while self._heap and self._heap[0][2].is_cancelled and self.now(system) < self._reading[1]:
            self._pop()

    def _is_paused(self, system: float) -> bool:
        if self._paused_until is None:
            self._paused_until = system + self._pause_s
        return system < self._paused_until

    def _resume_from(self, at: float, system: float) -> None:
        lost_s = system - at
        while system - lost_s < at:  # rounding error
            lost_s = math.nextafter(lost_s, 0.0)
        self._reading = (lost_s, at)

    def _set_own_timer(self, fired: ClockTimer, system: float) -> None:
        """Set a timer of our own: the receiver of `fired` may set its next one only after a gap."""
        if fired is self._own_timer:
            self._own_timer = None
        elif self._own_timer is None and not fired.is_cancelled:
            self._own_timer = ClockTimer(_do_nothing)
            self._push(self.now(system) + _OWN_TIMER_S, self._own_timer, system)

    def _push(self, at: float, timer: ClockTimer, system: float) -> None:
        now = self.now(system)
        heapq.heappush(self._heap, (at, next(self._numbers), timer))
        self._reading = (self.lost_s, max(self._heap[0][0], now))

    def _pop(self) -> ClockTimer:
        lost_s, max_reading = self._reading
        timer = heapq.heappop(self._heap)[2]
        self._reading = (lost_s, max(self._heap[0][0], max_reading) if self._heap else math.inf)
        return timer

    def _sweep(self) -> None:
        """Now and then drop cancelled timers: distant ones that are reset often would pile up."""
        if len(self._heap) >= self._sweep_at:
            first, *others = sorted(self._heap)  # kept even if cancelled: it may show a gap
            self._heap = [first, *(entry for entry in others if not entry[2].is_cancelled)]
            self._sweep_at = max(_SWEEP_MIN, 2 * len(self._heap))


def _do_nothing() -> None:
    """The call of the clock's own timer."""
