"""How long a launch may take, with a literal clock."""

from __future__ import annotations

import pytest

from llama_worker.profiles import TimeoutProfile
from llama_worker.server.startup import StartupWatch

PROFILE = TimeoutProfile(startup_timeout_s=120.0)


def test_a_launch_without_a_sign_of_work_is_given_up() -> None:
    watch = StartupWatch.begin(100.0)
    assert watch.overdue(PROFILE, 219.9) is None
    why = watch.overdue(PROFILE, 220.0)
    assert why is not None
    assert why.startswith("not ready, and no sign of work for startup_timeout_s 120 s; 120.0 s since the launch")


def test_work_starts_the_time_anew() -> None:
    watch = StartupWatch.begin(100.0).saw_work(200.0).saw_work(300.0).saw_work(250.0)
    assert watch.overdue(PROFILE, 419.9) is None
    assert watch.overdue(PROFILE, 420.0) is not None


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


def test_the_load_timeout_bounds_all_of_it() -> None:
    profile = TimeoutProfile(load_timeout_s=900.0)
    assert StartupWatch.begin(100.0).saw_work(999.9).overdue(profile, 999.9) is None
    assert (
        StartupWatch.begin(100.0).saw_work(1000.0).overdue(profile, 1000.0) == "not ready within load_timeout_s 900 s"
    )


@pytest.mark.parametrize(("now", "at"), [(100.1, 100.6), (129.9, 130.4), (130.0, 132.0), (5000.0, 5002.0)])
def test_readiness_is_probed_every_half_second_at_first_then_less_often(now: float, at: float) -> None:
    assert StartupWatch.begin(100.0).first_probe_at(100.0) == pytest.approx(100.1)
    assert StartupWatch.begin(100.0).next_probe_at(now) == pytest.approx(at)
