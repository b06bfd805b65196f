"""What a fleet raises. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from llama_worker.errors import LlamaWorkerError, WorkerClosed


class ReplicaLost(LlamaWorkerError):
    """A replica is gone: its actor, its node, or its worker for good. `node` is "" where Ray had
    found none yet.

    `request_id` is the request that was lost with it, None where the error is not about one.
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
    """No replica could be asked; `replicas` says of each what it is doing. They come back by
    themselves."""

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
