"""python -m tests.two_machines.stories FOLDER PREFIX: the host program, on machine 1.

Prints a line of JSON for each story: `{"row", "errors"}`.
"""

import json
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray

from llama_worker import WorkerConfig, llama_server_cmd
from llama_worker.ray import Fleet, ReplicaState
from llama_worker.testing import scripts
from tests.actors.conftest import eventually, fast_timeouts
from tests.server.pace import SERVER_ARGS
from tests.server.thin_model import write_thin_model
from tests.two_machines.load import Load, of_a_model, of_a_script
from tests.two_machines.machines import GCS_PORT, Machines, seconds_until
from tools.found import find_model, find_server

# What each machine has room for; there is one more than the replicas need, once machine 4 is up.
SEATS: dict[int, dict[str, float]] = {
    1: {},
    2: {"seat": 1},
    3: {"seat": 1, "real": 1},
    4: {"seat": 2, "real": 1},
}
LOOPBACK = "127.0.0.1"
IN_FLIGHT = 100
SLOTS = 64
LEASE_S = 20.0
PLACED_WITHIN_S = 120.0  # Ray looks for a place, and a server starts: on a busy machine
SILENT_WITHIN_S = 10.0
BACK_WITHIN_S = 20.0  # TCP doubles its waits while nothing comes back
GONE_WITHIN_S = LEASE_S + 20.0


def scripted(folder: Path, port: int) -> WorkerConfig:
    journal = folder / f"{time.time_ns()}.journal"
    command = scripts.scripted_server_cmd(
        scripts.Script(), host=LOOPBACK, port=port, slots=SLOTS, journal=journal
    )
    timeouts = fast_timeouts()
    return WorkerConfig("scripted", LOOPBACK, port, command, slots=SLOTS, timeouts=timeouts)


def real(server: str, model: str, port: int) -> WorkerConfig:
    command = llama_server_cmd(
        model,
        host=LOOPBACK,
        port=port,
        slots=1,
        executable=server,
        extra_args=(*SERVER_ARGS, "--ctx-size", "1024"),
    )
    return WorkerConfig("real", LOOPBACK, port, command)


class Stage:
    """A fleet of three scripted replicas, one of them still without a place, with a hundred
    requests in flight, and a fleet of one real server, with one."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        seat = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        self.fleet = Fleet(
            partial(scripted, machines.folder),
            replicas=3,
            name="scripted",
            options={**seat, "resources": {"seat": 1}},
            retry_s=1.0,
            lease_s=LEASE_S,
        )
        model = machines.folder / "thin.gguf"  # four machines and their load share these cores
        write_thin_model(Path(find_model()), model)
        self.real = Fleet(
            partial(real, find_server(), str(model)),
            replicas=1,
            name="real",
            options={**seat, "resources": {"real": 1}},
            retry_s=1.0,
            lease_s=LEASE_S,
        )
        self.fleet.start()
        self.real.start().get(timeout=PLACED_WITHIN_S)
        seconds_until(lambda: len(self.ready()) == 2, PLACED_WITHIN_S)
        self.load = Load(self.fleet, IN_FLIGHT, of_a_script)
        self.real_load = Load(self.real, 1, of_a_model)

    def replicas(self) -> list[Any]:
        return list(self.fleet.get_fleet_status().get(timeout=60)["replicas"])

    def ready(self) -> list[Any]:
        return [each for each in self.replicas() if each["state"] is ReplicaState.READY]

    def victim(self) -> tuple[int, int]:
        """A machine with one seat, and the scripted replica that works there."""
        one_seat = {self.machines.address(number): number for number in (2, 3)}

        def look() -> tuple[int, int] | None:
            for each in self.ready():
                number = one_seat.get(each["place"]["node_ip"])
                if number is not None and len(each["active_request_ids"]) >= IN_FLIGHT // 10:
                    return number, each["replica"]
            return None

        return eventually(look, "a replica with many requests", PLACED_WITHIN_S)

    def state_of(self, replica: int) -> ReplicaState:
        return ReplicaState(self.replicas()[replica]["state"])

    def all_ready(self) -> bool:
        return len(self.ready()) == 3

    def one_server_each(self) -> bool:
        """As many servers as replicas, on all machines together."""
        counts = [len(self.machines.servers(number)) for number in range(1, 5)]
        return sum(counts) == 4

    def wait_for_the_real_one(self) -> None:
        """Its load goes on."""
        completed = self.real_load.ended["completed"]
        seconds_until(lambda: self.real_load.ended["completed"] > completed, PLACED_WITHIN_S)


# ---------------------------------------------------------------- the stories, in their order


def a_node_joins_late(stage: Stage) -> str:
    stage.machines.start_ray(4, **SEATS[4])
    joined_s = seconds_until(stage.all_ready, PLACED_WITHIN_S)
    return f"the replica that had no place is ready {joined_s:.0f} s after the node is up"


def the_link_is_down_for_5_seconds(stage: Stage) -> str:
    number, replica = stage.victim()
    launches = stage.replicas()[replica]["launches"]
    stage.machines.set_link(number, up=False)
    cut_at = time.monotonic()
    silent_s = seconds_until(
        lambda: stage.state_of(replica) is ReplicaState.SILENT, SILENT_WITHIN_S
    )
    time.sleep(max(0.0, cut_at + 5.0 - time.monotonic()))
    stage.machines.set_link(number, up=True)
    back_s = seconds_until(lambda: stage.state_of(replica) is ReplicaState.READY, BACK_WITHIN_S)
    assert stage.replicas()[replica]["launches"] == launches, "it was replaced"
    return f"not chosen after {silent_s:.1f} s, chosen again {back_s:.1f} s after the link is up"


def every_worker_is_replaced_in_turn(stage: Stage) -> str:
    began_at = time.monotonic()
    before = {each["replica"]: each["launches"] for each in stage.replicas()}
    failed = Counter(stage.load.ended)
    for replica in before:
        stage.fleet.replace(replica).get(timeout=PLACED_WITHIN_S)
    after = {each["replica"]: each["launches"] for each in stage.ready()}
    assert after == {replica: launches + 1 for replica, launches in before.items()}
    lost = [what for what in stage.load.ended - failed if what.startswith("failed")]
    assert not lost, lost
    return f"three replicas in {time.monotonic() - began_at:.0f} s, no request failed"


def the_link_is_down_for_60_seconds(stage: Stage) -> str:
    number, replica = stage.victim()
    before = Counter(stage.load.ended)
    stage.machines.set_link(number, up=False)
    cut_at = time.monotonic()
    silent_s = seconds_until(
        lambda: stage.state_of(replica) is ReplicaState.SILENT, SILENT_WITHIN_S
    )
    gone_s = silent_s + seconds_until(lambda: not stage.machines.servers(number), GONE_WITHIN_S)
    replaced = "no other while it is down"
    while time.monotonic() < cut_at + 60.0:
        if stage.all_ready() and replaced.startswith("no"):
            replaced = f"another is ready after {time.monotonic() - cut_at:.0f} s"
        time.sleep(0.5)
    lost = (stage.load.ended - before)["failed (server_died)"]
    stage.machines.set_link(number, up=True)
    healed_at = time.monotonic()
    while time.monotonic() < healed_at + 30.0:
        running = sum(len(stage.machines.servers(number)) for number in range(1, 5))
        assert running <= 4, f"{running} servers for 4 replicas"
        time.sleep(0.5)
    stage.machines.restart_ray(number, **SEATS[number])
    seconds_until(lambda: stage.all_ready() and stage.one_server_each(), PLACED_WITHIN_S)
    return (
        f"not chosen after {silent_s:.1f} s; its server has ended after {gone_s:.0f} s; "
        f"{replaced}; {lost} requests failed with a reason"
    )


def a_nodes_power_goes(stage: Stage) -> str:
    number, replica = stage.victim()
    stage.machines.power_off(number)
    off_at = time.monotonic()
    silent_s = seconds_until(
        lambda: stage.state_of(replica) is not ReplicaState.READY, SILENT_WITHIN_S
    )
    seconds_until(stage.all_ready, PLACED_WITHIN_S)
    ready_s = time.monotonic() - off_at
    seconds_until(stage.one_server_each, PLACED_WITHIN_S)
    return f"not chosen after {silent_s:.1f} s, another is ready after {ready_s:.0f} s"


def the_heads_process_dies(stage: Stage) -> str:
    before = Counter(stage.load.ended)
    stage.machines.kill_head()
    died_at = time.monotonic()
    seconds_until(lambda: (stage.load.ended - before)["completed"] > IN_FLIGHT, 60.0)
    served_s = time.monotonic() - died_at
    return f"{IN_FLIGHT} more requests completed within {served_s:.0f} s"


STORIES: dict[str, Callable[[Stage], str]] = {
    "a node joins late": a_node_joins_late,
    "the link is down for 5 s": the_link_is_down_for_5_seconds,
    "every worker is replaced in turn": every_worker_is_replaced_in_turn,
    "the link is down for 60 s": the_link_is_down_for_60_seconds,
    "a node's power goes": a_nodes_power_goes,
    "the head's process dies": the_heads_process_dies,  # the last: Ray ends this program for it
}


def tell(stage: Stage, name: str) -> bool:
    """Play it; False: it went wrong."""
    loads, errors, saw = (stage.load, stage.real_load), [], "FAILED"
    before, stage.load.slowest_submit_s = [Counter(load.ended) for load in loads], 0.0
    try:
        saw = STORIES[name](stage)
        stage.wait_for_the_real_one()
        assert not any(load.wrong for load in loads), [load.wrong[:5] for load in loads]
    except BaseException:
        errors.append(traceback.format_exc())
    ended = [load.since(then) for load, then in zip(loads, before, strict=True)]
    show(name, saw, *ended, f"{stage.load.slowest_submit_s:.1f} s", errors=errors)
    return not errors


def show(*row: str, errors: list[str]) -> None:
    print(json.dumps({"row": row, "errors": errors}), flush=True)


def begun_twice(folder: Path) -> int:
    """How many requests reached two servers: one that did not answer was asked first."""
    prompts = [
        str(fact["body"]["messages"][-1]["content"])
        for path in folder.glob("*.journal")
        for fact in scripts.JournalReader(path).facts("request", path="/v1/chat/completions")
    ]
    return sum(count > 1 for count in Counter(prompts).values())


def main(folder: str, prefix: str) -> None:
    machines = Machines(Path(folder), prefix)
    logging.basicConfig(filename=machines.folder / "host.log", level=logging.INFO)
    ray.init(
        address=f"{machines.address(1)}:{GCS_PORT}",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    stage = Stage(machines)
    loads = (stage.load, stage.real_load)
    for load in loads:
        load.start()
    held = [tell(stage, name) for name in STORIES]
    before = [Counter(load.ended) for load in loads]
    for load in loads:
        load.stop(60.0)
    closing_at = time.monotonic()
    stage.fleet.close(timeout_s=20.0)
    stage.real.close(timeout_s=20.0)
    saw = f"`close` returns after {time.monotonic() - closing_at:.1f} s"
    left = seconds_until(lambda: not any(machines.servers(each) for each in SEATS), GONE_WITHIN_S)
    saw += f", the last server has ended {left:.1f} s later"
    saw += f"; {begun_twice(machines.folder)} requests in all had begun on two servers"
    ended = [load.since(then) for load, then in zip(loads, before, strict=True)]
    wrong = [each for load in loads for each in load.wrong[:5]]
    show("then the host closes its fleets", saw, *ended, "", errors=wrong)
    sys.exit(0 if all(held) and not wrong else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
