"""A server that nobody here started, in virtual time: what hangs is given up, and nothing else."""

import logging
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llama_worker.actors.messages import EndLease
from llama_worker.server.messages import HealthLost, Stalled
from tests.simulation.promises import Violation
from tests.simulation.test_planted_bugs import ignores, returns, then
from tests.simulation.upstream import OF_ONE, OF_THE_SERVER, UpstreamWorld
from tests.tables import cases

_WATCH = "llama_worker.server.watch:ServerWatch."
_ACTOR = "llama_worker.actors.upstream:UpstreamActor."


@pytest.fixture(autouse=True)
def nothing_is_logged() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def play(first: int, count: int) -> tuple[Counter[str], Counter[str]]:
    """So many seeds: the faults, and those for which requests were given up."""
    faults, given_up = Counter[str](), Counter[str]()
    for seed in range(first, first + count):
        world = UpstreamWorld(seed)
        world.run()
        faults += world.faults
        given_up += world.given_up
    return faults, given_up


def test_every_fault_of_an_upstream_server_occurs() -> None:
    faults, given_up = play(0, 15)
    assert set(faults) == {*OF_ONE, *OF_THE_SERVER}
    assert set(given_up) == {"hung stream", "request lost", *OF_THE_SERVER}


def test_upstream_servers_nobody_has_seen() -> None:
    play(time.time_ns() % 2**40, 10)


def without(*kinds: type) -> Callable[..., Any]:
    """The watch's effects, but for these."""
    return then(lambda effects, *rest: [each for each in effects if type(each) not in kinds])


@cases(
    "where, make",
    {
        "no verdict": (_WATCH + "step", without(Stalled)),
        "nobody hears that the server is lost": (_WATCH + "step", without(HealthLost)),
        "the end of a lease is dropped": (_ACTOR + "handle", ignores(EndLease)),
        "probes are not aborted": (_ACTOR + "_abort_probes", returns(None)),
        "a connection stays open": (
            "llama_worker.runtime.http.leased_exchange:LeasedExchange._abort_if_ended",
            returns(None),
        ),
        "data puts no limit off": (
            "llama_worker.request.progress:Progress.heard_at",
            lambda right: property(lambda progress: progress.turn_started_at),
        ),
    },
)
def test_a_bug_planted_for_an_upstream_server_is_found(
    where: str, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _, function = where.replace(":", ".").rpartition(".")
    place: Any = pkgutil.resolve_name(owner)
    monkeypatch.setattr(place, function, make(vars(place)[function]))
    with pytest.raises(Violation):
        play(0, 30)
