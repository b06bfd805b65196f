"""A simulator that finds no planted bug proves nothing: each must be found within a few runs."""

from __future__ import annotations

from functools import partial

import pytest

from tests.simulation.planted_bugs import BUGS, Bug, planted
from tests.simulation.world import Failure, Setting, World

RUNS = 40
HECTIC = partial(Setting, hours=4.0, requests_per_hour=25.0, faults_per_hour=20.0)
CALM = partial(Setting, hours=12.0, requests_per_hour=1.0, faults_per_hour=4.0)


def hunt(bug: Bug) -> tuple[int, Failure] | None:
    """How many runs it took, and what broke; None: the bug got away."""
    with planted(bug):
        for seed in range(RUNS):
            try:
                World(HECTIC(seed=seed) if seed % 4 else CALM(seed=seed)).run()
            except Failure as failure:
                return seed + 1, failure
    return None


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    assert hunt(bug) is not None
