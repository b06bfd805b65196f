"""What a fleet on Ray costs: a token and a request, against the handle; requests on several
nodes, and alone with up to 1,000 replicas that are stubs.

    python -m benchmarks.ray_fleet [--write] [--json FILE]

`--write` puts the tables into docs/ray.md. All nodes are on this machine, which is what their
requests per second show; the CPU of the host's process is what a host has to give.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from benchmarks.common import HOST, config, report, script, table
from llama_worker import LlamaWorker, TimeoutProfile, WorkerConfig, free_port
from llama_worker.testing.scripts import Script, Text, Tokens, plain_reply, scripted_server_cmd
from tests.ray.cluster import add_node, cluster_environment
from tests.ray.stub_actor import without_ray
from tools.pages import DOCS, write_part

PAGE = DOCS / "ray.md"
STREAMS, RATE_HZ, TOKENS = 16, 30, 150
REQUESTS, SLOTS, SECONDS = 100, 16, 5.0
NODES, STUBS = (1, 2, 4), (1, 10, 100, 1000)
TALKS = script(*plain_reply(Tokens(TOKENS, interval_s=1 / RATE_HZ)))
SHORT = script(*plain_reply(Text("yes")))


def config_for(served: Script, slots: int, port: int) -> WorkerConfig:
    """Of a replica."""
    command = scripted_server_cmd(served, host=HOST, port=port, slots=slots)
    return WorkerConfig("bench", HOST, port, command, slots=slots, timeouts=TimeoutProfile.normal())


def fleet(served: Script, slots: int, replicas: int) -> Any:
    from llama_worker.ray import Fleet

    options = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
    return Fleet(partial(config_for, served, slots), replicas=replicas, options=options)


def cpu_s(*pids: int) -> float:
    """What these processes have used."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


async def completed(target: Any) -> None:
    """One request, to its end."""
    admitted = await target.submit("bench", "", "x")
    assert admitted["ok"], admitted
    result = await target.result(admitted["request_id"])
    assert result["ok"], result
    assert result["state"] == "completed", result


# ---------------------------------------------------------------- one replica, and one handle


async def streamed(target: Any) -> None:
    await asyncio.gather(*(completed(target) for _ in range(STREAMS)))


def token_us(target: Any, pid: int) -> float:
    """CPU of one token in that process, microseconds, with all streams at once."""
    before = cpu_s(pid)
    asyncio.run(streamed(target))
    return (cpu_s(pid) - before) / (STREAMS * TOKENS) * 1e6


def request_ms(target: Any) -> float:
    """From `submit` to the result of a request with one token, one after the other; the median."""

    async def measure() -> float:
        taken = []
        for _ in range(REQUESTS):
            began_at = time.monotonic()
            await completed(target)
            taken.append(time.monotonic() - began_at)
        return median(taken) * 1e3

    return asyncio.run(measure())


def compared() -> list[list[object]]:
    """The rows: the handle, and a fleet of one."""
    me = os.getpid()
    with LlamaWorker(config(TALKS, slots=STREAMS)) as worker:
        handle_us = token_us(worker, me)
    with LlamaWorker(config(SHORT, slots=SLOTS)) as worker:
        handle_ms = request_ms(worker)
    with fleet(TALKS, STREAMS, 1) as one:
        actor = one.get_fleet_status().get()["replicas"][0]["place"]["pid"]
        actor_before = cpu_s(actor)
        host_us = token_us(one, me)
        actor_us = (cpu_s(actor) - actor_before) / (STREAMS * TOKENS) * 1e6
    with fleet(SHORT, SLOTS, 1) as one:
        fleet_ms = request_ms(one)
    return [
        ["`LlamaWorker`", round(handle_us), "", f"{handle_ms:.1f}"],
        ["`Fleet` of one", round(host_us), round(actor_us), f"{fleet_ms:.1f}"],
    ]


# ---------------------------------------------------------------- several


async def served(submitters: int, request: Callable[[], Any]) -> tuple[float, float]:
    """(requests/s, CPU of this process for one of them in ms), one after the other by each."""
    count, ends_at = 0, time.monotonic() + SECONDS

    async def submit() -> None:
        nonlocal count
        while time.monotonic() < ends_at:
            await request()
            count += 1

    before, began_at = cpu_s(os.getpid()), time.monotonic()
    await asyncio.gather(*(submit() for _ in range(submitters)))
    took_s = time.monotonic() - began_at
    return count / took_s, (cpu_s(os.getpid()) - before) / count * 1e3


def on_nodes(replicas: int) -> list[object]:
    """A row: a fleet with one replica on each node, every second slot taken."""
    with fleet(SHORT, SLOTS, replicas) as several:
        rate, cpu_ms = asyncio.run(served(replicas * SLOTS // 2, lambda: completed(several)))
    return [replicas, round(rate), f"{cpu_ms:.1f}"]


def on_stubs(replicas: int) -> list[object]:
    """A row: the fleet alone."""
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        with fleet(SHORT, SLOTS, replicas) as stubs:
            before = cpu_s(os.getpid())
            time.sleep(SECONDS)
            idle = (cpu_s(os.getpid()) - before) / SECONDS
            rate, cpu_ms = asyncio.run(served(SLOTS, lambda: completed(stubs)))
    return [replicas, f"{idle:.1%}", round(rate), f"{cpu_ms:.2f}"]


# ---------------------------------------------------------------- the command


def in_cluster() -> None:
    """In a process with the cluster's environment."""
    import ray
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster()
    try:
        nodes = []
        for count in NODES:
            while len(cluster.list_all_nodes()) < count:
                add_node(cluster, gcs_server_port=free_port())
            if not ray.is_initialized():
                ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
                against = compared()
            nodes.append(on_nodes(count))
    finally:
        ray.shutdown()
        cluster.shutdown()
    stubs = [on_stubs(count) for count in STUBS]
    tables = {
        "cost of a token": (
            ("", "CPU of a token, host (us)", "actor (us)", "request of one token (ms)"),
            against,
        ),
        "cost of nodes": (("nodes", "requests/s", "CPU of the host for one (ms)"), nodes),
        "cost of stubs": (("stub replicas", "CPU at rest", "requests/s", "CPU of one (ms)"), stubs),
    }
    shown = "\n\n".join(table(head, rows) for head, rows in tables.values())
    report("ray_fleet", shown, tables)
    if "--write" in sys.argv:
        for name, (head, rows) in tables.items():
            write_part(PAGE, name, markdown(head, rows))


def markdown(head: tuple[str, ...], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main() -> int:
    if os.environ.get("RAY_TMPDIR"):
        in_cluster()
        return 0
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    try:
        program = [sys.executable, "-m", "benchmarks.ray_fleet", *sys.argv[1:]]
        environment = {**os.environ, **cluster_environment(folder)}
        return subprocess.run(program, env=environment, check=False).returncode
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
