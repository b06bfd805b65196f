"""A worker's life, told by verbs: each steps it with one message."""

from __future__ import annotations

from typing import Any

from llama_worker.messages import (
    BecameReady,
    Died,
    Exited,
    LaunchFailed,
    Start,
    StartupFailed,
    Stop,
    StreamsClosed,
    Tick,
    Unkillable,
)
from llama_worker.server.lifecycle import Lifecycle, step
from llama_worker.server.lifecycle_states import Effects
from llama_worker.server.suspicion import Trouble
from llama_worker.types import StartFailReason

Step = tuple[Lifecycle, Effects]


class Unanswered:
    """A host's reply, which is not the life's to answer."""

    def answer(self, value: Any) -> None:
        raise AssertionError("the WorkerActor answers")

    def done(self) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        raise AssertionError("the WorkerActor answers") from error


def start(life: Lifecycle, now: float) -> Step:
    return step(life, Start(reply=Unanswered()), now)


def stop(life: Lifecycle, now: float, *, grace_s: float = 10.0) -> Step:
    return step(life, Stop(reply=Unanswered(), grace_s=grace_s), now)


def became_ready(life: Lifecycle, now: float, *, epoch: int | None = None, traits: Any = None) -> Step:
    return step(life, BecameReady(epoch=_of(life, epoch), traits=traits), now)


def launch_failed(life: Lifecycle, now: float, reason: StartFailReason, *, epoch: int | None = None) -> Step:
    return step(life, LaunchFailed(epoch=_of(life, epoch), reason=reason, detail="no process"), now)


def startup_failed(life: Lifecycle, now: float, reason: StartFailReason, *, epoch: int | None = None) -> Step:
    return step(life, StartupFailed(epoch=_of(life, epoch), reason=reason, detail="no sign of work"), now)


def died(life: Lifecycle, now: float, returncode: int = 1, *, epoch: int | None = None) -> Step:
    return step(life, Died(epoch=_of(life, epoch), returncode=returncode), now)


def exited(
    life: Lifecycle,
    now: float,
    returncode: int | None = 1,
    *,
    epoch: int | None = None,
    log_tail: tuple[str, ...] = ("oops",),
    port_taken: bool = False,
) -> Step:
    message = Exited(epoch=_of(life, epoch), returncode=returncode, log_tail=log_tail, port_taken=port_taken)
    return step(life, message, now)


def unkillable(life: Lifecycle, now: float, *, epoch: int | None = None) -> Step:
    return step(life, Unkillable(epoch=_of(life, epoch), detail="SIGKILL does not end process 5"), now)


def trouble(life: Lifecycle, now: float, reason: str = "stall_timeout") -> Step:
    return step(life, Trouble(reason, "silence"), now)


def streams_closed(life: Lifecycle, now: float, *, epoch: int | None = None) -> Step:
    return step(life, StreamsClosed(epoch=_of(life, epoch)), now)


def tick(life: Lifecycle, now: float) -> Step:
    return step(life, Tick(), now)


def _of(life: Lifecycle, epoch: int | None) -> int:
    return life.epoch if epoch is None else epoch
