"""The real `ServerWatch` in virtual time: its orders are carried out at once, its alarm moves the
clock."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Self

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.mailbox import Tick
from llama_worker.request.messages import ProgressReported
from llama_worker.request.progress import Progress
from llama_worker.request.table import RequestRecord
from llama_worker.server.messages import (
    AbortProbes,
    AskForProgress,
    BecameReady,
    EvidenceSeen,
    Launch,
    Launched,
    Look,
    LookAtSlots,
    Probed,
    ProbeOutcome,
    ProbeReadiness,
    SlotsSeen,
    Unwatch,
    Watch,
    WatchdogMessage,
    WatchReport,
)
from llama_worker.server.slots import Slot, SlotsLook, SlotsTimeout
from llama_worker.server.traits import ServerTraits
from llama_worker.server.watch import ServerWatch
from llama_worker.types.request import RequestFailReason, RequestPhase, RequestState

RequestAt = Callable[[float], Progress]
SlotsAt = Callable[[float], tuple[Slot, ...] | SlotsTimeout | None]


def probed(outcome: ProbeOutcome, epoch: int = 1, **traits: Any) -> Probed:
    return Probed(epoch=epoch, outcome=outcome, detail="told", traits=ServerTraits(**traits))


def unwatch(
    request_id: int, *, completed: bool = False, is_broken_off: bool = False, **kept: Any
) -> Unwatch:
    """A request has ended: completed, given up in the server's work, or refused by it. `kept`: what
    else its record holds."""
    why = RequestFailReason.STALL_TIMEOUT if is_broken_off else RequestFailReason.HTTP_ERROR
    result: Any = {"state": RequestState.FAILED, "fail_reason": why}
    if completed:
        result = {"state": RequestState.COMPLETED, "fail_reason": None}
    status: Any = {}
    return Unwatch(
        RequestRecord(request_id=request_id, job_name="", status=status, result=result, **kept)
    )


def generating(data_at: float, request_id: int = 1) -> Progress:
    """A request that was sent at 0.0, gets data twice a second, and got its latest at `data_at`."""
    return Progress(
        request_id=request_id,
        phase=RequestPhase.GENERATING,
        dispatched_at=0.0,
        turn_started_at=0.0,
        headers_at=0.0,
        first_token_at=0.0,
        last_data_at=data_at,
        longest_gap_s=0.5,
    )


def silent(phase: RequestPhase, **changes: Any) -> Progress:
    """A request that was sent at 0.0 and brought nothing since 40.0."""
    progress = Progress(request_id=1, phase=phase, dispatched_at=0.0, turn_started_at=0.0)
    if phase is not RequestPhase.WAITING:
        progress = replace(progress, headers_at=1.0)
    if phase is RequestPhase.GENERATING:
        progress = replace(
            progress, first_token_at=30.0, last_data_at=40.0, tokens=10, longest_gap_s=0.5
        )
    return replace(progress, **changes)


def slot(*, decoded: int = 0, prompt: int = 20, task: int = 1) -> Slot:
    return Slot(
        slot_id=0, is_processing=True, task=task, prompt_tokens=prompt, decoded_tokens=decoded
    )


@dataclass(eq=False)
class VirtualWatch:
    """One launch, number 1, ordered at `now`. `news` is what the WorkerActor would be told, and
    when.

    At each instant `evidence` tells whether the server's processes are at work (it knows whether
    the look is a fresh one), `readiness` what a probe brings, `slots` what `/slots` says (None:
    nothing), `reads` whether its memory comes from disk, `blind` whether nobody can see. It is
    llama-server b`build`, with a model of these `modalities`; the answer to a probe takes
    `probes_take_s`.
    """

    profile: TimeoutProfile
    _: KW_ONLY
    evidence: Callable[[float, bool], bool] = lambda now, fresh: False
    readiness: Callable[[float], ProbeOutcome] = lambda now: ProbeOutcome.READY
    slots: SlotsAt = lambda now: None
    blind: Callable[[float], bool] = lambda now: False
    reads: Callable[[float], bool] = lambda now: False
    build: int | None = 11434
    modalities: dict[str, bool] | None = None
    probes_take_s: Callable[[float], float] = lambda now: 0.0
    now: float = 0.0
    news: list[tuple[float, WatchReport]] = field(default_factory=list, init=False)
    slots_asked_at: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.watch = ServerWatch(self.profile, epoch=1, probes_count=1)
        self._requests: dict[int, RequestAt] = {}
        self._answer: tuple[float, Probed] | None = None  # of a probe, that is on its way
        self._open_look: tuple[float, LookAtSlots] | None = None  # and until when
        self.tell(Launch(epoch=1))
        self.tell(Launched(epoch=1, pid=1))

    @classmethod
    def ready(cls, profile: TimeoutProfile, **world: Any) -> Self:
        """Since 0.0."""
        watch = cls(profile, now=-0.1, **world)
        assert watch.run(1.0, BecameReady) is not None
        return watch

    def begin(self, *requests: RequestAt) -> None:
        """The requests are sent now."""
        self._requests = {request(self.now).request_id: request for request in requests}
        for request_id in self._requests:
            self.tell(Watch(request_id=request_id))

    def tell(self, message: WatchdogMessage) -> None:
        """Hand over one message, and every answer that it brings about."""
        if isinstance(message, Unwatch):
            del self._requests[message.record.request_id]
        messages = deque([message])
        while messages:
            for effect in self.watch.step(messages.popleft(), self.now):
                match effect:
                    case Look():
                        messages.append(self._seen(effect))
                    case ProbeReadiness():
                        traits: Any = {"build": self.build, "modalities": self.modalities}
                        answer = probed(self.readiness(self.now), **traits)
                        takes_s = self.probes_take_s(self.now)
                        if takes_s:
                            self._answer = (self.now + takes_s, answer)
                        else:
                            messages.append(answer)
                    case AskForProgress(for_verdict=for_verdict):
                        for request_id in sorted(self._requests):
                            progress = self._requests[request_id](self.now)
                            messages.append(
                                ProgressReported(progress=progress, for_verdict=for_verdict)
                            )
                    case LookAtSlots():
                        self.slots_asked_at.append(self.now)
                        self._open_look = (self.now + effect.timeout_s, effect)
                        messages += self._slots_seen()
                    case AbortProbes():
                        pass
                    case _:
                        self.news.append((self.now, effect))

    def run(self, until: float, stop_at: type[WatchReport]) -> tuple[float, Any] | None:
        """Let time pass until such news; None where there was none up to `until`."""
        while True:
            found = next((entry for entry in self.news if isinstance(entry[1], stop_at)), None)
            due_at = self.watch.deadline
            if self._open_look is not None:
                look_at = min(self.now + 0.5, self._open_look[0])
                due_at = look_at if due_at is None else min(due_at, look_at)
            if found is not None or due_at is None or due_at >= until:
                return found
            if self._answer is not None and self._answer[0] <= due_at:
                (self.now, answer), self._answer = self._answer, None
                self.tell(answer)
                continue
            if self._open_look is not None and due_at == look_at:
                self.now = look_at
                for seen in self._slots_seen():
                    self.tell(seen)
                continue
            self.now = max(self.now, due_at)
            self.tell(Tick())

    def _slots_seen(self) -> Iterator[SlotsSeen]:
        """The answer to the open look; nothing, as long as there is none."""
        assert self._open_look is not None
        until, order = self._open_look
        slots = self.slots(self.now)
        if isinstance(slots, SlotsTimeout) and self.now < until:
            return
        self._open_look = None
        look = SlotsLook(asked_at=self.now, slots=slots) if isinstance(slots, tuple) else slots
        yield SlotsSeen(epoch=order.epoch, look=look, by_shortage=self.blind(self.now))

    def _seen(self, look: Look) -> EvidenceSeen:
        if self.blind(self.now):
            return EvidenceSeen(look=look, by_shortage=True, at=self.now)
        alive, reads = self.evidence(self.now, look.fresh), self.reads(self.now)
        return EvidenceSeen(look=look, alive=alive, reads=reads, at=self.now, detail="told")
