"""With `check_invariants` a worker whose state is wrong ends at once, and says what was wrong."""

from __future__ import annotations

from typing import Any

import pytest

from llama_worker import WorkerClosed
from llama_worker.actors.server_life import ServerLife
from llama_worker.request.table import RequestTable
from tests.actors.conftest import MakeWorker, Rig, eventually


def lose_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of a request that ends is not freed."""
    right = RequestTable.end

    def end(table: RequestTable, record: Any, now: float) -> bool:
        ended = right(table, record, now)
        table._free.pop()
        return ended

    monkeypatch.setattr(RequestTable, "end", end)


def closed_by(rig: Rig) -> BaseException | None:
    """Why the worker takes no calls any more; None: it does."""
    try:
        rig.status()
    except WorkerClosed as closed:
        return closed.__cause__ or closed
    return None


def test_a_broken_invariant_ends_the_worker(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_slots(monkeypatch)
    rig = make_worker(slots=2)
    rig.submit()
    error = eventually(lambda: closed_by(rig), "the end of the worker")
    (note,) = error.__notes__
    assert "AssertionError: after RequestEnded: slots [] are in use and [0] free, of 2" in note
    rig.wait_gone()


def test_without_the_option_nothing_is_checked(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerLife, "violations", lambda life: ["all is wrong"])
    rig = make_worker(check_invariants=False)
    assert rig.run()["text"] == "Hello"
