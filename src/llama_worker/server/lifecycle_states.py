"""The states of a worker's life, and the effects of its transitions. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from llama_worker.errors import WorkerStartError, WorkerStopError
from llama_worker.messages import CloseAllStreams, Launch, Terminate
from llama_worker.types import RequestFailReason

# ---------------------------------------------------------------- states


@dataclass(frozen=True, slots=True)
class Stopped:
    """No server, and none wanted."""


@dataclass(frozen=True, slots=True)
class Failed:
    """No server, until an explicit start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
    """The process is being started, or loads its model."""

    epoch: int
    first: bool  # of an explicit start: a failure is not retried


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Requests are dispatched."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ToStopped:
    """Ending because of `stop()`, or of a start that leaves nothing behind."""

    then_start: bool = False


@dataclass(frozen=True, slots=True)
class ToFailed:
    """Ending for good."""


@dataclass(frozen=True, slots=True)
class ToRestart:
    """Ending, to be launched again at `resume_at`, or as soon after as the tree is gone."""

    resume_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The tree is being ended. While `closing_until` is set, SIGTERM still waits for our connections."""

    epoch: int
    goal: ToStopped | ToFailed | ToRestart
    grace_s: float = 0.0
    closing_until: float | None = None
    start_error: WorkerStartError | None = None  # what a `start()` that waits is told
    stuck: str | None = None  # unkillable: what is known of the process that SIGKILL does not end


@dataclass(frozen=True, slots=True, kw_only=True)
class BackingOff:
    """No server; the next launch is at `resume_at`."""

    resume_at: float


State = Stopped | Failed | Launching | Ready | Ending | BackingOff

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRequests:
    """Fail every request in flight."""

    reason: RequestFailReason
    detail: str


@dataclass(frozen=True, slots=True)
class ResolveStarts:
    """Answer everyone who waits on `start()`; None: it is READY."""

    error: WorkerStartError | None


@dataclass(frozen=True, slots=True)
class ResolveStops:
    """Answer everyone who waits on `stop()`; None: nothing of the server is left."""

    error: WorkerStopError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRestart:
    """An automatic restart was decided upon, or refused: into the journal."""

    reason: str
    detail: str
    delay_s: float | None  # None: locked out


Effect = Launch | Terminate | CloseAllStreams | FailRequests | ResolveStarts | ResolveStops | RecordRestart
"""Messages to the worker's actors, and what the WorkerActor does itself."""
Effects = tuple[Effect, ...]
