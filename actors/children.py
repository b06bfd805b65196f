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
    """The actors of the latest launch. Only the owning WorkerActor calls this; no call blocks.

    There are none before the first launch, and some are missing if one could not be started. The
    actors of earlier launches are dead or about to end.
    """

    def __init__(
        self, parent: Ref[WorkerMessage], live: LiveSet, runtime: Runtime, config: WorkerConfig
    ) -> None:
        self._parent = parent
        self._live = live
        self._runtime = runtime
        self._config = config
        self._actors: dict[Member, Child[Any]] = {}  # of the latest launch
        self.process: Ref[ProcessMessage] = Ref()
        self.transport: Ref[TransportMessage] = Ref()
        self.tools: Ref[ToolMessage] = Ref()
        self.watchdog: Ref[WatchdogMessage] = Ref()
        self.requests: list[Ref[RequestMessage]] = []  # by slot
        # when to end them: another actor has died, for which they may wait
        self.requests_end_at: float | None = None

    def start(self, epoch: int) -> bool:
        """Start the actors of a launch; the one before must be over. Returns False if the system
        has no thread left; the WorkerActor then gets LaunchFailed."""
        self.end()
        for member in self.members:  # those that are blocked, or have not ended yet
            self.give_up(member, "its launch is over")
        self._actors, self.requests_end_at = {}, None
        try:
            self.process = self._start(ProcessActor, epoch)
            self.transport = self._start(TransportActor, epoch)
            self.tools = self._start(ToolLoopActor, epoch)
            self.watchdog = self._start(WatchdogActor, epoch)
            peers: dict[str, Ref[Any]]
            peers = {"transport": self.transport, "tools": self.tools, "process": self.process}
            self.requests = [
                self._start(RequestActor, epoch, slot, **peers)
                for slot in range(self._config.slots)
            ]
        except RuntimeError as error:
            detail = f"cannot start the server: {described_error(error)}"
            self._parent.tell(LaunchFailed(epoch=epoch, detail=detail))
            self.end()
            return False
        return True

    def end(self) -> None:
        """Tell every live actor to end; each releases what it owns, the server last."""
        for ref in reversed(self.members.values()):
            ref.stop()

    def end_requests(self) -> None:
        """Tell every RequestActor to end, and so its request, whatever that waits for."""
        self.requests_end_at = None
        for ref in self.requests:
            ref.stop()

    @property
    def members(self) -> dict[Member, Ref[Any]]:
        """The actors of the latest launch."""
        return {member: child.me() for member, child in self._actors.items()}

    def give_up(self, member: Member, detail: str) -> bool:
        """Count the actor as dead, because it does not answer. Returns False if it has ended, or
        its launch is over."""
        child = self._actors.get(member)
        return child is not None and child.give_up(detail)

    def _start(
        self, actor: type[Child[M]], epoch: int, slot: int | None = None, **peers: Ref[Any]
    ) -> Ref[M]:
        """`peers`: the other actors that it sends orders to."""
        member, parts = Member(epoch, actor.role, slot), (self._live, self._runtime, self._config)
        return Ref(actor.start(self._parent, member, self._actors, *parts, **peers))
