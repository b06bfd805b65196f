"""WatchdogActor: watches the server; what follows from what it hears is the `ServerWatch`'s.

Receives Launch, Launched, Watch, Unwatch, ProbeNow, StandDown, and what probes, looks and requests report. Sends each
RequestActor ReportProgress, the WorkerActor BecameReady, StartupFailed, HealthLost, Stalled and, for the evidence of
a kill, Observed. Owns the readiness probe that is under way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from llama_worker.actors.base import LiveCount, SupervisedActor
from llama_worker.config import WorkerConfig
from llama_worker.messages import Mailbox, ReportProgress, Tick, WatchdogMessage, WorkerMessage
from llama_worker.runtime.look import look
from llama_worker.runtime.readiness import ReadinessProbe
from llama_worker.runtime.timers import Alarm
from llama_worker.server.watch import AbortProbe, Look, News, Order, ProbeReadiness, ServerWatch
from llama_worker.types import LivenessProbe


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
        self._probes = probes
        self._readiness: ReadinessProbe | None = None
        me = self.me()
        self._watch = ServerWatch(config.timeouts, probes_count=len(probes), me=me)
        self._alarm = Alarm(lambda: me.tell(Tick()))

    def handle(self, message: WatchdogMessage) -> None:
        """See the messages' own docstrings."""
        for effect in self._watch.step(message, time.monotonic()):
            self._carry_out(effect)
        self._alarm.set(self._watch.deadline)

    def release(self, failure: str | None) -> None:
        """Wake nobody any more."""
        self._alarm.set(None)
        self._abort_probe()

    def _carry_out(self, effect: Order | News) -> None:
        match effect:
            case ReportProgress():
                for request in self._watch.requests.values():
                    request.tell(effect)
            case Look(seen=seen, root_pid=root_pid):
                look(self._probes[seen.probe], seen, root_pid, self.me(), name=self._config.name)
            case ProbeReadiness(epoch=epoch, root_pid=root_pid, first=first):
                self._readiness = ReadinessProbe(
                    self._config, epoch=epoch, root_pid=root_pid, first=first, tell_to=self.me()
                )
            case AbortProbe():
                self._abort_probe()
            case _:
                self._worker.tell(effect)

    def _abort_probe(self) -> None:
        if self._readiness is not None:
            self._readiness.abort()
            self._readiness = None
