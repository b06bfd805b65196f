"""What the watch of a server wants to be done, and whom it has news for. Data."""

from __future__ import annotations

from msgspec import Struct

from llama_worker.server import messages


class ProbeReadiness(Struct, frozen=True, kw_only=True):
    """Ask the server whether it is ready; `Probed` is to follow. `first`: it was not, so far."""

    epoch: int
    root_pid: int
    first: bool


class LookAtSlots(Struct, frozen=True, kw_only=True):
    """Ask the server's `/slots`; `SlotsSeen` is to follow."""

    epoch: int


class AskForProgress(Struct, frozen=True, kw_only=True):
    """Send every request in flight `ReportProgress`."""

    liveness_at: float | None
    for_verdict: bool


# `StandDown`: nobody waits for the server's answers any more.
Order = ProbeReadiness | messages.StandDown | messages.Look | LookAtSlots | AskForProgress
# to the WorkerActor
News = (
    messages.BecameReady
    | messages.StartupFailed
    | messages.HealthLost
    | messages.GpuFaulted
    | messages.Stalled
    | messages.Observed
    | messages.PaceLearnt
)
Effect = Order | News
