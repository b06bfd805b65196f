"""A server that SIGKILL does not end: nobody waits for it for ever. How long, and what is said
meanwhile, is the simulator's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil
import pytest

from llama_worker import WorkerStartError, WorkerStopError
from llama_worker.types.worker import WorkerState
from tests.actors.conftest import MakeWorker, Rig, fast_timeouts
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


def test_what_cannot_be_killed_holds_up_neither_stop_nor_close_and_once_it_is_gone_all_is_well(
    leftovers: Leftovers, make_worker: MakeWorker
) -> None:
    rig = make_worker(timeouts=fast_timeouts(stop_grace_s=0.5, kill_timeout_s=1.0))
    with outliving_sigkill(rig) as pid:
        with pytest.raises(
            WorkerStopError, match=f"unkillable: SIGKILL does not end process {pid}"
        ):
            rig.stop()
        assert psutil.pid_exists(pid), "nobody waited for it"
        with pytest.raises(WorkerStartError, match="unkillable"):
            rig.start()
    rig.wait_state(WorkerState.STOPPED)
    rig.wait_gone()
    assert rig.start()["state"] is WorkerState.READY

    with outliving_sigkill(rig) as pid:
        rig.worker.close()
        assert psutil.pid_exists(pid), "nobody waited for it"
    rig.wait_gone()
    assert leftovers.wait_none() == []
