"""A server that SIGKILL does not end: everybody is answered in time, no second one is started beside it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator

import pytest

from llama_worker import WorkerStartError, WorkerStopError
from llama_worker.types import StartFailReason, WorkerState
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, fast_timeouts
from tests.conftest import Leftovers
from tests.fake_script import Headers, Script, Text, WaitClose, plain_reply

GRACE_S, KILL_TIMEOUT_S = 0.5, 1.0
BOUND_S = GRACE_S + KILL_TIMEOUT_S + 3.0  # a second for our connections, the rest for a busy machine
_PTRACE_SEIZE = 0x4206

Release = Callable[[], None]


def trace(pid: int) -> Release:
    """Into the hands of a debugger: nobody else hears of its end until the debugger lets go."""
    wait_read, wait_write = os.pipe()
    done_read, done_write = os.pipe()
    ptrace = ctypes.CDLL(None).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    debugger = os.fork()
    if debugger == 0:
        os.close(wait_write)
        os.write(done_write, b"y" if ptrace(_PTRACE_SEIZE, pid, None, None) == 0 else b"n")
        os.read(wait_read, 1)
        os._exit(0)
    os.close(wait_read)
    os.close(done_write)
    assert os.read(done_read, 1) == b"y", "this machine lets no process trace another of its user"
    os.close(done_read)

    def let_go() -> None:
        os.close(wait_write)
        os.waitpid(debugger, 0)

    return let_go


@pytest.fixture
def hold() -> Iterator[Callable[[int], Release]]:
    """Makes a process outlive SIGKILL until what is returned is called, at the latest at the end of the test."""
    with contextlib.ExitStack() as held:

        def holding(pid: int) -> Release:
            held.callback(trace(pid))
            return held.close

        yield holding


def stubborn(make_worker: MakeWorker) -> Rig:
    return make_worker(Script(), timeouts=fast_timeouts(stop_grace_s=GRACE_S, kill_timeout_s=KILL_TIMEOUT_S))


def assert_answered_unkillable(rig: Rig) -> None:
    """Every question and order is answered, and no second server was launched."""
    with pytest.raises(WorkerStartError) as not_started:
        rig.worker.start().get(timeout=WAIT_S)
    assert not_started.value.reason is StartFailReason.UNKILLABLE
    with pytest.raises(WorkerStopError, match="unkillable: SIGKILL does not end process"):
        rig.worker.stop().get(timeout=WAIT_S)
    status = rig.status()
    assert (status["state"], status["slots_used"]) == (WorkerState.FAILED, 0)
    assert status["last_error"].startswith("unkillable: SIGKILL does not end process")
    assert rig.worker.submit("job", "", "x").get(timeout=WAIT_S) == {"ok": False, "error": "WORKER_FAILED"}
    assert len(rig.journal.facts("launched")) == 1


def test_a_stop_says_that_the_server_cannot_be_killed_and_once_it_is_gone_all_is_well(
    make_worker: MakeWorker, hold: Callable[[int], Release]
) -> None:
    rig = stubborn(make_worker)
    request = rig.submit(Headers(), Text("kept"), WaitClose())
    rig.wait_text(request, "kept")
    pid = rig.status()["pid"]
    release = hold(pid)
    began_at = time.monotonic()
    with pytest.raises(WorkerStopError, match=f"unkillable: SIGKILL does not end process {pid}"):
        rig.worker.stop().get(timeout=WAIT_S)
    assert time.monotonic() - began_at < BOUND_S
    result = rig.ended(request)
    assert (result["fail_reason"], result["text"]) == ("worker_stopped", "kept")
    assert_answered_unkillable(rig)
    release()
    rig.wait_state(WorkerState.STOPPED)
    rig.wait_gone()
    assert rig.start()["state"] is WorkerState.READY
    assert rig.run(*plain_reply(Text("fine")))["text"] == "fine"


def test_close_returns_although_the_server_cannot_be_killed(
    make_worker: MakeWorker, hold: Callable[[int], Release], leftovers: Leftovers
) -> None:
    rig = stubborn(make_worker)
    release = hold(rig.status()["pid"])
    began_at = time.monotonic()
    rig.worker.close()
    assert time.monotonic() - began_at < BOUND_S + 5.0  # so long it waits for actors and processes to be gone
    release()
    rig.wait_gone()
    assert leftovers.wait_none() == []
