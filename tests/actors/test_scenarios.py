"""Hung or only slow? Every scenario on real processes, a topic at a time, side by side."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scenarios.cases import GROUPS
from tests.scenarios.runner import run_all
from tests.scenarios.scenario import Truth

SIDE_BY_SIDE = 10


@pytest.mark.parametrize("group", GROUPS)
def test_every_scenario_gets_the_verdict_that_is_due(group: str, free_port: Callable[[], int]) -> None:
    scenarios = GROUPS[group]
    reports = run_all(scenarios, [free_port() for _ in range(min(SIDE_BY_SIDE, len(scenarios)))])
    wrong = [f"{report.scenario.name}: {line}" for report in reports for line in report.wrong]
    assert not wrong, "\n".join(wrong)


def test_the_suite_holds_as_much_slow_as_hung() -> None:
    truths = [scenario.truth for group in GROUPS.values() for scenario in group]
    names = [scenario.name for group in GROUPS.values() for scenario in group]
    assert len(set(names)) == len(names)
    assert truths.count(Truth.HUNG) >= 15
    assert truths.count(Truth.SLOW) >= 15
