"""The states of a worker's life, and the effects of its transitions. Pure."""

from __future__ import annotations

from msgspec import Struct

from llama_worker.errors import WorkerStartError, WorkerStopError
from llama_worker.request.messages import Abandon, CloseAllStreams
from llama_worker.server.messages import Launch, Start, Stop, Terminate

# ---------------------------------------------------------------- states


class Stopped(Struct, frozen=True):
    """No server, and none wanted."""


class Failed(Struct, frozen=True):
    """No server, until an explicit start."""


class Launching(Struct, frozen=True, kw_only=True):
    """The process is being started, or loads its model."""

    epoch: int
    first: bool  # of an explicit start: a failure is not retried


class Ready(Struct, frozen=True, kw_only=True):
    """Requests are dispatched."""

    epoch: int


class Draining(Struct, frozen=True, kw_only=True):
    """The requests in flight go on; no other is dispatched. After the last one the server is
    stopped."""

    epoch: int
    then_start: bool = False


class ToStopped(Struct, frozen=True):
    """Ending because of `stop()` or `drain()`, or of a start that leaves nothing behind."""

    then_start: bool = False
    draining: bool = False  # what `submit` is told


class ToFailed(Struct, frozen=True):
    """Ending for good."""


class ToRestart(Struct, frozen=True):
    """Ending, to be launched again at `resume_at`, or as soon after as the tree is gone."""

    resume_at: float


class Ending(Struct, frozen=True, kw_only=True):
    """The tree is being ended, and every request in flight. While `closing_until` is set, SIGTERM
    still waits for our connections."""

    epoch: int
    goal: ToStopped | ToFailed | ToRestart
    grace_s: float = 0.0
    closing_until: float | None = None
    gone: bool = False  # nothing of the tree is left; a request may still lack its record
    start_error: WorkerStartError | None = None  # what a `start()` that waits is told
    stuck: str | None = None  # unkillable: what is known of the process that SIGKILL does not end


class BackingOff(Struct, frozen=True, kw_only=True):
    """No server; the next launch is at `resume_at`."""

    resume_at: float


State = Stopped | Failed | Launching | Ready | Draining | Ending | BackingOff

# ---------------------------------------------------------------- effects


class Resolve(Struct, frozen=True):
    """Answer everyone who waits for READY (Start: `start()` and `restart()`), or for the end (Stop:
    `stop()` and `drain()`); no error: it is so."""

    order: type[Start] | type[Stop]
    error: WorkerStartError | WorkerStopError | None = None


class RecordRestart(Struct, frozen=True, kw_only=True):
    """A restart was decided upon, or refused: into the journal."""

    reason: str
    detail: str
    delay_s: float | None  # None: locked out


Effect = Launch | Terminate | CloseAllStreams | Abandon | Resolve | RecordRestart
"""Messages to the worker's actors (`Abandon`: to every request in flight), and what the WorkerActor
does itself."""
Effects = tuple[Effect, ...]
