"""A server that SIGKILL does not end: everybody is answered in time, no second one is started beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from llama_worker import WorkerStartError, WorkerStopError
from llama_worker.types import StartFailReason, WorkerState
from tests.actors.conftest import WAIT_S, MakeWorker, fast_timeouts
from tests.conftest import Leftovers, trace, wait_traced
from tests.fake_script import Headers, Text, WaitClose, plain_reply

GRACE_S, KILL_TIMEOUT_S = 0.5, 1.0
BOUND_S = GRACE_S + KILL_TIMEOUT_S + 3.0  # a second for our connections, the rest for a busy machine


class Hold:
    """Makes processes outlive SIGKILL, until they are released."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def __call__(self, pid: int) -> None:
        trace(pid)
        self._held.append(pid)

    def release(self) -> None:
        while self._held:
            wait_traced(self._held.pop())


@pytest.fixture
def hold(make_worker: MakeWorker) -> Iterator[Hold]:
    made = Hold()
    yield made
    made.release()


def test_what_cannot_be_killed_holds_up_neither_stop_nor_close_and_once_it_is_gone_all_is_well(
    leftovers: Leftovers, make_worker: MakeWorker, hold: Hold
) -> None:
    rig = make_worker(timeouts=fast_timeouts(stop_grace_s=GRACE_S, kill_timeout_s=KILL_TIMEOUT_S))
    request = rig.submit(Headers(), Text("kept"), WaitClose())
    rig.wait_text(request, "kept")
    pid = rig.status()["pid"]
    hold(pid)
    began_at = time.monotonic()
    with pytest.raises(WorkerStopError, match=f"unkillable: SIGKILL does not end process {pid}"):
        rig.worker.stop().get(timeout=WAIT_S)
    assert time.monotonic() - began_at < BOUND_S
    result = rig.ended(request)
    assert (result["fail_reason"], result["text"]) == ("worker_stopped", "kept")
    with pytest.raises(WorkerStartError) as not_started:
        rig.start()
    assert not_started.value.reason is StartFailReason.UNKILLABLE
    with pytest.raises(WorkerStopError, match="unkillable: SIGKILL does not end process"):
        rig.stop()
    status = rig.status()
    assert (status["state"], status["slots_used"]) == (WorkerState.FAILED, 0)
    assert status["last_error"].startswith("unkillable: SIGKILL does not end process")
    assert rig.worker.submit("job", "", "x").get(timeout=WAIT_S) == {"ok": False, "error": "WORKER_FAILED"}
    assert len(rig.journal.facts("launched")) == 1
    hold.release()
    rig.wait_state(WorkerState.STOPPED)
    rig.wait_gone()
    assert rig.start()["state"] is WorkerState.READY
    assert rig.run(*plain_reply(Text("fine")))["text"] == "fine"

    hold(rig.status()["pid"])
    began_at = time.monotonic()
    rig.worker.close()
    assert time.monotonic() - began_at < BOUND_S + 5.0  # so long it waits for actors and processes to be gone
    hold.release()
    rig.wait_gone()
    assert leftovers.wait_none() == []
