"""What the scenarios stand on: scripted servers, and questions to actors and fleets."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray

from llama_worker import RequestResult, WorkerConfig
from llama_worker.ray import Fleet, RayWorker, ReplicaState
from llama_worker.testing import scripts as fs
from tests.actors.conftest import HOST, Tree, eventually, fast_timeouts, running, tree
from tests.ray.cluster import TwoNodes

WAIT_S = 300.0  # ends what would never end; on a busy machine a cluster takes minutes to come up
GONE_WITHIN_S = 5.0  # guard and server, once the actor's process is dead
TALKING = (fs.Headers(), fs.Reasoning("hm"), fs.Repeat(None, [fs.Text("token "), fs.Sleep(0.02)]))


@dataclass
class Stage:
    """What the scenarios share: the cluster, and folders."""

    nodes: TwoNodes
    folder: Path
    fleet: Fleet = field(init=False)

    def config_for(
        self,
        script: fs.Script = fs.Script(),  # noqa: B008  frozen
        **settings: Any,
    ) -> Callable[[int], WorkerConfig]:
        """A function that makes configs of scripted servers; each writes a journal."""
        folder, slots = self.folder, settings.get("slots", 1)

        def config(port: int) -> WorkerConfig:
            journal = folder / f"{port}.journal"
            command = fs.scripted_server_cmd(
                script, host=HOST, port=port, slots=slots, journal=journal
            )
            # TALKING says the same for as long as a slow machine needs.
            usual = {"timeouts": fast_timeouts(), "loop_detector": None}
            return WorkerConfig("scripted", HOST, port, command, **{**usual, **settings})

        return config

    def processes(self) -> Tree:
        """The guards and servers of every launch so far."""
        found: Tree = {}
        for path in self.folder.glob("*.journal"):
            found |= tree(fs.JournalReader(path))
        return found


def actor(config_for: Callable[[int], WorkerConfig], **options: Any) -> Any:
    return ray.remote(RayWorker).options(**options).remote(config_for)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=WAIT_S)


def submitted(fleet: Fleet, *steps: fs.Step, job_name: str = "job") -> int:
    answer = fleet.submit(
        job_name, "", "Hello?", params={"scripted_reply": fs.steps_json(*steps)}
    ).get(timeout=WAIT_S)
    assert answer["ok"], answer
    return answer["request_id"]


def text_of(fleet: Fleet, request_id: int) -> str:
    output = fleet.read_output(request_id).get(timeout=WAIT_S)
    assert output["ok"]
    return output["text"]


def ended(fleet: Fleet, request_id: int) -> RequestResult:
    result = fleet.result(request_id).get(timeout=WAIT_S)
    assert result["ok"], result
    return result


def ready_replicas(fleet: Fleet) -> dict[int, Any]:
    replicas = fleet.get_fleet_status().get(timeout=WAIT_S)["replicas"]
    return {each["replica"]: each for each in replicas if each["state"] is ReplicaState.READY}


def replica_of(fleet: Fleet, request_id: int) -> dict[str, Any]:
    (found,) = [
        each for each in ready_replicas(fleet).values() if request_id in each["active_request_ids"]
    ]
    return dict(found)


def server_pid(fleet: Fleet, replica: int) -> int:
    return fleet.get_worker_status(replica).get(timeout=WAIT_S)["pid"]


def back(fleet: Fleet, before: dict[str, Any]) -> dict[str, Any]:
    """The replica, once it is READY again."""

    def look() -> Any:
        found = ready_replicas(fleet).get(before["replica"])
        return found if found and found["launches"] > before["launches"] else None

    return dict(eventually(look, f"READY again: {before}", WAIT_S))


def assert_gone(seen: Tree) -> None:
    """Guard and server, within the time that the contract gives them after their host's death."""
    assert seen
    eventually(lambda: not running(seen), f"end of {seen}", GONE_WITHIN_S)


def tree_of(server: int) -> Tree:
    """A server and its guard, as `running` takes them."""
    process = psutil.Process(server)
    return {
        server: process.create_time(),
        process.ppid(): psutil.Process(process.ppid()).create_time(),
    }
