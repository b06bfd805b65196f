"""Workers on more than one machine, placed by Ray. Needs the extra `ray`; docs/ray.md shows how to
use it."""

try:
    import ray as _  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ray is missing: pip install 'llama-worker[ray]'", name=error.name
    ) from error

from llama_worker.ray.fleet import Fleet
from llama_worker.ray.types import (
    ConfigFor,
    FleetClosed,
    FleetStatus,
    NoLiveReplica,
    Place,
    ReplicaLost,
    ReplicaState,
    ReplicaStatus,
    RequestUpdate,
)
from llama_worker.ray.worker import RayWorker

__all__ = [
    "ConfigFor",
    "Fleet",
    "FleetClosed",
    "FleetStatus",
    "NoLiveReplica",
    "Place",
    "RayWorker",
    "ReplicaLost",
    "ReplicaState",
    "ReplicaStatus",
    "RequestUpdate",
]
