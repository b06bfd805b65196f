"""What must hold, checked after every step, or at the instant when a bound is due.

Ends once: slots are those of requests that have not ended; each has one record; a refusal is true
  when it is given.
Keeps output: it only grows, and after any ending it is what had come up to the instant that
  decided.
Hung or slow: nothing is given up, and no server ended, without a fault that excuses it; what is
  wedged is found within its kind's bound; what comes and goes beside it puts nothing off
  (`beside_others.py`).
Answers at once: every future resolves within its bound; no actor spins on its alarm.
Kill and restart: states change along the documented arrows, restarts keep to the budget, follow
  their backoff in time and happen when planned; SIGKILL comes after the grace; old news changes
  nothing; once faults stop, the worker comes to rest and a fresh request completes.
Leaves nothing: no process lives when the next is started, or after `stop()`; after `close()` no
  actor, timer, stream or open request is left.
Swaps a model: `drain()` ends soon after the last request; only who was asked to restarts.
Cancels for real: the connection of a request that has ended is closed.
Watches its clients: a lease gives its slot back, and its client is told the recorded reason.
A failure cannot be missed: a reason for each that did not complete, none for one that did.
Says what happens: the host hears of every state, restart, admission and ending, once and in order.
Tools: a call that does not return is given up in time; its thread is counted until it ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llama_worker.actors.messages import WaitSlot
from llama_worker.clock import LATE_S
from llama_worker.mailbox import Tick
from llama_worker.request.messages import RequestEnded, StreamEvents
from llama_worker.request.table import RequestRecord, RequestTable
from llama_worker.server.blame import is_degenerate
from llama_worker.server.journal import Journal
from llama_worker.server.lifecycle_states import BackingOff, Ending, Launching, Lifecycle, Ready
from llama_worker.server.messages import (
    Died,
    Drain,
    GpuFaulted,
    HealthLost,
    Observed,
    Stalled,
    StartupFailed,
    Unkillable,
)
from llama_worker.server.termination import Signal
from llama_worker.stream.events import ReasoningDelta, TextDelta
from llama_worker.types.request import RequestFailReason, RequestState
from llama_worker.types.worker import WorkerState
from tests.simulation.bench import Bench
from tests.simulation.beside_others import BesideOthers
from tests.simulation.costs import Costs
from tests.simulation.faults import Kind, Scope
from tests.simulation.instants import LATEST_TIMER_S, Backoff, Signals
from tests.simulation.promises import Promise
from tests.simulation.runtime import UNIX_EPOCH, SimServerProcess
from tests.simulation.scheduler import SimulatedActor
from tests.simulation.server import Exchange, LlamaServer
from tests.simulation.told import Told
from tests.simulation.verdicts import check_words
from tests.simulation.worker_state import violations

ARROWS = {
    WorkerState.STOPPED: {WorkerState.RUNNING},
    WorkerState.RUNNING: {WorkerState.READY, WorkerState.FAILED, WorkerState.STOPPED},
    WorkerState.READY: {WorkerState.RUNNING, WorkerState.FAILED, WorkerState.STOPPED},
    WorkerState.FAILED: {WorkerState.RUNNING, WorkerState.STOPPED},
}
_YEAR_S = 365 * 86400.0
OLD_EXCUSE_S = 90.0  # how long after its end a fault still excuses what follows from it
QUIET_S = 60.0  # so long without a call of the host's, and what happens is the worker's own doing
QUICK_S = 5.0  # for a call that waits for nothing: threads may sleep, mailboxes be full
_GIVES_UP = (HealthLost, GpuFaulted, Stalled, StartupFailed)
_MOST_TICKS = 20
_TO_WAIT = "to wait"  # the answer to `wait_slot()` is not due
_BY_THE_HOST = frozenset({RequestFailReason.CANCELED, RequestFailReason.WORKER_STOPPED})


_BY_TIME = frozenset({RequestFailReason.HEADERS_TIMEOUT, RequestFailReason.STALL_TIMEOUT})


@dataclass(eq=False, slots=True)
class Fault:
    kind: Kind
    began_at: float
    epoch: int | None = None  # of the launch it happened to; None: the host
    request_id: int | None = None  # None: every one of the launch
    ended_at: float | None = None  # in the host's time


@dataclass(eq=False, slots=True)
class Truth:
    """One request, as the world knows it."""

    request_id: int
    admitted_at: float
    exchanges: list[Exchange] = field(default_factory=list)
    text: list[str] = field(default_factory=list)  # handed to the request's actor so far
    reasoning: list[str] = field(default_factory=list)
    heard_at: deque[float] = field(default_factory=lambda: deque(maxlen=200))  # bytes, of late
    records_at: deque[float] = field(default_factory=lambda: deque(maxlen=2000))
    text_at: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    decided: tuple[str, str] | None = None  # (text, reasoning) when its end was decided
    epoch: int = 0
    canceled: bool = False
    record: RequestRecord | None = None
    ended_at: float | None = None
    result: Any = None
    waiting: list[Any] = field(default_factory=list)  # futures of `result()`


class Invariants:
    """Hears of every step of one worker; raises Violation."""

    def __init__(self, bench: Bench) -> None:
        self.faults: list[Fault] = []
        self.requests: dict[int, Truth] = {}
        self.canceled_ids: set[int] = set()  # by a host that guessed them; some come later
        self._killed: set[int] = set()  # launches
        # kinds of faults, and the seconds to their discovery
        self.found: list[tuple[str, float]] = []
        # by request: what is to end it, and since when
        self._awaited: dict[int, list[tuple[Fault, float]]] = {}
        self.stop_called_at = -math.inf  # by stop() or close()
        self.drain_called_at = -math.inf
        self.restarts_ordered = 0  # by restart(), those not seen yet
        self.stop_bound_s = math.inf
        self._drains: list[Any] = []  # futures of `drain()` whose bound has not begun
        self._slot_waiters: list[Any] = []  # futures of `wait_slot()`
        self.blind_until = -math.inf  # the host could not look
        self._blocked: list[list[float]] = []  # since when an actor was, and until when
        self.on_admitted: Callable[[Truth], object] = lambda truth: None
        self._scheduler, self._worker, self._machine = bench.scheduler, bench.actor, bench.machine
        self._policy, self._slots = bench.config.restart, bench.config.slots
        self._profile = bench.config.timeouts
        self._grace_s = bench.config.timeouts.stop_grace_s
        self._records: dict[int, RequestRecord] = {}  # also those that are released at once
        self._keep_records(bench.actor._table)
        self._hear_decisions(bench.actor._journal)
        self._active: tuple[int, ...] = ()
        self._observed_at = -math.inf  # when the watch said what it knows
        self.state = WorkerState.STOPPED  # the worker's
        # launches that ended as planned, or for the nonsense that they said
        self._replaced: set[int] = set()
        self.ready_at = self.ready_unix = 0.0
        self._backoff = Backoff(bench.config.restart)
        self._signals = Signals(
            self, bench.config.timeouts.stop_grace_s, bench.config.timeouts.kill_timeout_s
        )
        self.called_at = -math.inf  # start(), stop(), drain() or restart(), last
        self._ending_epoch: int | None = None  # of the latest launch that was ended
        self._decisions: list[tuple[int, str, str]] = []  # on restarts, by this message
        self.restarts_count = 0  # as seen
        # when, by both clocks, which process
        self.killed_with_evidence: list[tuple[float, float, int | None]] = []
        self._costs = Costs(self, bench.config.restart, bench.config.timeouts)
        self.beside_others = BesideOthers(self, bench.config.timeouts, bench.build)
        self.told = Told(self, bench.build, bench.config.slots)
        self._termed_at: dict[int, float] = {}  # by launch, when SIGTERM was first ordered
        self._stale_before: Lifecycle | None = None
        self._rang_at: dict[str, deque[float]] = {}
        self._backing_off: BackingOff | None = None  # the state whose end is expected
        bench.scheduler.before_message = self.before_message
        bench.scheduler.after_message = self.after_message
        bench.scheduler.on_told = self.on_told

    def _keep_records(self, requests: RequestTable) -> None:
        end = requests.end

        def ended(record: RequestRecord, *how: Any) -> bool:
            self._records[record.request_id] = record
            has_ended = end(record, *how)
            speaks_well = (
                self._policy.degenerate_outputs_before_restart is None or not is_degenerate(record)
            )
            completed = record.result["state"] is RequestState.COMPLETED
            if has_ended and completed and speaks_well:
                self._backoff.completed()
            if has_ended and record.request_id in self.requests:
                truth = self.requests[record.request_id]
                counts = isinstance(self.lifecycle.state, Ready)  # or nobody comes after
                self._costs.ended(truth, record, counts=counts, speaks_well=speaks_well)
            return has_ended

        requests.end = ended  # type: ignore[method-assign,assignment]

    def _hear_decisions(self, journal: Journal) -> None:
        note = journal.restart_decided

        def decided(reason: str, detail: str, delay_s: float | None, now: float) -> None:
            note(reason, detail, delay_s, now)
            self._backoff.decided(reason, delay_s, now)
            if delay_s is not None:
                self.restarts_count += 1
            self._decisions.append((self.lifecycle.epoch, reason, detail))

        journal.restart_decided = decided  # type: ignore[method-assign]
        keep = journal.keep_evidence

        def kept(now: float, **known: Any) -> None:
            keep(now, **known)
            server = self._machine.launched[-1].server if self._machine.launched else None
            kept_at = now, self.unix_now
            self.killed_with_evidence.append((*kept_at, None if server is None else server.pid))

        journal.keep_evidence = kept  # type: ignore[method-assign]

    @property
    def lifecycle(self) -> Lifecycle:
        life: Lifecycle = self._worker._server.lifecycle
        return life

    @property
    def now(self) -> float:
        return self._scheduler.host_time

    @property
    def unix_now(self) -> float:
        return self.now + (UNIX_EPOCH + self._scheduler.lost_s)  # rounded as the worker does

    @property
    def living_server(self) -> LlamaServer | None:
        """The one whose process the worker knows."""
        return self._machine.listening()

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(admitted.request_id for admitted in self._worker._table.active)

    # ------------------------------------------------------------ every step

    def before_message(self, actor: SimulatedActor, message: Any) -> None:
        if type(message) is Tick:
            self._check_alarm(actor)
        if type(message) is StreamEvents:
            truth = self.requests.get(message.turn_id[0])
            if truth is not None:
                truth.heard_at.append(message.at)
                if message.events:
                    truth.records_at.append(message.at)
                if any(type(event) in (TextDelta, ReasoningDelta) for event in message.events):
                    truth.text_at.append(message.at)
                truth.text += [event.text for event in message.events if type(event) is TextDelta]
                truth.reasoning += [
                    event.text for event in message.events if type(event) is ReasoningDelta
                ]
        elif actor.actor is self._worker:
            epoch = getattr(message, "epoch", None)
            if epoch is not None and epoch < self.lifecycle.epoch:
                self._stale_before = self.lifecycle

    def _check_alarm(self, actor: SimulatedActor) -> None:
        """What was due is done, and not due again at once: an actor has fewer deadlines than that
        at a time."""
        rang_at = self._rang_at.setdefault(actor.name, deque(maxlen=_MOST_TICKS))
        rang_at.append(self.now)
        if len(rang_at) == _MOST_TICKS and self.now - rang_at[0] < 1.0:
            what = f"the alarm of {actor.name} rings {_MOST_TICKS} times within a second"
            raise Promise.ANSWERS(what)

    def on_told(self, message: Any) -> None:
        teller = self._scheduler.serving
        if teller is not None and teller.actor.role == "watchdog":
            self._check_evidence(message)
        if type(message) is Unkillable:
            self._signals.called_unkillable(message.epoch)
        elif type(message) is Stalled and self._scheduler.serving is not None:
            self._costs.stalled(message)
        elif type(message) is RequestEnded:
            truth = self.requests.get(message.record.request_id)
            if truth is not None and truth.decided is None:
                truth.decided = "".join(truth.text), "".join(truth.reasoning)

    def _check_evidence(self, message: Any) -> None:
        """The watch says what it knows just before it gives anything up."""
        if type(message) is Observed:
            self._observed_at = message.at
        elif type(message) in _GIVES_UP and self._observed_at != self.now:
            what = f"{message} is told, and what is known of it was told at {self._observed_at}"
            raise Promise.SAYS_WHAT_HAPPENS(what)

    def after_message(self, actor: SimulatedActor, message: Any) -> None:
        if actor.actor is not self._worker:
            return
        if not actor.actor.actor_stopped.is_set():  # else an exception cut the step short
            for violation in violations(actor.actor):
                raise violation
        if self._stale_before is not None:
            if self._stale_before != self.lifecycle:
                what = f"{type(message).__name__} of an old launch changed the worker's state"
                raise Promise.KILLS_AND_RESTARTS(what)
            self._stale_before = None
        active = self.active
        if active != self._active:
            self._check_table(active)
        life = self.lifecycle
        if life.public_state is not self.state:
            self._check_arrow(life.public_state)
        for decision in self._decisions:
            self._check_decision(*decision)
        self._decisions.clear()
        if isinstance(life.state, Ending) and not life.state.gone:
            self._expect_signal(life.state, life.epoch, message)
        if isinstance(life.state, BackingOff) and life.state is not self._backing_off:
            self._backing_off = life.state
            self._expect_launch(life.state)
        self._check_waiters(message)

    def _expect_launch(self, backing_off: BackingOff) -> None:
        left_s = max(0.0, self._backoff.resume_at - self.now)
        self.expect(
            Promise.KILLS_AND_RESTARTS,
            left_s + LATEST_TIMER_S,
            "the launch behind a backoff",
            lambda: self.lifecycle.state is not backing_off,
        )

    def _expect_signal(self, ending: Ending, epoch: int, cause: Any) -> None:
        if self._ending_epoch != epoch:
            is_killed = ending.closing_until is None and type(cause) is not Died
            kept_at = self.killed_with_evidence[-1][0] if self.killed_with_evidence else -math.inf
            if is_killed and kept_at < self.now:
                what = f"launch {epoch} is killed for {cause}, and no evidence is kept"
                raise Promise.SAYS_WHAT_HAPPENS(what)
            for process in self._machine.launched[-1:]:
                if process.epoch == epoch:
                    self._signals.expect_some(process)
        self._ending_epoch = epoch

    def _check_waiters(self, message: Any) -> None:
        """A drain ends soon after the last request; who waits for a slot waits no longer than
        that."""
        if type(message) is Drain:
            self._drains.append(message.reply)
        elif type(message) is WaitSlot:
            self._slot_waiters.append(message.reply)
        if self._drains and not self._active:
            for future in self._drains:
                what = "drain(), with nothing in flight"
                self.expect(Promise.SWAPS, self.stop_bound_s, what, future.done)
            self._drains.clear()
        self._slot_waiters = [future for future in self._slot_waiters if not future.done()]
        if self._slot_waiters and self._slot_answer() != _TO_WAIT:
            what = f"wait_slot() has not resolved, and the answer is {self._slot_answer()}"
            raise Promise.ANSWERS(what)

    def slot_waited(self, error: str | None) -> None:
        """A `wait_slot()` resolves: a slot is free, or none will be for this reason."""
        if error != self._slot_answer():
            what = f"wait_slot() resolved with {error}, the answer is {self._slot_answer()}"
            raise Promise.ENDS_ONCE(what)

    def _slot_answer(self) -> str | None:
        """What who waits for a slot is told now: that one is free (None), why none will be without
        the host's doing, or nothing so far."""
        state = self.lifecycle.state
        if getattr(getattr(state, "goal", state), "then_start", False):
            return _TO_WAIT
        if self.lifecycle.is_draining and self.lifecycle.public_state is not WorkerState.FAILED:
            return "WORKER_DRAINING"
        is_full = len(self.active) >= self._slots
        answers = {
            WorkerState.FAILED: "WORKER_FAILED",
            WorkerState.STOPPED: "WORKER_NOT_READY",
            WorkerState.READY: _TO_WAIT if is_full else None,
            WorkerState.RUNNING: _TO_WAIT,
        }
        return answers[self.lifecycle.public_state]

    def _check_table(self, active: tuple[int, ...]) -> None:
        if len(active) > self._slots or len(set(active)) != len(active):
            raise Promise.ENDS_ONCE(f"requests {active} hold {self._slots} slots")
        for request_id in active:
            if request_id not in self.requests:
                truth = Truth(request_id, self.now, epoch=self.lifecycle.epoch)
                truth.canceled = request_id in self.canceled_ids
                self.requests[request_id] = truth
                self.on_admitted(truth)
            elif self.requests[request_id].record is not None:
                raise Promise.ENDS_ONCE(f"request {request_id} has ended and holds a slot again")
        for request_id in set(self._active) - set(active):
            self._ended(self.requests[request_id])
        self._active = active
        self._expect_recycling()

    def _expect_recycling(self) -> None:
        """An idle server that is as old as it may get, has served as many as it may, or is as
        large, is replaced; the host's calls come first."""
        policy, life = self._policy.recycle, self.lifecycle
        if policy is None or self._active:
            return
        if life.public_state is not WorkerState.READY or life.is_draining:
            return
        left_s = math.inf if policy.max_age_s is None else self._left_s(policy.max_age_s)
        has_served = any(each.epoch == life.epoch for each in self.requests.values())
        if has_served and (self._has_served_enough(life.epoch) or self._is_too_large()):
            left_s = 0.0
        if left_s < math.inf:
            self.expect(
                Promise.KILLS_AND_RESTARTS,
                left_s + LATEST_TIMER_S,
                f"launch {life.epoch} is recycled",
                lambda: (
                    self.lifecycle.state is not life.state
                    or bool(self._active)
                    or self.living_server is None
                ),
            )

    def _left_s(self, max_age_s: float) -> float:
        return max(0.0, self.ready_at + max_age_s - self.now)

    def _has_served_enough(self, epoch: int) -> bool:
        most = self._policy.recycle.max_requests if self._policy.recycle else None
        ended = (each for each in self.requests.values() if each.epoch == epoch and each.ended_at)
        return most is not None and sum(1 for _ in ended) >= most

    def _is_too_large(self) -> bool:
        most = self._policy.recycle.max_anon_mib if self._policy.recycle else None
        server = self._machine.launched[-1].server
        return most is not None and server is not None and server.anon_bytes >> 20 >= most

    def _check_arrow(self, state: WorkerState) -> None:
        if state not in ARROWS[self.state]:
            raise Promise.KILLS_AND_RESTARTS(f"the worker went from {self.state} to {state}")
        if state is WorkerState.READY and self._active:
            what = f"READY with requests {self._active} of the life before"
            raise Promise.KILLS_AND_RESTARTS(what)
        if state is WorkerState.READY:
            self.ready_at, self.ready_unix = self.now, self.unix_now
            self._backoff.ready(self.ready_at)
        elif self.state is WorkerState.READY:
            self._backoff.left_ready(self.now)
        self.state = state
        self._expect_recycling()

    def _check_decision(self, epoch: int, reason: str, detail: str) -> None:
        match reason:
            case "recycled":
                self._check_recycled(epoch, detail)
            case "requested":
                self._check_requested(epoch)
            case "degenerate_outputs":
                self._check_degenerate(epoch, detail)
            case "server_died" | "out_of_memory":
                server = self._machine.launched[-1].server
                lacked = server is not None and server.oom_evidence is not None
                if lacked is not (reason == "out_of_memory"):
                    what = f"launch {epoch} is restarted for {reason}; it lacked memory: {lacked}"
                    raise Promise.SAYS_WHAT_HAPPENS(what)
            case _:
                self._costs.restarted(epoch, reason, detail)

    def _check_requested(self, epoch: int) -> None:
        if self.restarts_ordered == 0:
            raise Promise.SWAPS(f"launch {epoch} is restarted by hand, and nobody asked")
        self.restarts_ordered -= 1
        self._replaced.add(epoch)

    def _check_recycled(self, epoch: int, detail: str) -> None:
        policy = self._policy.recycle
        if self.active or policy is None:
            what = f"launch {epoch} is recycled under requests {self.active}: {detail}"
            raise Promise.KILLS_AND_RESTARTS(what)
        is_old = (
            policy.max_age_s is not None and self.now - self.ready_at >= policy.max_age_s - 1e-6
        )
        if not (is_old or self._has_served_enough(epoch) or self._is_too_large()):
            raise Promise.KILLS_AND_RESTARTS(f"launch {epoch} is recycled too early: {detail}")
        self._replaced.add(epoch)

    def _check_degenerate(self, epoch: int, detail: str) -> None:
        records = [
            each.record
            for each in self.requests.values()
            if each.epoch == epoch and each.record is not None
        ]
        jobs = {record.job_name for record in records if is_degenerate(record)}
        if len(jobs) < (self._policy.degenerate_outputs_before_restart or math.inf):
            what = f"launch {epoch} is restarted for the nonsense of jobs {jobs}: {detail}"
            raise Promise.HUNG_OR_SLOW(what)
        self._replaced.add(epoch)

    # ------------------------------------------------------------ requests

    def _ended(self, truth: Truth) -> None:
        record = self._records.get(truth.request_id)
        if record is None:
            raise Promise.ENDS_ONCE(f"request {truth.request_id} lost its slot without a record")
        truth.record, truth.ended_at = record, self.now
        result = record.result
        self._check_excuse(truth, result["state"], result.get("fail_reason"))
        if result.get("fail_reason") in _BY_TIME and not record.is_leased:  # else not heard here
            check_words(
                result.get("fail_detail") or "",
                self._profile,
                in_time=self.ran_for(2 * OLD_EXCUSE_S),
                heard_at=truth.heard_at,
                records_at=truth.records_at,
                now=self.now,
            )
        self._note_found(truth)
        for future in truth.waiting:
            self.expect_answer(future, QUICK_S, f"result({truth.request_id}), which has ended")
        for exchange in truth.exchanges:
            what = f"request {truth.request_id} has ended, and its connection is closed"
            self.expect(Promise.CANCELS, QUICK_S, what, partial(_is_closed, exchange))
        for fault in self.faults[-20:]:
            if fault.request_id == truth.request_id and fault.ended_at is None:
                fault.ended_at = self.now
        self._check_output(truth, record)

    def ran_for(self, seconds: float) -> bool:
        """Whether nothing has held up the host for so long."""
        return self.ran_s > seconds and not any(
            fault.kind.scope is Scope.HOST
            and (fault.ended_at is None or fault.began_at > self.now - seconds)
            for fault in reversed(self.faults)
        )

    @property
    def ran_s(self) -> float:
        """For how long the host has run, since it was held up last."""
        return self._scheduler.now - self._scheduler.halted_until

    def _check_excuse(
        self, truth: Truth, state: RequestState, reason: RequestFailReason | None
    ) -> None:
        request_id = truth.request_id
        detail = truth.record.result.get("fail_detail", "") if truth.record is not None else ""
        if state is RequestState.COMPLETED:
            return
        if (
            reason is RequestFailReason.STREAM_DISCONNECTED
            and truth.exchanges
            and truth.exchanges[-1].died
        ):
            what = f"request {request_id} was disconnected, it says, and its server had died"
            raise Promise.HUNG_OR_SLOW(what)
        if reason is RequestFailReason.CANCELED:
            excused = truth.canceled
        elif reason is RequestFailReason.WORKER_STOPPED:
            since = truth.admitted_at - QUICK_S
            lost = self.drain_called_at >= since and self._has_excuse(truth.epoch, request_id)
            excused = lost or self.stop_called_at >= since
        else:
            planned = reason is RequestFailReason.WORKER_RESTARTED and truth.epoch in self._replaced
            # The library's gap: where a halt ends so soon after a limit of the host's code, its
            # look is not late.
            halted = (
                "did not return within" in detail
                and self._scheduler.now - self._scheduler.halted_until <= LATE_S
            )
            by_time = reason in _BY_TIME or reason is RequestFailReason.REQUEST_LOST
            excused = planned or halted or self._has_excuse(truth.epoch, request_id, by_time)
        if not excused:
            raise Promise.HUNG_OR_SLOW(
                f"request {request_id} was given up with {reason}, by no call and no fault: "
                f"{detail}"
            )

    def _check_output(self, truth: Truth, record: RequestRecord) -> None:
        result, reason = record.result, record.result.get("fail_reason")
        if truth.decided is None:
            return  # its actor died without a word
        text, reasoning = truth.decided
        loops = reason is not None and "loop" in str(reason)
        same = (
            text.startswith(result["text"])
            if loops
            else (text, reasoning) == (result["text"], result["reasoning"])
        )
        if not same:
            ended, came = (
                (result["text"], text)
                if result["text"] != text
                else (result["reasoning"], reasoning)
            )
            shown = f"{ended[:40]!r}...{ended[-40:]!r}, and {came[:40]!r}...{came[-40:]!r} had come"
            raise Promise.KEEPS_OUTPUT(f"request {truth.request_id} ({reason}) ended with {shown}")
        sent = "".join(words for each in truth.exchanges for words in each.said)
        whole = (
            result["state"] is RequestState.COMPLETED
            or reason is RequestFailReason.STREAM_DISCONNECTED
        )
        # the reader has 2 s for what the server had sent
        if reason is RequestFailReason.SERVER_DIED:
            whole = self._scheduler.now - self._scheduler.halted_until > 5.0
        if record.is_leased:
            if whole and record.status["output_chars"] != len(sent):
                what = f"lease {truth.request_id} ({reason}) missed a part of the text"
                raise Promise.WATCHES_CLIENTS(what)
            return
        if whole and result["text"] != sent:
            what = f"request {truth.request_id} ended ({reason}) without a part of what was sent"
            raise Promise.KEEPS_OUTPUT(what)
        signals = sum(each.signals for each in truth.exchanges)
        if whole and len(result["signals"]) != signals:
            what = f"request {truth.request_id} ended ({reason}) without one of {signals} signals"
            raise Promise.TOOLS(what)

    def awaits_result(self, request_id: int, future: Any) -> None:
        truth = self.requests[request_id]
        truth.waiting.append(future)
        if truth.ended_at is not None:
            self.expect_answer(future, QUICK_S, f"result({request_id}), which had ended")

    def admission_answered(self, error: str | None) -> None:
        """A `submit()` is being answered: admitted, or refused for a reason that is true now."""
        state, full = self.lifecycle.public_state, len(self.active) >= self._slots
        expected: str | None
        if self.lifecycle.is_draining and state is not WorkerState.FAILED:
            expected = "WORKER_DRAINING"
        elif state is not WorkerState.READY:
            expected = "WORKER_FAILED" if state is WorkerState.FAILED else "WORKER_NOT_READY"
        else:
            expected = None if error is None else "NO_SLOT_AVAILABLE" if full else "to be admitted"
        if error != expected or (error is None) is (self.active == self._active):
            what = f"submit() answered {error} while {state}, {len(self.active)} slots in use"
            raise Promise.ENDS_ONCE(what)

    def took_result(self, request_id: int, result: Any) -> None:
        truth = self.requests[request_id]
        if truth.record is None:
            raise Promise.ENDS_ONCE(f"request {request_id} has a result and has not ended")
        completed = result["state"] is RequestState.COMPLETED
        if completed is not (result["fail_reason"] is None):
            what = f"request {request_id}: {result['state']}, fail_reason {result['fail_reason']}"
            raise Promise.SHOWS_FAILURES(what)
        if truth.result is not None and truth.result != result:
            raise Promise.ENDS_ONCE(f"request {request_id} has two results")
        truth.result = result

    # ------------------------------------------------------------ faults and bounds

    def fault(
        self, kind: Kind, *, epoch: int | None = None, request_id: int | None = None
    ) -> Fault:
        fault = Fault(kind, self.now, epoch, request_id)
        self.faults.append(fault)
        where = (
            f"request {request_id}"
            if request_id is not None
            else f"launch {epoch}"
            if epoch
            else "the host"
        )
        self._scheduler.trace.note(self._scheduler.now, f"FAULT {kind.name} ({where})")
        return fault

    def _has_excuse(self, epoch: int, request_id: int | None, by_time: bool = False) -> bool:
        """Whether there is a fault for which the request, or (None) the server, may be given up.

        `by_time`: for its silence. The reply of another is no reason for that, unless the others
        wait behind it.
        """
        oldest = self.now - OLD_EXCUSE_S
        return any(
            (fault.kind.kills and (not by_time or fault.kind.neighbours_spare))
            or (request_id is not None and fault.request_id in (None, request_id))
            for fault in reversed(self.faults)
            if not fault.kind.honest and fault.epoch in (None, epoch)
            if fault.ended_at is None or fault.ended_at >= oldest
        )

    def signaled(self, process: SimServerProcess, signal: Signal) -> None:
        """The worker sends the server a signal: it is to end for a reason, and who may shut down in
        peace has its grace period."""
        now, epoch, launched_at = self.now, process.epoch, process.launched_at
        self._signals.sent(process, signal)
        if signal is Signal.TERMINATE:
            self._termed_at.setdefault(epoch, now)
        elif signal is Signal.KILL and epoch in self._termed_at:
            waited_s = now - self._termed_at[epoch]
            hurried = self.stop_called_at >= launched_at or self._has_excuse(epoch, None)
            if not hurried and waited_s < self._grace_s - LATE_S:
                what = f"launch {epoch} is killed {waited_s:.1f} s after SIGTERM"
                raise Promise.KILLS_AND_RESTARTS(what)
        # at the instant of its launch it has done nothing that could be evidence
        elif signal is Signal.KILL and self._grace_s > 0.0 and now > launched_at:
            kept_at = self.killed_with_evidence[-1][0] if self.killed_with_evidence else -math.inf
            if kept_at < launched_at and not self._has_excuse(epoch, None):
                what = f"launch {epoch} is killed without SIGTERM before, and without evidence"
                raise Promise.KILLS_AND_RESTARTS(what)
        self.server_killed(epoch, launched_at)

    def server_killed(self, epoch: int, launched_at: float) -> None:
        if epoch in self._killed | self._replaced:
            return
        self._killed.add(epoch)
        since = launched_at - QUICK_S
        drained = self.drain_called_at >= since and not self.active
        if self.stop_called_at < since and not drained and not self._has_excuse(epoch, None):
            what = f"launch {epoch} is killed without a fault: {self.lifecycle.last_error}"
            raise Promise.HUNG_OR_SLOW(what)

    def expect_warning(self, words: str, epoch: int) -> None:
        """Soon the status has a line with these words, unless the launch ends first."""
        self.told.warnings.add(words)

        def is_told() -> bool:
            life = self.lifecycle
            is_over = life.epoch != epoch or life.public_state is not WorkerState.READY
            return is_over or any(words in line for line in self._worker._journal.warnings)

        what = f"a warning of {words} in launch {epoch}"
        self.expect(Promise.SAYS_WHAT_HAPPENS, QUICK_S, what, is_told)

    def actor_blocked(self, blocked: SimulatedActor) -> Callable[[], object]:
        """Nobody waits for less than the time in which the actor is not given up; call what is
        returned once it is."""
        entry = [self.now, math.inf]
        self._blocked.append(entry)
        return lambda: entry.__setitem__(1, self.now)

    @property
    def _blocked_s(self) -> float:
        """In all, of the host's time."""
        now = self.now
        return sum(min(until, now) - since for since, until in self._blocked)

    def expect(
        self,
        promise: Promise,
        bound_s: float,
        what: str,
        done: Callable[[], bool],
        spared_s: Callable[[], float] = float,
    ) -> None:
        """Raise Violation unless `done` within so many seconds of the host's time, and those that
        `spared_s` adds then.

        Where the host lacked the threads to look, what hangs may have worked until then.
        """
        scheduler = self._scheduler
        began_at, elapsed_s = scheduler.host_time, scheduler.stopwatch()
        allowed_s, blocked_s = bound_s, self._blocked_s

        def check() -> None:
            nonlocal began_at, allowed_s, elapsed_s, blocked_s
            if done():
                return
            if promise is Promise.HUNG_OR_SLOW and self.blind_until > began_at:
                allowed_s = max(allowed_s, self.blind_until - began_at + bound_s)
            left_s = allowed_s - elapsed_s() + self._blocked_s - blocked_s
            if left_s <= 1e-6:
                left_s = spared_s()
                allowed_s, elapsed_s = left_s, scheduler.stopwatch()
                began_at, blocked_s = scheduler.host_time, self._blocked_s
            if left_s <= 0:
                raise promise(f"not within {bound_s:.1f} s: {what}")
            scheduler.after(left_s, check, "a bound is due", of_host=False)

        scheduler.after(bound_s, check, "a bound is due", of_host=False)

    def expect_found(self, fault: Fault, bound_s: Callable[[], float | None], truth: Truth) -> None:
        """The request must have ended within the bound, for whatever reason; None: it is only noted
        when. The bound may grow by what is sent meanwhile."""
        self._awaited.setdefault(truth.request_id, []).append((fault, self.now))
        first_s = bound_s()
        if first_s is None:
            return
        within_s: float = first_s

        def over() -> bool:
            return truth.ended_at is not None or fault.ended_at is not None

        def spared_s() -> float:
            nonlocal within_s
            before_s, within_s = within_s, max(within_s, bound_s() or _YEAR_S)
            if within_s > before_s:
                return within_s - before_s
            if not fault.kind.neighbours_spare:
                return 0.0
            others = [
                each
                for each in self.requests.values()
                if each is not truth and each.epoch == truth.epoch
            ]
            heard_at = max(
                (each.advanced_at for other in others[-50:] for each in other.exchanges),
                default=0.0,
            )
            return within_s - (self.now - heard_at)

        self.expect(
            Promise.HUNG_OR_SLOW,
            within_s,
            f"request {truth.request_id} under the fault {fault.kind.name!r}",
            over,
            spared_s,
        )

    def _note_found(self, truth: Truth) -> None:
        reason = truth.record.result.get("fail_reason") if truth.record is not None else None
        if reason is None or reason in _BY_THE_HOST:
            return
        for fault, since in self._awaited.pop(truth.request_id, ()):
            if fault.ended_at is None:
                self.found.append((fault.kind.name, self.now - since))

    def expect_answer(self, future: Any, bound_s: float, what: str) -> None:
        self.expect(Promise.ANSWERS, bound_s, f"the future of {what}", future.done)

    def launch(self, processes: Sequence[Any], epoch: int) -> None:
        """A process is about to be started: the one before is gone, as those before it were when it
        was started."""
        self.check_gone(processes[-1:], f"launch {epoch} begins")
        if isinstance(self.lifecycle.state, Launching) and self.lifecycle.state.first:
            self._backoff.started_by_hand()
        elif (
            self.called_at < self._backoff.decided_at - QUIET_S
            and self.now < self._backoff.resume_at - 1e-6
        ):
            what = f"launch {epoch} begins {self._backoff.resume_at - self.now:.3f} s early"
            raise Promise.KILLS_AND_RESTARTS(what)

    def check_gone(self, processes: Sequence[Any], what: str) -> None:
        for process in processes:
            if process.server is not None and not process.server.gone:
                raise Promise.LEAVES_NOTHING(f"{what} while launch {process.epoch} still lives")


def _is_closed(exchange: Exchange) -> bool:
    return exchange.over or exchange.closed_by_client
