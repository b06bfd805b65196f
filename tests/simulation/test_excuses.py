"""What went wrong once excuses what follows from it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llama_worker.types.request import RequestFailReason, RequestState
from tests.simulation.faults import KINDS
from tests.simulation.invariants import Truth
from tests.simulation.world import Failure, Setting, World


def _world() -> World:
    return World(Setting(seed=0, hours=2.0, requests_per_hour=20.0, faults_per_hour=0.0))


def _give_up_the_last(world: World, before: Callable[[Truth], object]) -> None:
    def give_up() -> None:
        last = max(world.invariants.requests.values(), key=lambda each: each.request_id)
        before(last)
        world.invariants._check_excuse(last, RequestState.FAILED, RequestFailReason.STALL_TIMEOUT)

    with pytest.raises(Failure, match="by no call and no fault"):
        world.do(world._live, give_up)


@pytest.mark.parametrize("name", ["BIOS provider raises", "guard stopped", "SIGTERM ignored"])
def test_a_fault_long_ago_excuses_no_healthy_request(name: str) -> None:
    world = _world()
    world.nature._at_next_request.append(KINDS[name])

    def of_the_same_launch(last: Truth) -> None:
        (fault,) = world.invariants.faults
        last.epoch = fault.epoch or last.epoch

    _give_up_the_last(world, of_the_same_launch)


def test_garbage_excuses_no_stall_of_another_request() -> None:
    world = _world()

    def garble(last: Truth) -> None:
        other = last.request_id - 1
        world.invariants.fault(KINDS["garbage"], epoch=last.epoch, request_id=other)

    _give_up_the_last(world, garble)
