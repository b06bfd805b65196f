"""Messages, orders and facts, about the server's life, its process, and the watch over it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct

from llama_worker.mailbox import Mailbox, Reply, Tick
from llama_worker.request.messages import (
    AllStreamsClosed,
    CheckServer,
    ProgressReported,
    ReportProgress,
)
from llama_worker.request.progress import Progress
from llama_worker.request.table import RequestRecord
from llama_worker.server.blame import GpuFault, ProbeNow, Verdict
from llama_worker.server.pace import Pace
from llama_worker.server.slots import SlotsLook, SlotsTimeout
from llama_worker.server.traits import ServerTraits
from llama_worker.types.worker import StartFailReason, WorkerStatus


class Start(Struct, frozen=True, kw_only=True):
    """Launch the server; answered when READY, or with a WorkerStartError."""

    reply: Reply[WorkerStatus]


class Stop(Struct, frozen=True, kw_only=True):
    """End all requests and the server; answered when no process of the tree is left."""

    reply: Reply[None]
    grace_s: float | None = None  # None: as configured; the exit hook allows less


class Drain(Struct, frozen=True, kw_only=True):
    """Refuse new requests, and stop once the last one has ended; answered as `Stop`."""

    reply: Reply[None]


class Restart(Struct, frozen=True, kw_only=True):
    """Replace the server at once, on the host's order; answered as `Start`."""

    reason: str
    reply: Reply[WorkerStatus]


class Launched(Struct, frozen=True, kw_only=True):
    """The server's process runs."""

    epoch: int
    pid: int


class LaunchFailed(Struct, frozen=True, kw_only=True):
    """No process was started, or none will be: the ProcessActor that had to start it has died."""

    epoch: int
    reason: StartFailReason = StartFailReason.SPAWN_FAILED
    detail: str


class Died(Struct, frozen=True, kw_only=True):
    """The server's first process has ended; `Exited` follows once the rest of its tree is gone,
    too."""

    epoch: int
    returncode: int | None  # negative: the signal's number; None: unknown
    oom_evidence: str | None = None  # evidence that it ran out of memory


class Unkillable(Struct, frozen=True, kw_only=True):
    """SIGKILL has no effect on the launch's tree; `Exited` still follows if the tree ends later."""

    epoch: int
    detail: str  # pid, state, what the kernel waits for


class Exited(Struct, frozen=True, kw_only=True):
    """No process of the server's tree is left; sent once per `Launched`."""

    epoch: int
    returncode: int | None  # negative: the signal's number; None: unknown
    log_tail: tuple[str, ...]
    port_taken: bool = False  # another process listens on the server's port
    oom_evidence: str | None = None  # evidence that it ran out of memory


class EvidenceKept(Struct, frozen=True, kw_only=True):
    """What was seen of the server's processes just before they were killed: on order, or
    (`after_grace`) because SIGTERM did not end them."""

    epoch: int
    processes: Mapping[str, Any]
    log_tail: tuple[str, ...]
    after_grace: bool


class BecameReady(Struct, frozen=True, kw_only=True):
    """The server answers, and it is the one that this launch started."""

    epoch: int
    traits: ServerTraits


class StartupFailed(Struct, frozen=True, kw_only=True):
    """The launch will not become ready: overdue, canary failed, API key refused, or another process
    has the port."""

    epoch: int
    reason: StartFailReason
    detail: str


class HealthLost(Struct, frozen=True, kw_only=True):
    """A READY server failed its readiness probes."""

    epoch: int
    detail: str


class GpuFaulted(Struct, frozen=True, kw_only=True):
    """A GPU that the server uses reported an error."""

    epoch: int
    fault: GpuFault


class GivenUp(Struct, frozen=True, kw_only=True):
    """The watchdog gave up one request in flight."""

    request_id: int
    verdict: Verdict
    restarts_server: bool  # else the request ends alone


class Stalled(Struct, frozen=True, kw_only=True):
    """All requests that the watchdog gave up at once: each ends for its own reason before the
    server is restarted."""

    epoch: int
    given_up: tuple[GivenUp, ...]


class Observed(Struct, frozen=True, kw_only=True):
    """What the watchdog knows at this instant; kept for the evidence of a kill."""

    epoch: int
    at: float
    activity: str  # the latest details of the liveness probes; "" if there are none
    liveness_at: float | None
    requests: tuple[Progress, ...]


class MemoryMeasured(Struct, frozen=True, kw_only=True):
    """The anonymous memory of the launch's tree, swapped out or not; None: it cannot be read."""

    epoch: int
    anon_bytes: int | None


class Launch(Struct, frozen=True, kw_only=True):
    """Start the server's process as launch number `epoch`."""

    epoch: int


class Terminate(Struct, frozen=True, kw_only=True):
    """End the launch's tree: SIGTERM, and SIGKILL after `grace_s`; 0.0 kills at once."""

    grace_s: float
    keep_evidence: bool = False  # send `EvidenceKept` first


class MeasureMemory(Struct, frozen=True):
    """Measure the tree's anonymous memory; `MemoryMeasured` follows if the server runs."""


class Watch(Struct, frozen=True, kw_only=True):
    """A request is in flight. `request`: its mailbox; None: the watching actor needs none."""

    request_id: int
    request: Mailbox[ReportProgress] | None = None


class Unwatch(Struct, frozen=True):
    """The request has ended; its data and batches still count."""

    record: RequestRecord


class StopWatching(Struct, frozen=True, kw_only=True):
    """The launch is over: stop probing."""


class AbortProbes(Struct, frozen=True, kw_only=True):
    """Abort the pending probes: nobody needs their answers."""


class ProbeReadiness(Struct, frozen=True, kw_only=True):
    """Ask the server whether it is ready; `Probed` follows. `first`: it was not ready so far."""

    epoch: int
    first: bool


class ProbeOutcome(Enum):
    READY = "ready"  # 200 with JSON, from a process of ours
    LOADING = "loading"  # 503: alive, but not ready
    FAILED = "failed"  # no answer, or an unexpected one
    OTHER_PROCESS = "other_process"  # an answer from a process outside the launch's tree
    UNAUTHORIZED = "unauthorized"  # 401 or 403: it wants another API key
    CANARY_FAILED = "canary_failed"  # it answers, but failed the canary
    NOT_ASKED = "not_asked"  # not asked: this machine lacked a thread, a descriptor or an address


class Probed(Struct, frozen=True, kw_only=True):
    """The result of one readiness probe, sent last by its thread."""

    epoch: int
    outcome: ProbeOutcome
    detail: str
    traits: ServerTraits = ServerTraits()


class AskForProgress(Struct, frozen=True, kw_only=True):
    """Send every request in flight `ReportProgress`."""

    liveness_at: float | None
    for_verdict: bool


class Look(Struct, frozen=True, kw_only=True):
    """Ask a liveness probe to look at the server's processes; `EvidenceSeen` follows."""

    probe: int  # its index
    round: int
    fresh: bool  # the first look since watching started over, which only sets the baseline


class EvidenceSeen(Struct, frozen=True, kw_only=True):
    """The result of one look, sent by the probe's thread."""

    look: Look
    at: float
    alive: bool = False
    detail: str = ""
    reads: bool = False  # the server reads its memory from disk
    by_shortage: bool = False  # the look failed for lack of a thread, a descriptor or memory


class PaceLearnt(Struct, frozen=True):
    """How long batches take on this server. The watch of a launch that is over sends it; the watch
    of the next launch gets it and copies it. This object is not changed any more."""

    pace: Pace


class LookAtSlots(Struct, frozen=True, kw_only=True):
    """Ask the server's `/slots`; `SlotsSeen` follows."""

    epoch: int
    timeout_s: float


class SlotsSeen(Struct, frozen=True, kw_only=True):
    """The result of one look at `/slots`, sent last by its thread. `look` None: no usable answer,
    or it was not asked, since this machine was short of something (`by_shortage`)."""

    epoch: int
    look: SlotsLook | SlotsTimeout | None
    by_shortage: bool = False


ServerMessage = (  # what decides about the server's life
    Start
    | Stop
    | Drain
    | Restart
    | Launched
    | LaunchFailed
    | Died
    | Unkillable
    | Exited
    | EvidenceKept
    | BecameReady
    | StartupFailed
    | HealthLost
    | GpuFaulted
    | Stalled
    | AllStreamsClosed
    | MemoryMeasured
    | PaceLearnt
)

LaunchReport = Launched | LaunchFailed | Died | Exited
"""What a launch reports to the ProcessActor and the WorkerActor: Launched or LaunchFailed; after
Launched, Died (unless the guard was killed) and one Exited."""

ProcessMessage = Launch | Terminate | CheckServer | MeasureMemory | LaunchReport | Tick

WatchdogMessage = (
    PaceLearnt
    | Launch
    | Launched
    | StopWatching
    | Watch
    | Unwatch
    | ProbeNow
    | Probed
    | EvidenceSeen
    | SlotsSeen
    | ProgressReported
    | GpuFaulted
    | Tick
)

WatchOrder = ProbeReadiness | AbortProbes | Look | LookAtSlots | AskForProgress
"""What a watch orders its actor to do."""

WatchReport = (
    BecameReady | StartupFailed | HealthLost | GpuFaulted | Stalled | Observed | PaceLearnt
)
"""What a watch reports to the WorkerActor."""

WatchEffect = WatchOrder | WatchReport
