"""ProcessActor: the server's process tree and its output.

Receives Launch, Terminate, GetDebugInfo and, from the launch itself, Launched, LaunchFailed, Died,
Exited, which it passes on to the WorkerActor. Sends that also Unkillable and, before a kill that
asks for it, EvidenceKept. Owns at most one server process, and is the only reader of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llama_worker.actors.base import Alarm, Child, Line, LiveCount, members
from llama_worker.errors import described_error
from llama_worker.messages import (
    CheckServer,
    Died,
    EvidenceKept,
    Exited,
    GetDebugInfo,
    Launch,
    Launched,
    LaunchFailed,
    Mailbox,
    MeasureMemory,
    MemoryMeasured,
    ProcessMessage,
    ServerChecked,
    ServerNews,
    Terminate,
    Tick,
    Unkillable,
)
from llama_worker.runtime.ports import ServerProcess, Timer
from llama_worker.server.termination import (
    FORCE_S,
    Absent,
    ProcessState,
    Signal,
    Stuck,
    deadline,
    describe_stuck,
    step,
)
from llama_worker.types import StartFailReason

_EVIDENCE_LINES = 50  # of the server's output, kept with the evidence of a kill


class ProcessActor(Child[ProcessMessage]):
    """Starts the server and ends it. A crash of this actor kills the server."""

    role = "process"
    accepts = members(ProcessMessage)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kill_timeout_s = self._config.timeouts.kill_timeout_s
        self._state: ProcessState = Absent()
        self._server: ServerProcess | None = None
        self._news: _News | None = None  # of the launch
        self._pid: int | None = None
        self._alarm = Alarm(self._runtime, self.me())

    def handle(self, message: ProcessMessage) -> None:
        """Act, step the state of the process, carry out what follows."""
        match message:
            case Launch(epoch=epoch):
                self._launch(epoch)
            case Terminate(epoch=epoch, keep_evidence=True):
                self._keep_evidence(epoch)
            case GetDebugInfo(info=dict(info), reply=reply):
                reply.answer({**info, "recent_logs": self._runtime.log.lines()})
            case CheckServer(request_id=request_id, reply_to=reply_to):
                gone = self._server is None or self._server.is_gone()
                reply_to.tell(ServerChecked(request_id=request_id, is_gone=gone))
            case MeasureMemory(epoch=epoch):
                if self._pid is not None:
                    found = self._runtime.anon_bytes(self._pid)
                    self._worker.tell(MemoryMeasured(epoch=epoch, anon_bytes=found))
            case Launched(pid=pid):
                self._pid = pid
                self._worker.tell(message)
            case Died():
                self._worker.tell(message)
            case LaunchFailed() | Exited():
                self._server = self._pid = None
                self._worker.tell(message)
            case Tick():
                self._alarm.rang()
            case _:
                pass
        before = self._state
        self._state, signal = step(
            before, message, self._runtime.now(), kill_timeout_s=self._kill_timeout_s
        )
        if isinstance(self._state, Stuck) and self._state != before:
            detail = describe_stuck(self._pid, self._evidence())
            self._worker.tell(Unkillable(epoch=self._state.epoch, detail=detail))
        if signal is not None and self._server is not None:
            self._server.send(signal)
        self._alarm.set(deadline(self._state))

    def release(self, failure: str | None) -> None:
        """Kill what is left."""
        self._alarm.set(None)
        server = self._server
        if server is not None:
            server.send(Signal.KILL)
            assert self._news is not None
            now = self._runtime.now()
            self._news.until_the_end(
                self._runtime.call_at(now + FORCE_S, lambda: server.send(Signal.FORCE)),
                self._runtime.call_at(
                    now + self._kill_timeout_s, self._unkillable_unless_ended(server)
                ),
            )

    def abandon(self, detail: str) -> None:
        """Kill the server: signals and timers may be set from any thread."""
        self.release(detail)

    def will_report(self) -> bool:
        """A server that is being killed tells the worker itself once it is gone.

        One whose last word was said already may have said it to this mailbox, which nobody reads
        any more.
        """
        return self._server is not None and not self._server.ended

    def _launch(self, epoch: int) -> None:
        self._news = news = _News(self.me(), self._line, self._live_count)
        self._live_count.enter(news)  # until its last word: nobody is gone while a process is left
        try:
            self._server = self._runtime.start_server(epoch, news)
        except (
            RuntimeError,
            OSError,
        ) as error:  # no thread for it: the system has none left, or the host exits
            detail = f"no process could be started: {described_error(error)}"
            news.tell(LaunchFailed(epoch=epoch, reason=StartFailReason.SPAWN_FAILED, detail=detail))

    def _keep_evidence(self, epoch: int) -> None:
        tail = self._runtime.log.tail(_EVIDENCE_LINES)
        self._worker.tell(EvidenceKept(epoch=epoch, processes=self._evidence(), log_tail=tail))

    def _evidence(self) -> Mapping[str, Any]:
        """Plain reads of /proc: they take a millisecond and wait for nothing."""
        return self._runtime.process_evidence(self._pid) if self._pid is not None else {}

    def _unkillable_unless_ended(self, server: ServerProcess) -> Callable[[], object]:
        """For when this actor, which would see that SIGKILL has no effect, is gone."""
        if isinstance(self._state, Absent):
            return lambda: None
        worker, stuck = (
            self._line.parent,
            Unkillable(epoch=self._state.epoch, detail=describe_stuck(self._pid, {})),
        )
        return lambda: server.ended or worker.tell(stuck)


class _News:
    """What a launch tells: the ProcessActor, or the worker itself where that one did not live to
    hear of the end."""

    def __init__(self, me: Mailbox[ServerNews], line: Line, live_count: LiveCount) -> None:
        self._me = me
        self._line = line
        self._live_count = live_count
        self._timers: tuple[Timer, ...] = ()
        self._is_over = False

    def tell(self, message: ServerNews) -> bool:
        heard = not self._line.is_cut and self._me.tell(message)
        if isinstance(message, LaunchFailed | Exited):
            self._is_over = True
            self._cancel_timers()
            if not heard:
                self._line.parent.tell(message)
            self._live_count.leave(self)
        return heard

    def until_the_end(self, *timers: Timer) -> None:
        """They are cancelled with the last word, which may have been said meanwhile."""
        self._timers = timers
        if self._is_over:
            self._cancel_timers()

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
