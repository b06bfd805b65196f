"""Every message that one actor sends another, grouped by the actor that receives it.

Orders are imperatives, facts are past tense. All are frozen, and what they carry is never changed
afterwards. Instants (`*_at`, `now`) are monotonic seconds. A message of a launch carries that
launch's `epoch`, one of a stream its `turn_id`, so that news from a life that is over can be told
and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import Struct

from llama_worker.request.orders import AskIfServerDied, CallTool, PostChat, TurnId
from llama_worker.request.progress import Batch, Progress
from llama_worker.request.submission import Submission
from llama_worker.request.table import RequestRecord
from llama_worker.server.gpu_faults import GpuFault
from llama_worker.server.roll_call import Member
from llama_worker.server.slots import SlotsLook, SlotsSilence
from llama_worker.server.timeouts import Verdict
from llama_worker.server.traits import ServerTraits
from llama_worker.stream.events import StreamEvent
from llama_worker.stream.failure import StreamFailure
from llama_worker.types import (
    BiosText,
    ExitSignal,
    NotFound,
    NotReady,
    OutputChunk,
    RequestFailReason,
    RequestResult,
    RequestStatus,
    StartFailReason,
    SubmitResult,
    TokenCount,
    WorkerDebugInfo,
    WorkerStatus,
)

if TYPE_CHECKING:
    from llama_worker.runtime.streams.leased_exchange import LeasedExchange

M_contra = TypeVar("M_contra", contravariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Mailbox(Protocol[M_contra]):
    """The sending side of an actor: `tell` never blocks and is False where the actor is dead."""

    def tell(self, message: M_contra) -> bool: ...


class Reply(Protocol[T_contra]):
    """Where a host's question is answered, once, from any thread; a second answer is ignored."""

    def answer(self, value: T_contra) -> None: ...

    def done(self) -> bool: ...

    def fail(self, error: BaseException) -> None: ...


# ---------------------------------------------------------------- to whoever set a timer


class Tick(Struct, frozen=True, kw_only=True):
    """A timer that the receiver set has fired."""


# ---------------------------------------------------------------- to every actor that a WorkerActor started


class ReportIn(Struct, frozen=True):
    """Tell the WorkerActor `ReportedIn`: who does not is stuck."""


# ---------------------------------------------------------------- to the WorkerActor, from the host's handle


class Start(Struct, frozen=True, kw_only=True):
    """Launch the server; answered when READY, or with a WorkerStartError."""

    reply: Reply[WorkerStatus]


class Stop(Struct, frozen=True, kw_only=True):
    """End requests and server; answered when no process of the tree is left."""

    reply: Reply[None]
    grace_s: float | None = None  # None: as configured; the exit hook allows less


class Drain(Struct, frozen=True, kw_only=True):
    """Refuse new requests, and stop once the last one has ended; answered as `Stop`."""

    reply: Reply[None]


class Restart(Struct, frozen=True, kw_only=True):
    """Replace the server at once, on the host's order; answered as `Start`."""

    reason: str
    reply: Reply[WorkerStatus]


class Submit(Struct, frozen=True, kw_only=True):
    """Admit the submission to a free slot, or refuse it, at once."""

    submission: Submission
    reply: Reply[SubmitResult]


class CountTokens(Struct, frozen=True, kw_only=True):
    """How many tokens the submission's prompt has, as the server would count it.

    The runtime answers, or fails the reply.
    """

    submission: Submission
    reply: Reply[TokenCount]


class GetStatus(Struct, frozen=True, kw_only=True):
    request_id: int
    reply: Reply[RequestStatus | NotFound]


class ReadOutput(Struct, frozen=True, kw_only=True):
    """`wait`: answered once something lies behind the offsets, or the request has ended."""

    request_id: int
    text_offset: int
    reasoning_offset: int
    reply: Reply[OutputChunk | NotFound]
    wait: bool = False


class GetResult(Struct, frozen=True, kw_only=True):
    """Return a terminal request's result and release it."""

    request_id: int
    reply: Reply[RequestResult | NotReady | NotFound]


class AwaitResult(Struct, frozen=True, kw_only=True):
    """Answered when the request is terminal; the host's taking the value sends `ReleaseResult`."""

    request_id: int
    reply: Reply[RequestResult | NotFound]


class ReleaseResult(Struct, frozen=True, kw_only=True):
    """The host has taken the result, or wants none: forget the request, if it has ended.

    Answered whether there was one.
    """

    request_id: int
    reply: Reply[bool] | None = None


class Lease(Struct, frozen=True, kw_only=True):
    """Give the exchange a slot, or refuse it, at once: a proxy is about to send its request to the
    worker's server. `EndLease` follows in any case.

    `exchange`: a handle of the runtime's, locked, for any thread; used by the actor of the slot.
    """

    job_name: str
    exchange: LeasedExchange
    reply: Reply[SubmitResult]


class EndLease(Struct, frozen=True, kw_only=True):
    """The exchange is over: its slot is free, if it has one. To the WorkerActor, which passes it
    on."""

    exchange: LeasedExchange


class WaitSlot(Struct, frozen=True, kw_only=True):
    """Answered once the server is READY and a slot is free; fails with RequestRefused where none
    will be."""

    reply: Reply[None]


class CancelRequest(Struct, frozen=True, kw_only=True):
    """Answered True once the running request is cancelled and its slot free, else False.

    Passed on to the RequestActor; the WorkerActor answers.
    """

    request_id: int
    reply: Reply[bool]


class GetWorkerStatus(Struct, frozen=True, kw_only=True):
    reply: Reply[WorkerStatus]


class GetDebugInfo(Struct, frozen=True, kw_only=True):
    reply: Reply[WorkerDebugInfo]


Question = GetStatus | ReadOutput
"""Of one request: passed on to the RequestActor while it runs, and answered from its record once it has ended."""

# ---------------------------------------------------------------- to the WorkerActor, from its own actors


class Launched(Struct, frozen=True, kw_only=True):
    """The server's process runs."""

    epoch: int
    pid: int


class LaunchFailed(Struct, frozen=True, kw_only=True):
    """No process came to be, or none will: the ProcessActor that was to start it has died."""

    epoch: int
    reason: StartFailReason
    detail: str


class Died(Struct, frozen=True, kw_only=True):
    """The server's first process has ended; `Exited` follows once the rest of its tree is gone,
    too."""

    epoch: int
    returncode: int  # negative: the signal's number
    lack_of_memory: str | None = None  # what tells that this was it


class Unkillable(Struct, frozen=True, kw_only=True):
    """SIGKILL has no effect on the launch's tree; `Exited` still follows, should it end one day."""

    epoch: int
    detail: str  # pid, state, what the kernel waits for


class Exited(Struct, frozen=True, kw_only=True):
    """No process of the server's tree is left; told once per `Launched`."""

    epoch: int
    returncode: int | None  # negative: the signal's number; None: never learnt
    log_tail: tuple[str, ...]
    port_taken: bool = False  # somebody else listens on the server's port
    lack_of_memory: str | None = None  # what tells that it ended for this


class EvidenceKept(Struct, frozen=True, kw_only=True):
    """What was seen of the server's processes just before they were killed."""

    epoch: int
    processes: Mapping[str, Any]
    log_tail: tuple[str, ...]


class BecameReady(Struct, frozen=True, kw_only=True):
    """The server answers, and it is ours."""

    epoch: int
    traits: ServerTraits


class StartupFailed(Struct, frozen=True, kw_only=True):
    """The launch will not become ready: its time is up, or a stranger answers on the port."""

    epoch: int
    reason: StartFailReason
    detail: str


class HealthLost(Struct, frozen=True, kw_only=True):
    """The server fails its readiness probe."""

    epoch: int
    detail: str


class GpuFaulted(Struct, frozen=True, kw_only=True):
    """A GPU that the server uses reported an error."""

    epoch: int
    fault: GpuFault


class Stalled(Struct, frozen=True, kw_only=True):
    """A verdict on one request in flight."""

    epoch: int
    request_id: int
    verdict: Verdict
    busy_neighbour: bool  # another request of this server received data just now


class Observed(Struct, frozen=True, kw_only=True):
    """What the watchdog knows at this instant; kept for the evidence of a kill."""

    epoch: int
    at: float
    activity: str  # what the liveness probes said last; "" where they said nothing
    liveness_at: float | None
    requests: tuple[Progress, ...]


class RequestEnded(Struct, frozen=True, kw_only=True):
    """A request reached its terminal state; its record is handed over, whole."""

    record: RequestRecord


class SignalEmitted(Struct, frozen=True, kw_only=True):
    """A request's model called an exit tool."""

    request_id: int
    job_name: str
    signal: ExitSignal


class StreamsClosed(Struct, frozen=True, kw_only=True):
    """No connection to the server is open any more."""

    epoch: int


class ToolsRefused(Struct, frozen=True, kw_only=True):
    """The server does not take `tools`: from now on requests use prompted mode."""

    detail: str


class ToolThreadStuck(Struct, frozen=True, kw_only=True):
    """A tool thread runs on although nobody waits for it any more."""

    turn_id: TurnId


class ToolThreadReturned(Struct, frozen=True, kw_only=True):
    """A stuck one has ended after all."""

    turn_id: TurnId


class MemoryMeasured(Struct, frozen=True, kw_only=True):
    """The anonymous memory of the launch's tree, swapped out or not; None: it cannot be seen."""

    epoch: int
    anon_bytes: int | None


class ActorDied(Struct, frozen=True, kw_only=True):
    """One of a launch's actors ended with an exception, or does not answer."""

    member: Member
    detail: str


class ReportedIn(Struct, frozen=True, kw_only=True):
    """An actor's answer to `ReportIn`."""

    member: Member


HostMessage = (
    Start
    | Stop
    | Drain
    | Restart
    | Submit
    | Lease
    | EndLease
    | WaitSlot
    | CountTokens
    | GetStatus
    | ReadOutput
    | GetResult
    | AwaitResult
    | ReleaseResult
    | CancelRequest
    | GetWorkerStatus
    | GetDebugInfo
)
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
    | StreamsClosed
    | MemoryMeasured
)
WorkerMessage = (
    HostMessage
    | ServerMessage
    | Stalled
    | Observed
    | RequestEnded
    | SignalEmitted
    | ToolsRefused
    | ToolThreadStuck
    | ToolThreadReturned
    | ActorDied
    | ReportedIn
    | Tick
)


# ---------------------------------------------------------------- to the ProcessActor


class Launch(Struct, frozen=True, kw_only=True):
    """Start the server's process as launch number `epoch`."""

    epoch: int


class Terminate(Struct, frozen=True, kw_only=True):
    """End the tree of launch `epoch`: SIGTERM, and SIGKILL after `grace_s`; 0.0 kills at once."""

    epoch: int
    grace_s: float
    keep_evidence: bool = False  # tell `EvidenceKept` first


ServerNews = Launched | LaunchFailed | Died | Exited
"""What a launch tells the ProcessActor and the WorkerActor: Launched or LaunchFailed; after Launched,
Died (unless the guard was killed) and one Exited."""


class CheckServer(AskIfServerDied, frozen=True, kw_only=True):
    """Answered with `ServerChecked`."""

    reply_to: Mailbox[RequestMessage]


class MeasureMemory(Struct, frozen=True, kw_only=True):
    """Answered with `MemoryMeasured`, while launch `epoch` runs."""

    epoch: int


ProcessMessage = Launch | Terminate | CheckServer | MeasureMemory | ServerNews | Tick

# ---------------------------------------------------------------- to the TransportActor


class OpenStream(PostChat, frozen=True, kw_only=True):
    """Send what comes to `reply_to`."""

    reply_to: Mailbox[RequestMessage]


class CloseStream(Struct, frozen=True, kw_only=True):
    """Close the stream's connection at once, in whatever phase it is."""

    turn_id: TurnId


class CloseAllStreams(Struct, frozen=True, kw_only=True):
    """Close every connection; answered by `StreamsClosed` when the last reader has ended."""

    epoch: int


class FlushStream(Struct, frozen=True, kw_only=True):
    """Have the stream tell what has come and was not told yet; then `reply_to` gets
    `StreamFlushed`."""

    turn_id: TurnId
    reply_to: Mailbox[RequestMessage]


class HurryStream(Struct, frozen=True, kw_only=True):
    """Somebody waits for text: what has come is told now, or else the next that comes, at once."""

    turn_id: TurnId


class StreamClosed(Struct, frozen=True, kw_only=True):
    """The stream is over. `failure` None: the server ended the body in the regular way."""

    turn_id: TurnId
    failure: StreamFailure | None
    at: float


TransportMessage = (
    OpenStream | CloseStream | CloseAllStreams | FlushStream | HurryStream | StreamClosed
)

# ---------------------------------------------------------------- to a RequestActor


class Begin(Struct, frozen=True, kw_only=True):
    """Carry out a request, from prompt to result."""

    request_id: int
    submission: Submission
    transport: Mailbox[TransportMessage]
    tools: Mailbox[ToolMessage]
    process: Mailbox[ProcessMessage]
    prompted: bool  # tool calls by text convention: the model's template has no tools
    opens_thinking: bool  # the template ends the prompt inside a think tag


class BeginLease(Struct, frozen=True, kw_only=True):
    """The slot is the exchange's: answer for it until it ends."""

    exchange: LeasedExchange
    process: Mailbox[ProcessMessage]


class Abandon(Struct, frozen=True, kw_only=True):
    """Fail the request with this reason, keeping what it has."""

    reason: RequestFailReason
    detail: str
    request_id: int | None = None  # None: whichever is under way


class StreamOpened(Struct, frozen=True, kw_only=True):
    """Response headers with status 200 have come."""

    turn_id: TurnId
    at: float


class StreamEvents(Struct, frozen=True, kw_only=True):
    """What was parsed since the batch before; no events where only keepalives came."""

    turn_id: TurnId
    events: tuple[StreamEvent, ...]
    at: float


class BiosWritten(Struct, frozen=True, kw_only=True):
    """From the thread of a BIOS provider: the text, or why there is none."""

    turn_id: TurnId
    bios: BiosText | str
    error: str | None


class CallEnded(Struct, frozen=True, kw_only=True):
    """From a tool thread: the call has ended."""

    turn_id: TurnId
    call_id: str
    ok: bool
    text: str  # what the runner returned, as JSON text, or what went wrong
    at: float


class ReportProgress(Struct, frozen=True, kw_only=True):
    """Tell `reply_to` how far the request is; `liveness_at` is the newest evidence of work by the
    server."""

    liveness_at: float | None
    for_verdict: bool
    reply_to: Mailbox[WatchdogMessage]


StreamNews = StreamOpened | StreamEvents | StreamClosed


class StreamFlushed(Struct, frozen=True, kw_only=True):
    """The answer to `FlushStream`, behind all that had come when that was carried out."""

    turn_id: TurnId


class ServerChecked(Struct, frozen=True, kw_only=True):
    """The answer to `CheckServer`."""

    request_id: int
    is_gone: bool  # the server's process has ended; news of it may be on their way


RequestMessage = (
    Begin
    | BeginLease
    | EndLease
    | CancelRequest
    | Abandon
    | Question
    | StreamFlushed
    | ServerChecked
    | StreamNews
    | BiosWritten
    | CallEnded
    | ReportProgress
    | Tick
)

# ---------------------------------------------------------------- to the ToolLoopActor


class RunTool(CallTool, frozen=True, kw_only=True):
    """`reply_to` gets `CallEnded`."""

    reply_to: Mailbox[RequestMessage]


class DropTool(Struct, frozen=True, kw_only=True):
    """Nobody waits for the turn's call any more; it is left to end by itself."""

    turn_id: TurnId


ToolMessage = RunTool | DropTool

# ---------------------------------------------------------------- to the WatchdogActor


class Watch(Struct, frozen=True, kw_only=True):
    """A request is in flight on this mailbox."""

    request_id: int
    request: Mailbox[RequestMessage]


class Unwatch(Struct, frozen=True, kw_only=True):
    """The request has ended; what it received stays true."""

    request_id: int
    data_at: float | None
    batches: tuple[Batch, ...] = ()
    completed: bool  # else the server may still compute a batch of it


class ProbeNow(Struct, frozen=True, kw_only=True):
    """Something looked wrong: probe the server out of turn; one failure is enough for
    `HealthLost`."""

    epoch: int
    cause: str


class StandDown(Struct, frozen=True, kw_only=True):
    """The launch is over: probe nothing any more."""


class ProbeOutcome(Enum):
    READY = "ready"  # 200 with JSON, from a process of ours
    LOADING = "loading"  # 503: alive, and not ready
    FAILED = "failed"  # no answer, or not the right one
    STRANGER = "stranger"  # an answer, from somebody else's process
    UNFIT = "unfit"  # it answers, and its canary's answer was not the right one
    LATE = "late"  # it failed so long after its time was over that this machine did not run
    NO_NEWS = "no_news"  # it was not asked: this machine had no thread or descriptor for it


class Probed(Struct, frozen=True, kw_only=True):
    """From the thread of one readiness probe, its last word."""

    epoch: int
    outcome: ProbeOutcome
    detail: str
    traits: ServerTraits


class EvidenceSeen(Struct, frozen=True, kw_only=True):
    """From a probe's thread: what it said of one look at the server's processes."""

    epoch: int
    probe: int  # its index
    round: int
    alive: bool
    at: float
    detail: str
    fresh: bool  # the first look, which only sets the mark
    reads: bool = False  # its memory is read from disk
    blind: bool = False  # this machine lacked what it takes to look


class SlotsSeen(Struct, frozen=True, kw_only=True):
    """From the thread of one look at `/slots`, its last word; None: an answer that tells nothing, or
    it was not asked."""

    epoch: int
    look: SlotsLook | SlotsSilence | None


class ProgressReported(Struct, frozen=True, kw_only=True):
    """A RequestActor's answer to `ReportProgress`; None where it is between two requests."""

    progress: Progress | None
    for_verdict: bool


WatchdogMessage = (
    Launch
    | Launched
    | StandDown
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

# ---------------------------------------------------------------- to the UpstreamActor

UpstreamMessage = Lease | EndLease | Probed | SlotsSeen | Tick
