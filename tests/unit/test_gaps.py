"""A machine or a program that did not run for a while: nothing is concluded from what was silent meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from llama_worker.messages import BecameReady, HealthLost, ProbeNow, ProbeOutcome, Stalled, StartupFailed, Tick
from llama_worker.profiles import TimeoutProfile
from llama_worker.request.progress import Progress
from llama_worker.server.gaps import NO_GAPS
from llama_worker.server.slots import Slot
from llama_worker.types import RequestPhase
from tests.virtual_watch import VirtualWatch

PROFILE = TimeoutProfile(idle_stream_timeout_s=20.0, liveness_probe_interval_s=5.0, health_probe_interval_s=None)


def test_lost_time_is_what_lies_behind_the_instant() -> None:
    gaps = NO_GAPS.with_gap(20.0, 5.0).with_gap(100.0, 10.0)
    assert [gaps.lost_s(since) for since in (0.0, 15.0, 17.0, 20.0, 50.0, 95.0, 100.0)] == [15, 15, 13, 10, 10, 5, 0]
    assert [gaps.lost_s(17.0, until) for until in (10.0, 17.0, 19.0, 20.0, 90.0, 91.0)] == [0, 0, 2, 3, 3, 4]


def test_only_the_latest_gaps_are_kept() -> None:
    gaps = NO_GAPS
    for end in range(1000):
        gaps = gaps.with_gap(float(end), 0.5)
    assert len(gaps.entries) == 64


def generating(data_at: Callable[[float], float]) -> Callable[[float], Progress]:
    return lambda now: Progress(
        request_id=1,
        phase=RequestPhase.GENERATING,
        dispatched_at=0.0,
        turn_started_at=0.0,
        headers_at=0.0,
        first_token_at=0.0,
        last_data_at=data_at(now),
    )


def ready_at_zero(profile: TimeoutProfile, **world: object) -> VirtualWatch:
    watch = VirtualWatch(profile, now=-0.1, **world)  # type: ignore[arg-type]
    assert watch.run(1.0, BecameReady) is not None
    return watch


def test_a_hang_is_found_also_where_every_alarm_is_late() -> None:
    watch = ready_at_zero(PROFILE)
    watch.begin({1: generating(lambda now: 0.0)})
    while not (found := [at for at, news in watch.news if isinstance(news, Stalled)]) and watch.now < 600.0:
        assert watch.watch.deadline is not None
        watch.now = watch.watch.deadline + 1.5
        watch.tell(Tick())
    assert found
    assert found[0] < 60.0


def test_a_probe_that_failed_over_a_gap_is_made_again() -> None:
    outcomes = [ProbeOutcome.READY, ProbeOutcome.READY, ProbeOutcome.READY]
    watch = ready_at_zero(TimeoutProfile(health_probe_interval_s=30.0), readiness=lambda now: outcomes.pop())
    watch.withhold_probes = True
    watch.tell(ProbeNow(epoch=1, cause="a broken connection"))
    watch.now = 100.0
    watch.withhold_probes = False
    watch.answer_probe(ProbeOutcome.FAILED)
    assert watch.run(102.0, HealthLost) is None
    assert outcomes == [ProbeOutcome.READY]  # it was asked once more


def test_a_probe_that_could_not_be_made_is_made_again_until_there_is_news() -> None:
    outcomes = iter([ProbeOutcome.READY, *[ProbeOutcome.NO_NEWS] * 5, ProbeOutcome.FAILED])
    watch = ready_at_zero(PROFILE, readiness=lambda now: next(outcomes))
    watch.tell(ProbeNow(epoch=1, cause="a broken connection"))
    found = watch.run(60.0, HealthLost)
    assert found is not None
    assert 4.9 < found[0] < 6.0
    assert "a broken connection" in found[1].detail


def test_looks_at_the_slots_from_both_sides_of_a_gap_are_not_compared() -> None:
    profile = TimeoutProfile(idle_stream_timeout_s=None, health_probe_interval_s=None)

    def slots(now: float) -> tuple[Slot, ...]:
        decoded = 9 if now < 100.0 else int(now)
        return (Slot(slot_id=0, is_processing=True, task=1, decoded_tokens=decoded),)

    watch = ready_at_zero(profile, slots=slots)
    watch.begin({1: generating(lambda now: 0.0)})
    assert watch.run(63.0, Stalled) is None
    assert len(watch.slots_asked_at) == 2  # the server stands still as long as the machine is about to be stopped
    watch.now = 100.0
    watch.tell(Tick())
    assert watch.run(200.0, Stalled) is None


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
    watch = ready_at_zero(PROFILE, evidence=lambda now, fresh: now > 65.0, blind=lambda now: now < 62.0)
    watch.begin({1: generating(lambda now: 0.0)})
    assert watch.run(300.0, Stalled) is None
