"""The pausing clock: what is lost while nothing runs, and that nobody is blamed for it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.clock import LATE_S, PAUSE_AFTER_GAP_S, ClockTimer, PausingClock
from llama_worker.config.profiles import TimeoutProfile
from llama_worker.mailbox import Tick
from llama_worker.request.progress import Progress
from llama_worker.server.messages import ProbeOutcome, Stalled, StartupFailed
from llama_worker.server.slots import Slot, SlotsTimeout
from llama_worker.types.request import RequestPhase
from tests.virtual_watch import VirtualWatch, generating


def nothing() -> None:
    pass


def at(clock: PausingClock, *instants: float) -> list[ClockTimer]:
    return [clock.call_at(instant, nothing, 0.0) for instant in instants]


def test_clock_follows_system_while_timers_are_on_time() -> None:
    clock = PausingClock()
    (timer,) = at(clock, 100.0)
    assert (clock.now(99.0), clock.wakes_at) == (99.0, 100.0)
    assert clock.due(99.9) is None
    assert clock.due(100.0 + LATE_S) is timer
    assert clock.now(101.0) == 101.0
    assert clock.lost_s == 0.0


def test_clock_passes_no_timer_that_has_not_fired() -> None:
    clock = PausingClock()
    at(clock, 100.0)
    assert clock.now(100.5) == clock.now(5000.0) == 100.0


def test_clock_pauses_after_gap_until_the_late_timer() -> None:
    clock = PausingClock()
    first, second = at(clock, 100.0, 130.0)
    assert clock.due(3700.0) is None
    assert clock.wakes_at == 3700.0 + PAUSE_AFTER_GAP_S
    assert clock.due(3700.5) is None
    assert clock.now(3700.9) == 100.0
    assert clock.due(3701.0) is first
    assert (clock.now(3701.0), clock.lost_s) == (100.0, 3601.0)
    assert clock.due(3701.0) is None
    assert clock.due(3702.0) is not None  # the watch's
    assert clock.wakes_at == 3601.0 + 130.0
    assert clock.due(3731.0) is second


def test_a_second_gap_delays_nothing_again() -> None:
    clock = PausingClock()
    (timer,) = at(clock, 100.0)
    assert clock.due(3700.0) is None
    assert clock.due(7300.0) is timer
    assert clock.now(7300.0) == 100.0


def test_gap_is_seen_though_next_timer_is_far() -> None:
    """Behind one that was fired its receiver may set the next only after a gap."""
    clock = PausingClock()
    (timer,) = at(clock, 100.0)
    assert clock.due(100.0) is timer
    assert clock.now(3700.0) == 101.0
    clock.call_at(0.0, nothing, 3700.0)
    assert clock.due(3700.0) is None
    assert clock.wakes_at == 3701.0


def test_a_clock_without_timers_wakes_nobody() -> None:
    clock = PausingClock()
    assert (clock.wakes_at, clock.due(1e6), clock.now(1e6)) == (None, None, 1e6)
    (timer,) = at(clock, 2e6)
    timer.cancel()
    assert clock.due(1e6) is None
    assert clock.wakes_at is None


def test_timer_cancelled_behind_gap_has_shown_it() -> None:
    clock = PausingClock()
    timer, _ = at(clock, 100.0, 5000.0)
    assert clock.now(3700.0) == 100.0
    timer.cancel()
    assert clock.due(3700.0) is None
    assert clock.due(3701.0) is timer
    assert clock.now(3701.0) == 100.0


def test_a_past_instant_counts_as_now() -> None:
    clock = PausingClock()
    at(clock, 100.0)
    clock.call_at(3.0, nothing, 50.0)
    assert clock.now(60.0) == 50.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["run", "set", "cancel"]), st.floats(0.0, 50.0)), max_size=60
    )
)
def test_clock_never_falls_and_fires_timers_in_order(steps: list[tuple[str, float]]) -> None:
    clock, system, shown = PausingClock(), 0.0, 0.0
    waiting: dict[ClockTimer, float] = {}
    for step, amount in steps:
        match step:
            case "set":
                timer = clock.call_at(amount, nothing, system)
                waiting[timer] = max(amount, clock.now(system))
            case "cancel" if waiting:
                timer = min(waiting, key=lambda each: abs(waiting[each] - amount))
                timer.cancel()
                del waiting[timer]
            case _:
                system += amount
                while (fired := clock.due(system)) is not None:
                    if fired in waiting:
                        at = waiting.pop(fired)
                        assert all(at <= other for other in waiting.values())
                        assert at <= clock.now(system)
        assert shown <= clock.now(system) <= system
        shown = clock.now(system)
    while waiting:  # whatever happened before, they come
        wakes_at = clock.wakes_at
        assert wakes_at is not None
        system = max(system, wakes_at)
        fired = clock.due(system)
        waiting.pop(fired, None)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the watch, by this clock


class Machine:
    """A watch, on a machine that may stand still: each of its alarms is late by `late_s`."""

    def __init__(self, watch: VirtualWatch, *, late_s: float = 0.0) -> None:
        self.watch, self.clock, self.late_s = watch, PausingClock(), late_s
        self.system = watch.now
        self._alarm: ClockTimer | None = None
        self._alarm_at: float | None = None

    def run(self, until: float, stop_at: type[Any]) -> float | None:
        """Let time pass up to such an instant of the system's clock; when such news came."""
        while True:
            if any(isinstance(news, stop_at) for _, news in self.watch.news):
                return self.system
            due_at = self.watch.watch.deadline
            if due_at != self._alarm_at and due_at is not None:
                if self._alarm is not None:
                    self._alarm.cancel()
                self._alarm = self.clock.call_at(due_at, nothing, self.system)
                self._alarm_at = due_at
            wakes_at = self.clock.wakes_at
            if wakes_at is None or wakes_at + self.late_s >= until:
                self.system = until
                return None
            self.system = max(self.system, wakes_at + self.late_s)
            self.look()

    def look(self) -> None:
        """The timer thread runs."""
        while (timer := self.clock.due(self.system)) is not None:
            if timer is self._alarm:
                self._alarm = self._alarm_at = None
                self.watch.now = self.clock.now(self.system)
                self.watch.tell(Tick())

    @property
    def ran_s(self) -> float:
        return self.system - self.clock.lost_s


PROFILE = TimeoutProfile(
    idle_stream_timeout_s=20.0, liveness_probe_interval_s=5.0, health_probe_interval_s=None
)
WAITING = Progress(request_id=1, phase=RequestPhase.WAITING, dispatched_at=0.0, turn_started_at=0.0)
UNPROBED = replace(TimeoutProfile(), health_probe_interval_s=None)
LATE = pytest.mark.parametrize("late_s", [1.5, 6.0, 20.0])


def hanging(profile: TimeoutProfile, late_s: float = 0.0, **world: Any) -> Machine:
    watch = VirtualWatch.ready(profile, **world)
    watch.begin(lambda now: generating(0.0))
    return Machine(watch, late_s=late_s)


@LATE
def test_repeatedly_lost_time_counts_for_no_limit(late_s: float) -> None:
    profile = replace(UNPROBED, silent_work_timeout_s=1200.0, suspect_after_s=None)
    machine = hanging(profile, late_s, evidence=lambda now, fresh: True)
    assert machine.run(1e6, Stalled) is not None
    assert machine.ran_s == pytest.approx(1200.0, abs=15.0)


def test_standstill_is_measured_without_lost_time() -> None:
    def slots(now: float) -> tuple[Slot, ...]:
        return (Slot(slot_id=0, is_processing=True, task=1, decoded_tokens=9),)

    machine = hanging(UNPROBED, 12.0, evidence=lambda *at: True, slots=slots)
    assert machine.run(1e6, Stalled) is not None
    assert machine.ran_s >= 60.0


@LATE
def test_hang_is_found_even_if_all_timers_late(late_s: float) -> None:
    machine = hanging(PROFILE, late_s)
    assert machine.run(1e6, Stalled) is not None
    assert machine.ran_s == pytest.approx(20.0, abs=6.0)


def test_a_standstill_does_not_continue_over_a_gap() -> None:
    def slots(now: float) -> tuple[Slot, ...]:
        decoded = 9 if machine.system < 100.0 else int(machine.system * 10)
        return (Slot(slot_id=0, is_processing=True, task=1, decoded_tokens=decoded),)

    profile = TimeoutProfile(idle_stream_timeout_s=None, health_probe_interval_s=None)
    watch = VirtualWatch.ready(profile)
    watch.slots = slots
    watch.begin(lambda now: generating(0.0))
    machine = Machine(watch)
    assert machine.run(63.0, Stalled) is None
    # the server stands still as long as the machine is about to be stopped
    assert watch.slots_asked_at[-2:] == [60.0, 62.0]
    machine.system = 1000.0
    assert machine.run(1500.0, Stalled) is None


def holds_text_back(now: float) -> tuple[Slot, ...]:
    """A token every 5 s, none of which is sent."""
    return (Slot(slot_id=0, is_processing=True, task=1, decoded_tokens=9 + int(now / 5.0)),)


def test_movement_counts_on_a_starved_machine() -> None:
    machine = hanging(UNPROBED, slots=holds_text_back)
    for _ in range(100):
        assert machine.run(machine.system + 7.0, Stalled) is None
        machine.system += 15.0
        machine.look()
    assert len(machine.watch.slots_asked_at) > 50


@pytest.mark.parametrize("hangs", [False, True])
def test_movement_between_looks_without_answer_counts(hangs: bool) -> None:
    """A build that answers between two batches only, now and then. The limit is 300 s."""

    def slots(now: float) -> tuple[Slot, ...] | SlotsTimeout:
        if int(now / 2.0) % 3:
            return SlotsTimeout()
        return holds_text_back(min(now, 100.0) if hangs else now)

    watch = VirtualWatch.ready(UNPROBED, slots=slots, build=10019)
    watch.begin(lambda now: generating(0.0))
    found = watch.run(1000.0, Stalled)
    assert (found is not None and 380.0 < found[0] < 410.0) if hangs else found is None


def test_a_launch_gets_lost_time_back() -> None:
    profile = TimeoutProfile(startup_timeout_s=10.0, load_timeout_s=30.0)
    loading = Machine(VirtualWatch(profile, readiness=lambda now: ProbeOutcome.LOADING))
    assert loading.run(8.0, StartupFailed) is None
    loading.system += 3600.0
    found_at = loading.run(2 * 3600.0, StartupFailed)
    assert found_at is not None
    assert 3610.0 <= found_at <= 3614.0


def test_look_that_failed_by_shortage_counts_as_work() -> None:
    """The limit is 20 s: from 62 on it is seen to work."""
    profile = replace(PROFILE, idle_stream_timeout_s=None, headers_timeout_s=20.0)
    watch = VirtualWatch.ready(
        profile, evidence=lambda now, fresh: now > 65.0, blind=lambda now: now < 62.0
    )
    watch.begin(lambda now: WAITING)
    assert watch.run(70.0, Stalled) is None
