"""Workers on several machines, placed by Ray. Needs the extra `ray`; see docs/ray.md."""
# ruff: noqa: I001 - the names of a module stand together

try:
    import ray as _  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ray is missing: pip install 'llama-worker[ray]'", name=error.name
    ) from error

from llama_worker.ray.fleet import Fleet as Fleet
from llama_worker.ray.types import (
    ConfigFor as ConfigFor,
    FleetClosed as FleetClosed,
    FleetStatus as FleetStatus,
    NoLiveReplica as NoLiveReplica,
    Place as Place,
    ReplicaLost as ReplicaLost,
    ReplicaState as ReplicaState,
    ReplicaStatus as ReplicaStatus,
    RequestUpdate as RequestUpdate,
)
from llama_worker.ray.worker import RayWorker as RayWorker
