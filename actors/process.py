"""ProcessActor: the server's process tree and its output.

Receives Launch, Terminate. Sends the WorkerActor Launched, LaunchFailed, Died, Exited and, before a kill that asks for
it, EvidenceKept. Owns at most one ServerProcess.
"""

from __future__ import annotations

import time
from typing import assert_never

from llama_worker.actors.base import LiveCount, SupervisedActor
from llama_worker.config import WorkerConfig
from llama_worker.messages import (
    Died,
    EvidenceKept,
    Exited,
    Launch,
    Launched,
    LaunchFailed,
    Mailbox,
    ProcessMessage,
    ServerDied,
    ServerGone,
    ServerNotStarted,
    ServerStarted,
    Terminate,
    Tick,
    WorkerMessage,
)
from llama_worker.runtime.liveness_probes import process_evidence
from llama_worker.runtime.log_ring import LogRing
from llama_worker.runtime.server_process import ServerNews, ServerProcess, host_environment, server_environment
from llama_worker.runtime.timers import Alarm, call_at
from llama_worker.server import termination
from llama_worker.server.termination import FORCE_S, Absent, Present, ProcessState, Signal
from llama_worker.types import StartFailReason


class ProcessActor(SupervisedActor[ProcessMessage]):
    """Starts the server and ends it. A crash of this actor kills the server."""

    role = "process"

    def __init__(
        self, parent: Mailbox[WorkerMessage], live_count: LiveCount, config: WorkerConfig, log: LogRing
    ) -> None:
        super().__init__(parent, live_count)
        self._worker = parent
        self._config = config
        self._log = log
        self._state: ProcessState = Absent()
        self._server: ServerProcess | None = None
        self._pid: int | None = None
        me = self.me()
        self._alarm = Alarm(lambda: me.tell(Tick()))

    def handle(self, message: ProcessMessage) -> None:
        """See the messages' own docstrings."""
        now = time.monotonic()
        match message:
            case Launch(epoch=epoch):
                self._state = Present(epoch)
                self._server = self._launch(epoch)
            case Terminate(epoch=epoch, grace_s=grace_s, keep_evidence=keep_evidence):
                if keep_evidence and self._pid is not None:
                    # Plain reads of /proc: they take a millisecond and wait for nothing.
                    self._worker.tell(EvidenceKept(epoch=epoch, processes=process_evidence(self._pid)))
                self._apply(termination.terminate(self._state, epoch=epoch, grace_s=grace_s, now=now))
            case Tick():
                self._apply(termination.tick(self._state, now=now))
            case ServerStarted(epoch=epoch, pid=pid):
                self._pid = pid
                self._worker.tell(Launched(epoch=epoch, pid=pid))
            case ServerDied(epoch=epoch, returncode=returncode):
                self._worker.tell(Died(epoch=epoch, returncode=returncode))
            case ServerNotStarted() | ServerGone():
                self._state, self._server, self._pid = Absent(), None, None
                self._worker.tell(_ended(message))
            case _:
                assert_never(message)

    def release(self, failure: str | None) -> None:
        """Kill what is left."""
        self._alarm.set(None)
        server = self._server
        if server is not None:
            server.send(Signal.KILL)
            call_at(time.monotonic() + FORCE_S, lambda: server.send(Signal.FORCE))

    def will_report(self) -> bool:
        """A server that is being killed tells the worker itself once it is gone.

        One whose last word was said already may have said it to this mailbox, which nobody reads any more.
        """
        return self._server is not None and not self._server.ended

    def _launch(self, epoch: int) -> ServerProcess | None:
        me, worker, live_count = self.me(), self._worker, self._live_count

        def tell(news: ServerNews) -> None:
            heard = me.tell(news)
            if isinstance(news, ServerStarted | ServerDied):
                return
            if not heard:  # the end must reach the worker also when this actor did not live to hear of it
                worker.tell(_ended(news))
            live_count.leave()

        environment = server_environment(host_environment(), self._config.env)
        live_count.enter()  # until its last word: nobody is gone while a process is left
        try:
            return ServerProcess(
                epoch=epoch,
                command=tuple(self._config.server_cmd),
                environment=environment,
                address=(self._config.host, self._config.port),
                log=self._log,
                tell=tell,
                name=f"llama_worker-{self._config.name}",
            )
        except RuntimeError as error:  # no thread for it: the system has none left, or the host exits
            detail = f"no process could be started: {error}"
            tell(ServerNotStarted(epoch=epoch, reason=StartFailReason.SPAWN_FAILED, detail=detail))
            return None

    def _apply(self, step: tuple[ProcessState, Signal | None]) -> None:
        self._state, signal = step
        if signal is not None and self._server is not None:
            self._server.send(signal)
        self._alarm.set(termination.deadline(self._state))


def _ended(news: ServerNotStarted | ServerGone) -> LaunchFailed | Exited:
    if isinstance(news, ServerNotStarted):
        return LaunchFailed(epoch=news.epoch, reason=news.reason, detail=news.detail)
    return Exited(epoch=news.epoch, returncode=news.returncode, log_tail=news.log_tail, port_taken=news.port_taken)
