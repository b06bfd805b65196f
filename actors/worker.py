"""WorkerActor: the supervisor. Admission, the server's life, replacement of an actor that dies.

Receives the host's orders and questions from the handle, and what its own actors tell. Owns the request table, the
journal and the other actors. Every decision about the server is `lifecycle`'s; this file carries its effects out.
Dealings with single requests are the `FrontDesk`'s.
"""

from __future__ import annotations

import logging
import time
from typing import Any, assert_never

from llama_worker import lifecycle
from llama_worker.actors.crew import Crew
from llama_worker.actors.front_desk import FrontDesk
from llama_worker.actors.futures import OpenFutures
from llama_worker.actors.log_ring import LogRing
from llama_worker.actors.process import ProcessActor
from llama_worker.actors.refs import HouseActor, Household
from llama_worker.actors.timers import Alarm, start_timers
from llama_worker.chat_request import OWNED_PARAMS
from llama_worker.config import WorkerConfig
from llama_worker.errors import WorkerClosed
from llama_worker.journal import Journal
from llama_worker.lifecycle import (
    CloseConnections,
    EndProcess,
    FailRequests,
    LaunchServer,
    Lifecycle,
    RestartDecided,
    StartsResolved,
    StopsResolved,
)
from llama_worker.messages import (
    ActorDied,
    AwaitResult,
    BecameReady,
    CancelRequest,
    CloseAllStreams,
    Died,
    EvidenceKept,
    Exited,
    GetDebugInfo,
    GetResult,
    GetStatus,
    GetWorkerStatus,
    HealthLost,
    Launch,
    Launched,
    LaunchFailed,
    Observed,
    ProbeNow,
    ReadOutput,
    ReleaseResult,
    Reply,
    RequestEnded,
    RequestRecord,
    Stalled,
    StandDown,
    Start,
    StartupFailed,
    Stop,
    StreamsClosed,
    Submit,
    Terminate,
    Tick,
    ToolsRefused,
    ToolThreadsStuck,
    WatchLaunch,
    WatchStartup,
    WorkerMessage,
)
from llama_worker.request_table import RequestTable, lost_record
from llama_worker.server_command import masked_server_cmd
from llama_worker.server_traits import ServerTraits, shortcomings
from llama_worker.suspicion import Doubt, Suspicion, Trouble
from llama_worker.types import RequestState, WorkerState, WorkerStatus

_EVIDENCE_LINES = 50  # of the server's output, kept with the evidence of a kill
_EXIT_LINES = 40  # of the server's output, told with an end that nobody saw


class WorkerActor(HouseActor[WorkerMessage]):
    """See the module. A crash of this actor ends the worker: the server is killed, every future is answered."""

    role = "worker"

    def __init__(self, household: Household, config: WorkerConfig, open_futures: OpenFutures) -> None:
        super().__init__(None, household)
        start_timers()
        self._config = config
        self._config_hash = config.config_hash
        self._open_futures = open_futures
        self._unix_offset = time.time() - time.monotonic()  # fixed: Unix instants never run backwards
        self._life = Lifecycle(policy=config.restart)
        self._table = RequestTable(config.slots)
        self._journal = Journal(config.name, self._unix_offset)
        self._log = LogRing(config.log_lines, api_key=config.api_key)
        self._pid: int | None = None
        self._last_ready_at: float | None = None
        self._traits = ServerTraits()
        self._tools_refused = False
        self._suspicion = Suspicion()
        self._starts: list[Reply[WorkerStatus]] = []
        self._stops: list[Reply[None]] = []
        self._due_stops: list[Reply[None]] = []  # the server is gone, a record is still to come
        me = self.me()
        self._lifecycle_alarm = Alarm(lambda: me.tell(Tick()))
        self._expiry_alarm = Alarm(lambda: me.tell(Tick()))
        self._crew = Crew(me, household, config, self._log, self._unix_offset)
        self._desk = FrontDesk(self._table, self._crew, config.slots)

    def handle(self, message: WorkerMessage) -> None:
        """See the messages' own docstrings."""
        now = time.monotonic()
        match message:
            case Submit():
                self._submit(message, now)
            case GetStatus() | ReadOutput():
                self._desk.question(message)
            case GetResult():
                self._desk.get_result(message)
            case AwaitResult():
                self._desk.await_result(message)
            case CancelRequest():
                self._desk.cancel(message)
            case ReleaseResult(request_id=request_id):
                self._table.release(request_id)
            case GetWorkerStatus(reply=reply):
                reply.answer(self._status())
            case GetDebugInfo(reply=reply):
                shown = masked_server_cmd(self._config.server_cmd, self._config.api_key)
                reply.answer(self._journal.debug_info(logs=self._log.lines(), server_cmd=shown))
            case RequestEnded(record=record):
                self._request_ended(record, now)
            case Stalled():
                self._stalled(message, now)
            case Observed():
                self._journal.observed = message
            case ToolsRefused(detail=detail):
                self._tools_refused = True
                self._journal.warn(f"the server refuses tools ({detail}); they are offered in prompted mode", now)
            case ToolThreadsStuck(count=count):
                self._journal.stuck_tool_threads_count = count
            case ActorDied():
                self._actor_died(message, now)
            case EvidenceKept(epoch=epoch, processes=processes):
                if epoch == self._life.epoch:
                    self._journal.add_processes(processes)
            case Tick():
                self._expire(now)
                self._apply(lifecycle.tick(self._life, now))
            case _:
                self._apply_news(message, now)

    def release(self, failure: str | None) -> None:
        """End everything: the server is killed, the actors end, every future is answered."""
        closed = WorkerClosed(self._config.name)
        if failure is not None:
            closed.add_note(f"the worker's actor failed: {failure}")
        self._crew.stop()
        self._lifecycle_alarm.set(None)
        self._expiry_alarm.set(None)
        self._open_futures.close(closed)

    # ------------------------------------------------------------ the server's life

    def _apply_news(self, message: WorkerMessage, now: float) -> None:
        """What only the lifecycle decides about."""
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
                    self._pid = pid
                    self._note("launched", pid=pid, epoch=epoch)
                    if isinstance(life.state, lifecycle.Launching):
                        self._crew.watchdog.tell(WatchStartup(epoch=epoch, pid=pid))
            case LaunchFailed(epoch=epoch, reason=reason, detail=detail):
                self._apply(lifecycle.launch_failed(life, now, epoch=epoch, reason=reason, detail=detail))
            case BecameReady(epoch=epoch, traits=traits):
                if epoch == life.epoch:
                    self._traits = traits
                    for line in shortcomings(traits, self._config):
                        self._journal.warn(line, now)
                self._apply(lifecycle.became_ready(life, now, epoch=epoch))
            case StartupFailed(epoch=epoch, reason=reason, detail=detail):
                self._apply(lifecycle.startup_failed(life, now, epoch=epoch, reason=reason, detail=detail))
            case HealthLost(epoch=epoch, detail=detail):
                if epoch == life.epoch:
                    self._trouble("health_lost", detail, now)
            case Died(epoch=epoch, returncode=returncode):
                self._apply(lifecycle.died(life, now, epoch=epoch, returncode=returncode))
            case Exited(epoch=epoch, returncode=returncode, log_tail=log_tail, port_taken=port_taken):
                if epoch == life.epoch:
                    self._pid = None
                    self._note("exited", returncode=returncode, epoch=epoch)
                    self._crew.watchdog.tell(StandDown())  # also where the worker was not READY yet and stays RUNNING
                self._apply(
                    lifecycle.exited(
                        life,
                        now,
                        epoch=epoch,
                        returncode=returncode,
                        log_tail=log_tail,
                        port_taken=port_taken,
                    )
                )
            case StreamsClosed(epoch=epoch):
                self._apply(lifecycle.connections_closed(life, now, epoch=epoch))
            case _:
                # A message from outside the house, by way of `actor_ref`: nothing that this actor should die of.
                self._note("unknown_message", level=logging.WARNING, type=type(message).__name__)

    def _trouble(self, reason: str, detail: str, now: float) -> None:
        self._apply(lifecycle.trouble(self._life, now, reason=reason, detail=detail))

    def _apply(self, step: tuple[Lifecycle, lifecycle.Effects]) -> None:
        """Take over the lifecycle's next state and carry out its effects, in order."""
        before = self._life.public_state
        self._life, effects = step
        state = self._life.public_state
        if state is not before:
            self._note("state", state=str(state), before=str(before), error=self._life.last_error)
            if state is WorkerState.READY:
                self._last_ready_at = time.monotonic()
                self._suspicion = Suspicion()
            else:
                self._crew.watchdog.tell(StandDown())  # a launch calls it up again
        for effect in effects:
            self._carry_out(effect)
        self._lifecycle_alarm.set(self._life.deadline)

    def _carry_out(self, effect: lifecycle.Effect) -> None:
        match effect:
            case LaunchServer(epoch=epoch):
                self._crew.watchdog.tell(WatchLaunch(epoch=epoch))
                self._crew.process.tell(Launch(epoch=epoch))
            case FailRequests(reason=reason, detail=detail):
                for admitted in self._table.active:
                    self._desk.abandon(admitted, reason, detail)
            case CloseConnections(epoch=epoch):
                self._crew.watchdog.tell(StandDown())
                self._crew.transport.tell(CloseAllStreams(epoch=epoch))
            case EndProcess(epoch=epoch, grace_s=grace_s, keep_evidence=keep_evidence):
                if keep_evidence:
                    self._journal.keep_evidence(
                        time.monotonic(),
                        epoch=epoch,
                        pid=self._pid,
                        last_error=self._life.last_error,
                        active=self._table.active,
                        log_tail=self._log.tail(_EVIDENCE_LINES),
                    )
                self._crew.process.tell(Terminate(epoch=epoch, grace_s=grace_s, keep_evidence=keep_evidence))
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

    # ------------------------------------------------------------ requests

    def _submit(self, order: Submit, now: float) -> None:
        state = self._life.public_state
        if state is WorkerState.FAILED:
            order.reply.answer({"ok": False, "error": "WORKER_FAILED"})
            return
        if state is not WorkerState.READY:
            order.reply.answer({"ok": False, "error": "WORKER_NOT_READY"})
            return
        admitted = self._table.admit(order.submission.job_name, now)
        if admitted is None:
            order.reply.answer({"ok": False, "error": "NO_SLOT_AVAILABLE"})
            return
        for owned in OWNED_PARAMS:
            if owned in order.submission.params or owned in self._config.default_params:
                self._journal.warn(f"params: {owned!r} belongs to the worker; the given value was replaced", now)
        mode = self._config.tool_call_mode
        no_tools = self._traits.tools is False or self._tools_refused
        self._desk.begin(
            admitted,
            order.submission,
            prompted=mode == "prompted" or (mode == "auto" and no_tools),
            opens_thinking=self._traits.opens_thinking,
        )
        self._note("admitted", request_id=admitted.request_id, job_name=admitted.job_name)
        order.reply.answer({"ok": True, "request_id": admitted.request_id})

    def _request_ended(self, record: RequestRecord, now: float) -> None:
        if not self._table.end(record):
            return
        self._journal.totals.request_ended(record)
        result = record.result
        self._note(
            "ended",
            request_id=record.request_id,
            job_name=record.job_name,
            state=str(result["state"]),
            fail_reason=result.get("fail_reason"),
        )
        self._desk.ended(record)
        self._answer_stops()
        self._set_expiry()
        self._learn_from(record, now)

    def _learn_from(self, record: RequestRecord, now: float) -> None:
        """What the end of a request says of the server."""
        if self._life.public_state is not WorkerState.READY:
            return
        if record.result["state"] is RequestState.COMPLETED:
            self._life = lifecycle.request_completed(self._life, now)
        self._suspicion, found = self._suspicion.ended(record, self._config.restart)
        match found:
            case Trouble(reason=reason, detail=detail):
                self._trouble(reason, detail, now)
            case Doubt(cause=cause):
                self._crew.watchdog.tell(ProbeNow(epoch=self._life.epoch, cause=cause))

    def _stalled(self, stalled: Stalled, now: float) -> None:
        admitted = self._table.find(stalled.request_id)
        if stalled.epoch != self._life.epoch or admitted is None:
            return
        self._suspicion, trouble = self._suspicion.stalled(
            stalled.request_id,
            stalled.verdict,
            busy_neighbour=stalled.busy_neighbour,
            newest_request_id=self._table.newest_id,
            policy=self._config.restart,
        )
        self._desk.abandon(admitted, stalled.verdict.reason, stalled.verdict.detail)
        if trouble is not None:
            self._trouble(trouble.reason, trouble.detail, now)

    def _expire(self, now: float) -> None:
        ttl_s = self._config.result_ttl_s
        if ttl_s is not None:
            for request_id in self._table.expire(now - ttl_s):
                self._note("result_expired", request_id=request_id)
            self._set_expiry()

    def _set_expiry(self) -> None:
        ttl_s, oldest = self._config.result_ttl_s, self._table.oldest_end()
        due_at = None
        if ttl_s is not None and oldest is not None:
            due_at = oldest + ttl_s + 0.001  # a record of just that age is kept
        self._expiry_alarm.set(due_at)

    # ------------------------------------------------------------ supervision

    def _actor_died(self, death: ActorDied, now: float) -> None:
        """Nuke and repave: a new actor, a new server; what was in flight fails."""
        self._note("actor_died", level=logging.ERROR, role=death.role, slot=death.slot, detail=death.detail)
        self._crew.replace(death.role, death.slot)
        if death.slot is not None:
            lost = self._table.in_slot(death.slot)
            if lost is not None:  # its actor could not even hand over its record
                self._request_ended(lost_record(lost, death.detail, now, self._unix_offset), now)
            self._desk.ask_again(death.slot)
        detail = f"{death.role}: {death.detail}"
        epoch = self._life.epoch
        self._trouble("actor_died", detail, now)
        if death.role == ProcessActor.role and not death.will_report:
            self._pid = None
            gone = lifecycle.exited(
                self._life, now, epoch=epoch, returncode=None, log_tail=self._log.tail(_EXIT_LINES), port_taken=False
            )
            self._apply(gone)

    # ------------------------------------------------------------ what is seen

    def _status(self) -> WorkerStatus:
        active = self._table.active
        status: WorkerStatus = {
            "name": self._config.name,
            "state": self._life.public_state,
            "slots_total": self._config.slots,
            "slots_used": len(active),
            "active_request_ids": [admitted.request_id for admitted in active],
            "active_jobs": {admitted.request_id: admitted.job_name for admitted in active},
            "restart_count": self._life.budget.restart_count,
            "config_hash": self._config_hash,
            "warnings": self._journal.warnings,
        }
        if self._pid is not None:
            status["pid"] = self._pid
        if self._life.last_error is not None:
            status["last_error"] = self._life.last_error
        if self._last_ready_at is not None:
            status["last_ready_at"] = self._last_ready_at + self._unix_offset
        match self._life.state:
            case lifecycle.BackingOff(resume_at=at) | lifecycle.Ending(goal=lifecycle.ToRestart(resume_at=at)):
                status["next_restart_at"] = at + self._unix_offset
        return status

    def _note(self, event: str, *, level: int = logging.INFO, **facts: Any) -> None:
        self._journal.note(event, time.monotonic(), level=level, **facts)
