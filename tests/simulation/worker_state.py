"""What must hold of a WorkerActor's state whenever it has handled a message."""

from __future__ import annotations

from collections.abc import Iterator

from llama_worker.actors.request_dispatcher import RequestDispatcher
from llama_worker.actors.server_life import ServerLife
from llama_worker.actors.worker import WorkerActor
from llama_worker.request.table import RequestTable
from llama_worker.server import lifecycle_states as states
from tests.simulation.promises import Promise, Violation


def violations(actor: WorkerActor) -> Iterator[Violation]:
    """One for each invariant that does not hold."""
    for what in _of_table(actor._table, actor._config.slots):
        yield Promise.ENDS_ONCE(what)
    for what in _of_dispatcher(actor._dispatcher, actor._table):
        yield Promise.ENDS_ONCE(what)
    for what in (*_of_lifecycle(actor._server.lifecycle), *_of_server(actor._server)):
        yield Promise.KILLS_AND_RESTARTS(what)


def _of_table(table: RequestTable, slots: int) -> Iterator[str]:
    used = [admitted.slot for admitted in table._active.values()]
    if sorted([*used, *table._free]) != list(range(slots)):
        yield f"slots {used} are in use and {table._free} free, of {slots}"
    if twice := table._active.keys() & table._records.keys():
        yield f"requests {sorted(twice)} have a record and are in flight"
    if any(request_id > table.newest_id for request_id in (*table._active, *table._records)):
        yield f"a request is newer than the newest, {table.newest_id}"


def _of_dispatcher(dispatcher: RequestDispatcher, table: RequestTable) -> Iterator[str]:
    active = {admitted.request_id for admitted in table.active}
    if active != dispatcher._in_flight.keys():
        yield f"requests {sorted(active)} run, and {sorted(dispatcher._in_flight)} are in flight"


def _of_lifecycle(life: states.Lifecycle) -> Iterator[str]:
    serves = isinstance(life.state, states.Ready | states.Draining)
    if serves is not (life.budget.ready_at is not None):
        yield f"{life.state}, and READY since {life.budget.ready_at}"
    if len(life.budget.recent) > life.budget.restart_count:
        counts = f"{len(life.budget.recent)}, of {life.budget.restart_count} in all"
        yield f"restarts in the window: {counts}"


def _of_server(server: ServerLife) -> Iterator[str]:
    state = server.lifecycle.state
    waiting = {type(order).__name__ for order in server._waiting}
    match state:
        case states.Stopped() | states.Failed():
            if server.pid is not None or waiting:
                yield f"{state} with process {server.pid}, and {waiting} wait"
        case states.BackingOff():
            if server.pid is not None:
                yield f"{state} with process {server.pid}"
        case states.Ready():
            if waiting:
                yield f"{state}, and {waiting} wait"
        case states.Draining(then_start=then_start):
            if "Drain" not in waiting or ("Start" in waiting) is not then_start:
                yield f"{state}, and {waiting} wait"
        case _:
            pass
