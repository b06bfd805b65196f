"""Probes share a thread, and one that hangs holds up no other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from llama_worker.runtime import probe_threads
from llama_worker.runtime.probe_threads import ProbeThreads
from tests.actors.conftest import WAIT_S, eventually, no_threads


@pytest.fixture
def alarms(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What the timers would call after `PATIENCE_S`."""
    calls: list[Callable[[], object]] = []
    monkeypatch.setattr(probe_threads, "call_at", lambda at, call: calls.append(call))
    return calls


class Hanging:
    """A probe that ends when it is let go."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.let_go = threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        self.let_go.wait(WAIT_S)


def threads_of(threads: ProbeThreads, probes: int) -> set[int]:
    """Which threads make so many probes that do not wait."""
    made_by: queue.SimpleQueue[int] = queue.SimpleQueue()
    for _ in range(probes):
        threads.run(lambda: made_by.put(threading.get_ident()))
    return {made_by.get(timeout=WAIT_S) for _ in range(probes)}


def alive() -> int:
    return sum(thread.name == "llama_worker-probes" for thread in threading.enumerate())


def test_one_thread_makes_all_probes(alarms: list[Callable[[], object]]) -> None:
    threads = ProbeThreads()
    assert len(threads_of(threads, 5) | threads_of(threads, 5)) == 1
    before = alive()
    for alarm in alarms:  # whoever waited has been served
        alarm()
    assert alive() == before


def test_a_hanging_probe_holds_up_no_other(alarms: list[Callable[[], object]]) -> None:
    threads, hanging, before = ProbeThreads(), [Hanging(), Hanging()], alive()
    for each in hanging:
        threads.run(each)
    assert hanging[0].has_begun.wait(WAIT_S)
    while not hanging[1].has_begun.is_set():
        alarms.pop(0)()
        hanging[1].has_begun.wait(0.01)
    made = threading.Event()
    threads.run(made.set)
    alarms.pop()()
    assert made.wait(WAIT_S)
    for each in hanging:
        each.let_go.set()
    eventually(lambda: alive() == before + 1, "the end of the threads that are not needed")
    assert len(threads_of(threads, 5)) == 1


def test_a_probe_that_raises_costs_no_other(alarms: list[Callable[[], object]]) -> None:
    threads = ProbeThreads()
    threads.run(lambda: 1 / 0)
    assert len(threads_of(threads, 1)) == 1


def test_probes_wait_while_the_host_has_no_thread(alarms: list[Callable[[], object]]) -> None:
    threads, hanging, made = ProbeThreads(), Hanging(), threading.Event()
    with no_threads("-probes"), pytest.raises(RuntimeError):
        threads.run(made.set)
    threads.run(hanging)
    assert hanging.has_begun.wait(WAIT_S)
    threads.run(made.set)
    with no_threads("-probes"):
        alarms.pop()()
    alarms.pop()()
    assert made.wait(WAIT_S)
    hanging.let_go.set()
