"""ProcessActor: starts and ends the server's process tree. `server.termination` decides when to
send which signal.

Receives Launch, Terminate, CheckServer and MeasureMemory. Answers a RequestActor's CheckServer with
ServerChecked. Sends the WorkerActor Unkillable, MemoryMeasured and, before a kill that asks for it
or follows a SIGTERM, EvidenceKept. Both this actor and the WorkerActor get the reports of the
launch itself (Launched, LaunchFailed, Died, Exited). Owns one server process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llama_worker.actors.base import Child, LiveSet, message_types
from llama_worker.actors.messages import WorkerMessage
from llama_worker.clock import ClockTimer
from llama_worker.errors import described_error
from llama_worker.mailbox import Mailbox, Tick
from llama_worker.ports import Host, ServerProcess
from llama_worker.request.messages import CheckServer, ServerChecked
from llama_worker.server import messages, termination

_EVIDENCE_LINES = 50  # lines of the server's output that are kept with the evidence of a kill


class ProcessActor(Child[messages.ProcessMessage]):
    """Starts and ends the server of one launch. When this actor ends, it kills the server."""

    role = "process"
    accepts = message_types(messages.ProcessMessage)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kill_timeout_s = self._config.timeouts.kill_timeout_s
        self._state: termination.ProcessState = termination.Absent()
        self._server: ServerProcess | None = None
        self._reports: _LaunchReports | None = None
        self._pid: int | None = None

    @property
    def _epoch(self) -> int:
        """The number of its launch."""
        return self.member.epoch

    def handle(self, message: messages.ProcessMessage) -> None:
        match message:
            case messages.Launch():
                self._launch()
            case messages.Terminate(keep_evidence=True):
                self._keep_evidence(after_grace=False)
            case CheckServer(request_id=request_id, reply_to=reply_to):
                gone = self._server is None or self._server.is_gone()
                reply_to.tell(ServerChecked(request_id=request_id, is_gone=gone))
            case messages.MeasureMemory():
                if self._pid is not None:
                    anon_bytes = self._runtime.anon_bytes(self._pid)
                    measured = messages.MemoryMeasured(epoch=self._epoch, anon_bytes=anon_bytes)
                    self.tell_worker(measured)
            case messages.Launched(pid=pid):
                self._pid = pid
            case messages.Exited():
                self._pid = None
            case _:
                pass
        before = self._state
        self._state, signal = termination.step(
            before, message, self._runtime.now(), kill_timeout_s=self._kill_timeout_s
        )
        if isinstance(self._state, termination.Stuck) and self._state != before:
            detail = termination.describe_stuck(self._pid, self._evidence())
            self.tell_worker(messages.Unkillable(epoch=self._epoch, detail=detail))
        if (
            isinstance(before, termination.Terminating)
            and isinstance(message, Tick)
            and signal is termination.Signal.KILL
        ):
            self._keep_evidence(after_grace=True)
        if signal is not None and self._server is not None:
            self._server.send(signal)
        self._alarm.set(termination.deadline(self._state))

    def release(self, failure: str | None) -> None:
        """Kill what is left of the server; the launch reports its end. If there was no launch,
        report that there will be none."""
        if self._server is None:
            why = failure or "another actor of this launch has ended"
            detail = f"the server was not started: {why}"
            self.tell_worker(messages.LaunchFailed(epoch=self._epoch, detail=detail))
        elif failure is None:
            self._kill()

    def on_crash(self, detail: str) -> None:
        """Tell of the crash before the kill: else the server would seem to have died by itself."""
        try:
            super().on_crash(detail)
        finally:
            self._kill()

    def abandon(self, detail: str) -> None:
        """Release and kill the server, on the parent's thread."""
        super().abandon(detail)
        self._kill()

    def _kill(self) -> None:
        server, reports = self._server, self._reports
        if server is None or reports is None or reports.orphan_kill is not None or server.ended:
            return
        reports.orphan_kill = _OrphanKill(
            server=server,
            epoch=self._epoch,
            pid=self._pid,
            worker=self._worker,
            clock=self._runtime,
            kill_timeout_s=self._kill_timeout_s,
            state=termination.Present(),
        )
        reports.orphan_kill.handle(messages.Terminate(grace_s=0.0))

    def _launch(self) -> None:
        reports = self._reports = _LaunchReports(self.me(), self._worker, self._live)
        try:
            self._server = self._runtime.start_server(self._epoch, reports)
        except (RuntimeError, OSError) as error:
            # The system has no thread left, or the host exits.
            detail = f"cannot start the server: {described_error(error)}"
            reports.tell(messages.LaunchFailed(epoch=self._epoch, detail=detail))

    def _keep_evidence(self, *, after_grace: bool) -> None:
        tail, seen = self._runtime.log.tail(_EVIDENCE_LINES), self._evidence()
        self.tell_worker(
            messages.EvidenceKept(
                epoch=self._epoch, processes=seen, log_tail=tail, after_grace=after_grace
            )
        )

    def _evidence(self) -> Mapping[str, Any]:
        """Read from /proc, which does not block."""
        return self._runtime.process_evidence(self._pid) if self._pid is not None else {}


class _LaunchReports:
    """Passes a launch's reports on to the ProcessActor and the WorkerActor, if they are alive. The
    worker's end waits for it until LaunchFailed or Exited was passed on."""

    def __init__(
        self, me: Mailbox[messages.LaunchReport], worker: Mailbox[WorkerMessage], live: LiveSet
    ) -> None:
        self._me = me
        self._worker = worker
        self._live = live
        self.orphan_kill: _OrphanKill | None = None
        live.enter(self)

    def tell(self, message: messages.LaunchReport) -> bool:
        self._me.tell(message)
        is_delivered = self._worker.tell(message)
        if isinstance(message, messages.LaunchFailed | messages.Exited):
            if self.orphan_kill is not None:
                self.orphan_kill.cancel()
            self._live.leave(self)
        return is_delivered


@dataclass
class _OrphanKill:
    """Kills a server that outlives its ProcessActor. Only the server and its launch refer to this
    object, so it ends with them."""

    server: ServerProcess
    epoch: int
    pid: int | None
    worker: Mailbox[WorkerMessage]
    clock: Host
    kill_timeout_s: float
    state: termination.ProcessState
    timer: ClockTimer | None = None

    def cancel(self) -> None:
        """Cancel the timer, since the server is gone. Any thread."""
        if self.timer is not None:
            self.timer.cancel()

    def handle(self, message: messages.Terminate | Tick) -> None:
        now = self.clock.now()
        self.state, signal = termination.step(
            self.state, message, now, kill_timeout_s=self.kill_timeout_s
        )
        if signal is not None:
            self.server.send(signal)
        if isinstance(self.state, termination.Stuck):
            detail = termination.describe_stuck(self.pid, {})
            self.worker.tell(messages.Unkillable(epoch=self.epoch, detail=detail))
        at = termination.deadline(self.state)
        if at is not None:
            self.timer = self.clock.call_at(at, lambda: self.handle(Tick()))
        if self.server.ended:
            self.cancel()
