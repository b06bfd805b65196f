"""The worker in virtual time: seeds that once failed, a fixed set, and new ones each time."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest

from tests.simulation.campaign import run_all, settings
from tests.simulation.faults import KINDS
from tests.simulation.world import Setting, World

YEAR_H = 8760.0
SHARES = 4  # of the year, one a test: they may run side by side


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(
            Setting(seed=7, hours=4.0, requests_per_hour=25.0, faults_per_hour=20.0),
            id="ask() resolved before its result was released",
        ),
        pytest.param(
            Setting(seed=189804746787714, hours=2.7, requests_per_hour=37.6712325, faults_per_hour=3.4246575),
            id="a bound counted time in which the host was halted",
        ),
        pytest.param(
            Setting(
                seed=193651771979271,
                hours=2.4833832883408595,
                requests_per_hour=37.67123287671233,
                faults_per_hour=3.4246575342465753,
            ),
            id="an honest server wrote for half a minute in one go, and showed no CPU time",
        ),
        pytest.param(
            Setting(
                seed=244459350129237,
                hours=108.02862194979923,
                requests_per_hour=1.0,
                faults_per_hour=0.046593980057776534,
            ),
            id="an actor broke before it took the text that had come",
        ),
        pytest.param(
            Setting(
                seed=45692451366883,
                hours=4.035282179853106,
                requests_per_hour=37.67123287671233,
                faults_per_hour=3.4246575342465753,
            ),
            id="a caller came in the moment in which the host went on",
        ),
        pytest.param(
            Setting(
                seed=62413012168464,
                hours=5.965414936806482,
                requests_per_hour=37.67123287671233,
                faults_per_hour=3.4246575342465753,
            ),
            id="the ProcessActor died twice over a server that could not be killed",
        ),
    ],
)
def test_a_run_that_once_broke_an_invariant(setting: Setting) -> None:
    World(setting).run()


def test_a_run_leaves_nothing_behind() -> None:
    world = World(Setting(seed=7, hours=1.0))
    world.run()
    reference = weakref.ref(world)
    del world
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.timeout(900)
def test_a_quarter_of_a_worker_year_that_nobody_has_seen_before(share: int) -> None:
    seed = time.time_ns() % 2**40 * SHARES + share
    total = run_all(settings(seed, YEAR_H / SHARES, 1000 / SHARES))
    assert total.hours >= YEAR_H / SHARES - 0.1
    assert total.requests >= 10_000 / SHARES
    assert sum(total.faults.values()) >= 1000 / SHARES


def test_every_kind_of_fault_is_met_in_the_fixed_set_and_the_same_seed_gives_the_same_trace() -> None:
    hour = partial(Setting, hours=1.0, requests_per_hour=60.0, faults_per_hour=60.0)
    reports = [World(hour(seed=seed)).run() for seed in range(16)]
    assert {name for report in reports for name in report.faults} == set(KINDS)
    assert World(hour(seed=7)).run().digest == reports[7].digest
