"""The actors that a WorkerActor starts, addresses, and replaces when one dies."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

from llama_worker.actors.base import Child, Line, LiveCount, Ref
from llama_worker.actors.process import ProcessActor
from llama_worker.actors.request import RequestActor
from llama_worker.actors.tool_loop import ToolLoopActor
from llama_worker.actors.transport import TransportActor
from llama_worker.actors.watchdog import WatchdogActor
from llama_worker.config import WorkerConfig
from llama_worker.messages import (
    ProcessMessage,
    RequestMessage,
    ToolMessage,
    TransportMessage,
    WatchdogMessage,
    WorkerMessage,
)
from llama_worker.runtime.ports import Runtime
from llama_worker.server.roll_call import Member

M = TypeVar("M")


class Children:
    """Belongs to one WorkerActor, which alone calls it. Nothing here waits."""

    def __init__(
        self,
        parent: Ref[WorkerMessage],
        live_count: LiveCount,
        runtime: Runtime,
        config: WorkerConfig,
    ) -> None:
        self._parent = parent
        self._live_count = live_count
        self._runtime = runtime
        self._config = config
        self._lines: dict[Member, Line] = {}
        self.requests: list[Ref[RequestMessage]] = []
        with contextlib.ExitStack() as undo:  # the system may have no thread left for the next one
            undo.callback(self._stop_requests)
            self.process: Ref[ProcessMessage] = self._start(ProcessActor)
            undo.callback(self.process.stop)
            self.transport: Ref[TransportMessage] = self._start(TransportActor)
            undo.callback(self.transport.stop)
            self.tools: Ref[ToolMessage] = self._start(ToolLoopActor)
            undo.callback(self.tools.stop)
            self.watchdog: Ref[WatchdogMessage] = self._start(WatchdogActor)
            undo.callback(self.watchdog.stop)
            for slot in range(config.slots):
                self.requests.append(self._start_request(slot))
            undo.pop_all()

    def replace(self, role: str, slot: int | None) -> None:
        """Start a new actor in the place of one that died."""
        match role:
            case ProcessActor.role:
                self.process = self._start(ProcessActor)
            case TransportActor.role:
                self.transport = self._start(TransportActor)
            case ToolLoopActor.role:
                self.tools = self._start(ToolLoopActor)
            case WatchdogActor.role:
                self.watchdog = self._start(WatchdogActor)
            case RequestActor.role if slot is not None:
                self.requests[slot] = self._start_request(slot)

    @property
    def members(self) -> dict[Member, Ref[Any]]:
        """Every actor there is."""
        single: dict[Member, Ref[Any]] = {
            (ProcessActor.role, None): self.process,
            (TransportActor.role, None): self.transport,
            (ToolLoopActor.role, None): self.tools,
            (WatchdogActor.role, None): self.watchdog,
        }
        return single | {(RequestActor.role, slot): ref for slot, ref in enumerate(self.requests)}

    def give_up(self, member: Member, detail: str) -> bool:
        """The actor does not answer, and counts as dead; whether the end of what it owned is still
        to be told."""
        child = self._lines[member].child
        return child is not None and child.give_up(detail)

    def stop(self) -> None:
        """Let every actor end; each releases what it owns."""
        self._stop_requests()
        for ref in (self.watchdog, self.tools, self.transport, self.process):
            ref.stop()

    def _stop_requests(self) -> None:
        for request in self.requests:
            request.stop()

    def _start_request(self, slot: int) -> Ref[RequestMessage]:
        return self._start(RequestActor, slot=slot)

    def _start(self, actor: type[Child[M]], **more: Any) -> Ref[M]:
        line = self._lines[actor.role, more.get("slot")] = Line(self._parent)
        return Ref(actor.start(line, self._live_count, self._runtime, self._config, **more))
