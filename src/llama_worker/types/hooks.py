"""What a host plugs into a worker: BIOS provider, handlers, tool runner, liveness probe. Pure."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from llama_worker.types.chat import ToolDef
from llama_worker.types.request import ExitSignal

ToolCallMode: TypeAlias = Literal["auto", "native", "prompted"]
ToolErrors: TypeAlias = Literal["fail", "tell"]
SystemPromptMode: TypeAlias = Literal["merged", "separate"]


@dataclass(frozen=True, slots=True)
class BiosText:
    """The BIOS text of a turn: `stable` is the same for a whole request and comes first; `volatile`
    ends the last message of each turn."""

    stable: str
    volatile: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BiosContext:
    """What a BIOS provider is given. `now` is an aware datetime in the configured time zone."""

    now: datetime
    timezone_name: str
    worker_name: str
    tool_iters_remaining: int
    normal_tools: tuple[ToolDef, ...]
    exit_tools: tuple[ToolDef, ...]
    bios_version: str = "bios-v1"
    tool_call_mode: ToolCallMode = "native"


class BiosProvider(Protocol):
    """Writes the BIOS text. It should be pure and quick; it runs on a thread of its own, and may
    take `bios_timeout_s` at most."""

    def __call__(self, ctx: BiosContext, /) -> BiosText | str: ...


class EventHandler(Protocol):
    """Gets each lifecycle event, in order, as a dict like those of `recent_events`. Called on the
    callback thread: it may use the worker, and should not block for long."""

    def __call__(self, event: dict[str, Any], /) -> object: ...


class SignalHandler(Protocol):
    """Gets each call of an exit tool, in order. Called on the callback thread: it may use the
    worker, and should not block for long."""

    def __call__(self, signal: ExitSignal, /, *, request_id: int, job_name: str) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCall:
    """Tells a tool runner how long its result is waited for, so that it can give up in time."""

    deadline: float
    """The instant of `time.monotonic()` at which `tool_timeout_s` is over, to some milliseconds:
    give up a little earlier. The real limit is later if this program is stopped meanwhile."""
    cancelled: threading.Event
    """Set once nobody waits for the result: the time is up, or the request has ended."""


@runtime_checkable
class ToolRunner(Protocol):
    """Runs normal tools. Called on a tool thread; several threads may call at once.

    `run_tool` may be `async def`: it then runs in an event loop on its own thread, and is cancelled
    once nobody waits for its result.
    """

    def run_tool(
        self, *, name: str, arguments: dict[str, Any], request_id: int, job_name: str
    ) -> Any:
        """Return any JSON value; for an exception see `tool_errors`."""
        ...


class CancellableToolRunner(Protocol):
    """A ToolRunner that is told how long its result is waited for."""

    def run_tool(
        self,
        *,
        name: str,
        arguments: dict[str, Any],
        request_id: int,
        job_name: str,
        call: RunningCall,
    ) -> Any:
        """Return any JSON value; for an exception see `tool_errors`."""
        ...


@dataclass(frozen=True, slots=True)
class LivenessEvidence:
    """What one look at the server's processes saw. `alive`: work since the previous look."""

    alive: bool
    detail: str
    """What was seen, with numbers, for a person."""
    reads: bool = False
    """Whether part of that work was reading from disk, such as a model that is paged in: a batch
    may then take any time."""


@runtime_checkable
class LivenessProbe(Protocol):
    """Observes from outside whether the server works. It compares with what it saw before, so each
    worker needs its own instance; one thread at a time then calls it."""

    def probe(self, root_pid: int, now: float) -> LivenessEvidence | None:
        """Look at the process tree of `root_pid`; `now` is monotonic seconds. None means that
        nothing could be said, and never counts as a failure."""
        ...

    def reset(self) -> None:
        """Forget what was seen: the next `probe` may be of another process."""
        ...
