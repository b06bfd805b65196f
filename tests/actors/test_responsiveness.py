"""Questions are answered whatever the server is doing: no actor's thread waits for it.

What the worker is doing here lasts until the test ends it; whoever waited for it would wait for
ever.
"""

import os
import signal
from typing import Any

from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.testing.scripts import Headers, Repeat, Script, ScriptedReply, Sleep, Text
from llama_worker.types.worker import WorkerState
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, eventually, fast_restart, fast_timeouts

TOKENS = [Headers(), Repeat(None, [Text("token "), Sleep(0.002)])]


def assert_answers(rig: Rig, state: WorkerState, request: int = 1) -> None:
    """Every question; the worker is in that state all the while."""
    asked: list[WorkerFuture[Any]] = [
        rig.worker.get_debug_info(),
        rig.worker.submit("job", "", "x"),
    ]
    asked += [question(request) for question in (rig.worker.get_status, rig.worker.read_output)]
    asked += [question(request + 1000) for question in (rig.worker.get_result, rig.worker.cancel)]
    for answer in asked:
        answer.get(timeout=WAIT_S)
    assert rig.status()["state"] is state


def test_responsive_during_standstill_stop_and_backoff(make_worker: MakeWorker) -> None:
    rig = make_worker(
        Script(replies=[ScriptedReply(TOKENS, times=None)], ignore_term=True),
        loop_detector=None,
        slots=2,
        timeouts=fast_timeouts(stop_grace_s=3 * WAIT_S),
        restart=fast_restart(restart_backoff_s=60.0, backoff_max_s=60.0),
    )
    request = rig.submit()
    rig.wait_text(request, "token")
    pid = rig.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    # the second request was admitted: the worker cannot know yet
    assert_answers(rig, WorkerState.READY, request)
    assert rig.worker.cancel(request + 1).get(timeout=WAIT_S) is True
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: "next_restart_at" in rig.status(), "the backoff")
    assert_answers(rig, WorkerState.RUNNING, request)
    rig.stop()
    rig.start()
    stopping = rig.worker.stop()
    rig.journal.wait("signal", timeout=WAIT_S)
    assert_answers(rig, WorkerState.RUNNING, request)
    assert not stopping.done()
    os.kill(rig.status()["pid"], signal.SIGKILL)
    stopping.get(timeout=WAIT_S)
