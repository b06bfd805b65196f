"""Questions are answered within milliseconds, whatever the server is doing."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from llama_worker import RestartPolicy, WorkerStartError
from llama_worker.types import WorkerState
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, eventually, fast_timeouts
from tests.fake_script import Headers, Repeat, Reply, Script, Sleep, Startup, Text, WaitClose

MEDIAN_S = 0.05
MAX_S = 0.5  # on a machine with noise
ROUNDS = 20
TOKENS = [Headers(), Repeat(None, [Text("token "), Sleep(0.002)])]


def _assert_answers_quickly(rig: Rig, request: int) -> None:
    """Every question, several times; the worker must be in the same state all the while."""
    before = rig.status()["state"]
    calls: dict[str, Callable[[], Any]] = {
        "get_worker_status": rig.worker.get_worker_status,
        "get_debug_info": rig.worker.get_debug_info,
        "get_status": lambda: rig.worker.get_status(request),
        "read_output": lambda: rig.worker.read_output(request),
        "get_result": lambda: rig.worker.get_result(request + 1000),
        "cancel": lambda: rig.worker.cancel(request + 1000),
        "submit": lambda: rig.worker.submit("job", "", "x", params={"fake_script": []}),
    }
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            began_at = time.monotonic()
            call().get(timeout=WAIT_S)
            took[name].append(time.monotonic() - began_at)
    assert rig.status()["state"] is before, "the state to be measured in was over too soon"
    assert {name: times for name, times in took.items() if statistics.median(times) > MEDIAN_S} == {}
    assert max(max(times) for times in took.values()) < MAX_S


def _running(make_worker: MakeWorker, *, slots: int = 1, **config: Any) -> tuple[Rig, list[int]]:
    rig = make_worker(
        Script(replies=[Reply(TOKENS, times=None)], ignore_term=True), slots=slots, loop_detector=None, **config
    )
    requests = [rig.submit() for _ in range(slots)]
    for request in requests:
        rig.wait_text(request, "token")
    return rig, requests


def test_while_the_server_stands_still(make_worker: MakeWorker) -> None:
    rig, requests = _running(make_worker)
    os.kill(rig.status()["pid"], signal.SIGSTOP)
    _assert_answers_quickly(rig, requests[0])
    assert rig.worker.cancel(requests[0]).get(timeout=MAX_S) is True
    again = rig.worker.submit("job", "", "x").get(timeout=MAX_S)  # admitted: the worker cannot know yet
    assert again["ok"] is True


def test_while_eight_streams_run(make_worker: MakeWorker) -> None:
    rig, requests = _running(make_worker, slots=8)
    _assert_answers_quickly(rig, requests[3])
    began_at = time.monotonic()
    assert all(rig.worker.cancel(request).get(timeout=WAIT_S) for request in requests)
    assert time.monotonic() - began_at < 8 * MAX_S


def test_during_a_start(make_worker: MakeWorker) -> None:
    rig = make_worker(Script(startup=Startup(load_s=None, load_work="cpu")), start=False)
    starting = rig.worker.start()
    rig.journal.wait("bound", timeout=WAIT_S)
    _assert_answers_quickly(rig, 1)
    assert rig.status()["state"] is WorkerState.RUNNING
    rig.stop()
    with pytest.raises(WorkerStartError):
        starting.get(timeout=WAIT_S)


def test_during_a_stop(make_worker: MakeWorker) -> None:
    rig, requests = _running(make_worker, timeouts=fast_timeouts(stop_grace_s=4.0))
    stopping = rig.worker.stop()
    rig.journal.wait("signal", timeout=WAIT_S)
    _assert_answers_quickly(rig, requests[0])
    assert not stopping.done()
    os.kill(rig.status()["pid"], signal.SIGKILL)
    stopping.get(timeout=WAIT_S)


def test_during_a_backoff(make_worker: MakeWorker) -> None:
    rig, requests = _running(make_worker, restart=RestartPolicy(restart_backoff_s=60.0))
    os.kill(rig.status()["pid"], signal.SIGKILL)
    eventually(lambda: "next_restart_at" in rig.status(), "the backoff")
    _assert_answers_quickly(rig, requests[0])
    began_at = time.monotonic()
    rig.stop()
    assert time.monotonic() - began_at < MAX_S


def test_while_a_long_output_is_kept(make_worker: MakeWorker) -> None:
    line = "x" * 1000 + "\n"
    rig = make_worker(loop_detector=None)
    request = rig.submit(Headers(), Repeat(2000, [Text(line)]), WaitClose())
    eventually(lambda: rig.request(request)["output_chars"] == 2000 * len(line), "the output")
    _assert_answers_quickly(rig, request)
