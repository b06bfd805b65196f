"""When a launch takes too long, when failed probes tell that a server is lost; with a literal
clock."""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from llama_worker import Canary, TimeoutProfile
from llama_worker.server.health import (
    HealthCounter,
    ReadinessProbes,
    StartupWatch,
    canary_body,
    canary_problem,
    models_outcome,
    next_probe_at,
    probe_timeout_s,
)
from llama_worker.server.messages import ProbeOutcome
from tests.tables import cases

PROFILE = TimeoutProfile(health_failures_before_restart=2)


@cases(
    "probes, data, lost",
    {
        "two in a row": ("--", [], 60),
        "a success between": ("-+-", [], None),
        "data since the probe before": ("--", [59], None),
        "data ends the row, and it begins anew": ("----", [59], 120),
        "data from before READY": ("--", [-5], 60),
        "data at the probe before is old": ("--", [0], 60),
        "data before the first probe": ("--", [10], None),
        "a stream that moves": ("-" * 100, range(29, 3000, 30), None),
    },
)
def test_failures_count_in_a_row_and_without_data(
    probes: str, data: Sequence[int], lost: float | None
) -> None:
    """READY since 0.0; a probe every 30 s, and the instants at which any request received data."""
    counter, lost_at = HealthCounter(since=0.0), None
    for now, outcome in zip(range(30, 3030, 30), probes, strict=False):
        data_at = max((at for at in data if at <= now), default=None)
        ok = outcome == "+"
        counter, why = counter.probed(
            ok=ok, detail="refused", data_at=data_at, profile=PROFILE, now=now
        )
        lost_at = lost_at or (why and now)
    assert lost_at == lost


def test_the_reason_names_count_limit_and_last_failure() -> None:
    counter, profile = HealthCounter(since=60.0, failures_count=2), TimeoutProfile()
    _, lost = counter.probed(
        ok=False, detail="connection refused", data_at=None, profile=profile, now=90.0
    )
    assert lost == (
        "3 health probes in a row failed (limit: health_failures_before_restart 3): "
        "connection refused"
    )


@pytest.mark.parametrize(
    ("interval_s", "timeout_s"), [(30.0, 10.0), (4.0, 4.0), (0.2, 1.0), (None, 10.0)]
)
def test_probe_abandoned_when_next_due_within_bounds(
    interval_s: float | None, timeout_s: float
) -> None:
    assert probe_timeout_s(replace(PROFILE, health_probe_interval_s=interval_s)) == timeout_s


@pytest.mark.parametrize(("interval_s", "at"), [(9.0, 109.4), (10.0, 111.0), (30.0, 131.0)])
def test_rare_probes_are_due_on_whole_seconds(interval_s: float, at: float) -> None:
    assert next_probe_at(replace(PROFILE, health_probe_interval_s=interval_s), 100.4) == at


def test_a_wanted_probe_keeps_its_first_cause() -> None:
    probes = ReadinessProbes()
    for cause in ("a broken stream", None, "another"):
        probes.want(cause)
    assert probes.begin(0.0, failure_counts=False)
    assert (probes.cause, probes.wanted) == ("a broken stream", None)
    assert probes.ended()  # its failure counts


@cases(
    "begins, counts",
    {
        "only out of curiosity": ([False, False], False),
        "due later": ([False, True, False], True),
        "due first": ([True, False], True),
    },
)
def test_a_failure_counts_if_the_probe_was_due(begins: Sequence[bool], counts: bool) -> None:
    probes = ReadinessProbes()
    begun = [probes.begin(float(now), failure_counts=due) for now, due in enumerate(begins)]
    assert begun == [True] + [False] * (len(begins) - 1)
    assert probes.ended() is counts


# ---------------------------------------------------------------- before READY

IDLE = "not ready, and no sign of work for 120.0 s (limit: startup_timeout_s 120)"
LAST_RESORT = TimeoutProfile(startup_timeout_s=120.0, silent_work_timeout_s=1000.0)
BOUNDED = TimeoutProfile(startup_timeout_s=120.0, silent_work_timeout_s=500.0, load_timeout_s=900.0)


def watch(*worked_at: float) -> StartupWatch:
    """Launched at 100.0."""
    launched = StartupWatch(began_at=100.0, worked_at=100.0)
    return functools.reduce(StartupWatch.saw_work, worked_at, launched)


@cases(
    "profile, worked_at, due_at, why",
    {
        "no sign of work": (LAST_RESORT, (), 220.0, f"{IDLE}; launched 120.0 s ago"),
        "work starts the time anew": (LAST_RESORT, (200.0, 300.0, 250.0), 420.0, IDLE),
        "spins": (LAST_RESORT, (1099.0,), 1100.0, "not ready within silent_work_timeout_s 1000 s"),
        "it is bound": (BOUNDED, (999.0,), 1000.0, "not ready within load_timeout_s 900 s"),
    },
)
def test_a_launch_is_given_up(
    profile: TimeoutProfile, worked_at: tuple[float, ...], due_at: float, why: str
) -> None:
    assert watch(*worked_at).overdue(profile, due_at - 0.1) is None
    assert (watch(*worked_at).overdue(profile, due_at) or "").startswith(why)


def test_launch_at_breakpoint_is_not_given_up() -> None:
    launch = StartupWatch(began_at=0.0, worked_at=0.0)
    assert launch.overdue(TimeoutProfile.debug(), 7 * 86400.0) is None


@pytest.mark.parametrize(
    ("now", "at"), [(100.1, 100.6), (129.9, 130.4), (130.0, 132.0), (5000.0, 5002.0)]
)
def test_readiness_probed_every_half_second_then_less_often(now: float, at: float) -> None:
    assert watch().next_probe_at(now) == pytest.approx(at)


# ---------------------------------------------------------------- replies


@pytest.mark.parametrize(
    ("status", "answer", "outcome"),
    [
        (503, {}, ProbeOutcome.LOADING),
        (404, {}, ProbeOutcome.FAILED),
        *((status, {}, ProbeOutcome.UNAUTHORIZED) for status in (401, 403)),
        (200, None, ProbeOutcome.FAILED),
        (200, {}, ProbeOutcome.READY),
    ],
)
def test_a_probe_with_an_answer(status: int, answer: Any, outcome: ProbeOutcome) -> None:
    assert models_outcome(status, answer)[0] is outcome


def replied(content: Any) -> Any:
    return {"choices": [{"message": {"content": content}}]}


def raises(text: str) -> bool:
    raise SystemExit(3)


class Neither:
    """As an array of NumPy."""

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


FOUR = re.compile("4").search


@pytest.mark.parametrize(
    ("check", "status", "told", "problem"),
    [
        (FOUR, 200, replied("2 + 2 = 4"), None),
        (FOUR, 200, replied("????"), "the canary check rejected the answer '????'"),
        (FOUR, 200, replied(None), "rejected the answer ''"),
        (lambda text: not text, 200, [], None),
        (bool, 500, {"error": "no"}, "the canary request got HTTP 500: {'error': 'no'}"),
        (raises, 200, replied("x"), "the canary check raised SystemExit: 3"),
        (lambda text: Neither(), 200, replied("x"), "check raised ValueError: ambiguous"),
    ],
)
def test_the_canary_check_decides_about_the_answer(
    check: Any, status: int, told: Any, problem: str | None
) -> None:
    found = canary_problem(check, status, told)
    assert (found is None) == (problem is None)
    assert (problem or "") in (found or "")


def test_the_canary_uses_greedy_sampling() -> None:
    body = canary_body(Canary(prompt="2 + 2?", check=bool, max_tokens=5))
    asked = body["temperature"], body["max_tokens"], body["messages"][0]["content"]
    assert asked == (0, 5, "2 + 2?")
    assert body["stream"] is False
