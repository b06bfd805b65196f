"""A simulator that finds no planted bug proves nothing: each must be found within a few runs of an hour."""

from __future__ import annotations

import pytest

from tests.simulation.faults import KINDS
from tests.simulation.planted_bugs import ANYTHING, BUGS, NOTHING, Bug
from tests.simulation.scheduler import Violation
from tests.simulation.world import Failure, Setting, World

RUNS = 40


def hunt(under: str) -> None:
    """Hours in which everything goes wrong, nothing, or only things of one kind."""
    rates = {ANYTHING: (40.0, 40.0), NOTHING: (20.0, 0.0)}
    requests, faults = rates.get(under, (12.0, 12.0))
    kinds = {under: 1.0} if under in KINDS else {}
    for seed in range(RUNS):
        World(Setting(seed=seed, hours=1.0, requests_per_hour=requests, faults_per_hour=faults, kinds=kinds)).run()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(Failure) as found:
        hunt(bug.under)
    assert isinstance(found.value.broken, Violation)
