"""The worker's state machine: what follows when the server starts, dies, is stopped or must be restarted. Pure.

Every transition takes a `Lifecycle` and `now` (monotonic seconds) and gives the next one with its effects. News
of another launch than the current (`epoch`) changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llama_worker.errors import WorkerStartError
from llama_worker.profiles import RestartPolicy
from llama_worker.server.lifecycle_states import (
    BackingOff,
    CloseConnections,
    Effects,
    Ending,
    EndProcess,
    Failed,
    FailRequests,
    Launching,
    LaunchServer,
    Ready,
    RestartDecided,
    StartsResolved,
    State,
    Stopped,
    StopsResolved,
    ToFailed,
    ToRestart,
    ToStopped,
)
from llama_worker.server.restart_budget import Lockout, RestartBudget
from llama_worker.server.start_advice import described
from llama_worker.types import RequestFailReason, StartFailReason, WorkerState

CLOSING_S = 1.0  # how long SIGTERM waits for our own connections to be closed; the server waits for open ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """Everything that decides about the server's life."""

    policy: RestartPolicy
    state: State = field(default_factory=Stopped)
    epoch: int = 0  # of the latest launch
    budget: RestartBudget = field(default_factory=RestartBudget)
    last_error: str | None = None

    @property
    def public_state(self) -> WorkerState:
        """What the host is told."""
        match self.state:
            case Stopped():
                return WorkerState.STOPPED
            case Failed():
                return WorkerState.FAILED
            case Ready():
                return WorkerState.READY
            case Launching() | BackingOff() | Ending():
                return WorkerState.RUNNING

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do; None: never."""
        match self.state:
            case Ending(closing_until=at) | BackingOff(resume_at=at):
                return at
            case _:
                return None


def start(life: Lifecycle, now: float) -> tuple[Lifecycle, Effects]:
    """An explicit `start()`. Whoever waits is answered by a StartsResolved, now or later."""
    match life.state:
        case Ready():
            return life, (StartsResolved(None),)
        case Stopped() | Failed():
            return _launch(replace(life, budget=life.budget.cleared(), last_error=None), first=True)
        case Ending(goal=ToStopped(), start_error=None) as ending:
            return replace(life, state=replace(ending, goal=ToStopped(then_start=True))), ()
        case _:
            return life, ()  # it shares the outcome of what is under way


def stop(life: Lifecycle, now: float, *, grace_s: float) -> tuple[Lifecycle, Effects]:
    """`stop()`. Whoever waits is answered by a StopsResolved, now or later."""
    stopped = WorkerStartError(StartFailReason.STOPPED, "stop() was called")
    match life.state:
        case Stopped() | Failed():
            return replace(life, state=Stopped()), (StopsResolved(),)
        case BackingOff():
            return replace(life, state=Stopped()), (StartsResolved(stopped), StopsResolved())
        case Launching(epoch=epoch) | Ready(epoch=epoch):
            ending = Ending(
                epoch=epoch,
                goal=ToStopped(),
                grace_s=grace_s,
                closing_until=now + CLOSING_S,
            )
            left = replace(life, state=ending, budget=life.budget.left_ready(now))
            effects: Effects = (
                FailRequests(reason=RequestFailReason.WORKER_STOPPED, detail="the worker was stopped"),
                StartsResolved(stopped),
                CloseConnections(epoch=epoch),
            )
            return left, effects
        case Ending() as ending:
            kept = replace(ending, goal=ToStopped(), start_error=None)
            if ending.closing_until is None and ending.grace_s <= grace_s:
                return replace(life, state=kept), (StartsResolved(stopped),)
            sooner = replace(kept, grace_s=min(ending.grace_s, grace_s))
            hurry: Effects = ()
            if ending.closing_until is None:
                hurry = (EndProcess(epoch=ending.epoch, grace_s=sooner.grace_s),)
            return replace(life, state=sooner), (StartsResolved(stopped), *hurry)


def became_ready(life: Lifecycle, now: float, *, epoch: int) -> tuple[Lifecycle, Effects]:
    """The server answers, and it is ours."""
    match life.state:
        case Launching(epoch=current) if current == epoch:
            ready = replace(life, state=Ready(epoch=epoch), budget=life.budget.became_ready(now))
            return ready, (StartsResolved(None),)
        case _:
            return life, ()


def launch_failed(
    life: Lifecycle, now: float, *, epoch: int, reason: StartFailReason, detail: str
) -> tuple[Lifecycle, Effects]:
    """No process came to be."""
    match life.state:
        case Launching(epoch=current, first=first) if current == epoch:
            error = WorkerStartError(reason, detail)
            if first:
                return _start_failed(life, now, error)
            return _restart(life, now, str(reason), detail, lives=False, failure=error)
        case Ending(epoch=current) if current == epoch:
            return _gone(life, now)
        case _:
            return life, ()


def startup_failed(
    life: Lifecycle, now: float, *, epoch: int, reason: StartFailReason, detail: str
) -> tuple[Lifecycle, Effects]:
    """The launch will not become ready: end its process; a first launch fails with this."""
    match life.state:
        case Launching(epoch=current, first=first) if current == epoch:
            kill: Effects = (
                CloseConnections(epoch=epoch),
                EndProcess(epoch=epoch, grace_s=0.0, keep_evidence=True),
            )
            error = WorkerStartError(reason, detail)
            if not first:
                return _restart(life, now, str(reason), detail, kill, lives=True, failure=error)
            goal = ToStopped() if reason is StartFailReason.PORT_IN_USE else ToFailed()
            ending = Ending(epoch=epoch, goal=goal, start_error=error)
            return replace(life, state=ending, last_error=str(error)), kill
        case _:
            return life, ()


def died(life: Lifecycle, now: float, *, epoch: int, returncode: int) -> tuple[Lifecycle, Effects]:
    """The server's first process has ended, and its guard kills the rest; `exited` follows."""
    match life.state:
        case Ready(epoch=current) if current == epoch:
            return _server_died(life, now, returncode, EndProcess(epoch=epoch, grace_s=0.0))
        case _:
            return life, ()


def exited(
    life: Lifecycle,
    now: float,
    *,
    epoch: int,
    returncode: int | None,
    log_tail: tuple[str, ...],
    port_taken: bool,
) -> tuple[Lifecycle, Effects]:
    """Nothing of the launch's tree is left."""
    if epoch != life.epoch:
        return life, ()
    detail = f"the server ended with {described(returncode)}"
    match life.state:
        case Launching(first=True):
            reason = StartFailReason.PORT_IN_USE if port_taken else StartFailReason.EXITED
            detail = "another process took the port" if port_taken else "the server ended before it was ready"
            error = WorkerStartError(reason, detail, returncode=returncode, log_tail=log_tail)
            return _start_failed(life, now, error)
        case Launching():
            reason = StartFailReason.PORT_IN_USE if port_taken else StartFailReason.EXITED
            error = WorkerStartError(reason, detail, returncode=returncode, log_tail=log_tail)
            return _restart(life, now, "exited", f"{detail} before it was ready", lives=False, failure=error)
        case Ready():
            return _server_died(life, now, returncode)
        case Ending(start_error=WorkerStartError() as error):
            told = WorkerStartError(error.reason, error.detail, returncode=error.returncode, log_tail=log_tail)
            return _gone(replace(life, state=replace(life.state, start_error=told)), now)
        case Ending():
            return _gone(life, now)
        case _:
            return life, ()


def trouble(life: Lifecycle, now: float, *, reason: str, detail: str) -> tuple[Lifecycle, Effects]:
    """The server cannot be trusted any more (or one of the worker's actors died): nuke and repave."""
    match life.state:
        case Ready(epoch=epoch) | Launching(epoch=epoch):
            effects: Effects = (
                FailRequests(reason=RequestFailReason.WORKER_RESTARTED, detail=f"{reason}: {detail}"),
                CloseConnections(epoch=epoch),
                EndProcess(epoch=epoch, grace_s=0.0, keep_evidence=True),
            )
            return _restart(life, now, reason, detail, effects, lives=True)
        case _:
            return life, ()


def connections_closed(life: Lifecycle, now: float, *, epoch: int) -> tuple[Lifecycle, Effects]:
    """None of our connections is open any more: SIGTERM may go out."""
    match life.state:
        case Ending(epoch=current, closing_until=float()) as ending if current == epoch:
            return _terminate(life, ending)
        case _:
            return life, ()


def tick(life: Lifecycle, now: float) -> tuple[Lifecycle, Effects]:
    """What has come due."""
    match life.state:
        case Ending(closing_until=float() as at) as ending if now >= at:
            return _terminate(life, ending)
        case BackingOff(resume_at=at) if now >= at:
            return _launch(life, first=False)
        case _:
            return life, ()


def request_completed(life: Lifecycle, now: float) -> Lifecycle:
    """A completed request shows that the server works: the row of restarts is broken."""
    return replace(life, budget=life.budget.request_completed(now))


def _launch(life: Lifecycle, *, first: bool) -> tuple[Lifecycle, Effects]:
    epoch = life.epoch + 1
    return replace(life, state=Launching(epoch=epoch, first=first), epoch=epoch), (LaunchServer(epoch=epoch),)


def _terminate(life: Lifecycle, ending: Ending) -> tuple[Lifecycle, Effects]:
    told = replace(life, state=replace(ending, closing_until=None))
    return told, (EndProcess(epoch=ending.epoch, grace_s=ending.grace_s),)


def _start_failed(life: Lifecycle, now: float, error: WorkerStartError) -> tuple[Lifecycle, Effects]:
    """An explicit start failed and nothing is left of it."""
    leaves_nothing = error.reason is StartFailReason.PORT_IN_USE
    state: State = Stopped() if leaves_nothing else Failed()
    return replace(life, state=state, last_error=str(error)), (StartsResolved(error),)


def _server_died(life: Lifecycle, now: float, returncode: int | None, *ending: EndProcess) -> tuple[Lifecycle, Effects]:
    """It was READY: what it was working on is lost. `ending`: what is left of its tree still goes."""
    detail = f"the server ended with {described(returncode)}"
    failed = FailRequests(reason=RequestFailReason.SERVER_DIED, detail=detail)
    return _restart(life, now, "server_died", detail, (failed, *ending), lives=bool(ending))


def _restart(
    life: Lifecycle,
    now: float,
    reason: str,
    detail: str,
    effects: Effects = (),
    *,
    lives: bool,
    failure: WorkerStartError | None = None,
) -> tuple[Lifecycle, Effects]:
    """Decide whether there is another launch; where a process still `lives`, only once that is gone.

    `failure`: what a launch that did not become ready came to, for a `start()` that shares it.
    """
    budget, decision = life.budget.next(now, life.policy)
    told = replace(life, budget=budget, last_error=f"{reason}: {detail}")
    if isinstance(decision, Lockout):
        error = _locked_out(failure, f"{reason}: {detail}; {decision.detail}")
        told = replace(told, last_error=f"{reason}: {detail}; {decision.detail}")
        note = RestartDecided(reason=reason, detail=f"{detail}; {decision.detail}", delay_s=None)
        if lives:
            return replace(told, state=Ending(epoch=life.epoch, goal=ToFailed(), start_error=error)), (note, *effects)
        return replace(told, state=Failed()), (note, *effects, StartsResolved(error))
    resume_at = now + decision.delay_s
    note = RestartDecided(reason=reason, detail=detail, delay_s=decision.delay_s)
    state: State = Ending(epoch=life.epoch, goal=ToRestart(resume_at)) if lives else BackingOff(resume_at=resume_at)
    return replace(told, state=state), (note, *effects)


def _locked_out(failure: WorkerStartError | None, detail: str) -> WorkerStartError:
    """What a `start()` that shared the restarts is told. The worker is FAILED, which `port_in_use` would deny."""
    if failure is None:
        return WorkerStartError(StartFailReason.EXITED, detail)
    reason = StartFailReason.EXITED if failure.reason is StartFailReason.PORT_IN_USE else failure.reason
    return WorkerStartError(reason, detail, returncode=failure.returncode, log_tail=failure.log_tail)


def _gone(life: Lifecycle, now: float) -> tuple[Lifecycle, Effects]:
    """The tree that was being ended is gone: on to the goal."""
    assert isinstance(life.state, Ending)
    error = life.state.start_error
    match life.state.goal:
        case ToStopped(then_start=True):
            fresh = replace(life, state=Stopped(), budget=life.budget.cleared(), last_error=None)
            launched, effects = _launch(fresh, first=True)
            return launched, (StopsResolved(), *effects)
        case ToStopped():
            failed: Effects = (StartsResolved(error),) if error is not None else ()
            return replace(life, state=Stopped()), (*failed, StopsResolved())
        case ToFailed():
            failed = (StartsResolved(error),) if error is not None else ()
            last_error = str(error) if error is not None else life.last_error
            return replace(life, state=Failed(), last_error=last_error), failed
        case ToRestart(resume_at=at):
            if now >= at:
                return _launch(life, first=False)
            return replace(life, state=BackingOff(resume_at=at)), ()
