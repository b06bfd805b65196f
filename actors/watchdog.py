"""WatchdogActor: looks at the server, and judges.

Receives WatchLaunch, WatchStartup, Watch, Unwatch, ProbeNow, StandDown. Sends each RequestActor ReportProgress, the
WorkerActor BecameReady, StartupFailed, HealthLost, Stalled and, for the evidence of a kill, Observed. Owns the liveness
probes and the readiness probe that is out.
While READY it wakes for the health probe, and for verdicts only while a request is in flight.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import assert_never

from llama_worker.actors.base import LiveCount, SupervisedActor
from llama_worker.config import WorkerConfig
from llama_worker.messages import (
    BecameReady,
    EvidenceSeen,
    HealthLost,
    LookDue,
    Mailbox,
    Observed,
    Probed,
    ProbeDue,
    ProbeNow,
    ProbeOutcome,
    ProgressReported,
    ReportProgress,
    RequestMessage,
    Stalled,
    StandDown,
    StartupFailed,
    Unwatch,
    Watch,
    WatchdogMessage,
    WatchLaunch,
    WatchStartup,
    WorkerMessage,
)
from llama_worker.profiles import TimeoutProfile
from llama_worker.runtime.probe_rounds import ProbeRounds
from llama_worker.runtime.readiness import ServerProbe
from llama_worker.runtime.timers import Timer, call_at
from llama_worker.server.health import HealthCounter
from llama_worker.server.startup import StartupWatch
from llama_worker.server.timeouts import DataLedger, Inquiry, Progress, busy_neighbour, verdict
from llama_worker.types import LivenessProbe, StartFailReason


class WatchdogActor(SupervisedActor[WatchdogMessage]):
    """Watches one launch at a time."""

    role = "watchdog"

    def __init__(
        self,
        parent: Mailbox[WorkerMessage],
        live_count: LiveCount,
        config: WorkerConfig,
        probes: Sequence[LivenessProbe],
    ) -> None:
        super().__init__(parent, live_count)
        self._worker = parent
        self._config = config
        self._profile: TimeoutProfile = config.timeouts
        self._probe_rounds = ProbeRounds(probes, config.name, self.me())
        self._requests: dict[int, Mailbox[RequestMessage]] = {}
        self._timers: dict[type[LookDue | ProbeDue], Timer] = {}
        self._epoch = 0  # of the watched launch; 0: none
        self._pid = 0
        self._startup: StartupWatch | None = None
        self._health: HealthCounter | None = None
        self._doubt: str | None = None  # why a probe is wanted out of turn
        self._suspicion: str | None = None  # why the one under way was wanted
        self._ledger = DataLedger()
        self._liveness_at: float | None = None
        self._activity: dict[int, str] = {}  # what each liveness probe said last
        self._progress: dict[int, Progress] = {}  # what each request said last
        self._inquiry = Inquiry()
        self._server_probe: ServerProbe | None = None  # the readiness probe that has not answered yet

    def handle(self, message: WatchdogMessage) -> None:
        """See the messages' own docstrings. News of another launch than the watched one is dropped."""
        now = time.monotonic()
        match message:
            case WatchLaunch(epoch=epoch):
                self._stand_down()
                self._epoch = epoch
                self._startup = StartupWatch.begin(now)
                self._set_timer(ProbeDue, self._startup.first_probe_at(now))
            case WatchStartup(epoch=epoch, pid=pid):
                if epoch == self._epoch and self._startup is not None:
                    self._pid = pid
                    self._look(fresh=True)
                    self._set_timer(ProbeDue, self._startup.first_probe_at(now))
            case StandDown():
                self._stand_down()
            case Watch(request_id=request_id, request=request):
                self._requests[request_id] = request
                if len(self._requests) == 1:
                    self._liveness_at = None
                    self._look(fresh=True)
                    self._set_timer(LookDue, now + self._profile.liveness_probe_interval_s)
            case Unwatch(request_id=request_id, data_at=data_at):
                self._progress.pop(request_id, None)
                if self._requests.pop(request_id, None) is not None:
                    self._ledger = self._ledger.heard(request_id, data_at)
                    self._inquiry = self._inquiry.without(request_id)
                    self._judge_when_all_are_heard(now)
                if not self._requests:
                    self._cancel_timer(LookDue)
            case ProbeNow(epoch=epoch, cause=cause):
                if epoch == self._epoch and self._startup is None:
                    self._doubt = self._doubt or cause
                    self._probe()
            case LookDue(epoch=epoch):
                if epoch == self._epoch and self._requests:
                    self._look_due(now)
            case ProbeDue(epoch=epoch):
                if epoch == self._epoch:
                    self._probe_due(now)
            case EvidenceSeen(epoch=epoch):
                if self._probe_rounds.returned(message) and epoch == self._epoch:
                    self._evidence(message)
            case Probed(epoch=epoch):
                if epoch == self._epoch:
                    self._server_probe = None
                    self._probed(message, now)
            case ProgressReported(progress=progress, for_verdict=for_verdict):
                if progress is not None and progress.request_id in self._requests:
                    self._ledger = self._ledger.heard(progress.request_id, progress.data_at)
                    self._progress[progress.request_id] = progress
                    if for_verdict:
                        self._inquiry = self._inquiry.answered(progress)
                        self._judge_when_all_are_heard(now)
            case _:
                assert_never(message)

    def release(self, failure: str | None) -> None:
        """Wake nobody any more."""
        self._stand_down()

    def _stand_down(self) -> None:
        for kind in (LookDue, ProbeDue):
            self._cancel_timer(kind)
        self._epoch, self._pid = 0, 0
        self._startup = self._health = self._suspicion = self._doubt = self._liveness_at = None
        self._requests.clear()
        self._progress.clear()
        self._activity.clear()
        self._ledger = DataLedger()
        self._inquiry = Inquiry()
        if self._server_probe is not None:
            self._server_probe.abort()
            self._server_probe = None

    # ------------------------------------------------------------ startup and health

    def _probe_due(self, now: float) -> None:
        if self._startup is not None:
            overdue = self._startup.overdue(self._profile, now)
            if overdue is not None:
                self._fail_startup(StartFailReason.STARTUP_TIMEOUT, overdue)
                return
            self._set_timer(ProbeDue, self._startup.next_probe_at(now))
            if not self._pid:
                return  # no process yet
            self._look(fresh=False)
        else:
            self._set_health_timer(now)
        self._probe()

    def _probe(self) -> None:
        if self._server_probe is not None:
            return  # where there is a doubt, another one follows it
        self._suspicion, self._doubt = self._doubt, None
        self._ask_for_progress(for_verdict=False)  # data that came by now outdoes a failure
        self._server_probe = ServerProbe(
            self._config, epoch=self._epoch, root_pid=self._pid, first=self._startup is not None, tell_to=self.me()
        )

    def _probed(self, probed: Probed, now: float) -> None:
        if self._startup is not None:
            if probed.outcome is ProbeOutcome.READY:
                self._startup = None
                self._health = HealthCounter(since=now)
                self._set_health_timer(now)
                self._worker.tell(BecameReady(epoch=self._epoch, traits=probed.traits))
            elif probed.outcome is ProbeOutcome.STRANGER:
                self._fail_startup(StartFailReason.PORT_IN_USE, probed.detail)
            return
        if self._health is None:
            return
        heard = self._ledger.latest
        ok = probed.outcome is ProbeOutcome.READY
        self._health, lost = self._health.probed(
            ok=ok,
            detail=probed.detail,
            data_at=heard[0][1] if heard else None,
            profile=self._profile,
            now=now,
        )
        if self._suspicion is not None and not ok:
            lost = f"{self._suspicion}, and then the probe failed: {probed.detail}"
        if lost is not None:
            self._tell_observed(now)
            self._worker.tell(HealthLost(epoch=self._epoch, detail=lost))
        elif self._doubt is not None:
            self._probe()  # the one that is done had begun before the doubt

    def _fail_startup(self, reason: StartFailReason, detail: str) -> None:
        self._tell_observed(time.monotonic())
        self._worker.tell(StartupFailed(epoch=self._epoch, reason=reason, detail=detail))
        self._stand_down()

    def _set_health_timer(self, now: float) -> None:
        interval_s = self._profile.health_probe_interval_s
        if interval_s is None:
            self._cancel_timer(ProbeDue)
        else:
            self._set_timer(ProbeDue, now + interval_s)

    # ------------------------------------------------------------ liveness and verdicts

    def _look_due(self, now: float) -> None:
        """First the evidence, then the question, then the verdict: none is given on old evidence."""
        self._set_timer(LookDue, now + self._profile.liveness_probe_interval_s)
        a_probe_hangs = not self._probe_rounds.complete
        if not self._look(fresh=False) or a_probe_hangs:
            self._ask_for_progress(for_verdict=True)  # judge by what the others saw

    def _look(self, *, fresh: bool) -> bool:
        return self._probe_rounds.look(self._pid, self._epoch, fresh=fresh)

    def _evidence(self, seen: EvidenceSeen) -> None:
        self._activity[seen.probe] = seen.detail
        if self._startup is not None and seen.alive:
            self._startup = self._startup.saw_work(seen.at)
        if self._requests:
            if seen.alive:
                self._liveness_at = seen.at
            self._tell_observed(seen.at)
            if self._probe_rounds.complete and not seen.fresh:
                self._ask_for_progress(for_verdict=True)

    def _ask_for_progress(self, *, for_verdict: bool) -> None:
        if for_verdict:
            self._judge_heard(time.monotonic())  # of an inquiry that somebody has not answered all this time
            self._inquiry = Inquiry(owing=frozenset(self._requests))
        order = ReportProgress(liveness_at=self._liveness_at, for_verdict=for_verdict, reply_to=self.me())
        for request in self._requests.values():
            request.tell(order)

    def _judge_when_all_are_heard(self, now: float) -> None:
        if not self._inquiry.owing:
            self._judge_heard(now)

    def _judge_heard(self, now: float) -> None:
        inquiry, self._inquiry = self._inquiry, Inquiry()
        for progress in inquiry.heard:
            self._judge(progress, now)

    def _judge(self, progress: Progress, now: float) -> None:
        neighbour_data_at = self._ledger.of_others(progress.request_id)
        found = verdict(
            progress,
            liveness_at=self._liveness_at,
            neighbour_data_at=neighbour_data_at,
            profile=self._profile,
            now=now,
        )
        if found is not None:
            self._tell_observed(now)
            self._worker.tell(
                Stalled(
                    epoch=self._epoch,
                    request_id=progress.request_id,
                    verdict=found,
                    busy_neighbour=busy_neighbour(neighbour_data_at, profile=self._profile, now=now),
                )
            )

    def _tell_observed(self, now: float) -> None:
        """With every look and before every verdict: the worker may also have reasons of its own for a kill."""
        self._worker.tell(
            Observed(
                epoch=self._epoch,
                at=now,
                activity="; ".join(text for text in self._activity.values() if text),
                liveness_at=self._liveness_at,
                requests=tuple(self._progress.values()),
            )
        )

    # ------------------------------------------------------------ timers

    def _set_timer(self, kind: type[LookDue | ProbeDue], at: float) -> None:
        self._cancel_timer(kind)
        me, epoch = self.me(), self._epoch
        self._timers[kind] = call_at(at, lambda: me.tell(kind(epoch=epoch)))

    def _cancel_timer(self, kind: type[LookDue | ProbeDue]) -> None:
        timer = self._timers.pop(kind, None)
        if timer is not None:
            timer.cancel()
