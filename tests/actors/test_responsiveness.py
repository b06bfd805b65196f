"""Questions are answered whatever the server is doing: no actor's thread waits for it.

What the worker is doing here lasts until the test ends it; whoever waited for it would wait for ever.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from llama_worker import RestartPolicy, WorkerStartError
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, eventually, fast_timeouts
from tests.fake_script import Headers, Repeat, Reply, Script, Sleep, Startup, Text

TOKENS = [Headers(), Repeat(None, [Text("token "), Sleep(0.002)])]


def _assert_answers(rig: Rig, request: int) -> None:
    """Every question; the worker must be in the same state all the while."""
    before = rig.status()["state"]
    calls: list[Callable[[], Any]] = [
        rig.worker.get_worker_status,
        rig.worker.get_debug_info,
        lambda: rig.worker.get_status(request),
        lambda: rig.worker.read_output(request),
        lambda: rig.worker.get_result(request + 1000),
        lambda: rig.worker.cancel(request + 1000),
        lambda: rig.worker.submit("job", "", "x", params={"fake_script": []}),
    ]
    for call in calls:
        call().get(timeout=WAIT_S)
    assert rig.status()["state"] is before, "the state to be asked in was over too soon"


def _running(make_worker: MakeWorker, **config: Any) -> tuple[Rig, int]:
    rig = make_worker(Script(replies=[Reply(TOKENS, times=None)], ignore_term=True), loop_detector=None, **config)
    request = rig.submit()
    rig.wait_text(request, "token")
    return rig, request


def test_while_the_server_stands_still(make_worker: MakeWorker) -> None:
    rig, request = _running(make_worker)
    os.kill(rig.status()["pid"], signal.SIGSTOP)
    _assert_answers(rig, request)
    assert rig.worker.cancel(request).get(timeout=WAIT_S) is True
    again = rig.worker.submit("job", "", "x").get(timeout=WAIT_S)  # admitted: the worker cannot know yet
    assert again["ok"] is True


def test_during_a_start(make_worker: MakeWorker) -> None:
    rig = make_worker(Script(startup=Startup(load_s=None, load_ticks_per_s=100)), start=False)
    starting = rig.worker.start()
    rig.journal.wait("bound", timeout=WAIT_S)
    _assert_answers(rig, 1)
    rig.stop()
    with pytest.raises(WorkerStartError):
        starting.get(timeout=WAIT_S)


def test_during_a_stop(make_worker: MakeWorker) -> None:
    rig, request = _running(make_worker, timeouts=fast_timeouts(stop_grace_s=3 * WAIT_S))
    stopping = rig.worker.stop()
    rig.journal.wait("signal", timeout=WAIT_S)
    _assert_answers(rig, request)
    assert not stopping.done()
    os.kill(rig.status()["pid"], signal.SIGKILL)
    stopping.get(timeout=WAIT_S)


def test_during_a_backoff(make_worker: MakeWorker) -> None:
    rig, request = _running(make_worker, restart=RestartPolicy(restart_backoff_s=60.0))
    os.kill(rig.status()["pid"], signal.SIGKILL)
    eventually(lambda: "next_restart_at" in rig.status(), "the backoff")
    _assert_answers(rig, request)
    rig.stop()
