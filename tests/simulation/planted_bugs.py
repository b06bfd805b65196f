"""Bugs that a person could have made, each to be put into the library for one test.

A `Bug` replaces one function by what `make` makes of it.
"""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from llama_worker.messages import CancelRequest, CloseStream, Exited, Stop, StreamClosed, Tick, Unkillable, Watch
from llama_worker.request.ending import failed
from llama_worker.request.state import _InTools
from llama_worker.server.lifecycle_states import BackingOff, Ending, Resolve
from llama_worker.server.restart_budget import Lockout, RestartAfter
from llama_worker.server.termination import Terminating

Function = Callable[..., Any]
Make = Callable[[Function], Any]
ANYTHING, NOTHING = "anything", "nothing"


@dataclass(frozen=True, slots=True)
class Bug:
    """`where`: module:function or module:Class.function; `make` gets the right function and returns the wrong one."""

    name: str
    where: str
    make: Make
    under: str = ANYTHING  # what goes wrong in the runs that are to show it

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it into the library."""
        module, _, path = self.where.partition(":")
        *owners, function = path.split(".")
        place: Any = pkgutil.resolve_name(f"llama_worker.{module}:{'.'.join(owners)}")
        monkeypatch.setattr(place, function, self.make(vars(place)[function]))


def instead(where: Callable[..., bool], answer: Function) -> Make:
    """A function that gives another answer where that is true of its arguments."""
    return lambda right: lambda *given, **named: answer(*given) if where(*given) else right(*given, **named)


def ignores(*kinds: type) -> Make:
    """A handler that drops messages of these kinds."""
    return instead(lambda actor, message, *rest: isinstance(message, kinds), lambda *given: [])


def returns(value: Any) -> Make:
    """A function that always says the same."""
    return lambda right: lambda *given, **named: value


def given(change: Callable[..., tuple[Any, ...]]) -> Make:
    """A function that gets other arguments."""
    return lambda right: lambda *arguments, **named: right(*change(*arguments), **named)


def named(**wrong_ones: Any) -> Make:
    """A function that gets these, whatever it is given."""
    return lambda right: lambda *arguments, **others: right(*arguments, **{**others, **wrong_ones})


def then(act: Function) -> Make:
    """A function after which something else happens, with its answer and its arguments."""

    def make(right: Function) -> Function:
        def wrong(*arguments: Any) -> Any:
            answer = right(*arguments)
            act(answer, *arguments)
            return answer

        return wrong

    return make


def without_deadline(is_in: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """A property that is None while that is so."""
    return lambda right: property(lambda owner: None if is_in(owner) else right.fget(owner))


def _given_twice(admitted: Any, table: Any, *rest: Any) -> None:
    if admitted is not None and table.newest_id % 7 == 0:
        table._free.append(admitted.slot)


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


def _forget_waiters(dispatcher: Any, record: Any) -> tuple[Any, Any]:
    dispatcher._result_waiters.pop(record.request_id, None)
    return dispatcher, record


_calls = itertools.count(1)
_WATCH, _LIFE = "server.watch:ServerWatch", "server.lifecycle:"
_TABLE, _REQUEST = "request.table:RequestTable", "request.state:Request"
_WORKER, _DISPATCHER = "actors.worker:WorkerActor", "actors.request_dispatcher:RequestDispatcher"
_ALARM = "actors.base:Alarm.set"
BUGS: tuple[Bug, ...] = (
    Bug("a slot is not freed", _TABLE + ".end", then(lambda ended, table, record: ended and table._free.pop())),
    Bug("a slot is given twice", _TABLE + ".admit", then(_given_twice), "crash"),
    Bug(
        "a record is not kept",
        _TABLE + ".end",
        then(lambda ended, table, record: table._records.pop(record.request_id, None)),
    ),
    Bug("a cancel is dropped", _REQUEST + ".step", ignores(CancelRequest)),
    Bug("the end of a stream is dropped", _REQUEST + ".step", ignores(StreamClosed)),
    Bug("a stream is not closed at a request's end", "actors.transport:TransportActor.handle", ignores(CloseStream)),
    Bug("a release is dropped", _TABLE + ".release", returns(None)),
    Bug("who waits for a result is forgotten", _DISPATCHER + ".ended", given(_forget_waiters)),
    Bug(
        "a long batch of events is cut",
        _REQUEST + "._stream_events",
        given(lambda request, batch: (request, replace(batch, events=batch.events[:3]))),
    ),
    Bug(
        "a death that is told late is a broken connection",
        "actors.request:RequestActor._look_for_the_server",
        returns(None),
        "crash",
    ),
    Bug(
        "text is appended twice",
        "request.output:Output.add",
        given(lambda output, reasoning, text: (output, reasoning, text * (1 + (next(_calls) % 97 == 0)))),
        NOTHING,
    ),
    Bug(
        "what a dead server had sent is not read",
        _REQUEST + "._abandon",
        lambda right: lambda request, reason, detail, now: request._give_up(failed(reason, detail), now),
        "crash in the answer",
    ),
    Bug(
        "tools have no deadline",
        _REQUEST + ".deadline",
        without_deadline(lambda request: isinstance(request._waiting, _InTools)),
        "tool never returns",
    ),
    Bug("evidence of work is ignored", "server.watch:verdict", named(liveness_at=None), NOTHING),
    Bug(
        "limits count from the turn's start",
        "server.timeouts:newest",
        lambda right: lambda first, *others: first,
        NOTHING,
    ),
    Bug("no verdict is ever given", _WATCH + "._give_up", returns(None)),
    Bug("gaps are not noticed", _WATCH + "._notice_gap", returns(None), "host and server stalled"),
    Bug("whatever comes is progress", "stream.advance:Advance.by", returns(True), "frozen progress"),
    Bug(
        "failed health probes do not add up",
        "server.health:HealthCounter.probed",
        lambda right: lambda counter, **named: (counter, None),
        "HTTP thread dead",
    ),
    Bug("a load is never overdue", "server.startup:StartupWatch.overdue", returns(None), "load hangs"),
    Bug(
        "SIGKILL is never sent",
        "actors.process:step",
        instead(
            lambda state, message, now: (
                isinstance(state, Terminating) and type(message) is Tick and now >= state.kill_at
            ),
            lambda state, message, now: (state, None),
        ),
        "SIGTERM ignored",
    ),
    Bug("what cannot be killed is not reported", _WORKER + ".handle", ignores(Unkillable), "unkillable for ever"),
    Bug("stop() resolves too soon", _LIFE + "_stop", _stops_too_soon),
    Bug("a restart does not wait for the old process", _LIFE + "_restart", _restarts_beside_the_old, "livelock"),
    Bug("restarts have no budget", "server.restart_budget:RestartBudget.next", _budget_without_end, "crash loop"),
    Bug(
        "nothing wakes after the backoff",
        _LIFE + "Lifecycle.deadline",
        without_deadline(lambda life: isinstance(life.state, BackingOff)),
        "crash",
    ),
    Bug("an exit is dropped", _WORKER + ".handle", ignores(Exited), "crash"),
    Bug("a dead actor is not replaced", "actors.children:Children.replace", returns(None), "actor's exception"),
    Bug("an alarm is not taken back", _ALARM, instead(lambda alarm, at: at is None, lambda *given: None)),
    Bug(
        "the first alarm wins",
        _ALARM,
        instead(lambda alarm, at: at is not None and alarm._at is not None, lambda *given: None),
    ),
    Bug("a request is begun and not watched", "actors.watchdog:WatchdogActor.handle", ignores(Watch), "request lost"),
    Bug("requests in flight are not failed", _DISPATCHER + ".abandon", returns(None), "crash"),
)
