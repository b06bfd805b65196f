"""What the worker may cost: counted things and ratios within one run, never absolute times."""

import contextlib
import http.client
import json
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Set
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_worker.actors.base import SupervisedActor
from llama_worker.clock import ClockTimer
from llama_worker.mailbox import Tick
from llama_worker.request.messages import FlushStream, HurryStream, StreamEvents
from llama_worker.runtime.host import threads
from llama_worker.runtime.host.threads import TimerThread
from llama_worker.server.messages import Probed
from llama_worker.stream.lazy_reading import HURRY_S, WAKE_INTERVAL_S
from llama_worker.testing import scripts as fs
from tests.actors.conftest import HOST, MakeWorker, Rig, eventually, fast_timeouts

EVENTS = 4000  # below the bound on tokens


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Counter[type]:
    """Counts the messages that actors are told."""
    counts: Counter[type] = Counter()
    receive = SupervisedActor.on_receive

    def receiving(self: SupervisedActor[Any], message: Any) -> None:
        counts[type(message)] += 1
        receive(self, message)

    monkeypatch.setattr(SupervisedActor, "on_receive", receiving)
    return counts


def test_fast_text_is_sent_at_each_third_look(rig: Rig, told: Counter[type]) -> None:
    before, began = _wakeups(), time.monotonic()
    rig.run(*fs.plain_reply(fs.Tokens(1000, 0.002)))
    ticks = (time.monotonic() - began) / WAKE_INTERVAL_S
    assert told[StreamEvents] <= ticks / 3 + 10
    # The stream's thread, and now and then the request's, each for the interpreter's lock, too.
    assert _wakeups() - before <= 3 * ticks + 100


def test_waiting_reads_hurry_the_stream_rarely(rig: Rig, told: Counter[type], gate: Path) -> None:
    began = time.monotonic()
    request_id = rig.submit(*fs.plain_reply(fs.Text("Once"), fs.Gate(gate), fs.Tokens(100, 0.01)))
    chunks = rig.worker.iter_output(request_id)
    assert next(chunks)["text"] == "Once"
    gate.touch()
    assert "tok99" in "".join(chunk["text"] for chunk in chunks)
    windows = 2 * (time.monotonic() - began) / HURRY_S
    assert told[HurryStream] <= windows + 2
    assert told[FlushStream] == 0


def test_bulk_event_costs_no_more_than_bare_loop(make_worker: MakeWorker) -> None:
    # On a quiet machine it costs half as much; the least of interleaved rounds, since noise only
    # ever adds: the more noise, the more rounds.
    rig = make_worker(
        fs.Script(replies=[fs.ScriptedReply(fs.plain_reply(fs.Tokens(EVENTS)))]), max_tokens=None
    )
    ours: list[float] = []
    bare: list[float] = []
    while len(ours) < 4 or (min(ours) >= min(bare) and len(ours) < 16):
        bare.append(_cpu_s(lambda: _bare_loop(rig.config.port)))
        ours.append(_cpu_s(lambda: rig.run()))
    assert min(ours) / min(bare) < 1.0


def test_idle_worker_wakes_nobody_except_for_health_probe(
    monkeypatch: pytest.MonkeyPatch, make_worker: MakeWorker
) -> None:
    others = _tasks()  # what earlier tests have left running is no cost of this worker
    monkeypatch.setattr(threads, "_timers", TimerThread())
    rig = make_worker(slots=4, timeouts=fast_timeouts(health_probe_interval_s=None))
    rig.run(*fs.plain_reply(fs.Sleep(0)))

    def rests() -> bool:
        before = _switches(others)
        time.sleep(3.0)  # the time over which nothing may happen is the claim itself
        return (_switches(others) - before).total() <= 2

    eventually(rests, "a rest")


def test_probe_costs_two_messages_two_timers_no_thread(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, told: Counter[Any]
) -> None:
    call_at = TimerThread.call_at

    def calling_at(self: TimerThread, at: float, call: Any) -> ClockTimer:
        told[ClockTimer] += 1
        return call_at(self, at, call)

    start_thread = threading.Thread.start

    def starting(self: threading.Thread) -> None:
        told[threading.Thread] += 1
        start_thread(self)

    monkeypatch.setattr(TimerThread, "call_at", calling_at)
    monkeypatch.setattr(threading.Thread, "start", starting)
    make_worker(timeouts=fast_timeouts(health_probe_interval_s=0.2))
    told.clear()
    eventually(lambda: told[Probed] >= 2, "health probes, and the end of the start")
    before, woken = Counter(told), _wakeups()
    eventually(lambda: told[Probed] - before[Probed] >= 10, "health probes")
    counts, woken = told - before, _wakeups() - woken
    probes = counts[Probed]
    assert set(counts) == {Tick, Probed, ClockTimer}
    assert counts[Tick] <= probes + 1  # one may be under way
    assert counts[ClockTimer] <= 2 * probes + 1  # when it is due, and when its time is up
    assert woken / probes <= 20  # 6 to 7 on an idle machine; a busy one adds waits for the GIL


def _bare_loop(port: int) -> None:
    connection = http.client.HTTPConnection(HOST, port)
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "scripted_reply": fs.steps_json(*fs.plain_reply(fs.Tokens(EVENTS))),
    }
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response, rest, count = connection.getresponse(), b"", 0
    while data := response.read1(65536):
        *lines, rest = (rest + data).split(b"\n")
        count += sum(
            1 for line in lines if line.startswith(b"data: {") and json.loads(line[6:])["choices"]
        )
    connection.close()
    assert count >= EVENTS


def _cpu_s(run: Any) -> float:
    before = time.process_time()
    run()
    return time.process_time() - before


def _tasks() -> set[int]:
    """This process's threads, those that Python knows nothing of too."""
    return set(map(int, os.listdir("/proc/self/task")))


def _switches(others: Set[int] = frozenset()) -> Counter[str]:
    """Voluntary context switches by the name of the thread, but for the others'."""
    found: Counter[str] = Counter()
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in _tasks() - others:
        with contextlib.suppress(psutil.Error, OSError):  # one that has just ended
            found[names.get(task, str(task))] += psutil.Process(task).num_ctx_switches().voluntary
    return found


def _wakeups() -> int:
    """Voluntary context switches of all threads but this one, those that have ended included."""
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        - resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    )
