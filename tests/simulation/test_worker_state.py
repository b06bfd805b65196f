"""The simulator reports a worker whose own state is wrong, at the message that made it wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from llama_worker.request.table import RequestTable
from llama_worker.server.lifecycle_states import BackingOff, Draining, State, Stopped
from llama_worker.server.messages import Start
from tests.simulation.bench import ready_bench
from tests.simulation.promises import Violation
from tests.simulation.worker_state import violations
from tests.simulation.world import Failure, Setting, World
from tests.tables import cases


def test_a_lost_slot_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RequestTable.end

    def end(table: RequestTable, record: Any, now: float) -> bool:
        ended = right(table, record, now)
        table._free.pop()
        return ended

    monkeypatch.setattr(RequestTable, "end", end)
    with pytest.raises(Failure) as found:
        World(Setting(seed=1)).run()
    assert isinstance(found.value.broken, Violation)
    assert "are in use and [" in found.value.broken.what


def life(actor: Any, **changes: Any) -> None:
    actor._server.lifecycle = replace(actor._server.lifecycle, **changes)


def without_server(
    actor: Any, state: State, *, pid: int | None = None, waiting: tuple[Start, ...] = ()
) -> None:
    """In that state, as if it had been reached in order, but for `pid` and `waiting`."""
    life(actor, state=state, budget=replace(actor._server.lifecycle.budget, ready_at=None))
    actor._server.pid, actor._server._waiting = pid, list(waiting)


START = Start(reply=None)  # type: ignore[arg-type]


@cases(
    "change, what",
    {
        "nothing": (lambda actor: None, ""),
        "a slot": (
            lambda actor: actor._table._free.pop(),
            "slots [0] are in use and [] free, of 2",
        ),
        "a record": (
            lambda actor: actor._table._records.update({1: None}),
            "requests [1] have a record and are in flight",
        ),
        "an id": (
            lambda actor: setattr(actor._table, "newest_id", 0),
            "a request is newer than the newest, 0",
        ),
        "a request": (
            lambda actor: actor._dispatcher._in_flight.clear(),
            "requests [1] run, and [] are in flight",
        ),
        "ready": (lambda actor: life(actor, state=Stopped()), "Stopped(), and READY since "),
        "a restart": (
            lambda actor: life(
                actor, budget=replace(actor._server.lifecycle.budget, recent=(1.0,))
            ),
            "restarts in the window: 1, of 0 in all",
        ),
        "a caller": (
            lambda actor: actor._server._waiting.append(START),
            "Ready(), and {'Start'} wait",
        ),
        "a drain": (
            lambda actor: life(actor, state=Draining()),
            "Draining(then_start=False), and set() wait",
        ),
        "a caller of none": (
            lambda actor: without_server(actor, Stopped(), waiting=(START,)),
            "Stopped() with process None, and {'Start'} wait",
        ),
        "a process": (
            lambda actor: without_server(actor, BackingOff(resume_at=1.0), pid=7),
            "BackingOff(resume_at=1.0) with process 7",
        ),
    },
)
def test_each_inconsistency_is_named(change: Callable[[Any], object], what: str) -> None:
    with ready_bench() as (bench, _, worker):
        bench.answer(worker.submit("job", "", "a question"))
        change(bench.actor)
        found = [violation.what for violation in violations(bench.actor)]
    assert bool(found) == bool(what)
    assert "".join(found).startswith(what)
