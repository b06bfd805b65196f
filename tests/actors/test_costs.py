"""What the worker may cost: counted things and ratios within one run, never absolute times."""

from __future__ import annotations

import contextlib
import heapq
import http.client
import json
import os
import resource
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llama_worker.actors.base import SupervisedActor
from llama_worker.actors.request import RequestActor
from llama_worker.messages import Probed, StreamEvents, Tick
from llama_worker.runtime import timers
from llama_worker.runtime.loop_thread import TICK_S
from llama_worker.runtime.timers import Timer, TimerThread
from tests.actors.conftest import HOST, MakeWorker, eventually, fast_timeouts
from tests.fake_script import Reply, Script, Sleep, Tokens, plain_reply, steps_json

EVENTS = 4000  # below the bound on tokens
PROBES = 10


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Counter[type]:
    """Counts the messages that request actors handle."""
    counts: Counter[type] = Counter()
    handle = RequestActor.handle

    def counting(self: RequestActor, message: Any) -> None:
        counts[type(message)] += 1
        handle(self, message)

    monkeypatch.setattr(RequestActor, "handle", counting)
    return counts


def test_text_that_comes_fast_is_told_at_most_once_per_50_ms_and_wakes_one_thread_as_often(
    make_worker: MakeWorker, told: Counter[type]
) -> None:
    rig = make_worker()
    before, began = _switches(), time.monotonic()
    rig.run(*plain_reply(Tokens(1000, 0.002)))
    ticks = (time.monotonic() - began) / TICK_S
    assert told[StreamEvents] <= ticks + 10
    woken = _switches() - before
    # The timed wait, and now and then the interpreter's lock.
    assert woken["llama_worker-loop"] <= 2 * ticks + 30, woken
    assert sum(count for name, count in woken.items() if "request" in name or "transport" in name) == 0


def test_an_event_in_bulk_costs_no_more_than_a_bare_loop(make_worker: MakeWorker) -> None:
    # On a quiet machine it costs half as much; the least of interleaved rounds, since noise only ever adds.
    rig = make_worker(Script(replies=[Reply(plain_reply(Tokens(EVENTS)))]), max_tokens=None)
    ours, bare = [], []
    for _ in range(4):
        bare.append(_cpu_s(lambda: _bare_loop(rig.config.port)))
        ours.append(_cpu_s(lambda: rig.run()))
    assert min(ours) / min(bare) < 1.0


def test_an_idle_worker_wakes_nobody_but_for_its_health_probe(make_worker: MakeWorker) -> None:
    rig = make_worker(slots=4, timeouts=fast_timeouts(health_probe_interval_s=None))
    rig.run(*plain_reply(Sleep(0)))
    _wait_quiet()
    before = _switches()
    time.sleep(3.0)  # the time over which nothing may happen is the claim itself
    woken = {name: count - before[name] for name, count in _switches().items() if count > before[name]}
    woken.pop("MainThread", None)
    assert sum(woken.values()) <= 2, woken


def test_a_health_probe_costs_two_messages_two_timers_and_few_wakeups(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[Any] = Counter()
    receive, call_at = SupervisedActor.on_receive, TimerThread.call_at

    def receiving(self: SupervisedActor[Any], message: Any) -> None:
        counts[type(message)] += 1
        receive(self, message)

    def calling_at(self: TimerThread, at: float, call: Any) -> Timer:
        counts["timers"] += 1
        return call_at(self, at, call)

    monkeypatch.setattr(SupervisedActor, "on_receive", receiving)
    monkeypatch.setattr(TimerThread, "call_at", calling_at)
    make_worker(timeouts=fast_timeouts(health_probe_interval_s=0.2))
    counts.clear()
    eventually(lambda: counts[Probed] >= 2, "health probes, and the end of the start")
    told, woken = Counter(counts), _wakeups()
    eventually(lambda: counts[Probed] - told[Probed] >= PROBES, "health probes")
    told, woken = counts - told, _wakeups() - woken
    probes, timers = told[Probed], told.pop("timers")
    assert set(told) == {Tick, Probed}
    assert told[Tick] <= probes + 1  # one may be under way
    assert timers <= 2 * (probes + 1)  # when it is due, and how long it may take
    assert woken / probes <= 15


def _bare_loop(port: int) -> None:
    connection = http.client.HTTPConnection(HOST, port)
    body = {"messages": [{"role": "user", "content": "x"}], "fake_script": steps_json(*plain_reply(Tokens(EVENTS)))}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response, rest, count = connection.getresponse(), b"", 0
    while data := response.read1(65536):
        *lines, rest = (rest + data).split(b"\n")
        count += sum(1 for line in lines if line.startswith(b"data: {") and json.loads(line[6:])["choices"])
    connection.close()
    assert count >= EVENTS


def _cpu_s(run: Any) -> float:
    before = time.process_time()
    run()
    return time.process_time() - before


def _switches() -> Counter[str]:
    """Voluntary context switches by thread name."""
    found: Counter[str] = Counter()
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # one that has just ended
            for line in Path(f"/proc/self/task/{task}/status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    found[names.get(task, task)] += int(line.split()[1])
    return found


def _wakeups() -> int:
    """Voluntary context switches of all threads but this one, those that have ended included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _wait_quiet() -> None:
    """Until nothing but this thread has been woken for half a second."""
    with timers._timers._changed:  # those of earlier tests that were cancelled wake their thread once each
        timers._timers._heap[:] = [entry for entry in timers._timers._heap if entry[2]._call is not None]
        heapq.heapify(timers._timers._heap)
    for _ in range(40):
        before = _switches()
        time.sleep(0.5)
        after = _switches()
        if all(after[name] == count for name, count in before.items() if name != "MainThread"):
            return
    raise AssertionError("the worker never came to rest")
