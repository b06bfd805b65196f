"""Types of what a Ray actor reports to a fleet and a fleet to its host, and their errors. Pure;
data that serialises as it is."""

# No `from __future__ import annotations` here: with it Python 3.11 does not see `NotRequired`.

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NotRequired, TypeAlias, TypedDict

from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import LlamaWorkerError, WorkerClosed
from llama_worker.types.request import OutputChunk, RequestResult, RequestStatus

ConfigFor: TypeAlias = Callable[[int], WorkerConfig]
"""Makes the config of a worker whose server gets this port. Called on the server's machine."""


class Place(TypedDict):
    """Where an actor lives."""

    node_id: str
    node_ip: str
    pid: int
    """Process id of the actor, which is the host of its worker."""


class RequestUpdate(TypedDict):
    """What is new of a request since its previous `RequestUpdate`."""

    status: RequestStatus
    output: OutputChunk
    result: NotRequired[RequestResult]
    """Only in a request's last update."""


class ReplicaState(StrEnum):
    """The stages in the life of a replica."""

    STARTING = "starting"
    """Ray looks for a place, or the server starts there."""
    READY = "ready"
    SILENT = "silent"
    """It was READY, and has not answered for 3 seconds: no request is given to it until it answers
    again, and after the fleet's `lease_s` it is LOST."""
    DRAINING = "draining"
    """It takes no more requests, and is replaced once those in flight have ended."""
    LOST = "lost"
    """It died, or did not start; another is about to take its place, unless Ray was shut down."""


class ReplicaStatus(TypedDict):
    """The state of one replica of a fleet, which keeps its number when it moves to another node."""

    replica: int
    state: ReplicaState
    launches: int
    """Actors that were created for it, the first one included."""
    slots_total: int
    """0 until it was READY for the first time."""
    active_request_ids: list[int]
    place: NotRequired[Place]
    """Absent until Ray has found one."""
    last_error: NotRequired[str]
    """Why it was lost the last time."""


class FleetStatus(TypedDict):
    """The state of a fleet; slots are those of READY replicas."""

    name: str
    slots_total: int
    slots_used: int
    replicas: list[ReplicaStatus]


class ReplicaLost(LlamaWorkerError):
    """A replica is gone: its actor, its node, or its worker for good. `node` is "" if Ray had found
    none yet.

    `request_id` is the request that was lost with it, None if the error is not about one.
    """

    def __init__(self, replica: int, node: str, detail: str, request_id: int | None = None) -> None:
        self.replica = replica
        self.node = node
        self.detail = detail
        self.request_id = request_id
        super().__init__(replica, node, detail, request_id)

    def __str__(self) -> str:
        where = f" on node {self.node}" if self.node else ""
        lost = f"request {self.request_id} was lost with " if self.request_id is not None else ""
        return f"{lost}replica {self.replica}{where}: {self.detail}"


class NoLiveReplica(LlamaWorkerError):
    """No replica could be asked; `replicas` has a line on the state of each. They recover
    automatically."""

    def __init__(self, fleet: str, replicas: Sequence[str]) -> None:
        self.fleet = fleet
        self.replicas = tuple(replicas)
        super().__init__(fleet, self.replicas)

    def __str__(self) -> str:
        what = f"fleet {self.fleet!r} has no live replica; submit again later"
        return "\n  ".join((what, *self.replicas))


class FleetClosed(WorkerClosed):
    """The call came after the fleet's `close()`; `worker_name` is the fleet's name."""

    def __str__(self) -> str:
        return f"fleet {self.worker_name!r} is closed; create another Fleet"
