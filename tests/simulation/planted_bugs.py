"""Bugs that a person could have made, each to be put into the library for one test.

A `Bug` replaces one function by what `make` makes of it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from llama_worker.messages import (
    CancelRequest,
    CloseStream,
    Exited,
    Stop,
    StreamClosed,
    StreamEvents,
    Tick,
    Unkillable,
    Watch,
)
from llama_worker.request.ending import failed
from llama_worker.request.state import _InTools
from llama_worker.server.lifecycle_states import BackingOff, Ending, Resolve
from llama_worker.server.restart_budget import Lockout, RestartAfter
from llama_worker.server.termination import Terminating

Function = Callable[..., Any]


ANYTHING, NOTHING = "anything", "nothing"


@dataclass(frozen=True, slots=True)
class Bug:
    """`where`: module:function or module:Class.function; `make` gets the right function and returns the wrong one."""

    name: str
    where: str
    make: Callable[[Function], Any]
    under: str = ANYTHING  # what goes wrong in the runs that are to show it


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The library with the bug in it."""
    module, _, path = bug.where.partition(":")
    *owners, function = path.split(".")
    place: Any = pkgutil.resolve_name(f"llama_worker.{module}:{'.'.join(owners)}")
    right = vars(place)[function]
    setattr(place, function, bug.make(right))
    try:
        yield
    finally:
        setattr(place, function, right)


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


def returns_first(right: Function) -> Function:
    """A function that says what it is given first."""
    return lambda first, *others: first


def with_arguments(**wrong_ones: Any) -> Callable[[Function], Function]:
    """A function that gets these, whatever it is given."""
    return lambda right: lambda *given, **named: right(*given, **{**named, **wrong_ones})


def _forgets(right: Function) -> Function:
    return lambda counter, **named: (counter, None)


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
        return request._give_up(failed(reason, detail), now)

    return abandon


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


def _without_deadline(is_in: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """A property that is None while that is so."""
    return lambda right: property(lambda owner: None if is_in(owner) else right.fget(owner))


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


def _waiters_are_forgotten(right: Function) -> Function:
    def ended(dispatcher: Any, record: Any) -> None:
        dispatcher._result_waiters.pop(record.request_id, None)
        right(dispatcher, record)

    return ended


_WATCH, _LIFE = "server.watch:ServerWatch", "server.lifecycle:"
_TABLE, _REQUEST = "request.table:RequestTable", "request.state:Request"
_WORKER, _DISPATCHER = "actors.worker:WorkerActor", "actors.request_dispatcher:RequestDispatcher"
_in_tools = _without_deadline(lambda request: isinstance(request._waiting, _InTools))
_in_backoff = _without_deadline(lambda life: isinstance(life.state, BackingOff))
BUGS: tuple[Bug, ...] = (
    Bug("a slot is not freed", _TABLE + ".end", _slot_is_lost),
    Bug("a slot is given twice", _TABLE + ".admit", _ends_twice, "crash"),
    Bug("a record is not kept", _TABLE + ".end", _record_is_lost),
    Bug("a cancel is dropped", _REQUEST + ".step", ignores(CancelRequest)),
    Bug("the end of a stream is dropped", _REQUEST + ".step", ignores(StreamClosed)),
    Bug("a stream is not closed at a request's end", "actors.transport:TransportActor.handle", ignores(CloseStream)),
    Bug("a release is dropped", _TABLE + ".release", returns(None)),
    Bug("who waits for a result is forgotten", _DISPATCHER + ".ended", _waiters_are_forgotten),
    Bug("a long batch of events is cut", _REQUEST + "._stream_events", _last_of_a_batch_is_lost),
    Bug(
        "a death that is told late is a broken connection",
        "actors.request:RequestActor._look_for_the_server",
        returns(None),
        "crash",
    ),
    Bug("text is appended twice", "request.output:Output.add", _text_comes_twice, NOTHING),
    Bug(
        "what a dead server had sent is not read",
        _REQUEST + "._abandon",
        _rest_of_the_dead_is_lost,
        "crash in the answer",
    ),
    Bug("tools have no deadline", _REQUEST + ".deadline", _in_tools, "tool never returns"),
    Bug("evidence of work is ignored", "server.watch:verdict", with_arguments(liveness_at=None), NOTHING),
    Bug("limits count from the turn's start", "server.timeouts:newest", returns_first, NOTHING),
    Bug("no verdict is ever given", _WATCH + "._give_up", returns(None)),
    Bug("gaps are not noticed", _WATCH + "._notice_gap", returns(None), "host and server stalled"),
    Bug("whatever comes is progress", "stream.advance:Advance.by", returns(True), "frozen progress"),
    Bug("failed health probes do not add up", "server.health:HealthCounter.probed", _forgets, "HTTP thread dead"),
    Bug("a load is never overdue", "server.startup:StartupWatch.overdue", returns(None), "load hangs"),
    Bug("SIGKILL is never sent", "actors.process:step", _without_kill, "SIGTERM ignored"),
    Bug("what cannot be killed is not reported", _WORKER + ".handle", ignores(Unkillable), "unkillable for ever"),
    Bug("stop() resolves too soon", _LIFE + "_stop", _stops_too_soon),
    Bug("a restart does not wait for the old process", _LIFE + "_restart", _restarts_beside_the_old, "livelock"),
    Bug("restarts have no budget", "server.restart_budget:RestartBudget.next", _budget_without_end, "crash loop"),
    Bug("nothing wakes after the backoff", _LIFE + "Lifecycle.deadline", _in_backoff, "crash"),
    Bug("an exit is dropped", _WORKER + ".handle", ignores(Exited), "crash"),
    Bug("a dead actor is not replaced", "actors.children:Children.replace", returns(None), "actor's exception"),
    Bug("an alarm is not taken back", "actors.base:Alarm.set", _alarm_is_kept),
    Bug("the first alarm wins", "actors.base:Alarm.set", _first_alarm_wins),
    Bug("a request is begun and not watched", "actors.watchdog:WatchdogActor.handle", ignores(Watch), "request lost"),
    Bug("requests in flight are not failed", _DISPATCHER + ".abandon", returns(None), "crash"),
)
