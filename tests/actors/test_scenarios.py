"""Hung or only slow? The simulator's cross-check on real processes: a scenario of each topic,
another each time."""

import random
from collections.abc import Callable

import pytest

from tests.scenarios.cases import GROUPS, TWINS
from tests.scenarios.runner import run_all

SIDE_BY_SIDE = 4  # what they are to find, they must not bring about


def test_each_topics_scenario_gets_the_verdict_due(
    free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure names the scenario: `make scenarios` runs them all."""
    monkeypatch.delenv("SCRIPTED_SERVER_PACE", raising=False)  # the pauses are what is judged
    chosen = [random.choice(scenarios) for scenarios in GROUPS.values()]
    reports = run_all(chosen, [free_port() for _ in range(SIDE_BY_SIDE)])
    wrong = [f"{report.scenario.name}: {line}" for report in reports for line in report.wrong]
    assert not wrong, "\n".join(wrong)


def test_twenty_kinds_of_hang_have_an_honest_twin() -> None:
    assert len({scenario.name for pair in TWINS for scenario in pair}) == 2 * len(TWINS) >= 40
