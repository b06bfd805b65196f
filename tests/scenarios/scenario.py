"""What a scenario is: a server's behaviour, what the host does, and the verdict that is due. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from llama_worker import RequestFailReason, RestartPolicy, TimeoutProfile
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


@dataclass(frozen=True, slots=True)
class Found:
    """How soon the end must follow the mark `since`: `limit_s`, and not before it, but for the watchdog's rhythm.

    A mark is a `Note` of the server's script, "start", "submit NAME", or the name of a signal. `after_work`: the server
    worked until then, and the CPU rate falls only as the window of 3 s moves on.
    """

    limit_s: float
    since: str
    after_work: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, how the server replies, and what must become of it."""

    name: str  # the job's
    reply: Sequence[Step]
    fails: RequestFailReason | None = None  # None: it completes
    found: Found | None = None
    text: str | None = None  # all the output, whatever the ending
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`moves`, by comma; without any, every request is submitted in order:

    submit NAME
    end NAME: until the request has ended
    heard NAME N: until the worker has received so many characters of the request's output
    await NOTE: until the server's script has come to `Note(NOTE)`
    state STATE: until the worker is in it
    pause SECONDS: as long as a state of things is to last
    signal NAME: to the server's process, from outside; one that is gone is no error
    """

    name: str
    truth: Truth
    asks: Sequence[Ask] = ()
    moves: str = ""
    launches: Sequence[Script] = ()  # one per launch, the last for all others; () is a well server
    timeouts: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    wrapped: bool = False  # the server is the child of an idle process
    sidecar: bool = False  # the server has a child that computes for itself
    start_found: Found | None = None  # the start fails: the server is not ready in its time
    restart_reason: str = ""  # of the last one; "": no restart is due
    restarts: int = 1  # where there is a reason
    leaves: bool = False  # the process ends by itself once its connections are closed: it may be gone by then


def silent(name: str) -> Step:
    """Marks the beginning of the silence."""
    return Note(f"silent {name}")
