"""The watchdog by itself: what it asks, and when it judges."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llama_worker import TimeoutProfile, WorkerConfig
from llama_worker.actors import watchdog
from llama_worker.actors.base import LiveCount, Ref
from llama_worker.actors.watchdog import WatchdogActor
from llama_worker.messages import (
    BecameReady,
    HealthLost,
    Probed,
    ProbeNow,
    ProbeOutcome,
    ProgressReported,
    ReportProgress,
    Stalled,
    Unwatch,
    Watch,
    WatchdogMessage,
    WatchLaunch,
    WatchStartup,
)
from llama_worker.server.timeouts import Progress
from llama_worker.server.traits import ServerTraits
from llama_worker.types import RequestPhase
from tests.actors.conftest import WAIT_S


class Box:
    """A mailbox that nobody empties but the test."""

    def __init__(self) -> None:
        self._told: queue.Queue[Any] = queue.Queue()

    def tell(self, message: Any) -> bool:
        self._told.put(message)
        return True

    def next(self, kind: type[Any]) -> Any:
        """The next message of the kind; others before it are passed over."""
        while not isinstance(message := self._told.get(timeout=WAIT_S), kind):
            pass
        return message


class Probes:
    """The server's answers, in the test's hands."""

    def __init__(self) -> None:
        self._asked: queue.Queue[Callable[[ProbeOutcome], object]] = queue.Queue()

    def __call__(self, config: WorkerConfig, *, epoch: int, root_pid: int, first: bool, tell_to: Any) -> Probes:
        self._asked.put(
            lambda outcome: tell_to.tell(Probed(epoch=epoch, outcome=outcome, detail="told", traits=ServerTraits()))
        )
        return self

    def abort(self) -> None:
        """Nobody waits for the answer any more."""

    def next(self) -> Callable[[ProbeOutcome], object]:
        """Answer the next probe with what this is called with."""
        return self._asked.get(timeout=WAIT_S)


class House:
    """A watchdog over a server that is READY."""

    def __init__(self, probes: Probes, **timeouts: Any) -> None:
        self.worker = Box()
        self.probes = probes
        self._live_count = LiveCount()
        profile = TimeoutProfile(**timeouts)
        config = WorkerConfig("w", "127.0.0.1", 1, ("true",), timeouts=profile, liveness_probes=())
        self.dog: Ref[WatchdogMessage] = Ref(WatchdogActor.start(self.worker, self._live_count, config, ()))
        self.dog.tell(WatchLaunch(epoch=1))
        self.dog.tell(WatchStartup(epoch=1, pid=1))
        probes.next()(ProbeOutcome.READY)
        self.worker.next(BecameReady)

    def close(self) -> None:
        self.dog.stop()
        assert self._live_count.wait_empty(WAIT_S)


MakeHouse = Callable[..., House]


@pytest.fixture
def make_house(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeHouse]:
    houses: list[House] = []
    probes = Probes()
    monkeypatch.setattr(watchdog, "ServerProbe", probes)

    def make(**timeouts: Any) -> House:
        houses.append(House(probes, **timeouts))
        return houses[-1]

    yield make
    for house in houses:
        house.close()


def generating(request_id: int, began_at: float, data_at: float) -> Progress:
    return Progress(
        request_id=request_id,
        phase=RequestPhase.GENERATING,
        dispatched_at=began_at,
        turn_started_at=began_at,
        headers_at=began_at,
        first_token_at=began_at,
        last_data_at=data_at,
    )


def answer(asked: ReportProgress, progress: Progress) -> None:
    asked.reply_to.tell(ProgressReported(progress=progress, for_verdict=asked.for_verdict))


@pytest.mark.parametrize("neighbour", ["answers late", "ends"])
def test_no_verdict_falls_before_every_request_was_heard(make_house: MakeHouse, neighbour: str) -> None:
    house = make_house(idle_stream_timeout_s=1.0, liveness_probe_interval_s=0.1, health_probe_interval_s=None)
    began_at = time.monotonic() - 60.0
    requests = Box(), Box()
    for number, request in enumerate(requests, start=1):
        house.dog.tell(Watch(request_id=number, request=request))
    hung, busy = (request.next(ReportProgress) for request in requests)
    answer(hung, generating(1, began_at, began_at))
    lately = time.monotonic()
    if neighbour == "ends":
        house.dog.tell(Unwatch(request_id=2, data_at=lately))
    else:
        answer(busy, generating(2, began_at, lately))
    stalled = house.worker.next(Stalled)
    assert (stalled.request_id, stalled.busy_neighbour) == (1, True)


def test_a_request_that_never_answers_holds_no_verdict_up_for_ever(make_house: MakeHouse) -> None:
    house = make_house(idle_stream_timeout_s=1.0, liveness_probe_interval_s=0.1, health_probe_interval_s=None)
    began_at = time.monotonic() - 60.0
    requests = Box(), Box()
    for number, request in enumerate(requests, start=1):
        house.dog.tell(Watch(request_id=number, request=request))
    answer(requests[0].next(ReportProgress), generating(1, began_at, began_at))
    stalled = house.worker.next(Stalled)
    assert (stalled.request_id, stalled.busy_neighbour) == (1, False)


def test_a_doubt_during_a_probe_gets_a_probe_of_its_own(make_house: MakeHouse) -> None:
    house = make_house(health_probe_interval_s=0.1, health_failures_before_restart=99)
    regular = house.probes.next()
    house.dog.tell(ProbeNow(epoch=1, cause="a broken connection"))
    regular(ProbeOutcome.READY)  # it had reached the server before that
    house.probes.next()(ProbeOutcome.FAILED)
    assert house.worker.next(HealthLost).detail == "a broken connection, and then the probe failed: told"
