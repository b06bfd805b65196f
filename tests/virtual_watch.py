"""The real `ServerWatch` in virtual time: its orders are carried out at once, its alarm moves the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from llama_worker.messages import (
    EvidenceSeen,
    Launch,
    Launched,
    Probed,
    ProbeOutcome,
    ProgressReported,
    ReportProgress,
    SlotsSeen,
    StandDown,
    Tick,
    Watch,
    WatchdogMessage,
)
from llama_worker.profiles import TimeoutProfile
from llama_worker.request.progress import Progress
from llama_worker.server.slots import Slot, SlotsLook
from llama_worker.server.traits import ServerTraits
from llama_worker.server.watch import Look, LookAtSlots, News, ProbeReadiness, ServerWatch

Evidence = Callable[[float, bool], bool]  # (now, fresh) -> whether the server's processes are at work
Readiness = Callable[[float], ProbeOutcome]
RequestAt = Callable[[float], Progress]
SlotsAt = Callable[[float], tuple[Slot, ...] | None]


class Nobody:
    """A mailbox that is never read: the driver answers itself."""

    def tell(self, message: Any) -> bool:
        return True


def idle(now: float, fresh: bool) -> bool:
    """A server whose processes do nothing."""
    return False


def always_ready(now: float) -> ProbeOutcome:
    """A server that answers every probe."""
    return ProbeOutcome.READY


def no_slots(now: float) -> None:
    """A server that was started with `--no-slots`."""


class VirtualWatch:
    """One launch, number 1, ordered at `now`. `news` is what the WorkerActor would be told, and when."""

    def __init__(
        self,
        profile: TimeoutProfile,
        *,
        evidence: Evidence = idle,
        readiness: Readiness = always_ready,
        slots: SlotsAt = no_slots,
        blind: Callable[[float], bool] = lambda now: False,
        now: float = 0.0,
    ) -> None:
        self.now = now
        self.news: list[tuple[float, News]] = []
        self.watch = ServerWatch(profile, probes_count=1, me=Nobody())
        self._evidence = evidence
        self._readiness = readiness
        self._slots = slots
        self._blind = blind
        self.withhold_probes = False  # leave readiness probes to `answer_probe`
        self.slots_asked_at: list[float] = []
        self._requests: Mapping[int, RequestAt] = {}
        self.tell(Launch(epoch=1))
        self.tell(Launched(epoch=1, pid=1))

    def begin(self, requests: Mapping[int, RequestAt]) -> None:
        """The requests are sent now."""
        self._requests = requests
        for request_id in requests:
            self.tell(Watch(request_id=request_id, request=Nobody()))

    def tell(self, message: WatchdogMessage) -> None:
        """Hand over one message, and every answer that it brings about."""
        messages = deque([message])
        while messages:
            for effect in self.watch.step(messages.popleft(), self.now):
                match effect:
                    case Look(seen=seen):
                        messages.append(self._seen(seen))
                    case ProbeReadiness():
                        if not self.withhold_probes:
                            messages.append(_probed(self._readiness(self.now)))
                    case ReportProgress(for_verdict=for_verdict):
                        for request_id in self.watch.requests:
                            progress = self._requests[request_id](self.now)
                            messages.append(ProgressReported(progress=progress, for_verdict=for_verdict))
                    case LookAtSlots(epoch=epoch):
                        self.slots_asked_at.append(self.now)
                        slots = self._slots(self.now)
                        look = None if slots is None else SlotsLook(asked_at=self.now, slots=slots)
                        messages.append(SlotsSeen(epoch=epoch, look=look))
                    case StandDown():
                        pass
                    case _:
                        self.news.append((self.now, effect))

    def answer_probe(self, outcome: ProbeOutcome) -> None:
        """The readiness probe that was withheld is over."""
        self.tell(_probed(outcome))

    def run(self, until: float, stop_at: type[News]) -> tuple[float, Any] | None:
        """Let time pass until such news; None where there was none up to `until`."""
        while True:
            found = next((entry for entry in self.news if isinstance(entry[1], stop_at)), None)
            if found is not None:
                return found
            due_at = self.watch.deadline
            if due_at is None or due_at >= until:
                return None
            self.now = max(self.now, due_at)
            self.tell(Tick())

    def _seen(self, seen: EvidenceSeen) -> EvidenceSeen:
        if self._blind(self.now):
            return replace(seen, blind=True, at=self.now)
        return replace(seen, alive=self._evidence(self.now, seen.fresh), at=self.now, detail="told")


def _probed(outcome: ProbeOutcome) -> Probed:
    return Probed(epoch=1, outcome=outcome, detail="told", traits=ServerTraits())
