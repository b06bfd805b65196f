"""WorkerActor: the supervisor. Admits requests, and controls the server's life and the other actors
of each launch.

Receives the host's orders and questions from the handle, leases from a proxy's clients, and its own
actors' messages. Sends the ProcessActor Launch, Terminate and MeasureMemory; the TransportActor
CloseAllStreams; the RequestActors Begin, BeginLease, EndLease, CancelRequest, Abandon, GetStatus
and ReadOutput; the WatchdogActor PaceLearnt, Launch, Launched, Watch, Unwatch, ProbeNow and
StopWatching; and each of its actors ReportIn. Owns the request table, the journal and the other
actors. `ServerLife` deals with the server, `RequestDispatcher` with single requests.
"""

from __future__ import annotations

import logging

from llama_worker.actors import messages
from llama_worker.actors.base import LiveSet, SupervisedActor, message_types
from llama_worker.actors.children import Children
from llama_worker.actors.request_dispatcher import RequestDispatcher, RequestOrder
from llama_worker.actors.server_life import ServerLife
from llama_worker.clock import earliest
from llama_worker.config.command import masked_server_cmd
from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import ConfigError, LlamaWorkerError, RequestRefused, WorkerClosed
from llama_worker.mailbox import Reply, Tick
from llama_worker.ports import Runtime
from llama_worker.request.messages import (
    Begin,
    CountTokens,
    RequestEnded,
    SignalEmitted,
    StuckToolThreads,
    ToolsRefused,
)
from llama_worker.request.params import params_warnings
from llama_worker.request.report import lost_record
from llama_worker.request.states import READ_REST_S
from llama_worker.request.table import Admitted, RequestRecord, RequestTable
from llama_worker.runtime.host.futures import OpenFutures, WeakList
from llama_worker.server.blame import RestartCause
from llama_worker.server.journal import EventFeed, Journal
from llama_worker.server.messages import Observed
from llama_worker.server.roll_call import ANSWER_TIMEOUT_S, Member, RollCall
from llama_worker.server.traits import may_leave_thoughts, unsupported
from llama_worker.types.request import SubmitErrorCode
from llama_worker.types.worker import WorkerDebugInfo, WorkerState


class WorkerActor(SupervisedActor[messages.WorkerMessage]):
    """Supervises one worker. A crash of this actor ends the worker: the server is killed, and every
    future is answered."""

    role = "worker"
    accepts = message_types(messages.WorkerMessage)

    def __init__(
        self, live: LiveSet, runtime: Runtime, config: WorkerConfig, open_futures: OpenFutures
    ) -> None:
        super().__init__(live, runtime)
        self._runtime = runtime
        self._config = config
        self._open_futures = open_futures
        self._table = RequestTable(config.slots, config.result_ttl_s)
        feed = EventFeed(config.on_event, runtime.call_host) if config.on_event else None
        self._journal = Journal(config.name, runtime.unix, runtime.write_log, feed)
        for line in (*config.warnings, *runtime.warnings):
            self._journal.warn(line, runtime.now())
        self._tools_refused = False
        self._slot_waiters: WeakList[Reply[None]] = WeakList()
        me = self.me()
        self._children = Children(me, live, runtime, config)
        self._dispatcher = RequestDispatcher(self._table, self._children)
        self._roll_call = RollCall()
        self._server = ServerLife(
            config, self._children, self._dispatcher, self._table, self._journal
        )

    def handle(self, message: messages.WorkerMessage) -> None:
        now = self._runtime.now()
        self._dispatch(message, now)
        if self._slot_waiters:
            self._answer_slot_waiters()
        self._roll_call.keep(busy=self._is_busy, now=now)
        self._alarm.set(self._deadline)

    def _dispatch(self, message: messages.WorkerMessage, now: float) -> None:  # noqa: C901  a case each
        if isinstance(message, RequestOrder):
            self._dispatcher.handle(message)
            return
        match message:
            case messages.Submit() | messages.Ask():
                self._submit(message, now)
            case messages.Lease():
                self._lease(message, now)
            case messages.EndLease():
                self._end_lease(message, now)
            case CountTokens():
                self._count_tokens(message)
            case messages.WaitSlot(reply=reply):
                self._slot_waiters.add(reply)
            case messages.GetWorkerStatus(reply=reply):
                reply.answer(self._server.status())
            case messages.GetDebugInfo(reply=reply):
                reply.answer(self._debug_info())
            case RequestEnded(record=record):
                self._request_ended(record, now)
            case SignalEmitted():
                self._signal_emitted(message, now)
            case ToolsRefused():
                self._note_tools_refused(message, now)
            case StuckToolThreads(change=change):
                self._journal.stuck_tool_threads_count += change
            case Observed():
                self._journal.observed = message
            case messages.ActorDied():
                self._actor_died(message, now)
            case messages.ReportedIn(member=member):
                self._roll_call.answered(member)
            case Tick():
                self._tick(message, now)
            case _:
                self._server.handle(message, now)

    def _tick(self, tick: Tick, now: float) -> None:
        self._expire(now)
        self._server.handle(tick, now)
        self._server.recycle_if_due(now)
        self._check_actors(now)
        requests_end_at = self._children.requests_end_at
        if requests_end_at is not None and now >= requests_end_at:
            self._children.end_requests()

    def release(self, failure: str | None) -> None:
        """End everything: the server is killed, the actors end, every future is answered."""
        closed = WorkerClosed(self._config.name)
        if failure is not None:
            closed.add_note(f"the worker's actor failed: {failure}")
        self._children.end()
        self._open_futures.close(closed)

    # ------------------------------------------------------------ requests

    def _submit(self, order: messages.Submit | messages.Ask, now: float) -> None:
        error = self._server.lifecycle.refusal
        if error is not None:
            _refuse(order, error)
            return
        if refusal := unsupported(order.submission.part_kinds, self._server.traits):
            order.reply.fail(ConfigError(refusal))
            return
        admitted = self._table.admit(order.submission.job_name, now)
        if admitted is None:
            _refuse(order, "NO_SLOT_AVAILABLE")
            return
        for line in params_warnings(self._config, order.submission.params):
            self._journal.warn(line, now)
        begin = Begin(
            request_id=admitted.request_id,
            submission=order.submission,
            prompted=self._is_prompted,
            opens_thinking=may_leave_thoughts(
                self._server.traits, self._config, order.submission.params
            ),
        )
        asked_by = order.reply if isinstance(order, messages.Ask) else None
        self._dispatcher.begin(admitted, begin, asked_by)
        if isinstance(order, messages.Submit):
            order.reply.answer({"ok": True, "request_id": admitted.request_id})
        self._note_admitted(admitted, now)

    def _lease(self, order: messages.Lease, now: float) -> None:
        error = self._server.lifecycle.refusal
        admitted = self._table.admit(order.job_name, now, is_leased=True) if error is None else None
        if admitted is None:
            order.reply.answer({"ok": False, "error": error or "NO_SLOT_AVAILABLE"})
            return
        order.exchange.begin(admitted, api_key=self._config.api_key, unix=self._runtime.unix)
        order.reply.answer({"ok": True, "request_id": admitted.request_id})  # first: a client waits
        self._note_admitted(admitted, now)
        self._dispatcher.begin(admitted, messages.BeginLease(exchange=order.exchange))

    def _note_admitted(self, admitted: Admitted, now: float) -> None:
        request_id, job_name = admitted.request_id, admitted.job_name
        self._journal.note("admitted", now, request_id=request_id, job_name=job_name)

    def _end_lease(self, order: messages.EndLease, now: float) -> None:
        """Make its record here, so that the slot is free before anybody can ask for it again."""
        admitted = self._table.find(order.exchange.request_id)
        if admitted is None:
            return  # it never had a slot, or was given up
        record = order.exchange.end(now)
        if record is not None:
            self._request_ended(record, now)
        # If there is no record, the slot's actor finds out why the connection broke.
        self._dispatcher.tell(admitted, order)

    @property
    def _is_prompted(self) -> bool:
        """Whether the next request uses prompted mode: tool calls by text convention."""
        mode = self._config.tool_call_mode
        no_tools = self._server.traits.tools is False or self._tools_refused
        return mode == "prompted" or (mode == "auto" and no_tools)

    def _count_tokens(self, order: CountTokens) -> None:
        traits, life = self._server.traits, self._server.lifecycle
        missing = unsupported(order.submission.part_kinds, traits)
        if life.public_state is not WorkerState.READY:
            assert life.refusal is not None
            order.reply.fail(RequestRefused(life.refusal))
        elif missing:
            order.reply.fail(ConfigError(missing))
        elif traits.n_ctx is None:
            order.reply.fail(LlamaWorkerError("the server does not report its context size"))
        else:
            try:
                prompted = self._is_prompted
                self._runtime.count_tokens(order, prompted=prompted, n_ctx=traits.n_ctx)
            except (OSError, RuntimeError) as error:  # this machine has no thread left
                order.reply.fail(LlamaWorkerError(str(error)))

    def _answer_slot_waiters(self) -> None:
        """Answer all of them once a slot is free, or once none will be unless the host acts."""
        life, refusal = self._server.lifecycle, self._server.lifecycle.refusal
        starting = refusal == "WORKER_NOT_READY" and life.public_state is WorkerState.RUNNING
        if starting or life.will_start_again:
            return
        if refusal is None and not self._table.has_free_slot:
            return
        waiters, self._slot_waiters = self._slot_waiters, WeakList()
        for reply in waiters.alive():
            if refusal is None:
                reply.answer(None)
            else:
                reply.fail(RequestRefused(refusal))

    def _request_ended(self, record: RequestRecord, now: float) -> None:
        if not self._table.end(record, now):
            return
        self._journal.totals.request_ended(record)
        result = record.result
        self._journal.note(
            "ended",
            now,
            request_id=record.request_id,
            job_name=record.job_name,
            state=result["state"],
            fail_reason=result["fail_reason"],
        )
        self._dispatcher.ended(record, now)
        if record.is_leased:  # its client has received all of the output
            self._table.release(record.request_id)
        self._server.request_ended(record, now)

    def _note_tools_refused(self, refusal: ToolsRefused, now: float) -> None:
        self._tools_refused = True
        line = f"the server rejects tools ({refusal.detail}); using prompted mode instead"
        self._journal.warn(line, now)

    def _signal_emitted(self, emitted: SignalEmitted, now: float) -> None:
        request_id, job_name, signal = emitted.request_id, emitted.job_name, emitted.signal
        self._journal.totals.signal_emitted(signal["tool_name"])
        self._journal.note(
            "signal", now, request_id=request_id, job_name=job_name, tool_name=signal["tool_name"]
        )
        handler = self._config.on_signal
        if handler is not None:
            name = (
                f"on_signal of worker {self._config.name!r}, request {request_id} ({job_name!r}),"
            )
            self._runtime.call_host(
                lambda: handler(signal, request_id=request_id, job_name=job_name), name
            )

    def _expire(self, now: float) -> None:
        for old in self._table.expire(now):
            self._journal.note(
                "result_expired", now, request_id=old.request_id, job_name=old.job_name
            )

    @property
    def _deadline(self) -> float | None:
        """When a `Tick` is due; None: never."""
        return earliest(
            self._table.expires_at,
            self._roll_call.deadline,
            self._server.lifecycle.deadline,
            self._server.recycle_at,
            self._children.requests_end_at,
        )

    # ------------------------------------------------------------ supervision

    @property
    def _is_busy(self) -> bool:
        """Whether somebody waits for one of the other actors."""
        starts_or_ends = self._server.lifecycle.public_state is WorkerState.RUNNING
        return starts_or_ends or bool(self._table.active)

    def _check_actors(self, now: float) -> None:
        """Ask other actors to report in, unless idle; one that does not answer counts as dead."""
        for member in self._roll_call.overdue(now):
            self._roll_call.answered(member)
            detail = f"it has not answered for {ANSWER_TIMEOUT_S:g} s"
            if self._children.give_up(member, detail):
                # First: giving the actor up may cause news of the server's death.
                self._end_launch(member, detail, now)
                # Through the mailbox, so that it comes after the messages that the actor has sent.
                self.me().tell(messages.ActorDied(member=member, detail=detail))
        members = self._children.members
        for member in self._roll_call.due(members, now):
            if members[member].tell(messages.ReportIn()):
                self._roll_call.asked(member, now)

    def _actor_died(self, death: messages.ActorDied, now: float) -> None:
        """End the launch. If the dead actor could not hand over its request's record, make one."""
        epoch, role, slot = death.member
        self._journal.note(
            "actor_died", now, level=logging.ERROR, role=role, slot=slot, detail=death.detail
        )
        if epoch != self._server.lifecycle.epoch:
            return
        self._end_launch(death.member, death.detail, now)
        lost = self._table.in_slot(slot) if slot is not None else None
        if lost is not None:
            unix, secret = self._runtime.unix, self._config.api_key
            record = lost_record(lost, death.detail, now, unix=unix, secret=secret)
            self._request_ended(record, now)

    def _end_launch(self, dead: Member, detail: str, now: float) -> None:
        """End the launch, because an actor died: its requests fail, after unread output was read,
        then its server and its other actors end; the next launch has new ones."""
        self._children.requests_end_at = now + READ_REST_S
        self._server.handle(RestartCause("actor_died", f"{dead.role}: {detail}"), now)

    # ------------------------------------------------------------ what is seen

    def _debug_info(self) -> WorkerDebugInfo:
        shown = masked_server_cmd(self._config.server_cmd, self._config.api_key)
        logs, now = self._runtime.log.lines(), self._runtime.now()
        return self._journal.debug_info(shown, logs, self._table.active, now)


def _refuse(order: messages.Submit | messages.Ask, error: SubmitErrorCode) -> None:
    if isinstance(order, messages.Submit):
        order.reply.answer({"ok": False, "error": error})
    else:
        order.reply.fail(RequestRefused(error))
