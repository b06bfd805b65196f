"""ProcessActor: the server's process tree. When it is sent which signal is decided in
`server.termination`.

Receives Launch, Terminate, CheckServer and MeasureMemory. Sends the WorkerActor Unkillable,
MemoryMeasured and, before a kill that asks for it or follows a SIGTERM, EvidenceKept. What the
launch itself tells (Launched, LaunchFailed, Died, Exited) both of them get. Owns one server
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llama_worker.actors.base import Child, LiveSet, message_types
from llama_worker.actors.messages import WorkerMessage
from llama_worker.errors import described_error
from llama_worker.mailbox import Mailbox, Tick
from llama_worker.ports import Host, ServerProcess, Timer
from llama_worker.request.messages import CheckServer, ServerChecked
from llama_worker.server import messages
from llama_worker.server.termination import (
    Absent,
    Present,
    ProcessState,
    Signal,
    Stuck,
    Terminating,
    deadline,
    describe_stuck,
    step,
)

_EVIDENCE_LINES = 50  # of the server's output, kept with the evidence of a kill


class ProcessActor(Child[messages.ProcessMessage]):
    """Starts the server of one launch, and ends it. The end of this actor kills the server."""

    role = "process"
    accepts = message_types(messages.ProcessMessage)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kill_timeout_s = self._config.timeouts.kill_timeout_s
        self._state: ProcessState = Absent()
        self._server: ServerProcess | None = None
        self._news: _LaunchNews | None = None
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
        self._state, signal = step(
            before, message, self._runtime.now(), kill_timeout_s=self._kill_timeout_s
        )
        if isinstance(self._state, Stuck) and self._state != before:
            detail = describe_stuck(self._pid, self._evidence())
            self.tell_worker(messages.Unkillable(epoch=self._epoch, detail=detail))
        if isinstance(before, Terminating) and isinstance(message, Tick) and signal is Signal.KILL:
            self._keep_evidence(after_grace=True)
        if signal is not None and self._server is not None:
            self._server.send(signal)
        self._alarm.set(deadline(self._state))

    def release(self, failure: str | None) -> None:
        """Kill what is left; the launch reports its end. Without a launch, report that there will
        be none."""
        if self._server is None:
            detail = f"it was not begun: {failure or 'another of the actors has ended'}"
            self.tell_worker(messages.LaunchFailed(epoch=self._epoch, detail=detail))
        elif failure is None:
            self._kill()

    def died(self, detail: str) -> None:
        """The cause is told before its effect is: else the server would seem to have died."""
        try:
            super().died(detail)
        finally:
            self._kill()

    def abandon(self, detail: str) -> None:
        """As `release`, on the parent's thread."""
        super().abandon(detail)
        self._kill()

    def _kill(self) -> None:
        server, news = self._server, self._news
        if server is None or news is None or news.last_kill is not None or server.ended:
            return
        news.last_kill = _LastKill(
            server=server,
            epoch=self._epoch,
            pid=self._pid,
            worker=self._worker,
            clock=self._runtime,
            kill_timeout_s=self._kill_timeout_s,
            state=Present(),
        )
        news.last_kill.handle(messages.Terminate(grace_s=0.0))

    def _launch(self) -> None:
        news = self._news = _LaunchNews(self.me(), self._worker, self._live)
        try:
            self._server = self._runtime.start_server(self._epoch, news)
        except (RuntimeError, OSError) as error:
            # The system has no thread left for it, or the host exits.
            detail = f"no process could be started: {described_error(error)}"
            news.tell(messages.LaunchFailed(epoch=self._epoch, detail=detail))

    def _keep_evidence(self, *, after_grace: bool) -> None:
        tail, seen = self._runtime.log.tail(_EVIDENCE_LINES), self._evidence()
        self.tell_worker(
            messages.EvidenceKept(
                epoch=self._epoch, processes=seen, log_tail=tail, after_grace=after_grace
            )
        )

    def _evidence(self) -> Mapping[str, Any]:
        """Plain reads of /proc: they take a millisecond and wait for nothing."""
        return self._runtime.process_evidence(self._pid) if self._pid is not None else {}


class _LaunchNews:
    """Passes on what a launch tells, to the ProcessActor and to the WorkerActor, as far as they
    live. Until LaunchFailed or Exited has passed, the worker's end waits for it."""

    def __init__(
        self, me: Mailbox[messages.ServerNews], worker: Mailbox[WorkerMessage], live: LiveSet
    ) -> None:
        self._me = me
        self._worker = worker
        self._live = live
        self.last_kill: _LastKill | None = None
        live.enter(self)

    def tell(self, message: messages.ServerNews) -> bool:
        self._me.tell(message)
        is_heard = self._worker.tell(message)
        if isinstance(message, messages.LaunchFailed | messages.Exited):
            if self.last_kill is not None:
                self.last_kill.cancel()
            self._live.leave(self)
        return is_heard


@dataclass
class _LastKill:
    """Kills a server whose ProcessActor has ended before it. Only the server and its launch refer
    to this object, so it ends with them."""

    server: ServerProcess
    epoch: int
    pid: int | None
    worker: Mailbox[WorkerMessage]
    clock: Host
    kill_timeout_s: float
    state: ProcessState
    timer: Timer | None = None

    def cancel(self) -> None:
        """The server is gone. Any thread."""
        if self.timer is not None:
            self.timer.cancel()

    def handle(self, message: messages.Terminate | Tick) -> None:
        now = self.clock.now()
        self.state, signal = step(self.state, message, now, kill_timeout_s=self.kill_timeout_s)
        if signal is not None:
            self.server.send(signal)
        if isinstance(self.state, Stuck):
            detail = describe_stuck(self.pid, {})
            self.worker.tell(messages.Unkillable(epoch=self.epoch, detail=detail))
        at = deadline(self.state)
        if at is not None:
            self.timer = self.clock.call_at(at, lambda: self.handle(Tick()))
        if self.server.ended:
            self.cancel()
