"""A worker's life, told by verbs: each steps it with one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_worker import messages
from llama_worker.server.lifecycle import Lifecycle, step
from llama_worker.server.lifecycle_states import Effects
from llama_worker.server.suspicion import Trouble

Step = tuple[Lifecycle, Effects]
_REPLY: Any = object()  # to a host; not the life's to answer


def start(life: Lifecycle, now: float) -> Step:
    return step(life, messages.Start(reply=_REPLY), now)


def stop(life: Lifecycle, now: float, *, grace_s: float = 10.0) -> Step:
    return step(life, messages.Stop(reply=_REPLY, grace_s=grace_s), now)


def trouble(life: Lifecycle, now: float, reason: str = "stall_timeout") -> Step:
    return step(life, Trouble(reason, "silence"), now)


def tick(life: Lifecycle, now: float) -> Step:
    return step(life, messages.Tick(), now)


def _news(kind: Callable[..., Any], first: str = "", **usual: Any) -> Callable[..., Step]:
    """A verb for news of the life's own launch, or of launch `epoch`. `first`: the field that may be positional."""

    def tell(life: Lifecycle, now: float, *values: Any, epoch: int | None = None, **fields: Any) -> Step:
        given = {**usual, **dict(zip((first,), values, strict=False)), **fields}
        return step(life, kind(epoch=life.epoch if epoch is None else epoch, **given), now)

    return tell


became_ready = _news(messages.BecameReady, traits=None)
launch_failed = _news(messages.LaunchFailed, "reason", detail="no process")
startup_failed = _news(messages.StartupFailed, "reason", detail="no sign of work")
died = _news(messages.Died, "returncode", returncode=1)
exited = _news(messages.Exited, "returncode", returncode=1, log_tail=("oops",), port_taken=False)
unkillable = _news(messages.Unkillable, detail="SIGKILL does not end process 5")
streams_closed = _news(messages.StreamsClosed)
