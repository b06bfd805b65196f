"""WatchdogActor: watches the server of one launch; its `ServerWatch` makes the decisions.

Receives PaceLearnt, Launch, Launched, Watch, Unwatch, ProbeNow, StopWatching, and what probes,
looks, GPUs and requests report. Sends each RequestActor ReportProgress, and the WorkerActor
BecameReady, StartupFailed, HealthLost, GpuFaulted, Stalled, Observed (for the evidence of a kill)
and PaceLearnt (for the next launch). Owns the probes under way.
"""

from __future__ import annotations

import contextlib
from typing import Any

from llama_worker.actors.base import Child, message_types
from llama_worker.config.command_flags import batch_tokens
from llama_worker.mailbox import Mailbox
from llama_worker.ports import Abortable
from llama_worker.request.messages import ReportProgress
from llama_worker.server import messages
from llama_worker.server.watch import ServerWatch


class WatchdogActor(Child[messages.WatchdogMessage]):
    """Watches one launch."""

    role = "watchdog"
    accepts = message_types(messages.WatchdogMessage)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._probes: dict[type, Abortable] = {}  # the latest of each kind
        self._requests: dict[int, Mailbox[ReportProgress]] = {}  # by id
        self._watch = ServerWatch(
            self._config.timeouts,
            epoch=self.member.epoch,
            probes_count=self._runtime.probes_count,
            batch_tokens=batch_tokens(self._config.server_cmd, self._config.env),
        )

    def handle(self, message: messages.WatchdogMessage) -> None:
        match message:
            case messages.Watch(request_id=request_id, request=request) if request is not None:
                self._requests[request_id] = request
            case messages.Unwatch(record):
                self._requests.pop(record.request_id, None)
            case _:
                pass
        for effect in self._watch.step(message, self._runtime.now()):
            self._carry_out(effect)
        self._alarm.set(self._watch.deadline)

    def release(self, failure: str | None) -> None:
        self._abort_probes()

    def _carry_out(self, effect: messages.WatchEffect) -> None:
        match effect:
            case messages.AskForProgress(liveness_at=liveness_at, for_verdict=for_verdict):
                question = ReportProgress(
                    liveness_at=liveness_at, for_verdict=for_verdict, reply_to=self.me()
                )
                for request in self._requests.values():
                    request.tell(question)
            case messages.Look():
                self._runtime.look(effect, self._watch.root_pid, self.me())
            case messages.BecameReady(epoch=epoch):
                self.tell_worker(effect)
                with contextlib.suppress(RuntimeError):  # no thread left: GPUs are not watched
                    self._runtime.watch_gpus(epoch, self._watch.root_pid, self.me())
            case messages.ProbeReadiness(epoch=epoch, first=first):
                self._probes[messages.ProbeReadiness] = self._runtime.probe_readiness(
                    epoch, self._watch.root_pid, first=first, reply_to=self.me()
                )
            case messages.LookAtSlots():
                look = self._runtime.look_at_slots(effect, self.me())
                self._probes[messages.LookAtSlots] = look
            case messages.AbortProbes():
                self._abort_probes()
            case _:
                self.tell_worker(effect)

    def _abort_probes(self) -> None:
        for probe in self._probes.values():
            probe.abort()
        self._probes.clear()
