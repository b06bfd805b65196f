"""Backoff and lockout, with a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llama_worker.profiles import RestartPolicy
from llama_worker.server.restart_budget import Lockout, RestartAfter, RestartBudget, backoff_s

POLICY = RestartPolicy(
    restart_backoff_s=5.0,
    backoff_factor=2.0,
    backoff_max_s=60.0,
    restart_window_s=120.0,
    max_restarts_per_window=5,
    stable_after_s=600.0,
)


@pytest.mark.parametrize(
    ("number", "delay_s"), [(1, 5.0), (2, 10.0), (3, 20.0), (4, 40.0), (5, 60.0), (6, 60.0), (5000, 60.0)]
)
def test_backoff_doubles_up_to_its_maximum(number: int, delay_s: float) -> None:
    assert backoff_s(number, POLICY) == delay_s


def test_no_backoff_stays_none() -> None:
    policy = replace(POLICY, restart_backoff_s=0.0)
    assert [backoff_s(number, policy) for number in (1, 7, 5000)] == [0.0, 0.0, 0.0]


def crashes(
    policy: RestartPolicy,
    *,
    load_s: float,
    ready_s: float,
    completes: bool = False,
    crashes_count: int = 50,
) -> tuple[RestartBudget, list[float], str | None]:
    """A server READY `load_s` after each launch that crashes `ready_s` later: delays, and the lockout."""
    budget, now = RestartBudget(), 0.0
    delays: list[float] = []
    for _ in range(crashes_count):
        now += load_s
        budget = budget.became_ready(now)
        now += ready_s
        if completes:
            budget = budget.request_completed(now - ready_s / 2)
        budget, decision = budget.next(now, policy)
        if isinstance(decision, Lockout):
            return budget, delays, decision.detail
        delays.append(decision.delay_s)
        now += decision.delay_s
    return budget, delays, None


def test_a_server_that_crashes_at_once_is_locked_out_by_the_window() -> None:
    policy = replace(POLICY, restart_backoff_s=1.0)
    budget, delays, detail = crashes(policy, load_s=0.1, ready_s=0.1, completes=True)
    assert delays == [1.0] * 5
    assert detail is not None
    assert "within" in detail
    assert "restart_window_s 120" in detail
    assert budget.restart_count == 5


def test_a_server_that_crashes_a_minute_after_every_start_ends_failed() -> None:
    budget, delays, detail = crashes(POLICY, load_s=2.0, ready_s=60.0)
    assert delays == [5.0, 10.0, 20.0, 40.0, 60.0]
    assert detail is not None
    assert "5 times in a row" in detail
    assert budget.restart_count == 5


def test_a_server_that_completes_requests_between_crashes_goes_on() -> None:
    _, delays, detail = crashes(POLICY, load_s=2.0, ready_s=60.0, completes=True)
    assert detail is None
    assert delays == [5.0] * 50


@pytest.mark.parametrize(("ready_s", "locked"), [(599.0, True), (600.0, False)])
def test_a_server_that_was_stable_between_crashes_goes_on(ready_s: float, locked: bool) -> None:
    _, delays, detail = crashes(POLICY, load_s=2.0, ready_s=ready_s)
    assert (detail is not None) is locked
    assert delays[:2] == ([5.0, 10.0] if locked else [5.0, 5.0])


def test_launches_that_never_become_ready_count() -> None:
    budget, now = RestartBudget(), 0.0
    delays = []
    while True:
        now += 200.0
        budget, decision = budget.next(now, POLICY)
        if isinstance(decision, Lockout):
            break
        delays.append(decision.delay_s)
    assert delays == [5.0, 10.0, 20.0, 40.0, 60.0]


def test_stability_is_judged_also_when_ready_was_left_before() -> None:
    budget, _ = RestartBudget().next(0.0, POLICY)
    left = budget.became_ready(10.0).left_ready(610.0).left_ready(611.0)
    assert left.next(9000.0, POLICY)[1] == RestartAfter(delay_s=5.0)
    short = budget.became_ready(10.0).left_ready(609.0)
    assert short.next(9000.0, POLICY)[1] == RestartAfter(delay_s=10.0)


def test_ready_of_a_former_launch_does_not_make_the_next_one_stable() -> None:
    budget = RestartBudget().became_ready(0.0)
    budget, first = budget.next(1000.0, POLICY)
    budget, second = budget.next(2000.0, POLICY)
    assert (first, second) == (RestartAfter(delay_s=5.0), RestartAfter(delay_s=10.0))


def test_the_window_counts_what_is_younger_than_it() -> None:
    policy = replace(POLICY, max_restarts_per_window=2)
    budget, _ = RestartBudget().next(0.0, policy)
    budget, _ = budget.request_completed(1.0).next(60.0, policy)
    busy = budget.request_completed(61.0)
    assert isinstance(busy.next(119.9, policy)[1], Lockout)
    assert busy.next(120.0, policy)[1] == RestartAfter(delay_s=5.0)


def test_never_restarts() -> None:
    budget, decision = RestartBudget().became_ready(0.0).next(10_000.0, RestartPolicy.never())
    assert isinstance(decision, Lockout)
    assert "turned off" in decision.detail
    assert budget.restart_count == 0


def test_an_explicit_start_clears_the_budget_but_not_the_count() -> None:
    budget, _, detail = crashes(POLICY, load_s=2.0, ready_s=60.0)
    assert detail is not None
    cleared = budget.cleared()
    assert cleared == RestartBudget(restart_count=5)
    after, decision = cleared.next(1000.0, POLICY)
    assert decision == RestartAfter(delay_s=5.0)
    assert after.restart_count == 6
