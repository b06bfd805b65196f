"""Runs the server's lifecycle for a WorkerActor: `lifecycle` decides, this carries out the
effects."""

from __future__ import annotations

from typing import assert_never

from llama_worker.actors.children import Children
from llama_worker.actors.request_dispatcher import RequestDispatcher
from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import WorkerStartError, WorkerStopError
from llama_worker.request.messages import Abandon, CloseAllStreams
from llama_worker.request.table import RequestRecord, RequestTable
from llama_worker.server import lifecycle, messages
from llama_worker.server import lifecycle_states as states
from llama_worker.server.blame import FailureCounts, ProbeNow, RestartCause, recycle_due, succeeded
from llama_worker.server.journal import Journal
from llama_worker.server.lifecycle import Drained, LifecycleMessage
from llama_worker.server.traits import ServerTraits, shortcomings
from llama_worker.types.request import RequestFailReason
from llama_worker.types.worker import WorkerState, WorkerStatus


class ServerLife:
    """Runs one server's lifecycle. Only the owning WorkerActor calls this; no call blocks."""

    def __init__(
        self,
        config: WorkerConfig,
        children: Children,
        dispatcher: RequestDispatcher,
        table: RequestTable,
        journal: Journal,
    ) -> None:
        self.pid: int | None = None
        self._last_ready_unix: float | None = None
        self.traits = ServerTraits()
        self._config = config
        self._config_hash = config.config_hash
        self._children = children
        self._dispatcher = dispatcher
        self._table = table
        self._journal = journal
        self._requests_count = 0  # requests that ended since READY
        self._anon_bytes: int | None = None  # of this launch's server, as last measured
        self._pace: messages.PaceLearnt | None = None  # from the launches so far
        self.lifecycle = states.Lifecycle(
            policy=config.restart, stop_grace_s=config.timeouts.stop_grace_s
        )
        self._failure_counts = FailureCounts()
        self._waiting: list[messages.Start | messages.Restart | messages.Stop | messages.Drain] = []

    def status(self) -> WorkerStatus:
        """The answer to Start, Restart and GetWorkerStatus; keys with unknown values are absent."""
        life, active = self.lifecycle, self._table.active
        status: WorkerStatus = {
            "name": self._config.name,
            "state": life.public_state,
            "slots_total": self._config.slots,
            "slots_used": len(active),
            "active_request_ids": [admitted.request_id for admitted in active],
            "active_jobs": {admitted.request_id: admitted.job_name for admitted in active},
            "finished_request_ids": self._table.finished_ids,
            "draining": life.is_draining,
            "restart_count": life.budget.restart_count,
            "config_hash": self._config_hash,
            "warnings": self._journal.warnings,
        }
        if self.pid is not None:
            status["pid"] = self.pid
        if life.last_error is not None:
            status["last_error"] = life.last_error
        if self._last_ready_unix is not None:
            status["last_ready_at"] = self._last_ready_unix
        if self.traits.n_ctx is not None:
            status["n_ctx"] = self.traits.n_ctx
        if self.traits.modalities is not None:
            status["modalities"] = dict(self.traits.modalities)
        if self.traits.model is not None:
            status["model"] = self.traits.model
        match life.state:
            case (
                states.BackingOff(resume_at=at)
                | states.Ending(goal=states.ToRestart(resume_at=at), stuck=None)
            ):
                status["next_restart_at"] = self._journal.unix(at)
        return status

    # ------------------------------------------------------------ messages about the server

    def handle(self, message: LifecycleMessage, now: float) -> None:
        """Record the message, step the lifecycle, carry out the effects. News of another launch is
        dropped."""
        if getattr(message, "epoch", self.lifecycle.epoch) != self.lifecycle.epoch:
            return
        match message:
            case messages.Start() | messages.Restart() | messages.Stop():
                self._waiting.append(message)
            case messages.Drain():
                self._waiting.append(message)
                self._journal.note("draining", now, requests=len(self._table.active))
            case messages.Launched(epoch=epoch, pid=pid):
                self.pid = pid
                self._journal.note("launched", now, pid=pid, epoch=epoch)
                if isinstance(self.lifecycle.state, states.Launching):
                    self._children.watchdog.tell(message)
            case messages.MemoryMeasured(anon_bytes=anon_bytes):
                self._anon_bytes = anon_bytes
                self._recycle(now)
            case messages.PaceLearnt():
                self._pace = message
            case messages.Stalled():
                self._stalled(message, now)
            case messages.EvidenceKept(
                processes=processes, log_tail=log_tail, after_grace=after_grace
            ):
                if after_grace:
                    self._keep_evidence(now)
                self._journal.add_processes(processes, log_tail)
            case messages.BecameReady(traits=traits):
                self.traits = traits
                for line in shortcomings(traits, self._config):
                    self._journal.warn(line, now)
            case messages.GpuFaulted(fault=fault) if not fault.fatal:
                self._journal.warn(fault.detail, now)
            case messages.Exited(epoch=epoch, returncode=returncode):
                self.pid = None
                self._journal.note("exited", now, returncode=returncode, epoch=epoch)
            case _:
                pass
        self._apply(lifecycle.step(self.lifecycle, message, now), now)
        self._continue_if_drained(now)

    # ------------------------------------------------------------ requests that end or stall

    def request_ended(self, record: RequestRecord, now: float) -> None:
        """Call it when a request has its record: go on with what waits for the last request, and
        find out whether its end is a reason to probe or restart the server."""
        if succeeded(record, self._config.restart):  # perhaps just before its server died
            self.lifecycle = lifecycle.request_completed(self.lifecycle)
        self._continue_if_drained(now)
        if self.lifecycle.public_state is not WorkerState.READY:
            return
        if record.result["fail_reason"] is RequestFailReason.SERVER_DIED:
            # The request found out by itself: the report of the server's death is overdue.
            self.handle(messages.Died(epoch=self.lifecycle.epoch, returncode=None), now)
            return
        self._requests_count += 1
        self._failure_counts, cause = self._failure_counts.after(record, self._config.restart, now)
        match cause:
            case _ if self.lifecycle.is_draining:
                pass  # this server gets no further request
            case RestartCause():
                self.handle(cause, now)
            case ProbeNow():
                self._children.watchdog.tell(cause)
        self.recycle_if_due(now)

    def _continue_if_drained(self, now: float) -> None:
        if not self._table.active:
            self._apply(lifecycle.step(self.lifecycle, Drained(), now), now)

    def recycle_if_due(self, now: float) -> None:
        """Restart an idle server if a planned restart is due. Its memory is that of the latest
        measurement: the next one may come when the server has the next request."""
        policy = self._config.restart.recycle
        if policy is not None and policy.max_anon_mib and self._is_idle:
            self._children.process.tell(messages.MeasureMemory())
        self._recycle(now)

    def _recycle(self, now: float) -> None:
        policy, ready_at = self._config.restart.recycle, self.lifecycle.budget.ready_at
        if policy is None or ready_at is None or not self._is_idle:
            return
        due = recycle_due(
            policy,
            ready_at=ready_at,
            requests_count=self._requests_count,
            anon_bytes=self._anon_bytes,
            now=now,
        )
        if due is not None:
            self.handle(RestartCause("recycled", due), now)

    @property
    def recycle_at(self) -> float | None:
        """When an idle server is replaced because of its age; None: never, or not while it is
        busy."""
        policy, ready_at = self._config.restart.recycle, self.lifecycle.budget.ready_at
        if policy is None or policy.max_age_s is None or ready_at is None or not self._is_idle:
            return None
        return ready_at + policy.max_age_s

    @property
    def _is_idle(self) -> bool:
        return self.lifecycle.public_state is WorkerState.READY and not self._table.active

    def _stalled(self, stalled: messages.Stalled, now: float) -> None:
        """Give up requests that stalled, and perhaps the server, too."""
        cause: RestartCause | None = None
        for each in stalled.given_up:
            admitted, verdict = self._table.find(each.request_id), each.verdict
            if admitted is None:
                continue  # it has ended meanwhile
            given_up = Abandon(
                request_id=each.request_id, reason=verdict.reason, detail=verdict.detail
            )
            self._dispatcher.tell(admitted, given_up)
            if each.restarts_server and cause is None:
                cause = RestartCause(str(verdict.reason), verdict.detail)
        if cause is not None and self._config.restart.restart_on_stall:
            self.handle(cause, now)

    # ------------------------------------------------------------ effects

    def _apply(self, step: tuple[states.Lifecycle, states.Effects], now: float) -> None:
        """Take over the lifecycle's next state and carry out its effects, in order."""
        before, old_error = self.lifecycle.public_state, self.lifecycle.last_error
        self.lifecycle, effects = step
        state, error = self.lifecycle.public_state, self.lifecycle.last_error
        if state is not before:
            if error is old_error and state is not WorkerState.FAILED:
                error = None  # of an earlier change
            self._journal.note("state", now, state=state, before=before, error=error)
            if state is WorkerState.READY:
                self._last_ready_unix = self._journal.unix(now)
                self._requests_count, self._anon_bytes = 0, None
                self._failure_counts = FailureCounts()
        match self.lifecycle.state:
            case states.Ending():
                self._children.watchdog.tell(messages.StopWatching())
            case states.Stopped() | states.Failed() | states.BackingOff():
                self._children.end()
            case _:
                pass
        for effect in effects:
            self._carry_out(effect, now)

    def _carry_out(self, effect: states.Effect, now: float) -> None:
        match effect:
            case messages.Launch(epoch=epoch):
                if self._children.start(epoch):
                    if self._pace is not None:
                        self._children.watchdog.tell(self._pace)
                    self._children.watchdog.tell(effect)
                    self._children.process.tell(effect)
            case Abandon():
                for admitted in self._table.active:
                    self._dispatcher.tell(admitted, effect)
            case CloseAllStreams():
                self._children.transport.tell(effect)
            case messages.Terminate(keep_evidence=keep_evidence):
                if keep_evidence:
                    self._keep_evidence(now)
                self._children.process.tell(effect)
            case states.RecordRestart(reason=reason, detail=detail, delay_s=delay_s):
                self._journal.restart_decided(reason, detail, delay_s, now)
            case states.Resolve(order=order, error=error):
                self._resolve(order, error)
            case _:
                assert_never(effect)

    def _keep_evidence(self, now: float) -> None:
        self._journal.keep_evidence(
            now,
            epoch=self.lifecycle.epoch,
            pid=self.pid,
            last_error=self.lifecycle.last_error,
            active=self._table.active,
        )

    def _resolve(
        self,
        order: type[messages.Start] | type[messages.Stop],
        error: WorkerStartError | WorkerStopError | None,
    ) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if isinstance(each, messages.Start | messages.Restart) is not (order is messages.Start):
                self._waiting.append(each)
            elif error is not None:
                each.reply.fail(error)
            elif isinstance(each, messages.Start | messages.Restart):
                each.reply.answer(self.status())
            else:
                each.reply.answer(None)
