"""Liveness probes that misbehave, and hosts that poll."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pykka
import pytest

from llama_worker import LivenessEvidence
from llama_worker.runtime.liveness_probes import ProcessProbe
from tests.actors.conftest import WAIT_S, MakeWorker, fast_timeouts
from tests.fake_script import Burn, Gate, Text, plain_reply


class HangingProbe:
    """Blocks at its first look, as NVML does with a lost GPU."""

    def __init__(self) -> None:
        self.looks = 0
        self.let_go = threading.Event()

    def probe(self, root_pid: int, now: float) -> LivenessEvidence | None:
        self.looks += 1
        self.let_go.wait(WAIT_S)
        return None

    def reset(self) -> None:
        return


@pytest.fixture
def hanging() -> Iterator[HangingProbe]:
    probe = HangingProbe()
    yield probe
    probe.let_go.set()


def test_a_probe_that_hangs_costs_the_others_nothing_and_one_thread_at_most(
    make_worker: MakeWorker, hanging: HangingProbe
) -> None:
    timeouts = fast_timeouts(headers_timeout_s=1.0, prefill_liveness_timeout_s=1.0, liveness_probe_interval_s=0.25)
    rig = make_worker(timeouts=timeouts, liveness_probes=(hanging, ProcessProbe()))
    result = rig.run(Burn(3.0), *plain_reply(Text("done")))  # no headers, but work that shows
    assert (result["state"], result["text"]) == ("completed", "done")
    for _ in range(5):
        rig.run(*plain_reply(Text("again")))
    assert hanging.looks == 1
    assert rig.status()["restart_count"] == 0


def test_polling_for_a_result_leaves_no_futures_behind(make_worker: MakeWorker, tmp_path: object) -> None:
    rig = make_worker()
    gate = rig.journal.path.with_suffix(".gate")
    request_id = rig.submit(*plain_reply(Text("a"), Gate(str(gate)), Text("b")))
    polled = []
    for _ in range(20):
        future = rig.worker.result(request_id)
        with pytest.raises(pykka.Timeout):
            future.get(timeout=0.005)
        polled.append(weakref.ref(future))
        del future
    rig.status()  # the messages that carried them are handled
    gc.collect()
    assert [ref for ref in polled if ref() is not None] == []
    called = threading.Event()
    rig.worker.result(request_id).add_done_callback(lambda _: called.set())  # nobody else holds this one
    gc.collect()
    gate.touch()
    assert called.wait(WAIT_S)
    assert rig.ended(request_id)["text"] == "ab"
