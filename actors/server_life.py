"""The server's life as a WorkerActor conducts it: `lifecycle` decides, this carries its effects out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from llama_worker.actors.children import Children
from llama_worker.actors.request_dispatcher import RequestDispatcher
from llama_worker.config import WorkerConfig
from llama_worker.messages import (
    BecameReady,
    CloseAllStreams,
    Died,
    EvidenceKept,
    Exited,
    HealthLost,
    Launch,
    Launched,
    LaunchFailed,
    ProbeNow,
    Reply,
    RequestRecord,
    ServerMessage,
    Stalled,
    StandDown,
    Start,
    StartupFailed,
    Stop,
    StreamsClosed,
    Terminate,
)
from llama_worker.request.table import Admitted, RequestTable
from llama_worker.runtime.log_ring import LogRing
from llama_worker.runtime.timers import Alarm
from llama_worker.server import lifecycle
from llama_worker.server.journal import Journal
from llama_worker.server.lifecycle import Lifecycle
from llama_worker.server.lifecycle_states import (
    CloseConnections,
    Effect,
    Effects,
    EndProcess,
    FailRequests,
    Launching,
    LaunchServer,
    RestartDecided,
    StartsResolved,
    StopsResolved,
)
from llama_worker.server.suspicion import Doubt, Suspicion, Trouble
from llama_worker.server.traits import ServerTraits, shortcomings
from llama_worker.types import RequestState, WorkerState, WorkerStatus

_EVIDENCE_LINES = 50  # of the server's output, kept with the evidence of a kill
_EXIT_LINES = 40  # of the server's output, told with an end that nobody saw


class ServerLife:
    """Belongs to one WorkerActor, which alone calls it. Nothing here waits."""

    def __init__(
        self,
        config: WorkerConfig,
        children: Children,
        dispatcher: RequestDispatcher,
        table: RequestTable,
        journal: Journal,
        log: LogRing,
        *,
        wake: Callable[[], object],
        status: Callable[[], WorkerStatus],
    ) -> None:
        self.pid: int | None = None
        self.last_ready_at: float | None = None
        self.traits = ServerTraits()
        self._config = config
        self._children = children
        self._dispatcher = dispatcher
        self._table = table
        self._journal = journal
        self._log = log
        self._status = status  # the answer to a start
        self._life = Lifecycle(policy=config.restart)
        self._suspicion = Suspicion()
        self._starts: list[Reply[WorkerStatus]] = []
        self._stops: list[Reply[None]] = []
        self._due_stops: list[Reply[None]] = []  # the server is gone, a record is still to come
        self._alarm = Alarm(wake)

    @property
    def lifecycle(self) -> Lifecycle:
        """What there is to be told of it."""
        return self._life

    def close(self) -> None:
        """Wake nobody any more."""
        self._alarm.set(None)

    # ------------------------------------------------------------ what is heard of the server

    def handle(self, message: ServerMessage, now: float) -> None:
        """See the messages' own docstrings. News of another launch than the present one changes nothing."""
        life = self._life
        match message:
            case Start(reply=reply):
                self._starts.append(reply)
                self._apply(lifecycle.start(life, now))
            case Stop(reply=reply, grace_s=grace_s):
                configured_s = self._config.timeouts.stop_grace_s
                self._stops.append(reply)
                self._apply(lifecycle.stop(life, now, grace_s=configured_s if grace_s is None else grace_s))
            case Launched(epoch=epoch, pid=pid):
                if epoch == life.epoch:
                    self.pid = pid
                    self._journal.note("launched", now, pid=pid, epoch=epoch)
                    if isinstance(life.state, Launching):
                        self._children.watchdog.tell(message)
            case LaunchFailed(epoch=epoch, reason=reason, detail=detail):
                self._apply(lifecycle.launch_failed(life, now, epoch=epoch, reason=reason, detail=detail))
            case BecameReady(epoch=epoch, traits=traits):
                if epoch == life.epoch:
                    self.traits = traits
                    for line in shortcomings(traits, self._config):
                        self._journal.warn(line, now)
                self._apply(lifecycle.became_ready(life, now, epoch=epoch))
            case StartupFailed(epoch=epoch, reason=reason, detail=detail):
                self._apply(lifecycle.startup_failed(life, now, epoch=epoch, reason=reason, detail=detail))
            case HealthLost(epoch=epoch, detail=detail):
                if epoch == life.epoch:
                    self.trouble("health_lost", detail, now)
            case Died(epoch=epoch, returncode=returncode):
                self._apply(lifecycle.died(life, now, epoch=epoch, returncode=returncode))
            case Exited(epoch=epoch, returncode=returncode, log_tail=log_tail, port_taken=port_taken):
                if epoch == life.epoch:
                    self.pid = None
                    self._journal.note("exited", now, returncode=returncode, epoch=epoch)
                    self._children.watchdog.tell(
                        StandDown()
                    )  # also where the worker was not READY yet and stays RUNNING
                self._apply(
                    lifecycle.exited(
                        life, now, epoch=epoch, returncode=returncode, log_tail=log_tail, port_taken=port_taken
                    )
                )
            case StreamsClosed(epoch=epoch):
                self._apply(lifecycle.connections_closed(life, now, epoch=epoch))
            case EvidenceKept(epoch=epoch, processes=processes):
                if epoch == life.epoch:
                    self._journal.add_processes(processes)
            case _:
                assert_never(message)

    def tick(self, now: float) -> None:
        """Carry out what has come due."""
        self._apply(lifecycle.tick(self._life, now))

    def trouble(self, reason: str, detail: str, now: float) -> None:
        """Nuke and repave."""
        self._apply(lifecycle.trouble(self._life, now, reason=reason, detail=detail))

    def ended_unseen(self, now: float, *, epoch: int) -> None:
        """Who would have told that the launch ended is gone, and so is its server."""
        self.pid = None
        tail = self._log.tail(_EXIT_LINES)
        gone = lifecycle.exited(self._life, now, epoch=epoch, returncode=None, log_tail=tail, port_taken=False)
        self._apply(gone)

    # ------------------------------------------------------------ what requests say of it

    def request_ended(self, record: RequestRecord, now: float) -> None:
        """A request has its record: who waits for the last one, and what it says of the server."""
        self._answer_stops()
        if self._life.public_state is not WorkerState.READY:
            return
        if record.result["state"] is RequestState.COMPLETED:
            self._life = lifecycle.request_completed(self._life, now)
        self._suspicion, found = self._suspicion.ended(record, self._config.restart)
        match found:
            case Trouble(reason=reason, detail=detail):
                self.trouble(reason, detail, now)
            case Doubt(cause=cause):
                self._children.watchdog.tell(ProbeNow(epoch=self._life.epoch, cause=cause))

    def stalled(self, stalled: Stalled, admitted: Admitted, now: float) -> None:
        """A verdict on a request that runs: it is given up, and perhaps the server, too."""
        if stalled.epoch != self._life.epoch:
            return
        self._suspicion, trouble = self._suspicion.stalled(
            stalled.request_id,
            stalled.verdict,
            busy_neighbour=stalled.busy_neighbour,
            newest_request_id=self._table.newest_id,
            policy=self._config.restart,
        )
        self._dispatcher.abandon(admitted, stalled.verdict.reason, stalled.verdict.detail)
        if trouble is not None:
            self.trouble(trouble.reason, trouble.detail, now)

    # ------------------------------------------------------------ effects

    def _apply(self, step: tuple[Lifecycle, Effects]) -> None:
        """Take over the lifecycle's next state and carry out its effects, in order."""
        before = self._life.public_state
        self._life, effects = step
        state = self._life.public_state
        if state is not before:
            now = time.monotonic()
            self._journal.note("state", now, state=str(state), before=str(before), error=self._life.last_error)
            if state is WorkerState.READY:
                self.last_ready_at = now
                self._suspicion = Suspicion()
            else:
                self._children.watchdog.tell(StandDown())  # a launch calls it up again
        for effect in effects:
            self._carry_out(effect)
        self._alarm.set(self._life.deadline)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case LaunchServer(epoch=epoch):
                launch = Launch(epoch=epoch)
                self._children.watchdog.tell(launch)
                self._children.process.tell(launch)
            case FailRequests(reason=reason, detail=detail):
                for admitted in self._table.active:
                    self._dispatcher.abandon(admitted, reason, detail)
            case CloseConnections(epoch=epoch):
                self._children.watchdog.tell(StandDown())
                self._children.transport.tell(CloseAllStreams(epoch=epoch))
            case EndProcess(epoch=epoch, grace_s=grace_s, keep_evidence=keep_evidence):
                if keep_evidence:
                    self._journal.keep_evidence(
                        time.monotonic(),
                        epoch=epoch,
                        pid=self.pid,
                        last_error=self._life.last_error,
                        active=self._table.active,
                        log_tail=self._log.tail(_EVIDENCE_LINES),
                    )
                self._children.process.tell(Terminate(epoch=epoch, grace_s=grace_s, keep_evidence=keep_evidence))
            case RestartDecided(reason=reason, detail=detail, delay_s=delay_s):
                self._journal.restart_decided(reason, detail, delay_s, time.monotonic())
            case StartsResolved(error=error):
                waiting, self._starts = self._starts, []
                for reply in waiting:
                    if error is None:
                        reply.answer(self._status())
                    else:
                        reply.fail(error)
            case StopsResolved():
                self._due_stops += self._stops
                self._stops = []
                self._answer_stops()
            case _:
                assert_never(effect)

    def _answer_stops(self) -> None:
        """`stop()` is done once the server is gone and every request in flight has its record."""
        if self._due_stops and not self._table.active:
            waiting, self._due_stops = self._due_stops, []
            for reply in waiting:
                reply.answer(None)
