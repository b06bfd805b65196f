"""Many lives of a worker: no thread, descriptor, process or actor is left, and memory stays where it was.

LLAMA_WORKER_CYCLES sets how many (default 12; 200 before a release).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import psutil
import pytest

from llama_worker import LlamaWorker
from llama_worker.types import WorkerState
from tests.actors.conftest import WAIT_S, MakeWorker, Rig
from tests.conftest import Leftovers
from tests.fake_script import Child, Headers, Reply, Script, Text, Tokens, WaitClose, plain_reply

CYCLES = int(os.environ.get("LLAMA_WORKER_CYCLES", "12"))
WARM_UP = 5
MAX_GROWTH_BYTES = 6 << 20
SCRIPT = Script(
    replies=[Reply([Headers(), Text("open"), WaitClose()], marker="stay", times=None)], children=[Child("daemon")]
)


def _rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _life(rig: Rig, number: int) -> None:
    rig.start()
    assert rig.run(*plain_reply(Tokens(50)))["state"] == "completed"
    if number % 3 == 0:
        request = rig.submit(prompt="stay")
        rig.wait_text(request, "open")
        if number % 2:
            rig.worker.cancel(request).get(timeout=WAIT_S)
        rig.stop()
        assert rig.ended(request)["text"] == "open"
    rig.stop()
    assert rig.status()["state"] is WorkerState.STOPPED


def _repeat(life: Callable[[int], None], leftovers: Leftovers) -> None:
    warm = 0
    for number in range(CYCLES):
        life(number)
        assert leftovers.wait_none() == [], f"after cycle {number}"
        if number == min(WARM_UP, CYCLES - 1):
            warm = _rss()
    assert _rss() - warm < MAX_GROWTH_BYTES


@pytest.mark.timeout(60 + 5 * CYCLES)
def test_start_request_stop_leaks_nothing(make_worker: MakeWorker) -> None:
    rig = make_worker(SCRIPT, slots=2, log_lines=50)
    rig.stop()
    _repeat(lambda number: _life(rig, number), Leftovers())
    rig.wait_gone(0.0)


@pytest.mark.timeout(60 + 5 * CYCLES)
def test_whole_workers_leak_nothing(make_worker: MakeWorker) -> None:
    first = make_worker(SCRIPT, slots=2, start=False)

    def life(number: int) -> None:
        with LlamaWorker(first.config) as worker:
            _life(Rig(worker, first.config, first.journal), number)

    _repeat(life, Leftovers())
    first.wait_gone(0.0)
