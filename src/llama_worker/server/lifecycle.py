"""The worker's state machine: decides what to do when the server starts, dies, is stopped or must
be restarted. Pure.

`step` takes a `Lifecycle`, a message and `now` (monotonic seconds) and returns the next `Lifecycle`
and the effects.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llama_worker.errors import WorkerStartError, WorkerStopError
from llama_worker.mailbox import Tick
from llama_worker.request.messages import Abandon, AllStreamsClosed, CloseAllStreams
from llama_worker.server.blame import RestartCause
from llama_worker.server.lifecycle_states import (
    KILL,
    BackingOff,
    Draining,
    Effects,
    Ending,
    Failed,
    Launching,
    Lifecycle,
    Ready,
    RecordRestart,
    Resolve,
    State,
    Stopped,
    ToFailed,
    ToRestart,
    ToStopped,
)
from llama_worker.server.messages import (
    BecameReady,
    Died,
    Drain,
    Exited,
    GpuFaulted,
    HealthLost,
    LaunchFailed,
    Restart,
    ServerMessage,
    Start,
    StartupFailed,
    Stop,
    Terminate,
    Unkillable,
)
from llama_worker.start_advice import described
from llama_worker.types.request import RequestFailReason
from llama_worker.types.worker import StartFailReason


class Drained(Struct, frozen=True):
    """No request is in flight."""


LifecycleMessage = ServerMessage | Drained | RestartCause | Tick


def step(  # noqa: C901  one line per case
    life: Lifecycle, message: LifecycleMessage, now: float
) -> tuple[Lifecycle, Effects]:
    """The next lifecycle and the effects; the message is not about another launch."""
    match life.state, message:
        case _, Start():
            return _start(life)
        case _, Stop(grace_s=grace_s):
            allowed_s = life.stop_grace_s if grace_s is None else min(grace_s, life.stop_grace_s)
            return _stop(life, now, allowed_s)
        case Ready(), Drain():
            return replace(life, state=Draining()), ()
        case Draining(then_start=True) as draining, Drain():  # the later order wins
            drained_only = replace(life, state=replace(draining, then_start=False))
            return drained_only, (Resolve(Start, _stopped_by("drain()")),)
        case Draining(), Drain():
            return life, ()
        case _, Drain():  # no request is in flight
            return _stop(life, now, life.stop_grace_s, draining=True)
        case Draining() as draining, Drained():
            return life.drained(draining, now)
        case Ending(gone=True) as ending, Drained():
            return life.launch_over(ending, now)
        case _, Restart(reason=reason):
            return _manual_restart(life, now, reason)
        case Launching() as launching, Died():
            return replace(life, state=replace(launching, has_died=True)), ()
        case Launching(has_died=False), BecameReady():
            ready = replace(life, state=Ready(), budget=life.budget.became_ready(now))
            return ready, (Resolve(Start),)
        case _, LaunchFailed(reason=reason, detail=detail):
            return _launch_failed(life, now, WorkerStartError(reason, detail))
        case Launching(first=first), StartupFailed(reason=reason, detail=detail):
            return _startup_failed(life, now, WorkerStartError(reason, detail), first=first)
        case ((Ready() | Draining()), Died()):
            return _server_died(life, now, message)
        case _, Exited():
            return _exited(life, now, message)
        case Ending(gone=False) as ending, Unkillable(detail=detail):
            return life.unkillable(ending, detail)
        case ((Ready() | Draining() | Launching()), HealthLost(detail=detail)):
            return _replace_server(life, now, "health_lost", detail)
        case ((Ready() | Draining() | Launching()), GpuFaulted(fault=fault)) if fault.fatal:
            return _replace_server(life, now, "gpu_failed", fault.detail)
        case Ready(), RestartCause(reason="recycled", detail=detail):
            return life.recycle(now, detail)
        case ((Ready() | Draining() | Launching()), RestartCause(reason=reason, detail=detail)):
            return _replace_server(life, now, reason, detail)
        case Ending(closing_until=float()) as ending, AllStreamsClosed():
            return life.terminate(ending)
        case Ending(closing_until=float(at)) as ending, Tick() if now >= at:
            return life.terminate(ending)
        case BackingOff(resume_at=at), Tick() if now >= at:
            return life.launch(first=False)
        case _:
            return life, ()


def request_completed(life: Lifecycle) -> Lifecycle:
    """A completed request shows that the server works: it ends the row of restarts."""
    return replace(life, budget=life.budget.request_completed())


def _start(life: Lifecycle) -> tuple[Lifecycle, Effects]:
    """An explicit `start()`. A Resolve answers its caller, now or later."""
    match life.state:
        case Ready():
            return life, (Resolve(Start),)
        case Stopped() | Failed():
            cleared = replace(life, budget=life.budget.cleared(), last_error=None)
            return cleared.launch(first=True)
        case Ending(stuck=str(stuck)):
            return life, (Resolve(Start, WorkerStartError(StartFailReason.UNKILLABLE, stuck)),)
        case Draining() as draining:
            return replace(life, state=replace(draining, then_start=True)), ()
        case Ending(goal=ToStopped() as goal, start_error=None) as ending:
            then_start = replace(goal, then_start=True)
            return replace(life, state=replace(ending, goal=then_start)), ()
        case _:
            return life, ()  # answered with the outcome of the launch or end in progress


def _stop(
    life: Lifecycle, now: float, grace_s: float, *, draining: bool = False
) -> tuple[Lifecycle, Effects]:
    """`stop()`, or (`draining`) a `drain()` that has nothing to wait for. A Resolve answers its
    caller, now or later."""
    stopped = _stopped_by("drain()" if draining else "stop()")
    goal = ToStopped(draining=draining)
    match life.state:
        case Stopped() | Failed():
            return replace(life, state=Stopped()), (Resolve(Stop),)
        case BackingOff():
            return replace(life, state=Stopped()), (Resolve(Start, stopped), Resolve(Stop))
        case Launching() | Ready() | Draining():
            return life.close(now, goal, grace_s), (
                Abandon(reason=RequestFailReason.WORKER_STOPPED, detail="the worker was stopped"),
                Resolve(Start, stopped),
                CloseAllStreams(),
            )
        case Ending(stuck=str(stuck)) as ending:
            return replace(life, state=replace(ending, goal=goal)), (
                Resolve(Stop, WorkerStopError("unkillable", stuck)),
            )
        case Ending() as ending:
            shorter_s = min(ending.grace_s, grace_s)
            ending_now = replace(ending, goal=goal, start_error=None, grace_s=shorter_s)
            effects: Effects = (Resolve(Start, stopped),)
            if ending.closing_until is None:  # SIGTERM was sent: only a shorter grace counts
                effects = (*effects, Terminate(grace_s=shorter_s))
            return replace(life, state=ending_now), effects


def _stopped_by(called: str) -> WorkerStartError:
    """The error for a waiting `start()`."""
    return WorkerStartError(StartFailReason.STOPPED, f"{called} was called")


def _manual_restart(life: Lifecycle, now: float, reason: str) -> tuple[Lifecycle, Effects]:
    """`restart()`: it has no backoff and does not count towards the lockout. A Resolve answers its
    caller, now or later."""
    match life.state:
        case Ready() | Launching():
            detail = reason or "restart() was called"
            abandon = Abandon(
                reason=RequestFailReason.WORKER_RESTARTED, detail=f"requested: {detail}"
            )
            ending = Ending(goal=ToRestart(now))
            planned = replace(life, state=ending, budget=life.budget.planned(now))
            note = RecordRestart(reason="requested", detail=detail, delay_s=0.0)
            return planned, (note, abandon, *KILL)
        case BackingOff():
            return life.launch(first=False)
        case Ending(stuck=str(stuck)):
            return life, (Resolve(Start, WorkerStartError(StartFailReason.UNKILLABLE, stuck)),)
        case Ending(goal=ToRestart()) as ending:
            return replace(life, state=replace(ending, goal=ToRestart(now))), ()
        case Ending(start_error=WorkerStartError()):
            return life, ()  # answered with the outcome of the waiting start
        case _ if life.will_start_again:
            return life, ()
        case _:
            detail = "there is no server to restart; call start() to launch one"
            if life.is_draining:
                detail = "the worker is draining; call start() after it has stopped"
            return life, (Resolve(Start, WorkerStartError(StartFailReason.STOPPED, detail)),)


def _launch_failed(
    life: Lifecycle, now: float, error: WorkerStartError
) -> tuple[Lifecycle, Effects]:
    match life.state:
        case Launching(first=True):
            return _start_failed(life, error)
        case Launching():
            reason = str(error.reason)
            return life.restart(now, reason, error.detail, gone=True, failure=error)
        case Ending() as ending:
            return life.tree_gone(ending), ()
        case _:
            return life, ()


def _startup_failed(
    life: Lifecycle, now: float, error: WorkerStartError, *, first: bool
) -> tuple[Lifecycle, Effects]:
    """The launch will not become ready: end its process; a first launch fails with `error`."""
    if not first:
        return life.restart(now, str(error.reason), error.detail, KILL, failure=error)
    goal = ToStopped() if error.reason is StartFailReason.PORT_IN_USE else ToFailed()
    ending = Ending(goal=goal, start_error=error)
    return replace(life, state=ending, last_error=str(error)), KILL


def _exited(life: Lifecycle, now: float, exited: Exited) -> tuple[Lifecycle, Effects]:
    """No process of the launch's tree is left."""
    detail = _described(exited)
    match life.state:
        case Launching(first=True) if exited.port_taken:
            return _start_failed(life, _exit_error(exited, "another process took the port"))
        case Launching(first=True):
            early = _with_oom_evidence("the server ended before it was ready", exited)
            return _start_failed(life, _exit_error(exited, early))
        case Launching():
            error = _exit_error(exited, detail)
            cause = _cause(exited, str(error.reason))
            early = _described(exited, " before it was ready")
            return life.restart(now, cause, early, gone=True, failure=error)
        case Ready() | Draining():
            return _server_died(life, now, exited, gone=True)
        case Ending(start_error=WorkerStartError() as error) as ending:
            with_log = WorkerStartError(
                error.reason, error.detail, returncode=error.returncode, log_tail=exited.log_tail
            )
            return life.tree_gone(replace(ending, start_error=with_log)), ()
        case Ending() as ending:
            return life.tree_gone(ending), ()
        case _:
            return life, ()


def _exit_error(exited: Exited, detail: str) -> WorkerStartError:
    reason = StartFailReason.PORT_IN_USE if exited.port_taken else StartFailReason.EXITED
    return WorkerStartError(reason, detail, returncode=exited.returncode, log_tail=exited.log_tail)


def _replace_server(
    life: Lifecycle, now: float, reason: str, detail: str
) -> tuple[Lifecycle, Effects]:
    """The server counts as broken, or one of the worker's actors died: replace all of them."""
    if isinstance(life.state, Draining):
        lost = f"{reason}: {detail}; the worker was draining"
        abandon = Abandon(reason=RequestFailReason.WORKER_STOPPED, detail=lost)
        left = life.lost_while_draining(life.state, now, lost)
        return left, (abandon, *KILL)
    effects: Effects = (
        Abandon(reason=RequestFailReason.WORKER_RESTARTED, detail=f"{reason}: {detail}"),
        *KILL,
    )
    return life.restart(now, reason, detail, effects)


def _start_failed(life: Lifecycle, error: WorkerStartError) -> tuple[Lifecycle, Effects]:
    """An explicit start failed, and no process of it is left."""
    port_in_use = error.reason is StartFailReason.PORT_IN_USE
    state: State = Stopped() if port_in_use else Failed()
    return replace(life, state=state, last_error=str(error)), (Resolve(Start, error),)


def _server_died(
    life: Lifecycle, now: float, death: Died | Exited, *, gone: bool = False
) -> tuple[Lifecycle, Effects]:
    """A READY server died: its requests fail. Connections are left open, so that what it had sent
    is still read."""
    detail = _described(death)
    effects: Effects = (Abandon(reason=RequestFailReason.SERVER_DIED, detail=detail),)
    if not gone:  # its guard kills the rest of its tree; Exited follows
        effects = (*effects, Terminate(grace_s=0.0))
    if isinstance(life.state, Draining):
        return life.lost_while_draining(life.state, now, detail, gone=gone), effects
    return life.restart(now, _cause(death, "server_died"), detail, effects, gone=gone)


def _cause(death: Died | Exited, otherwise: str) -> str:
    return otherwise if death.oom_evidence is None else "out_of_memory"


def _described(death: Died | Exited, when: str = "") -> str:
    return _with_oom_evidence(f"the server ended with {described(death.returncode)}{when}", death)


def _with_oom_evidence(how: str, death: Died | Exited) -> str:
    return how if death.oom_evidence is None else f"{how}: {death.oom_evidence}"
