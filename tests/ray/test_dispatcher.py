"""The dispatcher and its replicas, on actors that are stubs: no Ray runs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import ray

from llama_worker.ray import NoLiveReplica, ReplicaState, replica
from llama_worker.ray.dispatcher import Dispatcher, ResultWaiter
from llama_worker.request.submission import validate_submit
from tests.actors.conftest import WAIT_S
from tests.ray.stub_actor import SLOTS, StubActor

SUBMISSION = validate_submit("job", "", "Hello?", None, None)
LONG_S = 3600.0


class Stage:
    """A fleet's dispatcher, and every actor that it has created."""

    def __init__(self, replicas: int, lease_s: float) -> None:
        self.actors: list[StubActor] = []
        self.dispatcher = Dispatcher("stubs", replicas, self._create, 0.01, lease_s)

    def _create(self) -> Any:
        self.actors.append(StubActor())
        return self.actors[-1]

    async def until_states(self, *states: ReplicaState) -> None:
        await until(lambda: [each.state for each in self.dispatcher._replicas] == [*states])


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.001)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[StubActor]:
    """The actors that were killed."""
    dead: list[StubActor] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(replica, "kill", dead.append)
    monkeypatch.setattr(replica, "_RENEW_S", 0.001)
    monkeypatch.setattr(replica, "_SILENT_S", 0.1)
    monkeypatch.setattr(replica, "_MARGIN_S", 0.0)
    return dead


def play(story: Callable[[Stage], Any], *, replicas: int = 2, lease_s: float = LONG_S) -> None:
    async def main() -> None:
        stage = Stage(replicas, lease_s)
        async with asyncio.timeout(WAIT_S):
            await stage.dispatcher.start()
            await story(stage)
            await stage.dispatcher.close(1.0)  # of every task in this loop, too

    asyncio.run(main())


@pytest.mark.usefixtures("killed")
def test_a_result_may_be_taken_before_its_follower_has_run() -> None:
    errors: list[Any] = []

    async def story(stage: Stage) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: errors.append(told))
        answer = await stage.dispatcher.submit(SUBMISSION)
        assert answer["ok"]
        waiter = ResultWaiter()
        await stage.dispatcher.await_result(answer["request_id"], waiter)
        assert waiter.done()
        stage.dispatcher.release(answer["request_id"])
        await until(lambda: not stage.dispatcher._replicas[0].requests)
        await asyncio.sleep(0)
        gc.collect()

    play(story)
    assert errors == []


def test_a_silent_replica_is_not_chosen_until_it_answers(killed: list[StubActor]) -> None:
    async def story(stage: Stage) -> None:
        first, second = stage.actors
        first.reachable.clear()
        await stage.until_states(ReplicaState.SILENT, ReplicaState.READY)
        for _ in range(SLOTS):
            assert (await stage.dispatcher.submit(SUBMISSION))["ok"]
        assert first.calls.count("submit") == 0
        assert second.calls.count("submit") == SLOTS
        first.reachable.set()
        await stage.until_states(ReplicaState.READY, ReplicaState.READY)
        assert killed == []

    play(story)


@pytest.mark.usefixtures("killed")
def test_an_admission_without_an_answer_goes_elsewhere_and_is_cancelled() -> None:
    async def story(stage: Stage) -> None:
        first, second = stage.actors
        first.reachable.clear()  # the dispatcher does not know it yet
        assert (await stage.dispatcher.submit(SUBMISSION))["ok"]
        assert (first.calls.count("submit"), second.calls.count("submit")) == (1, 1)
        first.reachable.set()
        await until(lambda: "cancel" in first.calls)
        assert "cancel" not in second.calls

    play(story)


@pytest.mark.usefixtures("killed")
def test_a_request_whose_connection_breaks_is_lost_and_cancelled() -> None:
    async def story(stage: Stage) -> None:
        (actor,) = stage.actors
        actor.breaks = True
        answer = await stage.dispatcher.submit(SUBMISSION)
        assert answer["ok"]
        waiter = ResultWaiter()
        await stage.dispatcher.await_result(answer["request_id"], waiter)
        result = await waiter
        assert result["ok"]
        assert (result["fail_reason"], result["text"]) == ("server_died", "yes")
        assert "the connection broke" in result["fail_detail"]
        assert "cancel" in actor.calls  # it may live, and would work on for nobody

    play(story, replicas=1)


def test_a_replica_is_replaced_when_its_lease_is_over(killed: list[StubActor]) -> None:
    async def story(stage: Stage) -> None:
        (first,) = stage.actors
        first.reachable.clear()
        await stage.until_states(ReplicaState.SILENT)
        with pytest.raises(NoLiveReplica, match="replica 0: silent"):
            await stage.dispatcher.submit(SUBMISSION)
        await until(lambda: len(stage.actors) == 2)
        await stage.until_states(ReplicaState.READY)
        assert killed[0] is first
        assert "no answer for 0.5 s" in str((await stage.dispatcher.status())["replicas"][0])

    play(story, replicas=1, lease_s=0.5)
