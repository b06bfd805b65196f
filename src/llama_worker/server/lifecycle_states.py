"""The states of a worker's life, the effects of its transitions, and the ways out of a launch: to a
stop, to another launch, or to none. Pure."""

from __future__ import annotations

from msgspec import Struct, field
from msgspec.structs import replace

from llama_worker.config.profiles import RestartPolicy
from llama_worker.errors import WorkerStartError, WorkerStopError
from llama_worker.request.messages import Abandon, CloseAllStreams
from llama_worker.server.blame import RestartBudget
from llama_worker.server.messages import Launch, Start, Stop, Terminate
from llama_worker.types.request import SubmitErrorCode
from llama_worker.types.worker import StartFailReason, WorkerState

# How long SIGTERM waits until our own connections are closed: the server would wait for open ones.
CLOSING_S = 1.0

# ---------------------------------------------------------------- states


class Stopped(Struct, frozen=True):
    """No server, and none wanted."""


class Failed(Struct, frozen=True):
    """No server, until an explicit start."""


class Launching(Struct, frozen=True, kw_only=True):
    """The process is being started, or loads its model."""

    first: bool  # by an explicit start: a failure is not retried
    has_died: bool = False  # the server is dead; Exited follows


class Ready(Struct, frozen=True):
    """Requests are dispatched."""


class Draining(Struct, frozen=True, kw_only=True):
    """Requests in flight continue; no new one is dispatched. The server is stopped after the last
    one."""

    then_start: bool = False


class ToStopped(Struct, frozen=True):
    """Ending after `stop()`, `drain()`, or a start that found its port taken; then STOPPED."""

    then_start: bool = False
    draining: bool = False  # `submit` then answers WORKER_DRAINING


class ToFailed(Struct, frozen=True):
    """Ending, to become FAILED."""


class ToRestart(Struct, frozen=True):
    """Ending, to be launched again at `resume_at`, or once the tree is gone if that is later."""

    resume_at: float


class Ending(Struct, frozen=True, kw_only=True):
    """The tree and every request in flight are being ended. While `closing_until` is set, SIGTERM
    still waits until our connections are closed."""

    goal: ToStopped | ToFailed | ToRestart
    grace_s: float = 0.0
    closing_until: float | None = None
    gone: bool = False  # no process of the tree is left; a request may still lack its record
    start_error: WorkerStartError | None = None  # for a waiting `start()`
    stuck: str | None = None  # what is known of the process, if SIGKILL does not end it


class BackingOff(Struct, frozen=True, kw_only=True):
    """No server; the next launch is at `resume_at`."""

    resume_at: float


State = Stopped | Failed | Launching | Ready | Draining | Ending | BackingOff

# ---------------------------------------------------------------- effects


class Resolve(Struct, frozen=True):
    """Answer all callers that wait for READY (Start: `start()` and `restart()`), or for the end
    (Stop: `stop()` and `drain()`). `error` None: it was reached."""

    order: type[Start] | type[Stop]
    error: WorkerStartError | WorkerStopError | None = None


class RecordRestart(Struct, frozen=True, kw_only=True):
    """Record in the journal that a restart was decided, or refused by the lockout."""

    reason: str
    detail: str
    delay_s: float | None  # None: locked out


Effect = Launch | Terminate | CloseAllStreams | Abandon | Resolve | RecordRestart
"""Messages to the worker's actors (`Abandon`: to every request in flight), and actions of the
WorkerActor itself."""
Effects = tuple[Effect, ...]

KILL: Effects = (CloseAllStreams(), Terminate(grace_s=0.0, keep_evidence=True))
"""SIGKILL at once; evidence of the server's state is kept first."""

# ---------------------------------------------------------------- the whole


class Lifecycle(Struct, frozen=True, kw_only=True):
    """The whole state of the state machine, with its settings."""

    policy: RestartPolicy
    stop_grace_s: float
    state: State = field(default_factory=Stopped)
    epoch: int = 0  # of the latest launch
    budget: RestartBudget = field(default_factory=RestartBudget)
    last_error: str | None = None

    @property
    def public_state(self) -> WorkerState:
        """The state that the host sees."""
        match self.state:
            case Stopped():
                return WorkerState.STOPPED
            case Failed() | Ending(stuck=str()):
                return WorkerState.FAILED
            case Ready() | Draining():
                return WorkerState.READY
            case Launching() | BackingOff() | Ending():
                return WorkerState.RUNNING

    @property
    def is_draining(self) -> bool:
        """Whether `drain()` was called, and the server is not gone yet."""
        match self.state:
            case Draining() | Ending(goal=ToStopped(draining=True)):
                return True
        return False

    @property
    def will_start_again(self) -> bool:
        """Whether a `start()` waits for the server's end."""
        match self.state:
            case Draining(then_start=True) | Ending(goal=ToStopped(then_start=True)):
                return True
        return False

    @property
    def refusal(self) -> SubmitErrorCode | None:
        """Why no request is dispatched now; None: one is dispatched if a slot is free."""
        if self.public_state is WorkerState.FAILED:
            return "WORKER_FAILED"
        if self.is_draining:
            return "WORKER_DRAINING"
        return None if self.public_state is WorkerState.READY else "WORKER_NOT_READY"

    @property
    def deadline(self) -> float | None:
        """When a `Tick` is due; None: never."""
        match self.state:
            case Ending(closing_until=at) | BackingOff(resume_at=at):
                return at
        return None

    def launch(self, *, first: bool) -> tuple[Lifecycle, Effects]:
        """Begin the next launch; `first`: by an explicit start."""
        epoch = self.epoch + 1
        launching = replace(self, state=Launching(first=first), epoch=epoch)
        return launching, (Launch(epoch=epoch),)

    def close(self, now: float, goal: ToStopped | ToRestart, grace_s: float) -> Lifecycle:
        """Begin a graceful end, which closes our connections first: the caller adds
        CloseAllStreams."""
        ending = Ending(goal=goal, grace_s=grace_s, closing_until=now + CLOSING_S)
        return replace(self, state=ending, budget=self.budget.left_ready(now))

    def terminate(self, ending: Ending) -> tuple[Lifecycle, Effects]:
        """Send SIGTERM: our connections are closed, or closing them takes too long."""
        terminated = replace(self, state=replace(ending, closing_until=None))
        return terminated, (Terminate(grace_s=ending.grace_s),)

    def drained(self, draining: Draining, now: float) -> tuple[Lifecycle, Effects]:
        """The last request has ended: stop the server, which is idle."""
        goal = ToStopped(then_start=draining.then_start, draining=True)
        return self.close(now, goal, self.stop_grace_s), (CloseAllStreams(),)

    def recycle(self, now: float, detail: str) -> tuple[Lifecycle, Effects]:
        """A planned restart of an idle server: it has no backoff and does not count towards the
        lockout."""
        closing = self.close(now, ToRestart(now), self.stop_grace_s)
        note = RecordRestart(reason="recycled", detail=detail, delay_s=0.0)
        planned = replace(closing, budget=self.budget.planned(now))
        return planned, (note, CloseAllStreams())

    def lost_while_draining(
        self, draining: Draining, now: float, detail: str, *, gone: bool = False
    ) -> Lifecycle:
        """The server is lost while draining: requests in flight fail, and no restart follows."""
        goal = ToStopped(then_start=draining.then_start, draining=True)
        return replace(
            self,
            state=Ending(goal=goal, gone=gone),
            budget=self.budget.left_ready(now),
            last_error=detail,
        )

    def restart(
        self,
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
        budget, decision = self.budget.next(now, self.policy)
        goal: ToFailed | ToRestart
        if isinstance(decision, str):  # the lockout
            detail = f"{detail}; {decision}"
            goal, error = ToFailed(), _locked_out(failure, reason, detail)
            note = RecordRestart(reason=reason, detail=detail, delay_s=None)
        else:
            goal, error = ToRestart(now + decision), None
            note = RecordRestart(reason=reason, detail=detail, delay_s=decision)
        ending = Ending(goal=goal, gone=gone, start_error=error)
        ends = replace(self, budget=budget, state=ending, last_error=f"{reason}: {detail}")
        return ends, (note, *effects)

    def tree_gone(self, ending: Ending) -> Lifecycle:
        """No process of the tree is left; the launch is over once every request has its record."""
        return replace(self, state=replace(ending, gone=True, closing_until=None))

    def unkillable(self, ending: Ending, detail: str) -> tuple[Lifecycle, Effects]:
        """SIGKILL has no effect: FAILED, and no second server is launched until the process is
        gone."""
        error = WorkerStartError(StartFailReason.UNKILLABLE, detail)
        # A start that waited for the end is answered now.
        goal = ToStopped() if isinstance(ending.goal, ToStopped) else ending.goal
        stuck = replace(ending, goal=goal, start_error=None, closing_until=None, stuck=detail)
        known = replace(self, state=stuck, last_error=str(error))
        return known, (Resolve(Start, error), Resolve(Stop, WorkerStopError("unkillable", detail)))

    def launch_over(self, ending: Ending, now: float) -> tuple[Lifecycle, Effects]:
        """The launch has neither processes nor requests left: enter the state of its goal."""
        error = ending.start_error
        failed: Effects = (Resolve(Start, error),) if error is not None else ()
        # a new object even if it says the same: this change's event gives it as the cause
        last_error = str(error) if error is not None else self.last_error
        match ending.goal:
            case ToStopped(then_start=True):
                fresh = replace(
                    self, state=Stopped(), budget=self.budget.cleared(), last_error=None
                )
                launched, effects = fresh.launch(first=True)
                return launched, (Resolve(Stop), *effects)
            case ToStopped():
                stopped = replace(self, state=Stopped(), last_error=last_error)
                return stopped, (*failed, Resolve(Stop))
            case ToFailed():
                if error is not None and error.detail == self.last_error:
                    # a lockout names its cause
                    last_error = str(error).removeprefix(f"{error.reason}: ")
                return replace(self, state=Failed(), last_error=last_error), failed
            case ToRestart(resume_at=at):
                if now >= at:
                    return self.launch(first=False)
                return replace(self, state=BackingOff(resume_at=at)), ()


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
