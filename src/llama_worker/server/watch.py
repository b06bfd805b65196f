"""Everything that is decided about a launch while it is watched: its startup, its health, its
silent requests.

Sans-IO: `step` takes a message and the time, and returns what is to be told and done, in order;
`deadline` is the instant of the next `Tick`. A *probe* asks the server whether it is ready; a
*look* asks a liveness probe what the server's processes did lately, or `/slots` what its slots do.
Instants (`*_at`, `now`) are monotonic seconds.

    Launch ──▶ starting ──BecameReady──▶ ready ──HealthLost, Stalled, StandDown──▶ idle
                  └──────StartupFailed, StandDown──────────────────────────────────▶ idle

While ready it wakes for the health probe, for verdicts only while a request is in flight, and for
the slots only while one is suspected. A message that comes long after the deadline comes after a
gap, in which this machine or this program did not run: then nothing is concluded before the world
has been looked at anew.
"""

from __future__ import annotations

import math
from typing import assert_never

from msgspec import Struct

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.gaps import FORGIVEN_IN_A_ROW, NO_GAPS, gap_s
from llama_worker.mailbox import Mailbox, Tick
from llama_worker.request.messages import ProgressReported, ReportProgress
from llama_worker.request.progress import Batch, Progress, newest
from llama_worker.server.builds import answers_in_batches
from llama_worker.server.health import HealthCounter
from llama_worker.server.look_rounds import LookRounds
from llama_worker.server.messages import (
    BecameReady,
    EvidenceSeen,
    GpuFaulted,
    HealthLost,
    Launch,
    Launched,
    Look,
    Observed,
    Probed,
    ProbeNow,
    ProbeOutcome,
    SlotsSeen,
    Stalled,
    StandDown,
    StartupFailed,
    Unwatch,
    Watch,
    WatchdogMessage,
)
from llama_worker.server.pace import Pace
from llama_worker.server.slots import (
    LOOK_TIMEOUT_S,
    SILENT_LOOKS,
    SILENT_S,
    SlotMoves,
    SlotsWatch,
    judge_by_slots,
)
from llama_worker.server.startup import StartupWatch
from llama_worker.server.timeouts import (
    DataLedger,
    Inquiry,
    Neighbours,
    SlotSigns,
    Verdict,
    busy_neighbour,
    describe,
    verdict,
)
from llama_worker.types import RequestFailReason, RequestPhase, StartFailReason

FIRST_LOOK_S = 0.5  # after the first request began
# health probes so rare are due on whole seconds: those of many workers wake the host once
_TOGETHER_FROM_S = 10.0
_RETRY_S = 1.0  # a probe that could not be made is made again


class ProbeReadiness(Struct, frozen=True, kw_only=True):
    """Ask the server whether it is ready; `Probed` is to follow. `first`: it was not, so far."""

    epoch: int
    root_pid: int
    first: bool


class LookAtSlots(Struct, frozen=True, kw_only=True):
    """Ask the server's `/slots`; `SlotsSeen` is to follow."""

    epoch: int


# `ReportProgress` goes to every request; `StandDown`: nobody waits for the server's answers any
# more.
Order = ProbeReadiness | StandDown | Look | LookAtSlots | ReportProgress
_Ordered = Launch | Launched | StandDown | Watch | Unwatch | ProbeNow
_Seen = EvidenceSeen | Probed | SlotsSeen | ProgressReported | GpuFaulted
# to the WorkerActor
News = BecameReady | StartupFailed | HealthLost | GpuFaulted | Stalled | Observed


class ServerWatch:
    """One launch at a time. Not thread-safe: one actor at a time. `me` is where requests report
    to."""

    def __init__(
        self, profile: TimeoutProfile, *, probes_count: int, me: Mailbox[WatchdogMessage]
    ) -> None:
        self._profile = profile
        self._me = me
        self._rounds = LookRounds(probes_count)
        self._pace = Pace()  # of every launch so far: they are of one configuration
        self._effects: list[Order | News] = []
        self._is_probing = False
        self._late_in_a_row = 0  # probes
        self._probe_counts = True  # a failure of the one under way counts against the server
        self._is_looking_at_slots = False
        self._reset()

    def _reset(self) -> None:
        """Of no launch."""
        self._epoch, self._pid = 0, 0
        # before READY, while READY; None: idle
        self._stage: StartupWatch | HealthCounter | None = None
        self._look_at: float | None = None
        self._probe_at: float | None = None
        self._doubt: str | None = None  # why a probe is wanted out of turn
        self._cause: str | None = None  # why the one under way was wanted
        self._probe_began_at = 0.0
        # When the probe began that was answered last within the time that a look has.
        self._answered_at: float | None = None
        self._requests: dict[int, Mailbox[ReportProgress]] = {}
        self._watched_since: float | None = None  # until the first look of this watching
        self._progress: dict[int, Progress] = {}  # what each request said last
        self._ledger = DataLedger()
        self._inquiry = Inquiry()
        self._liveness_at: float | None = None
        self._reads_at: float | None = None  # when its memory was last seen to come from disk
        self._is_cold = True  # nothing was computed in this launch so far
        self._activity: dict[int, str] = {}  # what each liveness probe said last
        self._slots = SlotsWatch()
        self._build_answers_in_batches = False
        self._media_left_at: float | None = None  # when a request with images or sounds ended
        # when the first request was broken off since the latest sign of work
        self._broken_off_at: float | None = None
        # when what may be a request's slot was seen to have moved
        self._moved_at: dict[int, float] = {}
        self._gaps = NO_GAPS
        self._gaps_in_a_row = 0
        self._probe_is_stale = False  # the one under way was begun before a gap
        self._round_began_at = 0.0
        self._is_blind = False  # in the present round of looks

    @property
    def root_pid(self) -> int:
        """Of the launch that is watched; 0 before there is one."""
        return self._pid

    @property
    def requests(self) -> dict[int, Mailbox[ReportProgress]]:
        """The requests in flight, by id."""
        return self._requests

    @property
    def deadline(self) -> float | None:
        """When a `Tick` is due; None: never."""
        instants = (self._look_at, self._probe_at, self._slots.deadline)
        return min((at for at in instants if at is not None), default=None)

    def step(self, message: WatchdogMessage, now: float) -> list[Order | News]:
        """Take note of the message; what is to be done now, in order. News of another launch is
        dropped."""
        self._effects = []
        self._notice_gap(now)
        match message:
            case Launch() | Launched() | StandDown() | Watch() | Unwatch() | ProbeNow():
                self._ordered(message, now)
            case Tick():
                self._tick(now)
            case EvidenceSeen() | Probed() | SlotsSeen() | ProgressReported() | GpuFaulted():
                self._seen(message, now)
            case _:
                assert_never(message)
        return self._effects

    def adopt(self, epoch: int, now: float) -> None:
        """Watch a server that runs already, and whose processes are nobody's here: it counts as
        ready."""
        assert self._stage is None
        self._epoch, self._stage = epoch, HealthCounter(since=now)
        self._set_health_probe(now)

    @property
    def is_watching(self) -> bool:
        """There is a launch."""
        return self._stage is not None

    def _ordered(self, order: _Ordered, now: float) -> None:
        match order:
            case Launch(epoch=epoch):
                self._stand_down()
                self._epoch = epoch
                self._stage = StartupWatch.begin(now)
                self._probe_at = self._stage.first_probe_at(now)
            case Launched(epoch=epoch, pid=pid):
                if epoch == self._epoch and isinstance(self._stage, StartupWatch):
                    self._pid = pid
                    self._begin_round(now, fresh=True)
                    self._probe_at = self._stage.first_probe_at(now)
            case StandDown():
                self._stand_down()
            case Watch(request_id=request_id, request=request):
                self._watch(request_id, request, now)
            case Unwatch():
                self._unwatch(order, now)
            case ProbeNow(epoch=epoch, cause=cause):
                if epoch == self._epoch and isinstance(self._stage, HealthCounter):
                    self._doubt = self._doubt or cause
                    self._probe(now)

    def _seen(self, seen: _Seen, now: float) -> None:
        match seen:
            case EvidenceSeen():
                self._evidence_seen(seen, now)
            case Probed(epoch=epoch):
                if epoch == self._epoch and self._is_probing:
                    self._is_probing = False
                    self._probed(seen, now)
            case SlotsSeen(epoch=epoch, look=look):
                if epoch == self._epoch:
                    self._is_looking_at_slots = False
                    is_complete = self._slots.seen(look, now)
                    if self._slots.silent_since is not None:
                        self._probe_beside(now)
                    if is_complete:
                        # what was told before the last look says too little
                        self._inquiry = Inquiry()
                        self._inquire(now)
            case ProgressReported(progress=progress, for_verdict=for_verdict):
                if progress is not None and progress.request_id in self._requests:
                    self._progress_reported(progress, now, for_verdict=for_verdict)
            case GpuFaulted(epoch=epoch):
                if epoch == self._epoch and isinstance(self._stage, HealthCounter):
                    self._tell_observed(now)
                    self._effects.append(seen)

    def _stand_down(self) -> None:
        self._reset()
        self._rounds.end()
        if self._is_probing or self._is_looking_at_slots:
            self._is_probing = self._is_looking_at_slots = False
            self._effects.append(StandDown())

    def _tick(self, now: float) -> None:
        if self._probe_at is not None and now >= self._probe_at:
            self._probe_due(now)
        if self._look_at is not None and now >= self._look_at:
            self._look_due(now)
        if self._slots.deadline is not None and now >= self._slots.deadline:
            self._slots.asked(now)
            self._look_at_slots()

    def _look_at_slots(self) -> None:
        if not self._is_looking_at_slots:
            self._is_looking_at_slots = True
            self._effects.append(LookAtSlots(epoch=self._epoch))

    def _notice_gap(self, now: float) -> None:
        """Whatever comes first after a gap finds the deadline long past."""
        due_at = self.deadline
        if due_at is None or now < due_at:
            return
        lost_s = gap_s(due_at, now)
        if not lost_s:
            self._gaps_in_a_row = 0
            return
        self._add_gap(now, lost_s)
        self._gaps_in_a_row += 1
        if self._gaps_in_a_row <= FORGIVEN_IN_A_ROW:
            self._look_anew(now)

    def _add_gap(self, now: float, lost_s: float) -> None:
        self._gaps = self._gaps.with_gap(now, lost_s)
        if isinstance(self._stage, StartupWatch):
            self._stage = self._stage.after_gap(lost_s)

    def _look_anew(self, now: float) -> None:
        """What is known is out of date, and what is under way may fail for no fault of the
        server's."""
        self._probe_is_stale = self._is_probing
        self._inquiry = Inquiry()
        self._slots.rest()
        if self._probe_at is not None and now >= self._probe_at:
            self._probe_at = now + _RETRY_S
        if self._look_at is not None and now >= self._look_at:
            self._begin_round(now, fresh=True)
            self._watched_since = None
            self._look_at = now + self._profile.liveness_probe_interval_s

    # ------------------------------------------------------------ startup and health

    def _probe_due(self, now: float) -> None:
        if isinstance(self._stage, StartupWatch):
            overdue = self._stage.overdue(self._profile, now)
            if overdue is not None:
                self._fail_startup(StartFailReason.STARTUP_TIMEOUT, overdue, now)
                return
            self._probe_at = self._stage.next_probe_at(now)
            if not self._pid:
                return  # no process yet
            self._begin_round(now, fresh=False)
        else:
            self._set_health_probe(now)
        self._probe(now)

    def _set_health_probe(self, now: float) -> None:
        interval_s = self._profile.health_probe_interval_s
        if interval_s is None:
            self._probe_at = None
        else:
            due_at = now + interval_s
            self._probe_at = math.ceil(due_at) if interval_s >= _TOGETHER_FROM_S else due_at

    def _probe_beside(self, now: float) -> None:
        """Does it answer anything while `/slots` is silent? A failure is no news."""
        if isinstance(self._stage, HealthCounter) and not self._is_probing:
            self._probe(now)
            self._probe_counts = False

    def _probe(self, now: float) -> None:
        self._probe_counts = True
        if self._is_probing:
            return  # where there is a doubt, another one follows it
        self._is_probing, self._probe_began_at = True, now
        self._cause, self._doubt = self._doubt, None
        self._ask_for_progress(for_verdict=False)  # data that came by now outdoes a failure
        first = isinstance(self._stage, StartupWatch)
        self._effects.append(ProbeReadiness(epoch=self._epoch, root_pid=self._pid, first=first))

    def _probed(self, probed: Probed, now: float) -> None:
        is_stale, self._probe_is_stale = self._probe_is_stale, False
        ok, is_late = probed.outcome is ProbeOutcome.READY, probed.outcome is ProbeOutcome.LATE
        self._late_in_a_row = self._late_in_a_row + 1 if is_late else 0
        no_news = (
            probed.outcome is ProbeOutcome.NO_NEWS
            or (is_late and self._late_in_a_row <= FORGIVEN_IN_A_ROW)
            or (is_stale and probed.outcome is ProbeOutcome.FAILED)
        )
        if ok and now - self._probe_began_at <= LOOK_TIMEOUT_S:
            self._answered_at = self._probe_began_at
        if not ok and not self._probe_counts:
            return
        if no_news and isinstance(self._stage, HealthCounter):
            self._doubt = self._doubt or self._cause
            self._probe_at = (
                now + _RETRY_S if self._probe_at is None else min(self._probe_at, now + _RETRY_S)
            )
        if no_news:
            return
        match self._stage:
            case StartupWatch():
                if probed.outcome is ProbeOutcome.READY:
                    self._stage = HealthCounter(since=now)
                    self._build_answers_in_batches = answers_in_batches(probed.traits.build)
                    self._set_health_probe(now)
                    self._effects.append(BecameReady(epoch=self._epoch, traits=probed.traits))
                    self._look_at_slots()  # its silence is news only if it ever answered
                elif probed.outcome is ProbeOutcome.UNFIT:
                    self._fail_startup(StartFailReason.CANARY_FAILED, probed.detail, now)
                elif probed.outcome is ProbeOutcome.STRANGER:
                    self._fail_startup(StartFailReason.PORT_IN_USE, probed.detail, now)
            case HealthCounter():
                self._health_probed(self._stage, probed, now)

    def _health_probed(self, health: HealthCounter, probed: Probed, now: float) -> None:
        ok = probed.outcome is ProbeOutcome.READY
        self._stage, lost = health.probed(
            ok=ok,
            detail=probed.detail,
            data_at=self._ledger.newest_at,
            profile=self._profile,
            now=now,
        )
        if self._cause is not None and not ok:
            lost = f"{self._cause}, and then the probe failed: {probed.detail}"
        if lost is not None:
            self._tell_observed(now)
            self._effects.append(HealthLost(epoch=self._epoch, detail=lost))
        elif self._doubt is not None:
            self._probe(now)  # the one that is done had begun before the doubt

    def _fail_startup(self, reason: StartFailReason, detail: str, now: float) -> None:
        self._tell_observed(now)
        self._effects.append(StartupFailed(epoch=self._epoch, reason=reason, detail=detail))
        self._stand_down()

    # ------------------------------------------------------------ liveness and verdicts

    def _watch(self, request_id: int, request: Mailbox[ReportProgress], now: float) -> None:
        self._requests[request_id] = request
        if len(self._requests) == 1:
            self._liveness_at = None
            self._watched_since = now
            # Most requests are over by then, or have their first token, which a look would delay.
            self._look_at = now + min(FIRST_LOOK_S, self._profile.liveness_probe_interval_s / 2)

    def _unwatch(self, order: Unwatch, now: float) -> None:
        request_id = order.request_id
        self._learn(request_id, order.batches)
        self._pace.forget(request_id)
        progress = self._progress.pop(request_id, None)
        if progress is not None and progress.has_media:
            self._media_left_at = now
        self._moved_at.pop(request_id, None)
        if self._requests.pop(request_id, None) is not None:
            self._ledger = self._ledger.heard(request_id, order.data_at)
            may_be_served = progress is None or progress.is_served
            if not order.completed and may_be_served and self._batch_of_one_gone_at is None:
                self._broken_off_at = now
            self._inquiry = self._inquiry.without(request_id)
            self._judge_when_all_are_heard(now)
        if not self._requests:
            self._look_at = self._watched_since = None
            self._slots.rest()

    def _look_due(self, now: float) -> None:
        """First the evidence, then the question, then the verdict: none is given on old
        evidence."""
        interval_s = self._profile.liveness_probe_interval_s
        if self._watched_since is not None:
            self._look_at = self._watched_since + interval_s
            self._watched_since = None
            self._begin_round(now, fresh=True)
            if now < self._look_at or not self._rounds.complete:
                return
        self._look_at = now + interval_s
        a_probe_hangs = not self._rounds.complete
        self._begin_round(now, fresh=False)
        if self._rounds.complete or a_probe_hangs:
            self._inquire(now)  # judge by what the others saw

    def _begin_round(self, now: float, *, fresh: bool) -> None:
        if self._is_blind:  # nobody could see what the server did in the round before
            self._add_gap(now, now - self._round_began_at)
        self._round_began_at, self._is_blind = now, False
        self._effects += self._rounds.begin(self._epoch, fresh=fresh)

    def _evidence_seen(self, seen: EvidenceSeen, now: float) -> None:
        again = self._rounds.returned(seen.look)
        if again is not None:
            self._effects.append(again)
        is_old = not self._rounds.counts(seen.look) or self._watched_since is not None
        if is_old or seen.look.epoch != self._epoch:
            return
        self._activity[seen.look.probe] = seen.detail
        self._is_blind = self._is_blind or seen.blind
        if isinstance(self._stage, StartupWatch) and seen.alive:
            self._stage = self._stage.saw_work(seen.at)
        if self._requests:
            if seen.alive:
                self._liveness_at = seen.at
            if seen.reads:
                self._reads_at = seen.at
            self._tell_observed(seen.at)
            if self._rounds.complete and not seen.look.fresh and not self._is_blind:
                self._inquire(now)

    def _inquire(self, now: float) -> None:
        """Before a verdict every request is asked."""
        self._judge_heard(now)  # of an inquiry that somebody has not answered all this time
        self._inquiry = Inquiry(owing=frozenset(self._requests))
        self._ask_for_progress(for_verdict=True)

    def _ask_for_progress(self, *, for_verdict: bool) -> None:
        if self._requests:
            self._effects.append(
                ReportProgress(
                    liveness_at=self._liveness_at, for_verdict=for_verdict, reply_to=self._me
                )
            )

    def _progress_reported(self, progress: Progress, now: float, *, for_verdict: bool) -> None:
        self._ledger = self._ledger.heard(progress.request_id, progress.data_at)
        self._progress[progress.request_id] = progress
        self._learn(progress.request_id, progress.batches)
        self._is_cold = self._is_cold and not progress.tokens
        if for_verdict:
            self._inquiry = self._inquiry.answered(progress)
            self._judge_when_all_are_heard(now)

    def _learn(self, request_id: int, batches: tuple[Batch, ...]) -> None:
        self._pace.learn(request_id, batches, self._gaps, is_cold=self._is_cold)
        self._is_cold = self._is_cold and not batches

    def _judge_when_all_are_heard(self, now: float) -> None:
        if not self._inquiry.owing:
            self._judge_heard(now)

    def _judge_heard(self, now: float) -> None:
        inquiry, self._inquiry = self._inquiry, Inquiry()
        if not inquiry.heard:
            return
        for progress in inquiry.heard:
            self._judge(progress, inquiry.heard, now)
        if self._slots.complete:
            self._slots.conclude(now)
        if any(self._is_suspect(progress, now) for progress in inquiry.heard):
            self._slots.suspect(now)
        else:
            self._slots.rest()

    def _is_suspect(self, progress: Progress, now: float) -> bool:
        heard_at = progress.data_at if progress.data_at is not None else progress.turn_started_at
        streams = (
            progress.phase not in (RequestPhase.TOOL, RequestPhase.DONE) and not progress.concluding
        )
        return streams and self._is_long_ago(heard_at, now)

    def _is_long_ago(self, at: float | None, now: float) -> bool:
        """For data, and what slots did: so long ago that who received it is suspected."""
        limit_s = self._profile.suspect_after_s
        return limit_s is not None and (at is None or now - at - self._gaps.lost_s(at) >= limit_s)

    def _judge(self, progress: Progress, all_heard: tuple[Progress, ...], now: float) -> None:
        request_id = progress.request_id
        found = verdict(
            progress,
            liveness_at=self._worked_at(request_id),
            neighbours=Neighbours(
                data_at=self._ledger.of_others(request_id),
                one_is_served=any(
                    other.is_served
                    for other in self._progress.values()
                    if other.request_id != request_id
                ),
                left_at=self._batch_of_one_gone_at,
            ),
            slots=SlotSigns(
                moved_at=self._moved_at.get(progress.request_id),
                any_moved_at=self._slots.moved_at,
                tells=self._slots.tells,
                may_read_unseen=self._slots.may_read_unseen
                or (self._slots.is_silent and not self._build_answers_in_batches),
            ),
            profile=self._profile,
            now=now,
            gaps=self._gaps,
        )
        found = found or self._judge_silent_slots(progress, all_heard, now)
        if found is not None:
            self._give_up(progress, found, now)
        elif self._slots.complete and self._is_suspect(progress, now):
            by_slots = judge_by_slots(
                self._slots.looks,
                progress,
                others=[other for other in all_heard if other.request_id != progress.request_id],
                all_are_silent=all(
                    self._is_long_ago(at, now)
                    for at in (self._ledger.newest_at, self._slots.moved_at, self._reads_at)
                ),
                still_since=newest(self._slots.still_since, self._reads_at),
                pace=Pace() if self._may_encode_media else self._pace,
                is_cold=self._is_cold,
                now=now,
                gaps=self._gaps,
            )
            match by_slots:
                case Verdict():
                    self._give_up(progress, by_slots, now)
                case SlotMoves():
                    self._moved_at[progress.request_id] = self._slots.looks[-1].asked_at

    @property
    def _batch_of_one_gone_at(self) -> float | None:
        """When a request was broken off whose batch may still be computed, as nobody has shown a
        sign of work since; None: there is none."""
        left_at = self._broken_off_at
        signs = (self._ledger.newest_at, self._slots.moved_at, self._liveness_at)
        is_over = left_at is None or any(at is not None and at > left_at for at in signs)
        return None if is_over else left_at

    @property
    def _may_encode_media(self) -> bool:
        """For a request that is gone: what is under way is finished first."""
        heard = (self._ledger.newest_at, self._slots.moved_at)
        left_at = self._media_left_at
        return left_at is not None and all(at is None or at < left_at for at in heard)

    def _worked_at(self, request_id: int) -> float | None:
        """The newest sign of work: by the server's processes, or by what may be the request's
        slot."""
        signs = (self._liveness_at, self._moved_at.get(request_id))
        return max((at for at in signs if at is not None), default=None)

    def _judge_silent_slots(
        self, progress: Progress, all_heard: tuple[Progress, ...], now: float
    ) -> Verdict | None:
        """The task queue is stuck where `/slots`, which had answered, no longer does, and the rest
        of HTTP goes on.

        Builds of 2025 and of spring 2026 answer it between two batches only: there it never counts,
        and nowhere while an image may be encoded, which nobody measured.
        """
        slots, since = self._slots, self._slots.silent_since
        if since is None or not self._is_suspect(progress, now):
            return None
        has_media = self._may_encode_media or any(each.has_media for each in all_heard)
        may_be_a_batch = has_media or not self._build_answers_in_batches
        if slots.silent_looks < SILENT_LOOKS or (may_be_a_batch and not slots.answers_in_batches):
            return None
        since = newest(since, self._ledger.newest_at, self._reads_at)
        silent_s = now - since - self._gaps.lost_s(since)
        answered_at = self._answered_at
        if silent_s < SILENT_S or answered_at is None or answered_at <= max(since, now - SILENT_S):
            return None
        shown = describe(progress, liveness_at=self._liveness_at, now=now)
        detail = f"/slots has not answered for {silent_s:.1f} s, /v1/models has; {shown}"
        return Verdict(reason=RequestFailReason.STALL_TIMEOUT, detail=detail, restart=True)

    def _give_up(self, progress: Progress, found: Verdict, now: float) -> None:
        self._tell_observed(now)
        neighbour_data_at = self._ledger.of_others(progress.request_id)
        busy = found.alone or busy_neighbour(neighbour_data_at, profile=self._profile, now=now)
        self._effects.append(
            Stalled(
                epoch=self._epoch,
                request_id=progress.request_id,
                verdict=found,
                busy_neighbour=busy,
            )
        )

    def _tell_observed(self, now: float) -> None:
        """With every look and before every verdict: the worker may also have reasons of its own for
        a kill."""
        self._effects.append(
            Observed(
                epoch=self._epoch,
                at=now,
                activity="; ".join(text for text in self._activity.values() if text),
                liveness_at=self._liveness_at,
                requests=tuple(self._progress.values()),
            )
        )
