"""What a scenario is: a server's behaviour, what the host does, and the verdict that is due. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from llama_worker import RequestFailReason, RestartPolicy, StartFailReason, TimeoutProfile, WorkerState
from tests.fake_script import Note, Script, Step

INTERVAL_S = 0.25
# Scaled down from the defaults; what a scenario is not about is long or off.
TIMEOUTS = TimeoutProfile(
    connect_timeout_s=1.0,
    headers_timeout_s=0.8,
    prefill_liveness_timeout_s=1.5,
    idle_stream_timeout_s=1.2,
    silent_work_timeout_s=60.0,
    liveness_probe_interval_s=INTERVAL_S,
    startup_timeout_s=20.0,
    stop_grace_s=2.0,
    health_probe_interval_s=None,
)
RESTART = RestartPolicy(restart_backoff_s=0.2, backoff_max_s=1.0)


class Truth(Enum):
    """What is really the matter, and so what is due: SLOW is to be spared, the others are not."""

    HUNG = "hung"  # or over a limit that the host set
    SLOW = "slow"
    DEAD = "dead"  # the process, or its connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How soon the end must follow the mark `since`: `limit_s`, and not before it, but for the watchdog's rhythm.

    `after_work`: the server worked until then, and the CPU rate falls only as the window of 3 s moves on.
    """

    since: str
    limit_s: float
    after_work: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, how the server replies, and what must become of it."""

    name: str  # the job's; it picks the reply
    reply: Sequence[Step]
    fails: RequestFailReason | None = None  # None: it completes
    found: Found | None = None
    text: str | None = None  # all the output, whatever the ending
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    name: str


@dataclass(frozen=True, slots=True)
class Await:
    """Until the server's script has come to `Note(name)`."""

    name: str


@dataclass(frozen=True, slots=True)
class Heard:
    """Until the worker has received so many characters of the request's output."""

    name: str
    chars: int


@dataclass(frozen=True, slots=True)
class Pause:
    """As long as the scenario wants a state of things to last."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Signal:
    """To the server's process, from outside; sets the mark of the signal's name. A process that is gone is no error."""

    name: str


@dataclass(frozen=True, slots=True)
class End:
    """Until the request has ended."""

    name: str


@dataclass(frozen=True, slots=True)
class AwaitState:
    """Until the worker is in this state."""

    state: WorkerState


Move = Submit | Await | Heard | Pause | Signal | End | AwaitState


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`moves` default to submitting every request in order. The script replies as the asks say."""

    name: str
    truth: Truth
    asks: Sequence[Ask] = ()
    moves: Sequence[Move] = ()
    launches: Sequence[Script] = ()  # one per launch, the last for all others; () is a well server
    slots: int = 1
    timeouts: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    wrapped: bool = False  # the server is the child of an idle process
    sidecar: bool = False  # the server has a child that computes for itself
    start_fails: StartFailReason | None = None
    start_found: Found | None = None  # since "start"
    restarts: int = 0
    restart_reason: str = ""  # of the last one
    ends: WorkerState = WorkerState.READY
    leaves: bool = False  # the process ends by itself once its connections are closed: it may be gone by then

    @property
    def profile(self) -> TimeoutProfile:
        return replace(TIMEOUTS, **self.timeouts)


def silent(name: str) -> Note:
    """Marks the beginning of the silence."""
    return Note(f"silent {name}")


def found(name: str, limit_s: float, *, after_work: bool = False) -> Found:
    """Within `limit_s` of the silence of that request."""
    return Found(since=f"silent {name}", limit_s=limit_s, after_work=after_work)
