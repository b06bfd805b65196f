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


HECTIC = (
    37.67123287671233,
    3.4246575342465753,
)  # requests and faults per hour, as `settings` draws them
CALM = (1.0, 0.046593980057776534)


@pytest.mark.parametrize(
    ("seed", "hours", "rates"),
    [
        pytest.param(7, 4.0, (25.0, 20.0), id="ask() resolved before its result was released"),
        pytest.param(
            189804746787714,
            2.7,
            (37.6712325, 3.4246575),
            id="a bound counted time of a halted host",
        ),
        pytest.param(
            193651771979271,
            2.4833832883408595,
            HECTIC,
            id="an honest server wrote half a minute in one go",
        ),
        pytest.param(
            244459350129237,
            108.02862194979923,
            CALM,
            id="an actor broke before it took the text that came",
        ),
        pytest.param(
            45692451366883, 4.035282179853106, HECTIC, id="a caller came as the host went on"
        ),
        pytest.param(
            62413012168464,
            5.965414936806482,
            HECTIC,
            id="two ProcessActors died over an unkillable server",
        ),
        pytest.param(
            26355305580647,
            3.633422827150914,
            HECTIC,
            id="a halt of the host ended with a provider's limit",
        ),
        pytest.param(5090, 3.0, (60.0, 15.0), id="frozen for a request that had been canceled"),
        pytest.param(
            170558119922303,
            3.232545830356577,
            (165.0, 15.0),
            id="silent slots of a server that works",
        ),
        pytest.param(
            173331711187648,
            51.85015493848307,
            (1.0, 0.20408163265306123),
            id="a lease heard its finish behind its end",
        ),
        pytest.param(
            138223323556463,
            5.23535762498518,
            (75.34246575342465, 6.84931506849315),
            id="probes were in time where every look was late",
        ),
        pytest.param(
            51871100183379,
            198.98072515182605,
            (1.0, 0.04659398005777654),
            id="its repeats came a minute apart",
        ),
        pytest.param(
            78314829161864,
            4.534096138311952,
            (75.34246575342465, 6.84931506849315),
            id="its host stopped a load that hung, and it ignored SIGTERM",
        ),
        pytest.param(
            75430103562003,
            178.18094298047092,
            (1.0, 0.04659398005777654),
            id="it was restarted before its process began",
        ),
        pytest.param(
            122918312022039,
            5.807026001719291,
            (37.671232876712324, 3.424657534246575),
            id="a request ended badly beside another while the worker drained",
        ),
        pytest.param(
            20034866699390,
            2.8539235841697046,
            (37.671232876712324, 3.424657534246575),
            id="three slots wrote many tokens in one slow batch",
        ),
        pytest.param(
            179196856528474,
            201.5021848073454,
            (1.0, 0.04659398005777654),
            id="its ProcessActor died, and the worker heard of it late",
        ),
        pytest.param(
            32015304328468,
            2.495963481194701,
            (37.671232876712324, 3.424657534246575),
            id="a lease was refused by a server that died then",
        ),
        pytest.param(
            220992768886379,
            5.386532325325142,
            (37.671232876712324, 3.424657534246575),
            id="a lost request's slot stood still, and an image was encoded",
        ),
        pytest.param(
            216877593245595,
            5.899546182878867,
            (37.671232876712324, 3.424657534246575),
            id="it was recycled while all were at rest",
        ),
        pytest.param(
            239683604732883,
            5.1623265623196275,
            (37.671232876712324, 3.424657534246575),
            id="a connection broke while it drained",
        ),
        pytest.param(
            127004680186025,
            3.7515956158453654,
            (37.671232876712324, 3.424657534246575),
            id="headers were waited for behind a batch that was broken off",
        ),
    ],
)
def test_a_run_that_once_broke_an_invariant(
    seed: int, hours: float, rates: tuple[float, float]
) -> None:
    World(
        Setting(seed=seed, hours=hours, requests_per_hour=rates[0], faults_per_hour=rates[1])
    ).run()


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


def test_every_kind_of_fault_is_met_in_the_fixed_set_and_the_same_seed_gives_the_same_trace() -> (
    None
):
    hour = partial(Setting, hours=1.0, requests_per_hour=60.0, faults_per_hour=60.0)
    reports = [World(hour(seed=seed)).run() for seed in range(8, 34)]
    assert {name for report in reports for name in report.faults} == set(KINDS)
    assert World(hour(seed=8)).run().digest == reports[0].digest
