"""A server that SIGKILL does not end: nobody waits for it for ever. What is said meanwhile is the
simulator's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from llama_worker import WorkerStartError, WorkerStopError
from llama_worker.types.worker import WorkerState
from tests.actors.conftest import MakeWorker, Rig, fast_timeouts
from tests.conftest import Leftovers, trace, wait_traced

GRACE_S, KILL_TIMEOUT_S = 0.5, 1.0
# a second for our connections, the rest for a busy machine
BOUND_S = GRACE_S + KILL_TIMEOUT_S + 3.0


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
    rig = make_worker(timeouts=fast_timeouts(stop_grace_s=GRACE_S, kill_timeout_s=KILL_TIMEOUT_S))
    with outliving_sigkill(rig) as pid:
        began_at = time.monotonic()
        with pytest.raises(
            WorkerStopError, match=f"unkillable: SIGKILL does not end process {pid}"
        ):
            rig.stop()
        assert time.monotonic() - began_at < BOUND_S
        with pytest.raises(WorkerStartError, match="unkillable"):
            rig.start()
    rig.wait_state(WorkerState.STOPPED)
    rig.wait_gone()
    assert rig.start()["state"] is WorkerState.READY

    with outliving_sigkill(rig):
        began_at = time.monotonic()
        rig.worker.close()
        # so long it waits for actors and processes to be gone
        assert time.monotonic() - began_at < BOUND_S + 5.0
    rig.wait_gone()
    assert leftovers.wait_none() == []
