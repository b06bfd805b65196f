"""The worker in virtual time: seeds that once failed, a fixed set, and new ones each time."""

from __future__ import annotations

import time

import pytest

from tests.simulation.campaign import add, run_all, settings
from tests.simulation.corpus import CORPUS
from tests.simulation.faults import KINDS
from tests.simulation.not_yet_found import NOT_YET_FOUND
from tests.simulation.world import Report, Setting, World

YEAR_H = 8760.0
SHARES = 4  # of the year, one a test: they may run side by side


@pytest.mark.parametrize("setting", CORPUS, ids=lambda setting: str(setting.seed))
def test_a_seed_that_once_failed(setting: Setting) -> None:
    World(setting).run()


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.timeout(900)
def test_a_quarter_of_a_worker_year_that_nobody_has_seen_before(share: int) -> None:
    seed = time.time_ns() % 2**40 * SHARES + share
    total = run_all(settings(seed, YEAR_H / SHARES, 1000 / SHARES))
    assert total.hours >= YEAR_H / SHARES - 0.1
    assert total.requests >= 10_000 / SHARES
    assert sum(total.faults.values()) >= 1000 / SHARES


def test_every_kind_of_fault_is_met_in_the_fixed_set_and_the_same_seed_gives_the_same_trace() -> None:
    total, digests = Report(), []
    for seed in range(30):
        report = World(Setting(seed=seed, hours=4.0, requests_per_hour=40.0, faults_per_hour=15.0)).run()
        add(total, report)
        digests.append(report.digest)
    assert set(total.faults) == set(KINDS) - NOT_YET_FOUND
    again = World(Setting(seed=7, hours=4.0, requests_per_hour=40.0, faults_per_hour=15.0)).run()
    assert again.digest == digests[7]
