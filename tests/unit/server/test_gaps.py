"""A machine or a program that did not run for a while: nothing is concluded from what was silent
meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.gaps import NO_GAPS, gap_s
from llama_worker.mailbox import Tick
from llama_worker.server.messages import ProbeOutcome, Stalled, StartupFailed
from llama_worker.server.slots import Slot, SlotsSilence
from tests.virtual_watch import VirtualWatch, generating

PROFILE = TimeoutProfile(
    idle_stream_timeout_s=20.0, liveness_probe_interval_s=5.0, health_probe_interval_s=None
)


@pytest.mark.parametrize(
    ("now", "lost_s"), [(99.0, 0.0), (100.0, 0.0), (101.0, 0.0), (101.5, 1.5), (160.0, 60.0)]
)
def test_what_comes_late_shows_lost_time(now: float, lost_s: float) -> None:
    assert gap_s(100.0, now) == lost_s


def test_lost_time_is_what_lies_behind_the_instant() -> None:
    gaps = NO_GAPS.with_gap(20.0, 5.0).with_gap(100.0, 10.0)
    since = {0.0: 15, 15.0: 15, 17.0: 13, 20.0: 10, 50.0: 10, 95.0: 5, 100.0: 0}
    until = {10.0: 0, 17.0: 0, 19.0: 2, 20.0: 3, 90.0: 3, 91.0: 4}
    assert {begin: gaps.lost_s(begin) for begin in since} == since
    assert {end: gaps.lost_s(17.0, end) for end in until} == until


@pytest.mark.parametrize(
    ("gaps", "lost_s"),
    [
        pytest.param([(20.0, 5.0), (24.0, 8.0)], 9.0, id="the second began before the first ended"),
        pytest.param([(20.0, 2.0), (24.0, 8.0)], 8.0, id="the first lies in the second"),
        pytest.param([(20.0, 5.0), (20.0, 5.0)], 5.0, id="the same twice"),
    ],
)
def test_what_two_gaps_share_was_lost_once(gaps: list[tuple[float, float]], lost_s: float) -> None:
    told = NO_GAPS
    for end, length_s in gaps:
        told = told.with_gap(end, length_s)
    assert told.lost_s(0.0) == lost_s


def test_no_gap_is_forgotten_however_many_follow() -> None:
    gaps = NO_GAPS
    for end in range(10, 50_000, 10):  # half of all time is lost
        gaps = gaps.with_gap(float(end), 5.0)
    assert len(gaps.spans) <= 256
    for since in (0.0, 20_000.0, 40_000.0, 49_000.0):
        assert gaps.lost_s(since, 49_990.0) == pytest.approx((49_990.0 - since) / 2, rel=0.01)


UNPROBED = replace(TimeoutProfile(), health_probe_interval_s=None)


def served_until_a_verdict(profile: TimeoutProfile, late_s: float, **world: Any) -> float:
    """Seconds of service that a request got on a machine whose every alarm is so late."""
    watch = VirtualWatch.ready(profile, **world)
    watch.begin(lambda now: generating(0.0))
    lost_s = 0.0
    while not any(isinstance(news, Stalled) for _, news in watch.news):
        assert watch.watch.deadline is not None
        watch.now = max(watch.now, watch.watch.deadline) + late_s
        lost_s += late_s
        watch.tell(Tick())
    return watch.now - lost_s


@pytest.mark.parametrize("late_s", [1.5, 6.0, 20.0])
def test_time_that_is_lost_again_and_again_counts_for_no_limit(late_s: float) -> None:
    profile = replace(UNPROBED, silent_work_timeout_s=1200.0, suspect_after_s=None)
    served_s = served_until_a_verdict(profile, late_s, evidence=lambda now, fresh: True)
    assert served_s == pytest.approx(1200.0, abs=15.0)


def test_a_standstill_is_measured_without_the_time_that_was_lost() -> None:
    def slots(now: float) -> tuple[Slot, ...]:
        return (Slot(slot_id=0, is_processing=True, task=1, decoded_tokens=9),)

    served_s = served_until_a_verdict(UNPROBED, 12.0, evidence=lambda *at: True, slots=slots)
    assert served_s >= 60.0


def test_a_hang_is_found_also_where_every_alarm_is_late() -> None:
    watch = VirtualWatch.ready(PROFILE)
    watch.begin(lambda now: generating(0.0))
    while not any(isinstance(news, Stalled) for _, news in watch.news):
        assert watch.watch.deadline is not None
        watch.now = watch.watch.deadline + 1.5
        assert watch.now < 60.0
        watch.tell(Tick())


def test_a_standstill_before_a_gap_does_not_go_on_behind_it() -> None:
    profile = TimeoutProfile(idle_stream_timeout_s=None, health_probe_interval_s=None)

    def slots(now: float) -> tuple[Slot, ...]:
        decoded = 9 if now < 100.0 else int(now)
        return (Slot(slot_id=0, is_processing=True, task=1, decoded_tokens=decoded),)

    watch = VirtualWatch.ready(profile, slots=slots)
    watch.begin(lambda now: generating(0.0))
    assert watch.run(63.0, Stalled) is None
    # the server stands still as long as the machine is about to be stopped
    assert watch.slots_asked_at == [0.0, 60.0, 62.0]
    watch.now = 100.0
    watch.tell(Tick())
    assert watch.run(200.0, Stalled) is None


def holds_text_back(now: float) -> tuple[Slot, ...]:
    """A token every 5 s, none of which is sent."""
    return (Slot(slot_id=0, is_processing=True, task=1, decoded_tokens=9 + int(now / 5.0)),)


def test_what_moved_between_two_gaps_spares_on_a_machine_that_hardly_runs() -> None:
    """It runs for some seconds at a time, which is too short for a round of looks."""
    watch = VirtualWatch.ready(UNPROBED, slots=holds_text_back)
    watch.begin(lambda now: generating(0.0))
    for _ in range(100):
        assert watch.run(watch.now + 7.0, Stalled) is None
        watch.now += 15.0
        watch.tell(Tick())
    assert len(watch.slots_asked_at) > 50


@pytest.mark.parametrize("hangs", [False, True])
def test_what_moved_between_looks_without_an_answer_spares(hangs: bool) -> None:
    """A build that answers between two batches only, now and then. The limit is 300 s."""

    def slots(now: float) -> tuple[Slot, ...] | SlotsSilence:
        if int(now / 2.0) % 3:
            return SlotsSilence()
        return holds_text_back(min(now, 100.0) if hangs else now)

    watch = VirtualWatch.ready(UNPROBED, slots=slots, build=10019)
    watch.begin(lambda now: generating(0.0))
    found = watch.run(1000.0, Stalled)
    assert (found is not None and 380.0 < found[0] < 410.0) if hangs else found is None


def test_a_launch_gets_the_time_again_that_was_lost() -> None:
    profile = TimeoutProfile(startup_timeout_s=10.0, load_timeout_s=30.0)
    loading = VirtualWatch(profile, readiness=lambda now: ProbeOutcome.LOADING)
    assert loading.run(8.0, StartupFailed) is None
    loading.now = 8.0 + 3600.0
    loading.tell(Tick())
    found = loading.run(2 * 3600.0, StartupFailed)
    assert found is not None
    assert 3610.0 <= found[0] <= 3614.0


def test_a_look_that_saw_nothing_for_lack_of_descriptors_judges_nobody() -> None:
    watch = VirtualWatch.ready(
        PROFILE, evidence=lambda now, fresh: now > 65.0, blind=lambda now: now < 62.0
    )
    watch.begin(lambda now: generating(0.0))
    assert watch.run(300.0, Stalled) is None
