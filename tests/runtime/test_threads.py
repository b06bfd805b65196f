"""Threads are used again; probes share one, and one that hangs holds up no other."""

import os
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pykka
import pytest

from llama_worker.errors import is_shortage
from llama_worker.runtime.host import probe_queue, threads
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.host.probe_queue import ProbeQueue
from llama_worker.runtime.host.threads import may_block_this_thread, run_on_thread
from tests.actors.conftest import WAIT_S, eventually, no_threads


class Hanging:
    """A call that returns when it is let go."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.let_go = threading.Event()
        self.made_by = ""

    def __call__(self) -> None:
        self.made_by = threading.current_thread().name
        self.has_begun.set()
        self.let_go.wait(WAIT_S)


def made_by(run: Callable[[Callable[[], object]], None]) -> int:
    """Which thread makes a call."""
    idents: queue.SimpleQueue[int] = queue.SimpleQueue()
    run(lambda: idents.put(threading.get_ident()))
    return idents.get(timeout=WAIT_S)


def test_a_retry_that_comes_at_once_starts_the_callback_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that sets the retry may be preempted until it is due."""
    lack = RuntimeError("can't start new thread")
    monkeypatch.setattr(threads, "start_thread", Mock(side_effect=[lack, lack, thread := Mock()]))
    monkeypatch.setattr(threads, "call_at", lambda _, retry: retry())
    callbacks = threads._CallbackThread()
    callbacks.start()
    assert callbacks._thread is thread


# ---------------------------------------------------------------- spare threads


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The spare threads of this test alone."""
    kept: list[object] = []
    monkeypatch.setattr(threads, "_spare", kept)
    return kept


def test_a_thread_is_used_again(spare: list[object]) -> None:
    first = made_by(lambda call: run_on_thread("one", call))
    eventually(lambda: len(spare) == 1, "the thread to have nothing left to do")
    again = Hanging()
    run_on_thread("two", again)
    assert again.has_begun.wait(WAIT_S)
    assert (again.made_by, spare) == ("two", [])
    again.let_go.set()
    eventually(lambda: len(spare) == 1, "the thread to have nothing left to do")
    assert made_by(lambda call: run_on_thread("three", call)) == first


def test_a_spare_thread_keeps_nothing_of_its_calls(spare: list[object]) -> None:
    for _ in range(2):
        held = Hanging()
        held.let_go.set()
        run_on_thread("one", partial(held))
        eventually(lambda: len(spare) == 1, "the thread to have nothing left to do")
        reference = weakref.ref(held)
        del held
        assert reference() is None


def test_waits_for_no_actor_except_in_host_code(spare: list[object]) -> None:
    future: WorkerFuture[None] = WorkerFuture()
    waited: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def call() -> None:
        with pytest.raises(pykka.Timeout):
            future.get()
        waited.put(future.wait(None))
        with may_block_this_thread():
            waited.put(future.wait(WAIT_S))

    run_on_thread("one", call)
    assert not waited.get(timeout=WAIT_S)
    future.answer(None)
    assert waited.get(timeout=WAIT_S)


def test_few_threads_are_kept(spare: list[object]) -> None:
    calls = [Hanging() for _ in range(8)]
    for call in calls:
        run_on_thread("one of many", call)
    assert all(call.has_begun.wait(WAIT_S) for call in calls)
    for call in calls:
        call.let_go.set()
    names = [call.made_by for call in calls]
    eventually(
        lambda: not {"one of many"} & {thread.name for thread in threading.enumerate()},
        "the end of the threads that are not kept",
    )
    assert names == ["one of many"] * 8
    assert 0 < len(spare) <= 4


# ---------------------------------------------------------------- probes

NOT_EXPECTED = Mock()  # a refusal: what the probe would do is missed


@pytest.fixture
def alarms(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What the timers would call after `ADD_THREADS_AFTER_S`."""
    calls: list[Callable[[], object]] = []

    def call_at(at: float, call: Callable[[], object]) -> None:
        assert at > threads.now(), "most servers answer before that"
        calls.append(call)

    monkeypatch.setattr(threads, "now", lambda: 100.0)
    monkeypatch.setattr(threads, "call_at", call_at)
    return calls


def test_one_thread_makes_all_probes(alarms: list[Callable[[], object]]) -> None:
    probes, first = ProbeQueue(), Hanging()
    probes.run(first, NOT_EXPECTED)
    idents: queue.SimpleQueue[int] = queue.SimpleQueue()
    for _ in range(5):
        probes.run(lambda: idents.put(threading.get_ident()), NOT_EXPECTED)
    first.let_go.set()
    assert len({idents.get(timeout=WAIT_S) for _ in range(5)}) == 1
    assert len(alarms) == 1
    alarms.pop()()  # nobody waits any more
    assert not alarms


def test_a_hanging_probe_delays_no_other(alarms: list[Callable[[], object]]) -> None:
    probes, hanging, made = ProbeQueue(), [Hanging(), Hanging()], threading.Event()
    for each in hanging:
        probes.run(each, NOT_EXPECTED)
    assert hanging[0].has_begun.wait(WAIT_S)
    while not hanging[1].has_begun.wait(0.01):
        alarms.pop(0)()
    probes.run(made.set, NOT_EXPECTED)
    while not made.wait(0.01):
        alarms.pop(0)()
    for each in hanging:
        each.let_go.set()


def test_no_thread_is_added_while_probes_begin(
    alarms: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Mock(wraps=run_on_thread)
    monkeypatch.setattr(threads, "run_on_thread", start)
    probes, (first, second, third) = ProbeQueue(), (Hanging(), Hanging(), Hanging())
    probes.run(first, NOT_EXPECTED)
    assert first.has_begun.wait(WAIT_S)
    for each in (second, third):
        probes.run(each, NOT_EXPECTED)
    first.let_go.set()
    assert second.has_begun.wait(WAIT_S)
    alarms.pop()()
    start.assert_called_once()
    for each in (second, third):
        each.let_go.set()


def test_many_hanging_probes_get_threads_soon(
    alarms: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Callable[[], object]] = []
    monkeypatch.setattr(threads, "run_on_thread", lambda name, call: begun.append(call))
    probes = ProbeQueue()
    for _ in range(2):
        counts = []
        for _ in range(10):
            probes.run(lambda: None, NOT_EXPECTED)
        for _ in range(5):
            counts.append(len(begun))
            alarms.pop()()
        assert counts == [1, 2, 4, 8, 16]
        while begun:
            begun.pop()()
        alarms.pop()()  # nobody waits any more: the next time it begins with one


def test_a_probe_that_raises_harms_no_other(
    alarms: list[Callable[[], object]], caplog: pytest.LogCaptureFixture
) -> None:
    probes = ProbeQueue()
    probes.run(lambda: 1 / 0, NOT_EXPECTED)
    assert made_by(lambda call: probes.run(call, NOT_EXPECTED))
    threads.flush_callbacks_and_log(WAIT_S)
    assert "a probe failed" in caplog.text


def test_a_forked_child_has_a_queue_of_its_own() -> None:
    parents = probe_queue._probes
    pid = os.fork()
    if pid == 0:
        os._exit(probe_queue._probes is parents)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_probe_without_a_first_thread_is_refused() -> None:
    probes, refused, made = ProbeQueue(), list[BaseException](), threading.Event()
    with no_threads("-probes"):
        probes.run(lambda: 1 / 0, refused.append)
    assert list(map(is_shortage, refused)) == [True]
    probes.run(made.set, NOT_EXPECTED)
    assert made.wait(WAIT_S)


def test_probes_that_get_no_thread_are_refused(alarms: list[Callable[[], object]]) -> None:
    probes, hanging, refused = ProbeQueue(), Hanging(), list[BaseException]()
    probes.run(hanging, NOT_EXPECTED)
    assert hanging.has_begun.wait(WAIT_S)
    for _ in range(2):
        probes.run(lambda: 1 / 0, refused.append)
    with no_threads("-probes"):
        alarms.pop()()
    assert list(map(is_shortage, refused)) == [True, True]
    alarms.pop()()  # nobody waits any more
    assert not alarms
    hanging.let_go.set()


def test_refuses_no_probe_while_threads_start(
    alarms: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lack = RuntimeError("can't start new thread")
    monkeypatch.setattr(threads, "run_on_thread", Mock(side_effect=[None, None, None, lack, lack]))
    probes, refused = ProbeQueue(), list[BaseException]()
    for _ in range(4):
        probes.run(lambda: None, refused.append)
    for _ in range(2):  # one more thread, then one of the two that it would take
        alarms.pop()()
    assert not refused
    alarms.pop()()
    assert refused == [lack] * 4
