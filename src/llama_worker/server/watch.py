"""Watches one launch, and decides about its startup, its health and its silent requests.

Sans-IO: `step` takes a message and the time, and returns the orders and reports that follow, in
order; `deadline` is the instant of the next `Tick`. A *probe* asks the server whether it is ready;
a *look* asks a liveness probe what the server's processes did lately, or `/slots` what its slots
do. Instants (`*_at`, `now`) are monotonic seconds.

| in | what happens | then in |
| --- | --- | --- |
| waiting | Launch | starting |
| waiting | adopt | ready |
| waiting | StopWatching | over |
| starting | READY | ready |
| starting | UNAUTHORIZED | over |
| starting | CANARY_FAILED | over |
| starting | OTHER_PROCESS | over |
| starting | overdue | over |
| starting | StopWatching | over |
| ready | StopWatching | over |

READY, UNAUTHORIZED, CANARY_FAILED and OTHER_PROCESS are outcomes of a probe; everything else leaves
the state as it is. The WorkerActor decides whether an unhealthy or stalled server is ended.

While ready, the watch wakes for the health probe, for verdicts only while a request is in flight,
and for the slots only while a request is suspected.
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

from llama_worker.clock import earliest
from llama_worker.config.profiles import TimeoutProfile
from llama_worker.mailbox import Tick
from llama_worker.request.messages import ProgressReported
from llama_worker.request.table import RequestRecord
from llama_worker.server import health, messages
from llama_worker.server.blame import ProbeNow, is_busy
from llama_worker.server.liveness import LookRounds
from llama_worker.server.request_watch import ENDED_ID, RequestWatch
from llama_worker.server.slots import LOOK_TIMEOUT_S
from llama_worker.server.traits import answers_during_batches
from llama_worker.types.worker import StartFailReason

FIRST_LOOK_S = 0.5  # after the first request began
_RETRY_S = 1.0  # until a probe that could not be made, or decided nothing, is made again


class ServerWatch:
    """Watches the server of launch `epoch`, which computes at most `batch_tokens` in one batch
    (None: unknown). Not thread-safe: one actor at a time."""

    def __init__(
        self,
        profile: TimeoutProfile,
        *,
        epoch: int,
        probes_count: int,
        batch_tokens: int | None = None,
    ) -> None:
        self.root_pid = 0  # 0 before there is a process
        self._profile = profile
        self._epoch = epoch
        # StartupWatch before READY, then HealthCounter; None while it waits for the launch.
        self._stage: health.StartupWatch | health.HealthCounter | None = None
        self._is_over = False
        self._effects: list[messages.WatchEffect] = []
        self._rounds = LookRounds(probes_count)
        self._look_at: float | None = None
        self._probe_at: float | None = None
        self._probes = health.ReadinessProbes()
        self._requests = RequestWatch(profile, batch_tokens=batch_tokens)
        self._watched_since: float | None = None  # when watching began; None after its first look
        self._activity: dict[int, str] = {}  # by liveness probe: its latest detail

    @property
    def deadline(self) -> float | None:
        """When a `Tick` is due; None: never."""
        if self._is_over:
            return None
        return earliest(self._look_at, self._probe_at, self._requests.slots.deadline)

    def step(self, message: messages.WatchdogMessage, now: float) -> list[messages.WatchEffect]:
        """The effects to carry out now, in order. A message about another launch is dropped."""
        self._effects = []
        is_of_another = getattr(message, "epoch", self._epoch) != self._epoch
        if not self._is_over and not is_of_another:
            self._handle(message, now)
        return self._effects

    def adopt(self, now: float) -> None:
        """Watch a server that this program did not start: it counts as ready, and several servers
        may share its address."""
        assert self.state == "waiting"
        self._requests.slots_are_reliable = False
        self._stage = health.HealthCounter(since=now)
        self._probe_at = health.next_probe_at(self._profile, now)

    @property
    def state(self) -> Literal["waiting", "starting", "ready", "over"]:
        """The current state in the module's table."""
        if self._is_over:
            return "over"
        match self._stage:
            case None:
                return "waiting"
            case health.StartupWatch():
                return "starting"
            case health.HealthCounter():
                return "ready"

    def _handle(self, message: messages.WatchdogMessage, now: float) -> None:
        match message:
            case Tick():
                self._tick(now)
            case messages.PaceLearnt(pace=pace):
                self._requests.pace = pace.copy()
            case messages.Launch():
                self._stage = health.StartupWatch(began_at=now, worked_at=now)
                self._probe_at = self._stage.next_probe_at(now)
            case messages.Launched(pid=pid):
                self.root_pid = pid
                self._begin_round(fresh=True)
                self._probe_at = now + health.FIRST_PROBE_S
            case messages.StopWatching():
                if self._stage is not None:
                    self._effects.append(messages.PaceLearnt(self._requests.pace))
                self._stop_watching()
            case messages.Watch(request_id=request_id):
                self._watch(request_id, now)
            case messages.Unwatch(record):
                self._unwatch(record, now)
            case ProbeNow(cause=cause):
                self._probe_now(cause, now)
            case messages.EvidenceSeen():
                self._evidence_seen(message, now)
            case messages.Probed():
                self._probed(message, now)
            case messages.SlotsSeen():
                self._slots_seen(message, now)
            case ProgressReported(progress=progress, for_verdict=for_verdict):
                self._give_up(
                    self._requests.record_progress(progress, now, for_verdict=for_verdict), now
                )
            case messages.GpuFaulted():
                self._gpu_faulted(message, now)
            case _:
                assert_never(message)

    def _stop_watching(self) -> None:
        self._is_over = True
        self._effects.append(messages.AbortProbes())

    def _tick(self, now: float) -> None:
        if self._probe_at is not None and now >= self._probe_at:
            self._probe_due(now)
        if self._look_at is not None and now >= self._look_at:
            self._look_due(now)
        slots = self._requests.slots
        if slots.deadline is not None and now >= slots.deadline:
            self._look_at_slots(now)

    def _look_at_slots(self, now: float) -> None:
        timeout_s = self._requests.slots.begin_look(now)
        if timeout_s is not None:
            self._effects.append(messages.LookAtSlots(epoch=self._epoch, timeout_s=timeout_s))

    # ------------------------------------------------------------ startup and health

    def _probe_due(self, now: float) -> None:
        if isinstance(self._stage, health.StartupWatch):
            overdue = self._stage.overdue(self._profile, now)
            if overdue is not None:
                self._fail_startup(StartFailReason.STARTUP_TIMEOUT, overdue, now)
                return
            self._probe_at = self._stage.next_probe_at(now)
            if not self.root_pid:
                return  # no process yet
            self._begin_round(fresh=False)
        else:
            self._probe_at = health.next_probe_at(self._profile, now)
        self._probe(now)

    def _probe(self, now: float, *, failure_counts: bool = True) -> None:
        if not self._probes.begin(now, failure_counts=failure_counts):
            return
        self._ask_for_progress(for_verdict=False)  # data received by now overrides a failure
        first = isinstance(self._stage, health.StartupWatch)
        self._effects.append(messages.ProbeReadiness(epoch=self._epoch, first=first))

    def _probed(self, probed: messages.Probed, now: float) -> None:
        began_at = self._probes.began_at
        if began_at is None:
            return
        if probed.outcome is messages.ProbeOutcome.READY and now - began_at <= LOOK_TIMEOUT_S:
            self._requests.probe_answered_at = began_at
        failure_counts = self._probes.ended()
        if probed.outcome is not messages.ProbeOutcome.READY and not failure_counts:
            return
        match self._stage:
            case health.StartupWatch():
                self._startup_probed(self._stage, probed, now)
            case health.HealthCounter() if probed.outcome is messages.ProbeOutcome.NOT_ASKED:
                self._probe_again(now)
            case health.HealthCounter():
                self._health_probed(self._stage, probed, began_at, now)

    def _probe_again(self, now: float) -> None:
        """Soon, for the same cause."""
        self._probes.want(self._probes.cause)
        self._probe_at = min(self._probe_at or math.inf, now + _RETRY_S)

    def _startup_probed(
        self, launch: health.StartupWatch, probed: messages.Probed, now: float
    ) -> None:
        match probed.outcome:
            case messages.ProbeOutcome.READY:
                self._stage = health.HealthCounter(since=now)
                traits = probed.traits
                answers = answers_during_batches(traits.build)
                self._requests.slots.answers_during_batches = answers
                self._requests.takes_media = any((traits.modalities or {}).values())
                self._probe_at = health.next_probe_at(self._profile, now)
                self._effects.append(messages.BecameReady(epoch=self._epoch, traits=traits))
                self._look_at_slots(now)  # silence counts only if it ever answered
            case messages.ProbeOutcome.UNAUTHORIZED:  # no waiting mends that
                self._fail_startup(StartFailReason.UNAUTHORIZED, probed.detail, now)
            case messages.ProbeOutcome.CANARY_FAILED:
                self._fail_startup(StartFailReason.CANARY_FAILED, probed.detail, now)
            case messages.ProbeOutcome.OTHER_PROCESS:
                self._fail_startup(StartFailReason.PORT_IN_USE, probed.detail, now)
            case messages.ProbeOutcome.NOT_ASKED:  # meanwhile the server may have become ready
                self._stage = launch.probed(probed.detail).saw_work(now)
            case _:
                self._stage = launch.probed(probed.detail)

    def _health_probed(
        self, counter: health.HealthCounter, probed: messages.Probed, began_at: float, now: float
    ) -> None:
        ok, profile = probed.outcome is messages.ProbeOutcome.READY, self._profile
        doubt, data_at = self._probes.cause, self._requests.data_at
        in_flight_data_at = self._requests.data_of_others(ENDED_ID)
        serves = data_at is not None and data_at > began_at
        serves = serves or is_busy(in_flight_data_at, profile=profile, now=now)
        if doubt is not None and not ok and serves:
            self._probe_again(now)
            return
        self._stage, lost = counter.probed(
            ok=ok, detail=probed.detail, data_at=data_at, profile=profile, now=now
        )
        if doubt is not None and not ok:
            lost = f"{doubt}, and then the probe failed: {probed.detail}"
        if lost is not None:
            self._report_observed(now)
            self._effects.append(messages.HealthLost(epoch=self._epoch, detail=lost))
        elif self._probes.wanted is not None:
            self._probe(now)  # the finished probe began too early

    def _fail_startup(self, reason: StartFailReason, detail: str, now: float) -> None:
        self._report_observed(now)
        failed = messages.StartupFailed(epoch=self._epoch, reason=reason, detail=detail)
        self._effects.append(failed)
        self._stop_watching()

    def _probe_now(self, cause: str, now: float) -> None:
        if self.state == "ready":
            self._probes.want(cause)
            self._probe(now)

    def _gpu_faulted(self, faulted: messages.GpuFaulted, now: float) -> None:
        if self.state == "ready":
            self._report_observed(now)
            self._effects.append(faulted)

    # ------------------------------------------------------------ requests

    def _watch(self, request_id: int, now: float) -> None:
        if self._requests.begin(request_id):
            self._watched_since = now
            self._activity.clear()
            # By then most have ended, or have their first token, which a look would delay.
            self._look_at = now + min(FIRST_LOOK_S, self._profile.liveness_probe_interval_s / 2)

    def _unwatch(self, record: RequestRecord, now: float) -> None:
        self._give_up(self._requests.end(record, now), now)
        if not self._requests.ids:
            self._look_at = self._watched_since = None

    def _look_due(self, now: float) -> None:
        """Collect evidence, then ask for progress, then judge: no verdict uses old evidence."""
        interval_s = self._profile.liveness_probe_interval_s
        if self._watched_since is not None:
            self._look_at = self._watched_since + interval_s
            self._watched_since = None
            self._begin_round(fresh=True)
            if now < self._look_at or not self._rounds.complete:
                return
        self._look_at = now + interval_s
        a_probe_hangs = not self._rounds.complete
        self._begin_round(fresh=False)
        if self._rounds.complete or a_probe_hangs:
            self._report_observed(now)  # perhaps no probe reports anything
            self._ask_for_verdicts(now)  # judge by what the others saw

    def _begin_round(self, *, fresh: bool) -> None:
        self._effects += self._rounds.begin(fresh=fresh)

    def _evidence_seen(self, seen: messages.EvidenceSeen, now: float) -> None:
        again = self._rounds.returned(seen.look)
        if again is not None:
            self._effects.append(again)
        elif seen.by_shortage:
            self._rounds.not_made(seen.look)
        if not self._rounds.is_current(seen.look) or self._watched_since is not None:
            return
        self._activity[seen.look.probe] = seen.detail
        # During a look that failed for lack of resources, the server may have worked.
        if isinstance(self._stage, health.StartupWatch) and (seen.alive or seen.by_shortage):
            self._stage = self._stage.saw_work(seen.at)
        if self._requests.ids:
            self._requests.record_evidence(seen)
            self._report_observed(seen.at)
            if self._rounds.complete and (seen.by_shortage or not seen.look.fresh):
                self._ask_for_verdicts(now)

    def _slots_seen(self, seen: messages.SlotsSeen, now: float) -> None:
        slots = self._requests.slots
        slots.record_look(seen.look, now, by_shortage=seen.by_shortage)
        if slots.silent_since is not None:
            self._probe(now, failure_counts=False)  # does HTTP still answer?
        if slots.complete:
            # Progress that was reported before the last look is outdated.
            self._requests.drop_answers()
            self._ask_for_verdicts(now)

    def _ask_for_verdicts(self, now: float) -> None:
        self._give_up(self._requests.begin_round(now), now)
        self._ask_for_progress(for_verdict=True)

    def _ask_for_progress(self, *, for_verdict: bool) -> None:
        if self._requests.ids:
            at = self._requests.liveness_at
            self._effects.append(messages.AskForProgress(liveness_at=at, for_verdict=for_verdict))

    def _give_up(self, given_up: list[messages.GivenUp], now: float) -> None:
        if given_up:
            self._report_observed(now)
            stalled = messages.Stalled(epoch=self._epoch, given_up=tuple(given_up))
            self._effects.append(stalled)

    def _report_observed(self, now: float) -> None:
        """Report at every look and before every verdict: the worker may also kill for reasons of
        its own. What an idle server does is not looked at."""
        is_looked_at = self.state == "starting" or bool(self._requests.ids)
        activity = self._activity.values() if is_looked_at else ()
        self._effects.append(
            messages.Observed(
                epoch=self._epoch,
                at=now,
                activity="; ".join(text for text in activity if text),
                liveness_at=self._requests.liveness_at,
                requests=tuple(self._requests.progress.values()),
            )
        )
