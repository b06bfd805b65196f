"""The worker in virtual time: seeds that once failed, a fixed set, and new ones each time."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest

from tests.simulation.campaign import run_all, settings
from tests.simulation.faults import KINDS
from tests.simulation.leases import IN_ONE_PIECE
from tests.simulation.world import Setting, World
from tests.tables import cases

HOURS = 876.0  # a tenth of a year


# Requests and faults per hour: as `settings` draws them, once drew them, and for twice the faults.
HECTIC, CALM = (37.671232876712324, 3.424657534246575), (1.0, 0.04659398005777654)
HECTIC_ONCE, CALM_ONCE = (37.67123287671233, 3.4246575342465753), (1.0, 0.046593980057776534)
MORE_HECTIC = (75.34246575342465, 6.84931506849315)
MORE_HECTIC_STILL = (75.34246575342466, 6.8493150684931505)


@cases(
    "seed, hours, rates",
    {
        "ask() resolved before its result was released": (7, 4.0, (25.0, 20.0)),
        "a bound counted time of a halt": (189804746787714, 2.7, (37.6712325, 3.4246575)),
        "half a minute in one go": (193651771979271, 2.4833832883408595, HECTIC_ONCE),
        "broke before it took its text": (244459350129237, 108.02862194979923, CALM_ONCE),
        "a caller came as the host went on": (45692451366883, 4.035282179853106, HECTIC_ONCE),
        "two deaths, one unkillable server": (62413012168464, 5.965414936806482, HECTIC_ONCE),
        "a halt ended with a provider's limit": (26355305580647, 3.633422827150914, HECTIC_ONCE),
        "frozen for a request that had been canceled": (5090, 3.0, (60.0, 15.0)),
        "silent slots of a server that works": (170558119922303, 3.232545830356577, (165.0, 15.0)),
        "a finish heard behind the end": (
            *(173331711187648, 51.85015493848307),
            (1.0, 0.20408163265306123),
        ),
        "in time, every look late": (138223323556463, 5.23535762498518, MORE_HECTIC),
        "its repeats came a minute apart": (51871100183379, 198.98072515182605, CALM),
        "stopped in a hung load, SIGTERM ignored": (78314829161864, 4.534096138311952, MORE_HECTIC),
        "restarted before its process began": (75430103562003, 178.18094298047092, CALM),
        "ended badly beside another in a drain": (122918312022039, 5.807026001719291, HECTIC),
        "many tokens in one slow batch": (20034866699390, 2.8539235841697046, HECTIC),
        "its ProcessActor died, told late": (179196856528474, 201.5021848073454, CALM),
        "refused by a server that died then": (32015304328468, 2.495963481194701, HECTIC),
        "a lost request beside an image": (220992768886379, 5.386532325325142, HECTIC),
        "recycled while all were at rest": (216877593245595, 5.899546182878867, HECTIC),
        "a connection broke while it drained": (239683604732883, 5.1623265623196275, HECTIC),
        "deaf, and it served another": (*(54861748827376, 3.4523435533184856), MORE_HECTIC_STILL),
        "its canary failed, and it was stopped": (
            *(193593670588204, 5.725514318130445),
            MORE_HECTIC_STILL,
        ),
        "its end was read while it was flushed": (
            *(222334923737670, 117.95679525660921),
            (1.0, 10.992153131731358 / 117.95679525660921),
        ),
        "headers waited for behind a broken-off batch": (
            *(127004680186025, 3.7515956158453654),
            HECTIC,
        ),
    },
)
def test_a_run_that_once_broke_an_invariant(
    seed: int, hours: float, rates: tuple[float, float]
) -> None:
    requests, faults = rates
    run = partial(Setting, seed=seed, hours=hours, is_early=True)
    World(run(requests_per_hour=requests, faults_per_hour=faults)).run()


def test_a_run_leaves_nothing_behind() -> None:
    world = World(Setting(seed=7, hours=1.0))
    world.run()
    reference = weakref.ref(world)
    del world
    gc.collect()
    assert reference() is None


def test_strangers_slow_steps_and_whole_replies_are_spared() -> None:
    """Four looks alone would have given up one that waits behind a stranger's step."""
    world = World(Setting(seed=2, hours=2.0, requests_per_hour=80.0, faults_per_hour=0))
    world.run()
    ended = [truth.record for truth in world.invariants.requests.values()]
    assert world.strangers.count
    assert any(each is not None and each.job_name.startswith(IN_ONE_PIECE) for each in ended)


@pytest.mark.timeout(900)
def test_a_tenth_of_a_year_nobody_has_seen() -> None:
    total = run_all(settings(time.time_ns() % 2**40, HOURS, 100.0))
    assert total.hours >= HOURS - 0.1
    assert total.requests >= 1000
    assert sum(total.faults.values()) >= 100


def test_the_fixed_set_has_every_fault_and_repeats() -> None:
    hour = partial(Setting, hours=1.0, requests_per_hour=60.0, faults_per_hour=60.0)
    reports = [World(hour(seed=seed)).run() for seed in (*range(8, 34), 45, 74)]
    assert {name for report in reports for name in report.faults} == set(KINDS)
    assert World(hour(seed=8)).run().digest == reports[0].digest
