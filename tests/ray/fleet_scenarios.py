"""What is to be true of fleets: how they start, and one that is shared, whose scenarios go on one
after the other."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from llama_worker import RestartPolicy, WorkerClosed, WorkerConfig, WorkerStartError
from llama_worker.ray import Fleet, FleetClosed, NoLiveReplica, ReplicaLost, ReplicaState
from llama_worker.testing import scripts as fs
from tests.actors.conftest import HOST, eventually, running
from tests.ray.stage import (
    TALKING,
    WAIT_S,
    Stage,
    assert_gone,
    back,
    ended,
    ready_replicas,
    replica_of,
    server_pid,
    submitted,
    text_of,
    tree_of,
)


def a_fleet_that_cannot_start_says_why(stage: Stage) -> None:
    script = fs.Script(exits=[fs.Exit(3, "before_bind", log=["no such model"])])
    with pytest.raises(WorkerStartError) as caught, Fleet(stage.config_for(script), replicas=1):
        raise AssertionError("it did not start")
    assert "no such model" in caught.value.log_tail
    broken = Fleet(lambda port: WorkerConfig("w", HOST, port + 1, ["x"]), replicas=1)
    try:
        with pytest.raises(
            ReplicaLost,
            match=r"replica 0.*ConfigError: config_for\(\d+\) returned a config with port",
        ):
            broken.start().get(timeout=WAIT_S)
        with pytest.raises(NoLiveReplica, match=r"replica 0: lost; last error: .*ConfigError"):
            broken.submit("job", "", "Hello?").get(timeout=WAIT_S)
        with pytest.raises(ReplicaLost):
            broken.get_worker_status(0).get(timeout=WAIT_S)
    finally:
        broken.close()


def a_fleet_without_room_has_no_live_replica(stage: Stage) -> None:
    with_room = Fleet(
        stage.config_for(), replicas=2, options={"resources": {"unobtainium": 1}}, name="dreamers"
    )
    starting = with_room.start()
    with pytest.raises(NoLiveReplica) as caught:
        with_room.submit("job", "", "Hello?").get(timeout=WAIT_S)
    assert caught.value.replicas == ("replica 0: starting", "replica 1: starting")
    with_room.close()
    with pytest.raises(FleetClosed):
        starting.get(timeout=WAIT_S)


# ---------------------------------------------------------------- a fleet in the order of its life


def a_fleet_starts_one_replica_on_each_node(stage: Stage) -> None:
    config_for = stage.config_for(restart=RestartPolicy.never())
    options = {"num_gpus": 1, "scheduling_strategy": "SPREAD"}
    stage.fleet = Fleet(config_for, replicas=2, name="shared", options=options, retry_s=0.5)
    status = stage.fleet.start().get(timeout=WAIT_S)
    assert (status["name"], status["slots_total"], status["slots_used"]) == ("shared", 2, 0)
    nodes = {each["place"]["node_id"] for each in status["replicas"]}
    assert nodes == {stage.nodes.first.node_id, stage.nodes.second.node_id}


def requests_without_a_free_slot_are_refused(stage: Stage) -> None:
    fleet, count = stage.fleet, 8
    barrier = threading.Barrier(count)
    script = {"scripted_reply": fs.steps_json(*TALKING)}

    def race(number: int) -> Any:
        barrier.wait()
        return fleet.submit(f"job-{number}", "", "Hello?", params=script).get(timeout=WAIT_S)

    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(race, range(count)))
    admitted = [answer["request_id"] for answer in answers if answer["ok"]]
    refused = [answer for answer in answers if not answer["ok"]]
    assert len(admitted) == len(set(admitted)) == 2
    assert refused == [{"ok": False, "error": "NO_SLOT_AVAILABLE"}] * (count - 2)
    assert {replica_of(fleet, each)["replica"] for each in admitted} == {0, 1}
    assert fleet.get_fleet_status().get(timeout=WAIT_S)["slots_used"] == 2
    for each in admitted:
        assert fleet.cancel(each).get(timeout=WAIT_S) is True
        assert fleet.cancel(each).get(timeout=WAIT_S) is False
        assert ended(fleet, each)["state"] == "canceled"
    assert fleet.get_fleet_status().get(timeout=WAIT_S)["slots_used"] == 0


def a_fleet_answers_as_a_worker_does(stage: Stage) -> None:
    fleet, gate = stage.fleet, stage.folder / "counted"
    script = fs.plain_reply(fs.Reasoning("hm"), fs.Tokens(30, interval_s=0.0), fs.Gate(gate))
    request_id = submitted(fleet, *script, job_name="count")
    assert fleet.get_result(request_id).get(timeout=WAIT_S) == {"ok": False, "error": "NOT_READY"}
    eventually(lambda: text_of(fleet, request_id), "output while the request runs", WAIT_S)
    status = fleet.get_status(request_id).get(timeout=WAIT_S)
    assert status["ok"]
    assert (status["request_id"], status["job_name"]) == (request_id, "count")
    gate.touch()
    result, *others = [
        waiter.get(timeout=WAIT_S) for waiter in [fleet.result(request_id) for _ in range(3)]
    ]
    assert result["ok"]
    assert [result, result] == others
    assert (result["request_id"], result["reasoning"]) == (request_id, "hm")
    assert result["text"] == "".join(f"tok{i} " for i in range(30))
    assert result["usage"]["completion_tokens"] == 31
    for late in (
        fleet.result(request_id),
        fleet.get_status(request_id),
        fleet.read_output(request_id),
    ):
        assert late.get(timeout=WAIT_S) == {"ok": False, "error": "NOT_FOUND"}
    with pytest.raises(TypeError, match="job_name"):
        fleet.submit(7, "", "").get(timeout=WAIT_S)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="request_id"):
        fleet.get_status("one").get(timeout=WAIT_S)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="replica"):
        fleet.get_worker_status(2).get(timeout=WAIT_S)


def a_replica_is_replaced_after_its_requests(stage: Stage) -> None:
    fleet, gate = stage.fleet, stage.folder / "swap"
    request_id = submitted(fleet, *fs.plain_reply(fs.Text("one "), fs.Gate(gate), fs.Text("two")))
    before = replica_of(fleet, request_id)
    number = before["replica"]
    replaced = fleet.replace(number)

    def is_draining() -> bool:
        status = fleet.get_fleet_status().get(timeout=WAIT_S)
        return status["replicas"][number]["state"] is ReplicaState.DRAINING

    eventually(is_draining, "the drain", WAIT_S)
    with pytest.raises(ReplicaLost, match="it cannot be replaced while it is draining"):
        fleet.replace(number).get(timeout=WAIT_S)
    other_id = submitted(fleet, *fs.plain_reply(fs.Text("elsewhere")))
    assert ended(fleet, other_id)["text"] == "elsewhere"
    gate.touch()
    assert ended(fleet, request_id)["text"] == "one two"
    after = replaced.get(timeout=WAIT_S)
    assert (after["state"], after["launches"]) == (ReplicaState.READY, before["launches"] + 1)
    assert after["place"]["pid"] != before["place"]["pid"]


def talking(fleet: Fleet) -> tuple[int, dict[str, Any]]:
    """A request that has put out much, and where it runs."""
    request_id = submitted(fleet, *TALKING)
    eventually(lambda: len(text_of(fleet, request_id)) > 100, "output", WAIT_S)
    return request_id, replica_of(fleet, request_id)


def a_worker_that_failed_for_good_is_replaced(stage: Stage) -> None:
    fleet = stage.fleet
    request_id, replica = talking(fleet)
    os.kill(server_pid(fleet, replica["replica"]), signal.SIGKILL)
    result = ended(fleet, request_id)
    assert (result["fail_reason"], result["text"][:6]) == ("server_died", "token "), result
    assert "replica" not in result["fail_detail"]
    assert "its worker failed" in back(fleet, replica)["last_error"]


def a_replica_whose_actor_is_killed_comes_back(stage: Stage) -> None:
    fleet = stage.fleet
    request_id, replica = talking(fleet)
    seen = tree_of(server_pid(fleet, replica["replica"]))
    os.kill(replica["place"]["pid"], signal.SIGKILL)
    assert_gone(seen)
    result = ended(fleet, request_id)
    assert (result["state"], result["fail_reason"], result["text"][:6]) == (
        "failed",
        "server_died",
        "token ",
    )
    lost = (
        f"request {request_id} was lost with replica {replica['replica']} on node "
        f"{replica['place']['node_id']}"
    )
    assert result["fail_detail"].startswith(lost)
    back(fleet, replica)


def spread_again(fleet: Fleet) -> None:
    """One that came back before its old GPU was free may be beside the other; killed, it finds the
    other node free."""
    one, other = ready_replicas(fleet).values()
    while one["place"]["node_id"] == other["place"]["node_id"]:
        os.kill(one["place"]["pid"], signal.SIGKILL)
        one = back(fleet, one)


def a_killed_node_loses_nothing_that_was_received(stage: Stage) -> None:
    fleet, second = stage.fleet, stage.nodes.second.node_id
    spread_again(fleet)
    requests = [talking(fleet), talking(fleet)]
    ((lost_id, lost),) = [each for each in requests if each[1]["place"]["node_id"] == second]
    ((kept_id, _),) = [each for each in requests if each[1]["place"]["node_id"] != second]
    seen = tree_of(server_pid(fleet, lost["replica"]))
    waiting = fleet.result(lost_id)
    before = text_of(fleet, lost_id)

    stage.nodes.kill_second()
    assert_gone(seen)

    eventually(waiting.done, "the end of the lost request", WAIT_S)
    status: Any = fleet.get_status(lost_id).get(timeout=WAIT_S)
    output: Any = fleet.read_output(lost_id).get(timeout=WAIT_S)
    result: Any = waiting.get(timeout=WAIT_S)
    assert (result["state"], result["finish_reason"], result["fail_reason"]) == (
        "failed",
        "failed",
        "server_died",
    )
    where = f"request {lost_id} was lost with replica {lost['replica']} on node {second} ({HOST}): "
    assert result["fail_detail"].startswith(where)
    assert (status["state"], status["phase"], status["fail_detail"]) == (
        "failed",
        "done",
        result["fail_detail"],
    )
    assert result["text"].startswith(before)
    assert (result["text"], result["reasoning"], True) == (output["text"], "hm", output["done"])

    assert back(fleet, lost)["place"]["node_id"] == stage.nodes.first.node_id
    assert ended(fleet, submitted(fleet, *fs.plain_reply(fs.Text("again"))))["text"] == "again"
    assert fleet.get_status(kept_id).get(timeout=WAIT_S)["state"] == "running"  # type: ignore[typeddict-item]
    gpus = {psutil.Process(server_pid(fleet, n)).environ()["CUDA_VISIBLE_DEVICES"] for n in (0, 1)}
    assert gpus == {"0", "1"}, "two replicas on one node have a GPU each"


def close_ends_requests_servers_and_actors(stage: Stage) -> None:
    fleet = stage.fleet
    (running_id,) = [
        each for replica in ready_replicas(fleet).values() for each in replica["active_request_ids"]
    ]
    waiting = fleet.result(running_id)
    actors = [psutil.Process(replica["place"]["pid"]) for replica in ready_replicas(fleet).values()]
    seen = {actor.pid: actor.create_time() for actor in actors}
    fleet.close()
    result = waiting.get(timeout=WAIT_S)
    assert result["ok"]
    assert (result["fail_reason"], result["text"][:6]) == ("worker_stopped", "token ")
    assert not running(stage.processes())
    eventually(lambda: not running(seen), "end of the actors' processes", WAIT_S)
    fleet.close()
    with pytest.raises(FleetClosed, match="'shared' is closed"):
        fleet.submit("job", "", "")
    with pytest.raises(WorkerClosed):
        fleet.result(running_id)
