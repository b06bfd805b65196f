"""The life of one server process as the ProcessActor sees it. Pure: what to signal, and when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

REPEAT_S = 2.0  # from SIGTERM to the second: llama-server (b11434) can get stuck in its handler, and heeds a second one
FORCE_S = 1.0  # from the kill order to going past the guard that should have obeyed it


class Signal(Enum):
    """What the ProcessActor sends the server."""

    TERMINATE = "SIGTERM to the group"
    KILL = "SIGKILL to the whole tree"
    FORCE = "SIGKILL past the guard"


@dataclass(frozen=True, slots=True)
class Absent:
    """No process."""


@dataclass(frozen=True, slots=True)
class Present:
    """Launched and not asked to end."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Terminating:
    """Asked to end; asked once more at `repeat_at`, killed at `kill_at`."""

    epoch: int
    kill_at: float
    repeat_at: float | None


@dataclass(frozen=True, slots=True)
class Killing:
    """Killed, through the guard; while its end is not seen, past the guard too, at `force_at` and again after it."""

    epoch: int
    force_at: float


ProcessState = Absent | Present | Terminating | Killing


def terminate(state: ProcessState, *, epoch: int, grace_s: float, now: float) -> tuple[ProcessState, Signal | None]:
    """End launch `epoch`. An order for another launch changes nothing; a later one can only shorten the grace."""
    match state:
        case Present(epoch=current) if current == epoch:
            if grace_s <= 0:
                return Killing(epoch, now + FORCE_S), Signal.KILL
            return Terminating(epoch, now + grace_s, now + REPEAT_S), Signal.TERMINATE
        case Terminating(epoch=current, kill_at=kill_at, repeat_at=repeat_at) if current == epoch:
            if grace_s <= 0:
                return Killing(epoch, now + FORCE_S), Signal.KILL
            return Terminating(epoch, min(kill_at, now + grace_s), repeat_at), None
        case _:
            return state, None


def tick(state: ProcessState, *, now: float) -> tuple[ProcessState, Signal | None]:
    """What has come due."""
    match state:
        case Terminating(epoch=epoch, kill_at=kill_at) if now >= kill_at:
            return Killing(epoch, now + FORCE_S), Signal.KILL
        case Terminating(epoch=epoch, kill_at=kill_at, repeat_at=float(repeat_at)) if now >= repeat_at:
            return Terminating(epoch, kill_at, None), Signal.TERMINATE
        case Killing(epoch=epoch, force_at=force_at) if now >= force_at:
            return Killing(epoch, now + FORCE_S), Signal.FORCE
        case _:
            return state, None


def deadline(state: ProcessState) -> float | None:
    """When `tick` has something to do; None: never."""
    match state:
        case Terminating(kill_at=kill_at, repeat_at=repeat_at):
            return kill_at if repeat_at is None else min(kill_at, repeat_at)
        case Killing(force_at=force_at):
            return force_at
        case _:
            return None
