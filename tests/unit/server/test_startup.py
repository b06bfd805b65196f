"""How long a launch may take, with a literal clock."""

from __future__ import annotations

import functools

import pytest

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.server.startup import StartupWatch

IDLE = "not ready, and no sign of work for startup_timeout_s 120 s"
LAST_RESORT = TimeoutProfile(startup_timeout_s=120.0, silent_work_timeout_s=1000.0)
BOUNDED = TimeoutProfile(startup_timeout_s=120.0, silent_work_timeout_s=500.0, load_timeout_s=900.0)


def watch(*worked_at: float) -> StartupWatch:
    """Launched at 100.0."""
    return functools.reduce(StartupWatch.saw_work, worked_at, StartupWatch.begin(100.0))


@pytest.mark.parametrize(
    ("profile", "worked_at", "due_at", "why"),
    [
        pytest.param(
            LAST_RESORT, (), 220.0, f"{IDLE}; 120.0 s since the launch", id="no sign of work"
        ),
        pytest.param(
            LAST_RESORT, (200.0, 300.0, 250.0), 420.0, IDLE, id="work starts the time anew"
        ),
        pytest.param(
            LAST_RESORT,
            (1099.0,),
            1100.0,
            "not ready within silent_work_timeout_s 1000 s",
            id="it spins",
        ),
        pytest.param(
            BOUNDED, (999.0,), 1000.0, "not ready within load_timeout_s 900 s", id="it is bound"
        ),
    ],
)
def test_a_launch_is_given_up(
    profile: TimeoutProfile, worked_at: tuple[float, ...], due_at: float, why: str
) -> None:
    assert watch(*worked_at).overdue(profile, due_at - 0.1) is None
    assert (watch(*worked_at).overdue(profile, due_at) or "").startswith(why)


def test_without_a_bound_a_launch_that_works_may_take_for_ever() -> None:
    assert watch(1e9).overdue(TimeoutProfile(silent_work_timeout_s=None), 1e9 + 1) is None


@pytest.mark.parametrize(
    ("now", "at"), [(100.1, 100.6), (129.9, 130.4), (130.0, 132.0), (5000.0, 5002.0)]
)
def test_readiness_is_probed_every_half_second_at_first_then_less_often(
    now: float, at: float
) -> None:
    assert watch().first_probe_at(100.0) == pytest.approx(100.1)
    assert watch().next_probe_at(now) == pytest.approx(at)
