"""A simulator that finds no planted bug proves nothing: each must be found within a few runs of an hour."""

from __future__ import annotations

from functools import partial

import pytest

from tests.simulation.planted_bugs import ANYTHING, BUGS, NOTHING, Bug, planted
from tests.simulation.world import Failure, Setting, World

RUNS = 40
HOUR = partial(Setting, hours=1.0, requests_per_hour=40.0)


def hunt(under: str) -> None:
    """Hours in which everything goes wrong, nothing, or only things of one kind."""
    faults = {ANYTHING: {"faults_per_hour": 40.0}, NOTHING: {"faults_per_hour": 0.0}}
    one_kind = {"faults_per_hour": 20.0, "kinds": {under: 1.0}}
    for seed in range(RUNS):
        World(HOUR(seed=seed, **faults.get(under, one_kind))).run()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with planted(bug), pytest.raises(Failure):
        hunt(bug.under)
