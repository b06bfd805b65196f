"""Bugs that a person could have made, each to be put into the library for one test.

A `Bug` replaces one function by what `make` makes of it. Owners are named by path: the library's layout is not this
file's business beyond the names it needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from llama_worker.messages import (
    CancelRequest,
    Exited,
    Stop,
    StreamClosed,
    StreamEvents,
    Tick,
    Unkillable,
)
from llama_worker.server.lifecycle_states import BackingOff, Ending, Resolve
from llama_worker.server.restart_budget import Lockout, RestartAfter
from llama_worker.server.termination import Terminating

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Bug:
    """`owner`: module:Class or module; `make` gets the right function and returns the wrong one."""

    name: str
    owner: str
    function: str
    make: Callable[[Function], Any]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The library with the bug in it."""
    module, _, inner = bug.owner.partition(":")
    owner = importlib.import_module(f"llama_worker.{module}")
    if inner:
        owner = getattr(owner, inner)
    right = vars(owner)[bug.function]
    setattr(owner, bug.function, bug.make(right))
    try:
        yield
    finally:
        setattr(owner, bug.function, right)


def ignores(*kinds: type) -> Callable[[Function], Function]:
    """A handler that drops messages of these kinds."""

    def make(right: Function) -> Function:
        @wraps(right)
        def wrong(self: Any, message: Any, *rest: Any, **named: Any) -> Any:
            return [] if isinstance(message, kinds) else right(self, message, *rest, **named)

        return wrong

    return make


def returns(value: Any) -> Callable[[Function], Function]:
    """A function that always says the same."""
    return lambda right: lambda *given, **named: value


def with_arguments(**wrong_ones: Any) -> Callable[[Function], Function]:
    """A function that gets these, whatever it is given."""
    return lambda right: lambda *given, **named: right(*given, **{**named, **wrong_ones})


def _slot_is_lost(right: Function) -> Function:
    def end(table: Any, record: Any) -> bool:
        free = list(table._free)
        ended: bool = right(table, record)
        table._free = free
        return ended

    return end


def _record_is_lost(right: Function) -> Function:
    def end(table: Any, record: Any) -> bool:
        ended: bool = right(table, record)
        table._records.pop(record.request_id, None)
        return ended

    return end


def _ends_twice(right: Function) -> Function:
    def admit(table: Any, job_name: str, now: float) -> Any:
        admitted = right(table, job_name, now)
        if admitted is not None and table.newest_id % 7 == 0:
            table._free.append(admitted.slot)
        return admitted

    return admit


def _last_of_a_batch_is_lost(right: Function) -> Function:
    def events(request: Any, batch: StreamEvents) -> Any:
        return right(request, replace(batch, events=batch.events[:3]))

    return events


def _text_comes_twice(right: Function) -> Function:
    calls = [0]

    def add(output: Any, reasoning: str, text: str) -> None:
        calls[0] += 1
        right(output, reasoning, text * 2 if calls[0] % 97 == 0 else text)

    return add


def _rest_of_the_dead_is_lost(right: Function) -> Function:
    def abandon(request: Any, reason: Any, detail: str, now: float) -> Any:
        return request._give_up(request_failed(reason, detail), now)

    return abandon


def request_failed(reason: Any, detail: str) -> Any:
    """An ending."""
    return importlib.import_module("llama_worker.request.ending").failed(reason, detail)


def _without_kill(right: Function) -> Function:
    def step(state: Any, message: Any, now: float, **named: Any) -> Any:
        if isinstance(state, Terminating) and isinstance(message, Tick) and now >= state.kill_at:
            return state, None
        return right(state, message, now, **named)

    return step


def _stops_too_soon(right: Function) -> Function:
    def stop(life: Any, now: float, grace_s: float) -> Any:
        stopping, effects = right(life, now, grace_s)
        return stopping, (*effects, Resolve(Stop))

    return stop


def _restarts_beside_the_old(right: Function) -> Function:
    def restart(life: Any, now: float, reason: str, detail: str, effects: Any = (), **named: Any) -> Any:
        restarted, following = right(life, now, reason, detail, effects, **named)
        if isinstance(restarted.state, Ending):
            restarted = replace(restarted, state=BackingOff(resume_at=now))
        return restarted, following

    return restart


def _budget_without_end(right: Function) -> Function:
    def following(budget: Any, now: float, policy: Any) -> Any:
        left, decision = right(budget, now, policy)
        if isinstance(decision, Lockout):
            left = replace(left, restart_count=left.restart_count + 1)
            return left, RestartAfter(delay_s=0.1)
        return left, decision

    return following


def _no_alarm_for_backoff(right: Any) -> Any:
    return property(lambda life: None if isinstance(life.state, BackingOff) else right.fget(life))


def _tools_without_deadline(right: Any) -> Any:
    return property(lambda request: None if type(request._waiting).__name__ == "_InTools" else right.fget(request))


def _alarm_is_kept(right: Function) -> Function:
    def set_alarm(alarm: Any, at: float | None) -> None:
        if at is not None:
            right(alarm, at)

    return set_alarm


def _first_alarm_wins(right: Function) -> Function:
    def set_alarm(alarm: Any, at: float | None) -> None:
        if at is None or alarm._at is None:
            right(alarm, at)

    return set_alarm


def _from_the_start(right: Function) -> Function:
    def newest(start: float, *others: float | None) -> float:
        return start

    return newest


def _waiters_are_forgotten(right: Function) -> Function:
    def ended(dispatcher: Any, record: Any) -> None:
        dispatcher._result_waiters.pop(record.request_id, None)
        right(dispatcher, record)

    return ended


def _stays_open(right: Function) -> Function:
    def handle(transport: Any, message: Any) -> None:
        if type(message).__name__ != "CloseStream":
            right(transport, message)

    return handle


def _unwatched(right: Function) -> Function:
    def handle(watchdog: Any, message: Any) -> None:
        if type(message).__name__ != "Watch":
            right(watchdog, message)

    return handle


_WATCH = "server.watch:ServerWatch"
_LIFE = "server.lifecycle"
BUGS: tuple[Bug, ...] = (
    Bug("a slot is not freed", "request.table:RequestTable", "end", _slot_is_lost),
    Bug("a slot is given twice", "request.table:RequestTable", "admit", _ends_twice),
    Bug("a record is not kept", "request.table:RequestTable", "end", _record_is_lost),
    Bug("a cancel is dropped", "request.state:Request", "step", ignores(CancelRequest)),
    Bug("the end of a stream is dropped", "request.state:Request", "step", ignores(StreamClosed)),
    Bug("a stream is not closed at a request's end", "actors.transport:TransportActor", "handle", _stays_open),
    Bug("a release is dropped", "request.table:RequestTable", "release", returns(None)),
    Bug(
        "who waits for a result is forgotten",
        "actors.request_dispatcher:RequestDispatcher",
        "ended",
        _waiters_are_forgotten,
    ),
    Bug("a long batch of events is cut", "request.state:Request", "_stream_events", _last_of_a_batch_is_lost),
    Bug("text is appended twice", "request.output:Output", "add", _text_comes_twice),
    Bug("what a dead server had sent is not read", "request.state:Request", "_abandon", _rest_of_the_dead_is_lost),
    Bug("tools have no deadline", "request.state:Request", "deadline", _tools_without_deadline),
    Bug("evidence of work is ignored", "server.watch", "verdict", with_arguments(liveness_at=None)),
    Bug("limits count from the turn's start", "server.timeouts", "newest", _from_the_start),
    Bug("no verdict is ever given", _WATCH, "_give_up", returns(None)),
    Bug("gaps are not noticed", _WATCH, "_notice_gap", returns(None)),
    Bug("whatever comes is progress", "stream.advance:Advance", "by", returns(True)),
    Bug(
        "failed health probes do not add up",
        "server.health:HealthCounter",
        "probed",
        lambda right: lambda self, **named: (self, None),
    ),
    Bug("a load is never overdue", "server.startup:StartupWatch", "overdue", returns(None)),
    Bug("SIGKILL is never sent", "actors.process", "step", _without_kill),
    Bug("a process that cannot be killed is not reported", "actors.worker:WorkerActor", "handle", ignores(Unkillable)),
    Bug("stop() resolves too soon", _LIFE, "_stop", _stops_too_soon),
    Bug("a restart does not wait for the old process", _LIFE, "_restart", _restarts_beside_the_old),
    Bug("restarts have no budget", "server.restart_budget:RestartBudget", "next", _budget_without_end),
    Bug("nothing wakes after the backoff", _LIFE + ":Lifecycle", "deadline", _no_alarm_for_backoff),
    Bug("an exit is dropped", "actors.worker:WorkerActor", "handle", ignores(Exited)),
    Bug("a dead actor is not replaced", "actors.children:Children", "replace", returns(None)),
    Bug("an alarm is not taken back", "actors.base:Alarm", "set", _alarm_is_kept),
    Bug("the first alarm wins", "actors.base:Alarm", "set", _first_alarm_wins),
    Bug("a request is begun and not watched", "actors.watchdog:WatchdogActor", "handle", _unwatched),
    Bug("requests in flight are not failed", "actors.request_dispatcher:RequestDispatcher", "abandon", returns(None)),
)
