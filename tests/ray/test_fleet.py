"""A fleet on actors that are stubs: no Ray runs."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorDiedError

from llama_worker import RequestResult, WorkerConfig
from llama_worker.ray import (
    Fleet,
    FleetClosed,
    NoLiveReplica,
    ReplicaLost,
    ReplicaState,
    calls,
    fleet,
    replica,
)
from llama_worker.runtime.host.futures import WorkerFuture
from tests.actors.conftest import HOST, WAIT_S, eventually
from tests.ray.stub_actor import SLOTS, StubActor, set_session, without_ray

READY, SILENT, LOST = ReplicaState.READY, ReplicaState.SILENT, ReplicaState.LOST


class Stage:
    """A fleet, every actor that it has created, and those that it has killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors, self.killed = without_ray(monkeypatch)
        self.fleet: Fleet
        for name, seconds in (("_RENEW_S", 0.001), ("_SILENT_S", 0.1), ("_MARGIN_S", 0.0)):
            monkeypatch.setattr(replica, name, seconds)
        monkeypatch.setattr(calls, "_CHECK_S", 0.001)
        monkeypatch.setattr(fleet, "_LEAST_LEASE_S", 0.0)

    @contextmanager
    def started(self, replicas: int, lease_s: float = 3600.0) -> Iterator[list[StubActor]]:
        """The first actors of its fleet."""
        self.fleet = Fleet(config_for, replicas=replicas, retry_s=0.01, lease_s=lease_s)
        with closing(self.fleet):
            self.fleet.start().get(timeout=WAIT_S)
            yield self.actors[:]

    def wait_states(self, *states: ReplicaState) -> None:
        eventually(lambda: [each["state"] for each in self.replicas()] == [*states], f"{states}")

    def replicas(self) -> list[Any]:
        return [*self.fleet.get_fleet_status().get(timeout=WAIT_S)["replicas"]]

    def submit(self) -> int:
        answer = self.fleet.submit("job", "", "Hello?").get(timeout=WAIT_S)
        assert answer["ok"], answer
        return answer["request_id"]

    def replacing_while_it_admits(self, first: StubActor) -> tuple[Any, Any]:
        """What a submit and the replacement of replica 0 will answer."""
        first.set_sends_pieces(False)
        submitted = self.fleet.submit("job", "", "Hello?")
        eventually(lambda: "follow" in first.calls, "its admission")
        replaced = self.fleet.replace(0)
        eventually(lambda: "drain" in first.calls, "its drain")
        return submitted, replaced

    def ended(self, request_id: int) -> RequestResult:
        result = self.fleet.result(request_id).get(timeout=WAIT_S)
        assert result["ok"], result
        return result


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def config_for(port: int) -> WorkerConfig:
    return WorkerConfig("w", HOST, port, ["llama-server"])


def test_a_result_that_came_first_is_taken_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with stage.started(1):
        request_id = stage.submit()  # its first piece is its last
        assert stage.ended(request_id)["text"] == "yes"
        assert stage.fleet.get_result(request_id).get(timeout=WAIT_S)["ok"] is False
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.timeout(60)
def test_a_signal_handler_may_close_during_a_close(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_SILENT_S", 3600.0)
    handled, before = threading.Event(), signal.getsignal(signal.SIGUSR1)

    def handle(*_: object) -> None:
        handled.set()
        stage.fleet.close()

    with stage.started(1) as (actor,):
        actor.set_reachable(False)

        def interrupt() -> None:
            eventually(lambda: "stop" in actor.calls, "the close")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            handled.wait(WAIT_S)
            actor.set_reachable(True)

        interrupting = threading.Thread(target=interrupt)
        signal.signal(signal.SIGUSR1, handle)
        try:
            interrupting.start()
            stage.fleet.close()
        finally:
            interrupting.join()
            signal.signal(signal.SIGUSR1, before)
    assert handled.is_set()
    assert actor.calls.count("stop") == 1


def test_a_forked_child_has_no_fleet(stage: Stage) -> None:
    with stage.started(1) as (actor,):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(WAIT_S))  # ends what would never end
            try:
                stage.fleet.submit("job", "", "Hello?")
            except FleetClosed as closed:
                stage.fleet.close()  # as its exit does
                os._exit("forked" not in closed.__notes__[0])
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert "stop" not in actor.calls
        assert stage.ended(stage.submit())["text"] == "yes"


def test_a_silent_replica_is_not_chosen(stage: Stage) -> None:
    with stage.started(2) as (first, second):
        first.set_reachable(False)
        stage.wait_states(SILENT, READY)
        for _ in range(SLOTS):
            stage.submit()
        assert first.calls.count("submit") == 0
        assert second.calls.count("submit") == SLOTS
        first.set_reachable(True)
        stage.wait_states(READY, READY)
        assert stage.killed == []


def test_an_admission_without_an_answer_goes_elsewhere(stage: Stage) -> None:
    with stage.started(2) as (first, second):
        first.set_reachable(False)  # the fleet does not know it yet
        stage.submit()
        assert (first.calls.count("submit"), second.calls.count("submit")) == (1, 1)
        first.set_reachable(True)
        eventually(lambda: "cancel" in first.calls, "cancelled: nobody wants it there")
        assert "cancel" not in second.calls


def test_a_request_without_its_connection_is_cancelled(stage: Stage) -> None:
    with stage.started(1) as (actor,):
        actor.breaks = True
        result = stage.ended(stage.submit())
        assert (result["fail_reason"], result["text"]) == ("server_died", "yes")
        assert "the connection broke" in result["fail_detail"]
        assert "cancel" in actor.calls  # it may live, and would work on for nobody


def test_an_admission_without_its_connection_is_cancelled(stage: Stage) -> None:
    with stage.started(2) as (first, second):
        first.breaks_first = True
        stage.submit()
        assert second.calls.count("submit") == 1
        assert "cancel" in first.calls  # it may live, and the request runs elsewhere now


def test_a_silent_replica_gets_no_requests_nor_a_replacement(stage: Stage) -> None:
    with stage.started(1) as (actor,):
        actor.set_reachable(False)
        stage.wait_states(SILENT)
        with pytest.raises(NoLiveReplica, match="replica 0: silent"):
            stage.submit()
        with pytest.raises(ReplicaLost, match="while it is silent"):
            stage.fleet.replace(0).get(timeout=WAIT_S)
        actor.set_reachable(True)
        stage.wait_states(READY)
        assert "drain" not in actor.calls


def test_a_replica_is_not_replaced_while_it_admits(stage: Stage) -> None:
    """A request that it ran to its end, but whose first piece was not received, would run again."""
    with stage.started(2) as (first, second):
        submitted, _ = stage.replacing_while_it_admits(first)
        for _ in range(3):  # turns of the fleet's loop
            stage.replicas()
        assert stage.killed == []
        first.set_sends_pieces(True)
        assert submitted.get(timeout=WAIT_S)["ok"]
        eventually(lambda: stage.killed == [first], "its end")
        assert second.calls.count("submit") == 0


def test_death_during_replacement_is_not_the_next_ones(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stage.started(1) as (first,):
        submitted, replaced = stage.replacing_while_it_admits(first)
        monkeypatch.setattr(first, "call", Mock(side_effect=ActorDiedError))
        eventually(lambda: len(stage.actors) == 2, "another actor")
        stage.wait_states(READY)
        first.set_sends_pieces(True)
        assert submitted.get(timeout=WAIT_S)["ok"]
        replaced.get(timeout=WAIT_S)
        second = stage.actors[1]
        monkeypatch.setattr(second, "call", Mock(side_effect=Exception("Failed to submit")))
        eventually(lambda: len(stage.actors) == 3, "a third actor")
        assert "Failed to submit" in stage.replicas()[0]["last_error"]


def test_without_ray_no_actor_is_called(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "_RENEW_S", 0.5)  # until then the replica counts as READY
    with stage.started(1) as (actor,):
        set_session(monkeypatch, None)
        with pytest.raises(NoLiveReplica):
            stage.submit()
        with pytest.raises(ReplicaLost, match="Ray was shut down"):
            stage.fleet.get_debug_info(0).get(timeout=WAIT_S)
        with pytest.raises(ReplicaLost):
            stage.fleet.replace(0).get(timeout=WAIT_S)
        assert {"submit", "get_debug_info", "drain"}.isdisjoint(actor.calls)


def test_a_shutdown_of_ray_lasts_until_a_start(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call would start a new cluster."""
    with stage.started(1) as (actor,):
        set_session(monkeypatch, None)
        stage.wait_states(LOST)
        assert "Ray was shut down" in stage.replicas()[0]["last_error"]
        renewals = actor.calls.count("renew")
        stage.replicas()
        assert actor.calls.count("renew") == renewals
        with pytest.raises(ReplicaLost, match="Ray was shut down"):
            stage.fleet.start().get(timeout=WAIT_S)
        set_session(monkeypatch, "second")
        assert stage.fleet.start().get(timeout=WAIT_S)["slots_total"] == SLOTS
        assert len(stage.actors) == 2
        stage.submit()


@pytest.mark.parametrize("method", ["get_place", "start"])
def test_a_start_ends_with_ray_and_works_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    stage.fleet = Fleet(config_for, replicas=1, retry_s=0.01)
    with closing(stage.fleet), monkeypatch.context() as patch:
        patch.setattr(StubActor, "unanswered", {method})
        started = stage.fleet.start()
        eventually(lambda: stage.actors and method in stage.actors[0].calls, method)
        set_session(monkeypatch, None)
        with pytest.raises(ReplicaLost, match="Ray was shut down"):
            started.get(timeout=WAIT_S)
        patch.undo()
        set_session(monkeypatch, "second")
        assert stage.fleet.start().get(timeout=WAIT_S)["slots_total"] == SLOTS
        assert len(stage.actors) == 2


def test_a_start_in_another_session_finds_new_replicas(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray is shut down and initialised faster than the fleet looks."""
    with stage.started(2):
        set_session(monkeypatch, "second")
        starts = [stage.fleet.start() for _ in range(2)]
        for start in starts:
            assert [each["launches"] for each in start.get(timeout=WAIT_S)["replicas"]] == [2, 2]


@pytest.mark.parametrize(
    ("method", "question"), [("drain", Fleet.replace), ("get_debug_info", Fleet.get_debug_info)]
)
@pytest.mark.parametrize("session", [None, "second"])
def test_no_question_outlives_ray(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    question: Callable[..., WorkerFuture[Any]],
    session: str | None,
) -> None:
    monkeypatch.setattr(StubActor, "unanswered", StubActor.unanswered | {method})
    with stage.started(1) as (actor,):
        answer = question(stage.fleet, 0)
        eventually(lambda: method in actor.calls, method)
        set_session(monkeypatch, session)
        with pytest.raises(ReplicaLost, match="Ray was shut down"):
            answer.get(timeout=WAIT_S)


def test_lease_is_renewed_until_the_server_has_stopped(stage: Stage) -> None:
    with stage.started(replicas=1) as (actor,):
        actor.stops_slowly = True
    assert actor.calls[-1] == "renew"


def test_host_may_change_what_it_learns_of_places(stage: Stage) -> None:
    with stage.started(replicas=1):
        for _ in range(2):
            (status,) = stage.replicas()
            assert status["place"].pop("node_id") == "stub"


def test_a_lease_that_is_over_replaces_the_replica(stage: Stage) -> None:
    with stage.started(1, lease_s=0.5) as (first,):
        first.set_reachable(False)
        eventually(lambda: len(stage.actors) >= 2, "another actor")
        stage.wait_states(READY)
        assert stage.killed[0] is first
        assert "no answer for 0.5 s" in stage.replicas()[0]["last_error"]
