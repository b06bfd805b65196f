"""Decides which signal to send to one server process, and when. Pure.

The order is SIGTERM, once more after `REPEAT_S`, and SIGKILL when the grace period is over. The
guard sends the signals (`runtime.process.guard`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from signal import Signals
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llama_worker.mailbox import Tick
from llama_worker.server.messages import Exited, Launch, LaunchFailed, ProcessMessage, Terminate

# From the first SIGTERM to the second. The handler of llama-server (b11434) takes a lock that the
# interrupted thread may hold, and then waits for ever; a second signal ends it at once.
REPEAT_S = 2.0
_CHECK_INTERVAL_S, _CHECKS_COUNT = 1.0, 5  # of a silent guard; the last check kills it
FORCE_S = 1.0  # from the kill order to a SIGKILL past a guard that did not obey it


class Signal(Enum):
    """What the ProcessActor sends the server."""

    TERMINATE = "SIGTERM to the group"
    KILL = "SIGKILL to the whole tree"
    FORCE = "SIGKILL past the guard"


class Absent(Struct, frozen=True):
    """No process."""


class Present(Struct, frozen=True):
    """Launched and not asked to end."""


class Terminating(Struct, frozen=True):
    """Asked to end; asked once more at `repeat_at`, killed at `kill_at`."""

    kill_at: float
    repeat_at: float | None


class Killing(Struct, frozen=True):
    """SIGKILL was ordered from the guard; until the end is seen, it is also sent past the guard, at
    `force_at` and again after it."""

    force_at: float
    give_up_at: float  # unkillable from then on


class Stuck(Struct, frozen=True):
    """SIGKILL has no effect: wait for the end, however long that takes."""


ProcessState = Absent | Present | Terminating | Killing | Stuck


def step(
    state: ProcessState, message: ProcessMessage, now: float, *, kill_timeout_s: float
) -> tuple[ProcessState, Signal | None]:
    """The next state, and the signal to send. A later order can only shorten the grace period."""
    match state, message:
        case _, Launch():
            return Present(), None
        case _, LaunchFailed() | Exited():
            return Absent(), None
        case ((Present() | Terminating()), Terminate(grace_s=grace_s)) if grace_s <= 0:
            return Killing(now + FORCE_S, now + kill_timeout_s), Signal.KILL
        case Present(), Terminate(grace_s=grace_s):
            return Terminating(now + grace_s, now + REPEAT_S), Signal.TERMINATE
        case Terminating() as ending, Terminate(grace_s=grace_s):
            return replace(ending, kill_at=min(ending.kill_at, now + grace_s)), None
        case Terminating() as ending, Tick() if now >= ending.kill_at:
            return Killing(now + FORCE_S, now + kill_timeout_s), Signal.KILL
        case Terminating(repeat_at=float(repeat_at)) as ending, Tick() if now >= repeat_at:
            return replace(ending, repeat_at=None), Signal.TERMINATE
        case Killing() as killing, Tick() if now >= killing.give_up_at:
            return Stuck(), None
        case Killing() as killing, Tick() if now >= killing.force_at:
            return replace(killing, force_at=now + FORCE_S), Signal.FORCE
        case _:
            return state, None


def deadline(state: ProcessState) -> float | None:
    """When a Tick is due; None: never."""
    match state:
        case Terminating(kill_at=kill_at, repeat_at=repeat_at):
            return kill_at if repeat_at is None else min(kill_at, repeat_at)
        case Killing(force_at=force_at, give_up_at=give_up_at):
            return min(force_at, give_up_at)
    return None


def describe_stuck(pid: int | None, processes: Mapping[str, Any]) -> str:
    """For a person: which process SIGKILL does not end, its user (another user's process may not be
    killed), and what it waits for, as far as /proc says. `pid` None: no server was started yet."""
    seen = processes.get("processes", ())[:1]
    what = "the start of the server's process" if pid is None else f"process {pid}"
    if pid is not None and not seen:  # it has ended, but a process that it started has not
        what = f"the tree of process {pid}"
    parts = [f"SIGKILL does not end {what}"]
    for process in seen:
        parts += [
            f"{name} {process[name]}"
            for name in ("state", "uid", "wchan", "stack")
            if process.get(name) not in (None, "", "0")
        ]
    return "; ".join(parts)


class SilentGuardWatch:
    """Resumes, and finally kills, a guard that does not report its server's end: it was stopped, or
    its control group was frozen.

    It counts checks, not seconds: a gap in which this host did not run either counts as one.
    """

    def __init__(self) -> None:
        self._checks_count = 0
        self._check_at: float | None = None

    def wait_ms(self, now: float) -> float | None:
        """Milliseconds until the next check; None: no check is due."""
        return None if self._check_at is None else max(0.0, self._check_at - now) * 1000

    def step(self, now: float, *, overdue: bool) -> Signals | None:
        """The signal to send the guard now. `overdue`: its server has ended, and it has not yet
        reported that. Once it has, it may have to wait for the rest of the tree."""
        if not overdue:
            self._check_at = None
            return None
        if self._check_at is not None and now < self._check_at:
            return None
        first, self._check_at = self._check_at is None, now + _CHECK_INTERVAL_S
        if first:
            return None
        self._checks_count += 1
        return Signals.SIGCONT if self._checks_count < _CHECKS_COUNT else Signals.SIGKILL
