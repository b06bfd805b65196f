"""Transitions that end a launch and enter what follows: a stop, another launch, or none. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from llama_worker.errors import WorkerStartError, WorkerStopError
from llama_worker.request.messages import CloseAllStreams
from llama_worker.server.lifecycle_states import (
    BackingOff,
    Draining,
    Effects,
    Ending,
    Failed,
    Launching,
    Lifecycle,
    RecordRestart,
    Resolve,
    Stopped,
    ToFailed,
    ToRestart,
    ToStopped,
)
from llama_worker.server.messages import Launch, Start, Stop, Terminate
from llama_worker.types.worker import StartFailReason

# How long SIGTERM waits until our own connections are closed: the server would wait for open ones.
CLOSING_S = 1.0


def launch(life: Lifecycle, *, first: bool) -> tuple[Lifecycle, Effects]:
    """Begin the next launch; `first`: by an explicit start."""
    epoch = life.epoch + 1
    launching = replace(life, state=Launching(first=first), epoch=epoch)
    return launching, (Launch(epoch=epoch),)


def close(life: Lifecycle, now: float, goal: ToStopped | ToRestart, grace_s: float) -> Lifecycle:
    """Begin a graceful end, which closes our connections first: the caller adds CloseAllStreams."""
    ending = Ending(goal=goal, grace_s=grace_s, closing_until=now + CLOSING_S)
    return replace(life, state=ending, budget=life.budget.left_ready(now))


def terminate(life: Lifecycle, ending: Ending) -> tuple[Lifecycle, Effects]:
    """Send SIGTERM: our connections are closed, or closing them takes too long."""
    terminated = replace(life, state=replace(ending, closing_until=None))
    return terminated, (Terminate(grace_s=ending.grace_s),)


def kill() -> Effects:
    """SIGKILL at once; evidence of the server's state is kept first."""
    return CloseAllStreams(), Terminate(grace_s=0.0, keep_evidence=True)


def drained(life: Lifecycle, draining: Draining, now: float) -> tuple[Lifecycle, Effects]:
    """The last request has ended: stop the server, which is idle."""
    goal = ToStopped(then_start=draining.then_start, draining=True)
    return close(life, now, goal, life.stop_grace_s), (CloseAllStreams(),)


def recycle(life: Lifecycle, now: float, detail: str) -> tuple[Lifecycle, Effects]:
    """A planned restart of an idle server: it has no backoff and does not count towards the
    lockout."""
    closing = close(life, now, ToRestart(now), life.stop_grace_s)
    note = RecordRestart(reason="recycled", detail=detail, delay_s=0.0)
    planned = replace(closing, budget=life.budget.planned(now))
    return planned, (note, CloseAllStreams())


def lost_while_draining(
    life: Lifecycle, draining: Draining, now: float, detail: str, *, gone: bool = False
) -> Lifecycle:
    """The server is lost while draining: requests in flight fail, and no restart follows."""
    goal = ToStopped(then_start=draining.then_start, draining=True)
    return replace(
        life,
        state=Ending(goal=goal, gone=gone),
        budget=life.budget.left_ready(now),
        last_error=detail,
    )


def restart(
    life: Lifecycle,
    now: float,
    reason: str,
    detail: str,
    effects: Effects = (),
    *,
    gone: bool = False,
    failure: WorkerStartError | None = None,
) -> tuple[Lifecycle, Effects]:
    """End this launch, and decide whether another one follows.

    `gone`: no process of its tree is left. `failure`: the error of a launch that did not become
    ready, for a `start()` that waits for it.
    """
    budget, decision = life.budget.next(now, life.policy)
    goal: ToFailed | ToRestart
    if isinstance(decision, str):  # the lockout
        detail = f"{detail}; {decision}"
        goal, error = ToFailed(), _locked_out(failure, reason, detail)
        note = RecordRestart(reason=reason, detail=detail, delay_s=None)
    else:
        goal, error = ToRestart(now + decision), None
        note = RecordRestart(reason=reason, detail=detail, delay_s=decision)
    ending = Ending(goal=goal, gone=gone, start_error=error)
    ends = replace(life, budget=budget, state=ending, last_error=f"{reason}: {detail}")
    return ends, (note, *effects)


def _locked_out(failure: WorkerStartError | None, cause: str, detail: str) -> WorkerStartError:
    """The error of a `start()` that waited through the restarts. Its reason is never `port_in_use`,
    which means that the worker is STOPPED: this one is FAILED."""
    if failure is None:
        return WorkerStartError(StartFailReason.EXITED, f"{cause}: {detail}")
    reason = (
        StartFailReason.EXITED if failure.reason is StartFailReason.PORT_IN_USE else failure.reason
    )
    if cause != reason:
        detail = f"{cause}: {detail}"
    return WorkerStartError(
        reason, detail, returncode=failure.returncode, log_tail=failure.log_tail
    )


def tree_gone(life: Lifecycle, ending: Ending) -> Lifecycle:
    """No process of the tree is left; the launch is over once every request has its record."""
    return replace(life, state=replace(ending, gone=True, closing_until=None))


def unkillable(life: Lifecycle, ending: Ending, detail: str) -> tuple[Lifecycle, Effects]:
    """SIGKILL has no effect: FAILED, and no second server is launched until the process is gone."""
    error = WorkerStartError(StartFailReason.UNKILLABLE, detail)
    # A start that waited for the end is answered now.
    goal = ToStopped() if isinstance(ending.goal, ToStopped) else ending.goal
    stuck = replace(ending, goal=goal, start_error=None, closing_until=None, stuck=detail)
    known = replace(life, state=stuck, last_error=str(error))
    return known, (Resolve(Start, error), Resolve(Stop, WorkerStopError("unkillable", detail)))


def launch_over(life: Lifecycle, ending: Ending, now: float) -> tuple[Lifecycle, Effects]:
    """The launch has neither processes nor requests left: enter the state of its goal."""
    error = ending.start_error
    failed: Effects = (Resolve(Start, error),) if error is not None else ()
    match ending.goal:
        case ToStopped(then_start=True):
            fresh = replace(life, state=Stopped(), budget=life.budget.cleared(), last_error=None)
            launched, effects = launch(fresh, first=True)
            return launched, (Resolve(Stop), *effects)
        case ToStopped():
            return replace(life, state=Stopped()), (*failed, Resolve(Stop))
        case ToFailed():
            last_error = str(error) if error is not None else life.last_error
            if error is not None and error.detail == life.last_error:  # a lockout names its cause
                last_error = str(error).removeprefix(f"{error.reason}: ")
            return replace(life, state=Failed(), last_error=last_error), failed
        case ToRestart(resume_at=at):
            if now >= at:
                return launch(life, first=False)
            return replace(life, state=BackingOff(resume_at=at)), ()
