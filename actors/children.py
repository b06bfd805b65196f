"""The actors that a WorkerActor starts for a launch, and ends with it."""

from __future__ import annotations

from typing import Any, TypeVar

from llama_worker.actors.base import Child, LiveSet, Ref
from llama_worker.actors.messages import RequestMessage, WorkerMessage
from llama_worker.actors.process import ProcessActor
from llama_worker.actors.request import RequestActor
from llama_worker.actors.tool_loop import ToolLoopActor
from llama_worker.actors.transport import TransportActor
from llama_worker.actors.watchdog import WatchdogActor
from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import described_error
from llama_worker.ports import Runtime
from llama_worker.request.messages import ToolMessage, TransportMessage
from llama_worker.server.messages import LaunchFailed, ProcessMessage, WatchdogMessage
from llama_worker.server.roll_call import Member

M = TypeVar("M")


class Children:
    """Belongs to one WorkerActor, which alone calls it. Nothing here waits.

    There are none before the first launch, and not all of them where one could not be started.
    Those of a launch that is over are dead, or will be.
    """

    def __init__(
        self, parent: Ref[WorkerMessage], live: LiveSet, runtime: Runtime, config: WorkerConfig
    ) -> None:
        self._parent = parent
        self._live = live
        self._runtime = runtime
        self._config = config
        self._family: dict[Member, Child[Any]] = {}  # those of the latest launch
        self.process: Ref[ProcessMessage] = Ref()
        self.transport: Ref[TransportMessage] = Ref()
        self.tools: Ref[ToolMessage] = Ref()
        self.watchdog: Ref[WatchdogMessage] = Ref()
        self.requests: list[Ref[RequestMessage]] = []  # by slot
        self.requests_end_at: float | None = None  # an actor has died that they may wait for

    def start(self, epoch: int) -> bool:
        """Start those of a launch; the former one is over. False: the system has no thread left,
        and the WorkerActor gets LaunchFailed."""
        self.end()
        for member in self.members:  # those that are blocked
            self.give_up(member, "its launch is over")
        self._family, self.requests_end_at = {}, None
        try:
            self.process = self._start(ProcessActor, epoch)
            self.transport = self._start(TransportActor, epoch)
            self.tools = self._start(ToolLoopActor, epoch)
            self.watchdog = self._start(WatchdogActor, epoch)
            asked: dict[str, Ref[Any]]
            asked = {"transport": self.transport, "tools": self.tools, "process": self.process}
            self.requests = [
                self._start(RequestActor, epoch, slot, **asked)
                for slot in range(self._config.slots)
            ]
        except RuntimeError as error:
            detail = f"no process could be started: {described_error(error)}"
            self._parent.tell(LaunchFailed(epoch=epoch, detail=detail))
            self.end()
            return False
        return True

    def end(self) -> None:
        """Let every actor end that still lives; each releases what it owns, the server last."""
        for ref in reversed(self.members.values()):
            ref.stop()

    def end_requests(self) -> None:
        """Let every request end as it is, whatever it waits for."""
        self.requests_end_at = None
        for ref in self.requests:
            ref.stop()

    @property
    def members(self) -> dict[Member, Ref[Any]]:
        """Those of the latest launch."""
        return {member: child.me() for member, child in self._family.items()}

    def give_up(self, member: Member, detail: str) -> bool:
        """The actor does not answer, and counts as dead; False: it has ended, or its launch is
        over."""
        child = self._family.get(member)
        return child is not None and child.give_up(detail)

    def _start(
        self, actor: type[Child[M]], epoch: int, slot: int | None = None, **asked: Ref[Any]
    ) -> Ref[M]:
        """`asked`: the other actors that it sends orders to."""
        member, parts = Member(epoch, actor.role, slot), (self._live, self._runtime, self._config)
        return Ref(actor.start(self._parent, member, self._family, *parts, **asked))
