"""A server that SIGKILL does not end: nobody waits for it for ever. How long, and what is said
meanwhile, is the simulator's."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from llama_worker import WorkerStartError, WorkerStopError
from llama_worker.server import termination
from llama_worker.testing.scripts import ChildProcess, Script
from llama_worker.types.worker import WorkerState
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, fast_timeouts
from tests.conftest import Leftovers, trace, wait_traced


@contextlib.contextmanager
def outliving_sigkill(rig: Rig) -> Iterator[int]:
    """The server's process, which is killed meanwhile."""
    pid = rig.status()["pid"]
    trace(pid)
    try:
        yield pid
    finally:
        wait_traced(pid)


def test_an_unkillable_server_delays_neither_stop_nor_close(
    leftovers: Leftovers,
    make_worker: MakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(termination, "FORCE_S", 0.3)  # until SIGKILL is sent past the guard
    rig = make_worker(timeouts=fast_timeouts(stop_grace_s=0.5, kill_timeout_s=1.0))
    guard = psutil.Process(rig.journal.wait("launched")["ppid"])
    with outliving_sigkill(rig) as pid:
        with pytest.raises(
            WorkerStopError, match=f"unkillable: SIGKILL does not end process {pid}"
        ):
            rig.stop()
        assert psutil.pid_exists(pid), "nobody waited for it"
        assert guard.status() != psutil.STATUS_ZOMBIE, "it waits for the server's end"
        with pytest.raises(WorkerStartError, match="unkillable"):
            rig.start()
    rig.wait_state(WorkerState.STOPPED)
    rig.wait_gone()
    assert rig.start()["state"] is WorkerState.READY

    with outliving_sigkill(rig) as pid:
        rig.worker.close()
        # not that it is there: with the guard gone, this process may see its end, as its debugger
        told = f"close() of worker 'w1': unkillable: SIGKILL does not end process {pid}"
        assert told in caplog.text
    rig.wait_gone()
    assert leftovers.wait_none() == []


def test_slow_name_lookup_leaves_gone_server_not_unkillable(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_worker(timeouts=fast_timeouts(kill_timeout_s=0.5))
    look_up, stopped = socket.getaddrinfo, threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        stopped.wait(WAIT_S)
        return look_up(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", slow)
        try:
            rig.stop()
        finally:
            stopped.set()
    rig.wait_gone(0.0)


def test_no_server_starts_beside_a_predecessors_child(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(termination, "_CHECK_INTERVAL_S", 0.3)  # at a guard that owes news
    rig = make_worker(
        Script(children=[ChildProcess("group")]), timeouts=fast_timeouts(kill_timeout_s=1.0)
    )
    launched, child = rig.journal.wait("launched"), rig.journal.wait("child")["pid"]
    trace(child)
    os.kill(launched["pid"], signal.SIGKILL)
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(launched["ppid"]).wait(3.0)
    rig.wait_state(WorkerState.FAILED)
    what = f"the tree of process {launched['pid']}"
    assert rig.status().get("last_error") == f"unkillable: SIGKILL does not end {what}"
    wait_traced(child)
    rig.wait_restarted(1)
