"""The timer thread: deadlines in order, each once, and nothing that stops it."""

import faulthandler
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from unittest.mock import Mock, call

import pytest

from llama_worker import WorkerConfig
from llama_worker.actors.base import Alarm
from llama_worker.runtime.host import threads
from llama_worker.runtime.host.threads import TimerThread, call_at
from llama_worker.runtime.real import RealHost, RealRuntime
from tests.actors.conftest import WAIT_S, eventually


def alarm_for(ring: Callable[[], object]) -> Alarm:
    """On the real clock; its mailbox rings for each Tick."""
    runtime = RealRuntime(WorkerConfig("w", "127.0.0.1", 9, ("llama-server",)))
    return Alarm(runtime, Mock(**{"tell.side_effect": lambda tick: ring()}))


def test_calls_come_in_the_order_of_deadlines() -> None:
    called: SimpleQueue[tuple[float, float, str]] = SimpleQueue()
    now = threads.now()

    def call(at: float) -> None:
        called.put((at, threads.now(), threading.current_thread().name))

    with threads._timers._changed:  # none of them is due before the last is set
        for at in (now + 0.03, now + 0.01, now + 0.04, now + 0.02, now):
            call_at(at, partial(call, at))
    calls = [called.get(timeout=WAIT_S) for _ in range(5)]
    assert calls == sorted(calls)
    assert all(made_at >= at and thread == "llama_worker-timers" for at, made_at, thread in calls)


def test_an_alarm_fires_at_the_latest_instant_set() -> None:
    rung: SimpleQueue[float] = SimpleQueue()
    now = threads.now()
    alarm, off = (alarm_for(lambda: rung.put(threads.now())) for _ in range(2))
    # however long this thread sleeps, nothing rings before the last word
    with threads._timers._changed:
        off.set(now + 0.02)
        off.set(None)
        alarm.set(now + 0.03)
        alarm.set(now + 0.06)
    assert rung.get(timeout=WAIT_S) >= now + 0.06
    last = threading.Event()
    call_at(now + 0.07, last.set)
    assert last.wait(WAIT_S)
    assert rung.empty()


def test_failing_call_is_logged_and_the_next_made(caplog: pytest.LogCaptureFixture) -> None:
    def failing() -> None:
        raise ValueError("mine")

    called = threading.Event()
    with caplog.at_level(logging.ERROR, logger="llama_worker.timers"):
        call_at(threads.now(), failing)
        call_at(threads.now() + 0.01, called.set)
        assert called.wait(WAIT_S)
        threads.flush_callbacks_and_log(WAIT_S)
    assert "a timer's call failed" in caplog.text


def test_timers_survive_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own, called = TimerThread(), threading.Event()
    pauses: SimpleQueue[float] = SimpleQueue()
    lacks, wait = [MemoryError()], own._changed.wait

    def lacking(timeout_s: float | None) -> bool:
        if lacks:
            raise lacks.pop()
        return wait(timeout_s)

    monkeypatch.setattr(own._changed, "wait", lacking)
    monkeypatch.setattr(threads, "time", Mock(sleep=pauses.put))
    own.start()
    assert pauses.get(timeout=WAIT_S) > 0
    own.call_at(threads.now() + 0.01, called.set)
    assert called.wait(WAIT_S)


def test_timers_survive_the_hosts_broken_logging() -> None:
    def failing(*_: object) -> bool:
        raise SystemExit(3)

    logger, called = logging.getLogger("llama_worker.timers"), threading.Event()
    logger.addFilter(failing)
    try:
        call_at(threads.now(), lambda: 1 / 0)
        call_at(threads.now() + 0.01, called.set)
        assert called.wait(WAIT_S)
    finally:
        logger.removeFilter(failing)


def test_deadline_beyond_platform_limit_delays_no_other() -> None:
    never = call_at(threads.now() + 1e300, lambda: None)
    ticked = threading.Event()
    call_at(threads.now(), ticked.set)
    assert ticked.wait(WAIT_S)
    again = threading.Event()  # by now the thread waits for the far one
    call_at(threads.now() + 0.05, again.set)
    assert again.wait(WAIT_S)
    never.cancel()


def test_far_deadlines_never_pile_up_or_wake_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    own = TimerThread()
    monkeypatch.setattr(threads, "_timers", own)
    rung = threading.Event()
    alarm, kept = alarm_for(lambda: None), alarm_for(rung.set)
    # on top, so that none of the others comes there
    near = call_at(threads.now() + 3599, lambda: None)
    kept.set(threads.now() + 0.5)
    for step in range(10_000):
        alarm.set(threads.now() + 3600 + step)
    assert len(own.clock._heap) < 200
    assert rung.wait(WAIT_S)
    alarm.set(None)
    near.cancel()
    eventually(lambda: own.clock.wakes_at is None, "a thread that waits for nothing")


def test_timers_run_before_the_first_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Mock()
    monkeypatch.setattr(threads, "_timers", timers)
    RealHost()  # of a worker
    assert timers.mock_calls == [call.start()]


def test_a_forked_child_has_timers_of_its_own() -> None:
    call_at(threads.now(), lambda: None)  # the parent's thread exists
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(WAIT_S, exit=True)
        called = threading.Event()
        try:
            call_at(threads.now(), called.set)
            called.wait()
        finally:
            os._exit(not called.is_set())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
