"""A Ray cluster of two nodes on this machine, one of which can be killed."""

import logging
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from llama_worker import free_port

LOOPBACK = "127.0.0.1"
WORKER_PORTS = 12  # of the actors' processes, per node


def cluster_environment(folder: Path) -> dict[str, str]:
    """For the process that starts the cluster, and so for every process of it."""
    (folder / "ray").mkdir(exist_ok=True)
    return {
        "RAY_TMPDIR": str(folder),  # short: it holds Unix sockets
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",  # else Ray writes a token into the home directory
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # else Ray takes an address that other machines can reach
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # else Ray puts its actors behind everything else that runs, by a nice value of 15
        "RAY_worker_niceness": "0",
    }


class TwoNodes:
    """Ray's nodes are groups of processes. Both are on this machine, and differ by their GPUs: two
    and one."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.first = add_node(cluster, num_gpus=2, gcs_server_port=free_port())
        self.second = add_node(cluster, num_gpus=1)
        self.address: str = cluster.address

    def kill_second(self) -> None:
        """SIGKILL to the second node's raylet and to all that it has started, actors among them,
        but no further.

        What an actor has started itself (guard and server) is left alone: the guard has to see to
        it.
        """
        (raylet,) = (info.process for info in self.second.all_processes["raylet"])
        doomed = [psutil.Process(raylet.pid), *psutil.Process(raylet.pid).children()]
        for process in doomed:
            process.send_signal(signal.SIGSTOP)  # nobody is to notice before all are gone
        for process in doomed:
            process.kill()
        raylet.wait()


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Started and, at the end, shut down; the driver is connected to the first node."""
    import ray
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster()
    try:
        nodes = TwoNodes(cluster)
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        yield nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def add_node(cluster: Any, **more: Any) -> Any:
    """One more, on this machine."""
    return cluster.add_node(
        node_ip_address=LOOPBACK,
        num_cpus=4,
        object_store_memory=80 << 20,
        include_dashboard=False,
        node_manager_port=free_port(),
        object_manager_port=free_port(),
        metrics_export_port=free_port(),
        runtime_env_agent_port=free_port(),
        dashboard_agent_listen_port=free_port(),
        worker_port_list=",".join(str(free_port()) for _ in range(WORKER_PORTS)),
        **more,
    )


def cluster_processes(folder: Path) -> list[psutil.Process]:
    """Those that run in `cluster_environment(folder)`, servers too; zombies do not run."""
    environments = (
        (process, process.info["environ"] or {}) for process in psutil.process_iter(["environ"])
    )
    return [
        each
        for each, env in environments
        if each.pid != os.getpid() and env.get("RAY_TMPDIR") == str(folder)
    ]
