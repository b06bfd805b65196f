"""Backoff, lockout and planned restarts, with a virtual clock."""

import re
from dataclasses import replace

import pytest

from llama_worker.config.profiles import Recycle, RestartPolicy
from llama_worker.server.blame import RestartBudget, backoff_s, recycle_due

MIB = 1 << 20
POLICY = RestartPolicy(
    restart_backoff_s=5.0,
    backoff_factor=2.0,
    backoff_max_s=60.0,
    restart_window_s=120.0,
    max_restarts_per_window=5,
    stable_after_s=600.0,
)


@pytest.mark.parametrize(
    ("first_s", "delays"), [(5.0, [5, 10, 20, 40, 60, 60, 60]), (0.0, [0] * 7)]
)
def test_backoff_doubles_up_to_maximum_and_none_stays(first_s: float, delays: list[int]) -> None:
    policy = replace(POLICY, restart_backoff_s=first_s)
    assert [backoff_s(number, policy) for number in (1, 2, 3, 4, 5, 6, 5000)] == delays


def crashes(
    policy: RestartPolicy, *, ready_s: float | None, completes: bool = False
) -> tuple[RestartBudget, list[float], str | None]:
    """Of a server that is READY 2 s after each launch and crashes `ready_s` later (None: before):
    delays, lockout."""
    budget, now = RestartBudget(), 0.0
    delays: list[float] = []
    for _ in range(50):
        now += 2.0
        if ready_s is not None:
            budget = budget.became_ready(now)
            now += ready_s
        if completes:
            budget = budget.request_completed()
        budget, decision = budget.next(now, policy)
        if isinstance(decision, str):
            return budget, delays, decision
        delays.append(decision)
        now += decision
    return budget, delays, None


QUICK = replace(POLICY, restart_backoff_s=1.0)
STABLE_AT_ONCE = replace(POLICY, stable_after_s=0.0, restart_window_s=1.0)
DOUBLING = [5.0, 10.0, 20.0, 40.0, 60.0]


@pytest.mark.parametrize(
    ("policy", "ready_s", "completes", "delays", "told"),
    [
        (QUICK, 0.1, True, [1.0] * 5, r"within .*restart_window_s 120"),
        *(
            (POLICY, ready_s, False, DOUBLING, "5 times in a row")
            for ready_s in (60.0, 599.0, None)
        ),
        (STABLE_AT_ONCE, None, False, DOUBLING, "5 times in a row"),
        (RestartPolicy.never(), 10_000.0, False, [], "turned off"),
    ],
)
def test_server_crashing_often_or_never_stable_locked_out(
    policy: RestartPolicy, ready_s: float | None, completes: bool, delays: list[float], told: str
) -> None:
    budget, *found, detail = crashes(policy, ready_s=ready_s, completes=completes)
    assert (found, budget.restart_count) == ([delays], len(delays))
    assert re.search(told, detail or "")


@pytest.mark.parametrize(("ready_s", "completes"), [(60.0, True), (600.0, False)])
def test_completing_requests_or_stability_between_crashes_keeps_server(
    ready_s: float, completes: bool
) -> None:
    assert crashes(POLICY, ready_s=ready_s, completes=completes)[1:] == ([5.0] * 50, None)


def test_stability_is_judged_also_after_ready_was_left() -> None:
    budget, _ = RestartBudget().next(0.0, POLICY)
    left = budget.became_ready(10.0).left_ready(610.0).became_ready(620.0).left_ready(630.0)
    assert left.next(9000.0, POLICY)[1] == 5.0
    short = budget.became_ready(10.0).left_ready(609.0)
    assert short.next(9000.0, POLICY)[1] == 10.0


def test_the_window_counts_what_is_younger_than_it() -> None:
    policy = replace(POLICY, max_restarts_per_window=2)
    budget, _ = RestartBudget().next(0.0, policy)
    budget, _ = budget.request_completed().next(60.0, policy)
    busy = budget.request_completed()
    assert isinstance(busy.next(119.9, policy)[1], str)
    assert busy.next(120.0, policy)[1] == 5.0


# ---------------------------------------------------------------- planned restarts


@pytest.mark.parametrize(
    ("policy", "ready_s", "requests", "anon", "says"),
    [
        (Recycle(max_requests=3), 1e9, 2, 1 << 60, None),
        (Recycle(max_requests=3), 0.0, 3, None, "3 requests ended (limit: max_requests 3)"),
        (Recycle(max_age_s=60), 59.9, 10**9, None, None),
        (Recycle(max_age_s=60), 60.0, 0, None, "ready for 60 s (limit: max_age_s 60)"),
        (Recycle(max_anon_mib=100), 1e9, 1, 100 * MIB - 1, None),
        (
            Recycle(max_anon_mib=100),
            0.0,
            1,
            100 * MIB,
            "100 MiB of anonymous memory (limit: max_anon_mib 100)",
        ),
        (Recycle(max_anon_mib=100), 1e9, 1, None, None),  # it cannot be seen
        (Recycle(max_anon_mib=100), 1e9, 0, 101 * MIB, None),  # no leak: it has done nothing yet
    ],
)
def test_an_idle_server_is_due_for_replacement(
    policy: Recycle, ready_s: float, requests: int, anon: int | None, says: str | None
) -> None:
    why = recycle_due(policy, ready_at=0.0, requests_count=requests, anon_bytes=anon, now=ready_s)
    assert why == says


def test_recycle_by_age_is_due_at_own_deadline() -> None:
    ready_at, max_age_s = 1000.2, 60.1
    alarm_at = ready_at + max_age_s
    assert alarm_at - ready_at < max_age_s  # rounded
    policy = Recycle(max_age_s=max_age_s)
    assert recycle_due(policy, ready_at=ready_at, requests_count=0, anon_bytes=None, now=alarm_at)
