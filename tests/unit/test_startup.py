"""How long a launch may take, with a literal clock."""

from __future__ import annotations

import pytest

from llama_worker.profiles import TimeoutProfile
from llama_worker.server.startup import StartupWatch

PROFILE = TimeoutProfile(startup_timeout_s=120.0)


@pytest.mark.parametrize(("now", "overdue"), [(219.9, False), (220.0, True)])
def test_a_launch_without_a_sign_of_work_is_given_up(now: float, overdue: bool) -> None:
    why = StartupWatch.begin(100.0).overdue(PROFILE, now)
    assert (why is not None) is overdue
    if why:
        assert "startup_timeout_s 120 s" in why
        assert "120.0 s since the launch" in why


@pytest.mark.parametrize(("now", "overdue"), [(419.9, False), (420.0, True)])
def test_work_starts_the_time_anew(now: float, overdue: bool) -> None:
    watch = StartupWatch.begin(100.0).saw_work(200.0).saw_work(300.0).saw_work(250.0)
    assert (watch.overdue(PROFILE, now) is not None) is overdue


def test_a_launch_that_works_may_take_as_long_as_silent_work_may() -> None:
    profile = TimeoutProfile(silent_work_timeout_s=100_000.0)
    watch = StartupWatch.begin(0.0)
    for at in range(0, 99_800, 100):
        watch = watch.saw_work(float(at))
        assert watch.overdue(profile, at + 119.0) is None
    spinning = StartupWatch.begin(0.0).saw_work(99_999.0)
    assert spinning.overdue(profile, 99_999.9) is None
    assert "silent_work_timeout_s 100000 s" in (spinning.overdue(profile, 100_000.0) or "")


def test_without_a_bound_a_launch_that_works_may_take_for_ever() -> None:
    watch = StartupWatch.begin(0.0).saw_work(1e9)
    assert watch.overdue(TimeoutProfile(silent_work_timeout_s=None), 1e9 + 1) is None


@pytest.mark.parametrize(("now", "overdue"), [(999.9, False), (1000.0, True)])
def test_the_load_timeout_bounds_all_of_it(now: float, overdue: bool) -> None:
    watch = StartupWatch.begin(100.0).saw_work(now)
    why = watch.overdue(TimeoutProfile(load_timeout_s=900.0), now)
    assert (why is not None) is overdue
    if why:
        assert "load_timeout_s 900 s" in why


@pytest.mark.parametrize(
    ("now", "at"),
    [(100.1, 100.6), (129.9, 130.4), (130.0, 132.0), (5000.0, 5002.0)],
)
def test_readiness_is_probed_every_half_second_at_first_then_less_often(now: float, at: float) -> None:
    assert StartupWatch.begin(100.0).first_probe_at(100.0) == pytest.approx(100.1)
    assert StartupWatch.begin(100.0).next_probe_at(now) == pytest.approx(at)
