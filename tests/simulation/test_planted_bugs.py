"""A simulator that finds no planted bug proves nothing: each must be found within a few runs of an
hour.

These are bugs that a person could have made; each is put into the library for one test.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from llama_worker.actors.messages import AwaitResult, EndLease
from llama_worker.request.messages import (
    Abandon,
    CancelRequest,
    CloseStream,
    ServerChecked,
    StreamClosed,
    StreamEvents,
)
from llama_worker.request.table import RequestTable
from llama_worker.server.lifecycle_states import BackingOff, Ending, Resolve
from llama_worker.server.messages import Exited, Stalled, Stop, Unkillable, Watch
from llama_worker.types.request import RequestPhase
from tests.simulation.faults import KINDS
from tests.simulation.promises import Violation
from tests.simulation.world import Failure, Setting, World

Function = Callable[..., Any]
Make = Callable[[Function], Any]
ANYTHING, NOTHING = "anything", "nothing"
RUNS = 40


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    where: str  # module:function or module:Class.function
    make: Make  # gets the right function and returns the wrong one
    under: str = ANYTHING  # what goes wrong in the runs that are to show it


def instead(where: Callable[..., bool], answer: Function) -> Make:
    """A function that gives another answer where that is true of its arguments."""
    return lambda right: (
        lambda *given, **named: answer(*given) if where(*given) else right(*given, **named)
    )


def ignores(*kinds: type) -> Make:
    """A handler that drops messages of these kinds."""
    return instead(lambda actor, message, *rest: isinstance(message, kinds), lambda *given: [])


def returns(value: Any) -> Make:
    """A function that always says the same."""
    return lambda right: lambda *given, **named: value


def given(change: Callable[..., tuple[Any, ...]]) -> Make:
    """A function that gets other arguments."""
    return lambda right: lambda *arguments, **named: right(*change(*arguments), **named)


def then(change: Function) -> Make:
    """A function whose answer is another one: `change` gets the right one, and the arguments."""
    return lambda right: lambda *arguments, **named: change(right(*arguments, **named), *arguments)


def without_deadline(is_in: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """A property that is None while that is so."""
    return lambda right: property(lambda owner: None if is_in(owner) else right.fget(owner))


def _slot_not_freed(ended: bool, table: RequestTable, record: Any, now: float) -> bool:
    if ended:
        table.admit("nobody", now)
    return ended


def _record_not_kept(ended: bool, table: RequestTable, record: Any, now: float) -> bool:
    table.release(record.request_id)
    return ended


def _no_verdict(effects: list[Any], *rest: Any) -> list[Any]:
    return [effect for effect in effects if not isinstance(effect, Stalled)]


def _nonsense_is_free(after: tuple[Any, Any], *rest: Any) -> tuple[Any, Any]:
    counts, cause = after
    return counts, None if cause and cause.reason == "degenerate_outputs" else cause


def _stops_too_soon(
    stepped: tuple[Any, Any], life: Any, message: Any, now: float
) -> tuple[Any, Any]:
    new, effects = stepped
    return new, (*effects, Resolve(Stop)) if isinstance(message, Stop) else effects


def _restarts_beside_the_old(
    restarted: tuple[Any, Any], life: Any, now: float, *rest: Any
) -> tuple[Any, Any]:
    new, effects = restarted
    return (
        replace(new, state=BackingOff(resume_at=now)) if isinstance(new.state, Ending) else new
    ), effects


def _budget_without_end(decided: tuple[Any, Any], *rest: Any) -> tuple[Any, Any]:
    left, decision = decided
    if isinstance(decision, str):
        return replace(left, restart_count=left.restart_count + 1), 0.1
    return decided


def _twice(signals: list[Any], *rest: Any) -> list[Any]:
    return [*signals, *signals]


def _closes_nothing(exchange: Any, abort: Any) -> tuple[Any, ...]:
    return exchange, Mock()


def _cut_events(request: Any, message: Any, now: float) -> tuple[Any, ...]:
    if isinstance(message, StreamEvents):
        message = replace(message, events=message.events[:3])
    return request, message, now


def _server_seems_alive(request: Any, message: Any, now: float) -> tuple[Any, ...]:
    if isinstance(message, ServerChecked):
        message = replace(message, is_gone=False)
    return request, message, now


_WATCH, _LIFE = "server.watch:ServerWatch", "server.lifecycle:"
_TOOLS = "request.turn:ToolUse"
_LIFECYCLE = "server.lifecycle_states:Lifecycle"
_TABLE, _REQUEST = "request.table:RequestTable", "request.request:Request"
_WORKER, _DISPATCHER = "actors.worker:WorkerActor", "actors.request_dispatcher:RequestDispatcher"
BUGS: tuple[Bug, ...] = (
    Bug("a slot is not freed", _TABLE + ".end", then(_slot_not_freed)),
    Bug("a record is not kept", _TABLE + ".end", then(_record_not_kept)),
    Bug("a cancel is dropped", _REQUEST + ".step", ignores(CancelRequest)),
    Bug("the end of a stream is dropped", _REQUEST + ".step", ignores(StreamClosed)),
    Bug(
        "a stream is not closed at a request's end",
        "actors.transport:TransportActor.handle",
        ignores(CloseStream),
    ),
    Bug("a release is dropped", _TABLE + ".release", returns(None)),
    Bug("who waits for a result is forgotten", _DISPATCHER + ".handle", ignores(AwaitResult)),
    Bug("a long batch of events is cut", _REQUEST + ".step", given(_cut_events)),
    Bug(
        "a death that is told late is a broken connection",
        _REQUEST + ".step",
        given(_server_seems_alive),
        "crash",
    ),
    Bug(
        "what a dead server had sent is not read",
        _REQUEST + ".step",
        instead(
            lambda request, message, now: getattr(message, "reason", None) == "server_died",
            lambda request, message, now: request.fail(message.reason, message.detail, now),
        ),
        "crash in the answer",
    ),
    Bug(
        "tools have no deadline",
        _REQUEST + ".deadline",
        without_deadline(lambda request: request.phase is RequestPhase.TOOL),
        "tool never returns",
    ),
    Bug("a signal is dropped", _TOOLS + ".take_new_signals", returns([]), NOTHING),
    Bug("a signal comes twice", _TOOLS + ".take_new_signals", then(_twice), NOTHING),
    Bug(
        "limits count from the turn's start",
        "server.timeouts:newest",
        lambda right: lambda first, *others: first,
        NOTHING,
    ),
    Bug("no verdict is ever given", _WATCH + ".step", then(_no_verdict)),
    Bug("lost time counts", "clock:LATE_S", lambda right: math.inf, "host and server stalled"),
    Bug(
        "whatever comes is progress",
        "request.progress:NoveltyDetector.is_new",
        returns(True),
        "frozen progress",
    ),
    Bug(
        "nonsense never costs the server",
        "server.blame:FailureCounts._after_reply",
        then(_nonsense_is_free),
        "repeated lines",
    ),
    Bug(
        "failed health probes do not add up",
        "server.health:HealthCounter.probed",
        lambda right: lambda counter, **named: (counter, None),
        "HTTP thread dead",
    ),
    Bug(
        "a load is never overdue", "server.health:StartupWatch.overdue", returns(None), "load hangs"
    ),
    Bug(
        "what cannot be killed is not reported",
        _WORKER + ".handle",
        ignores(Unkillable),
        "unkillable for ever",
    ),
    Bug("stop() resolves too soon", _LIFE + "step", then(_stops_too_soon)),
    Bug(
        "a restart does not wait for the old process",
        _LIFECYCLE + ".restart",
        then(_restarts_beside_the_old),
        "livelock",
    ),
    Bug(
        "restarts have no budget",
        "server.blame:RestartBudget.next",
        then(_budget_without_end),
        "crash loop",
    ),
    Bug(
        "nothing wakes after the backoff",
        _LIFECYCLE + ".deadline",
        without_deadline(lambda life: isinstance(life.state, BackingOff)),
        "crash",
    ),
    Bug("an exit is dropped", _WORKER + ".handle", ignores(Exited), "crash"),
    Bug(
        "the others outlive a dead actor",
        "actors.children:Children.end",
        returns(None),
        "actor's exception",
    ),
    Bug(
        "an alarm is not taken back",
        "actors.base:Alarm.set",
        instead(lambda alarm, at: at is None, lambda *given: None),
    ),
    Bug(
        "a request is begun and not watched",
        "actors.watchdog:WatchdogActor.handle",
        ignores(Watch),
        "request lost",
    ),
    Bug(
        "the last request does not end a drain",
        _LIFECYCLE + ".drained",
        lambda right: lambda life, *rest: (life, ()),
        NOTHING,
    ),
    Bug(
        "a free slot is not told of",
        _TABLE + ".has_free_slot",
        lambda right: property(returns(False)(right)),
        NOTHING,
    ),
    Bug(
        "requests in flight are not failed",
        _DISPATCHER + ".tell",
        instead(lambda dispatcher, slot, order: isinstance(order, Abandon), lambda *given: None),
        "crash",
    ),
    Bug("the end of a lease is dropped", _WORKER + ".handle", ignores(EndLease), NOTHING),
    Bug(
        "who holds a lease never waits for the server",
        "runtime.http.leased_exchange:LeasedExchange.started_waiting",
        returns(None),
        "request lost",
    ),
    Bug(
        "a lease that is given up keeps its connection",
        "runtime.http.leased_exchange:LeasedExchange.__init__",
        given(_closes_nothing),
        "request lost",
    ),
    Bug(
        "no limit holds while others get data",
        "server.timeouts:_Limits._no_data_beside_others",
        returns(()),
        "dead stream, live neighbour",
    ),
    Bug(
        "short requests hide a lost one",
        "server.slot_verdicts:SlotsRound._is_lost",
        returns(False),
        "request lost",
    ),
    Bug(
        "nobody says why a leased connection broke",
        "runtime.http.leased_exchange:LeasedExchange.step",
        given(_server_seems_alive),
        "crash",
    ),
)


def hunt(under: str) -> None:
    """Hours in which everything goes wrong, nothing, or only things of one kind."""
    requests, faults = {ANYTHING: (40.0, 40.0), NOTHING: (20.0, 0.0)}.get(under, (12.0, 12.0))
    kinds = {under: 1.0} if under in KINDS else {}
    rates: dict[str, Any] = {"requests_per_hour": requests, "faults_per_hour": faults}
    for seed in range(RUNS):
        World(Setting(seed=seed, hours=1.0, kinds=kinds, **rates)).run()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, path = bug.where.partition(":")
    *owners, function = path.split(".")
    place: Any = pkgutil.resolve_name(f"llama_worker.{module}:{'.'.join(owners)}")
    monkeypatch.setattr(place, function, bug.make(vars(place)[function]))
    with pytest.raises(Failure) as found:
        hunt(bug.under)
    assert isinstance(found.value.broken, Violation)
