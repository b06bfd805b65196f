"""The life of one server process as the ProcessActor sees it. Pure: what to signal, and when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GIVE_UP_S = 1.0  # from the kill order to killing the guard too, should it have been stopped or lost


class Signal(Enum):
    """What the ProcessActor sends the server."""

    TERMINATE = "SIGTERM to the group"
    KILL = "SIGKILL to the whole tree"
    KILL_GUARD = "SIGKILL to the guard; the kernel then kills the server"


@dataclass(frozen=True, slots=True)
class Absent:
    """No process."""


@dataclass(frozen=True, slots=True)
class Present:
    """Launched and not asked to end."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Terminating:
    """Asked to end; killed at `kill_at`."""

    epoch: int
    kill_at: float


@dataclass(frozen=True, slots=True)
class Killing:
    """Killed; should its end not be seen by `give_up_at`, the guard is killed."""

    epoch: int
    give_up_at: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Everything that can be killed was killed."""

    epoch: int


ProcessState = Absent | Present | Terminating | Killing | GivenUp


def terminate(state: ProcessState, *, epoch: int, grace_s: float, now: float) -> tuple[ProcessState, Signal | None]:
    """End launch `epoch`. An order for another launch changes nothing; a later one can only shorten the grace."""
    match state:
        case Present(epoch=current) if current == epoch:
            if grace_s <= 0:
                return Killing(epoch, now + GIVE_UP_S), Signal.KILL
            return Terminating(epoch, now + grace_s), Signal.TERMINATE
        case Terminating(epoch=current, kill_at=kill_at) if current == epoch:
            if grace_s <= 0:
                return Killing(epoch, now + GIVE_UP_S), Signal.KILL
            return Terminating(epoch, min(kill_at, now + grace_s)), None
        case _:
            return state, None


def tick(state: ProcessState, *, now: float) -> tuple[ProcessState, Signal | None]:
    """What has come due."""
    match state:
        case Terminating(epoch=epoch, kill_at=kill_at) if now >= kill_at:
            return Killing(epoch, now + GIVE_UP_S), Signal.KILL
        case Killing(epoch=epoch, give_up_at=give_up_at) if now >= give_up_at:
            return GivenUp(epoch), Signal.KILL_GUARD
        case _:
            return state, None


def deadline(state: ProcessState) -> float | None:
    """When `tick` has something to do; None: never."""
    match state:
        case Terminating(kill_at=at) | Killing(give_up_at=at):
            return at
        case _:
            return None
