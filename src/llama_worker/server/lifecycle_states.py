"""The states of a worker's life, and the effects of its transitions. Pure."""

from __future__ import annotations

from msgspec import Struct, field

from llama_worker.config.profiles import RestartPolicy
from llama_worker.errors import WorkerStartError, WorkerStopError
from llama_worker.request.messages import Abandon, CloseAllStreams
from llama_worker.server.messages import Launch, Start, Stop, Terminate
from llama_worker.server.restart_budget import RestartBudget
from llama_worker.types.request import SubmitErrorCode
from llama_worker.types.worker import WorkerState

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
            case _:
                return False

    @property
    def will_start_again(self) -> bool:
        """Whether a `start()` waits for the server's end."""
        match self.state:
            case Draining(then_start=True) | Ending(goal=ToStopped(then_start=True)):
                return True
            case _:
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
            case _:
                return None


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
