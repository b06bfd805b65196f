"""The messages between a host and its worker, those for every actor, and the unions of messages
that each actor accepts."""

from __future__ import annotations

from msgspec import Struct

from llama_worker.mailbox import Reply, Tick
from llama_worker.request import messages as request
from llama_worker.request.submission import Submission
from llama_worker.runtime.http.leased_exchange import LeasedExchange
from llama_worker.server import messages as server
from llama_worker.server.roll_call import Member
from llama_worker.types.request import NotFound, NotReady, RequestResult, SubmitResult
from llama_worker.types.worker import WorkerDebugInfo, WorkerStatus


class ReportIn(Struct, frozen=True):
    """Tell the WorkerActor `ReportedIn`. An actor that does not is stuck."""


class Submit(Struct, frozen=True, kw_only=True):
    """Admit the submission to a free slot, or refuse it, at once."""

    submission: Submission
    reply: Reply[SubmitResult]


class Ask(Struct, frozen=True, kw_only=True):
    """Admit the submission, or refuse it, as `Submit`. Answered with the result, which is then
    forgotten; fails with RequestRefused or RequestFailed."""

    submission: Submission
    reply: Reply[RequestResult]


class GetResult(Struct, frozen=True, kw_only=True):
    """Return a terminal request's result and release it."""

    request_id: int
    reply: Reply[RequestResult | NotReady | NotFound]


class AwaitResult(Struct, frozen=True, kw_only=True):
    """Answered when the request is terminal; `ReleaseResult` follows when the value is taken."""

    request_id: int
    reply: Reply[RequestResult | NotFound]


class ReleaseResult(Struct, frozen=True, kw_only=True):
    """The host has taken the result, or does not want it: forget the request, if it has ended.

    Answered True if a request was forgotten, else False.
    """

    request_id: int
    reply: Reply[bool] | None = None


class Lease(Struct, frozen=True, kw_only=True):
    """Give the exchange a slot, or refuse it, at once: a proxy is about to send its request to the
    worker's server. `EndLease` follows in any case.

    `exchange`: a handle of the runtime's, with a lock, for any thread; the slot's actor uses it.
    """

    job_name: str
    exchange: LeasedExchange
    reply: Reply[SubmitResult]


class EndLease(Struct, frozen=True, kw_only=True):
    """The exchange is over: free its slot, if it has one. The WorkerActor passes this on to the
    slot's actor."""

    exchange: LeasedExchange


class WaitSlot(Struct, frozen=True, kw_only=True):
    """Answered once the server is READY and a slot is free; fails with RequestRefused if none will
    be."""

    reply: Reply[None]


class GetWorkerStatus(Struct, frozen=True, kw_only=True):
    """Answered at once."""

    reply: Reply[WorkerStatus]


class GetDebugInfo(Struct, frozen=True, kw_only=True):
    """Answered at once."""

    reply: Reply[WorkerDebugInfo]


class ActorDied(Struct, frozen=True, kw_only=True):
    """One of a launch's actors ended with an exception, or does not answer."""

    member: Member
    detail: str


class ReportedIn(Struct, frozen=True, kw_only=True):
    """An actor's answer to `ReportIn`."""

    member: Member


class BeginLease(Struct, frozen=True, kw_only=True):
    """The exchange has the slot: answer questions about it until it ends."""

    exchange: LeasedExchange


HostMessage = (
    server.Start
    | server.Stop
    | server.Drain
    | server.Restart
    | Submit
    | Ask
    | Lease
    | EndLease
    | WaitSlot
    | request.CountTokens
    | request.GetStatus
    | request.ReadOutput
    | GetResult
    | AwaitResult
    | ReleaseResult
    | request.CancelRequest
    | GetWorkerStatus
    | GetDebugInfo
)

WorkerMessage = (
    HostMessage
    | server.ServerMessage
    | server.Observed
    | request.RequestEnded
    | request.SignalEmitted
    | request.ToolsRefused
    | request.StuckToolThreads
    | ActorDied
    | ReportedIn
    | Tick
)

RequestMessage = (
    request.RequestInput
    | request.Question
    | request.Begin
    | BeginLease
    | EndLease
    | request.StreamFlushed
    | request.ReportProgress
)

UpstreamMessage = Lease | EndLease | server.Probed | server.SlotsSeen | Tick
