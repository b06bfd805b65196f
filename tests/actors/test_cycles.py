"""Many lives of a worker: no thread, descriptor, process or actor is left, and memory stays where it was.

LLAMA_WORKER_CYCLES sets how many (default 12; 200 before a release).
"""

from __future__ import annotations

import gc
import os

import psutil
import pytest

from llama_worker import LlamaWorker
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


def _live(rig: Rig, number: int) -> None:
    rig.start()
    assert rig.run(*plain_reply(Tokens(50)))["state"] == "completed"
    if number % 3 == 0:
        request = rig.submit(prompt="stay")
        rig.wait_text(request, "open")
        if number % 2:
            rig.worker.cancel(request).get(timeout=WAIT_S)
        rig.stop()
        assert rig.ended(request)["text"] == "open"
        rig.start()
    if number % 2:
        rig.stop()


@pytest.mark.timeout(60 + 5 * CYCLES)
def test_workers_and_their_starts_and_stops_leak_nothing(make_worker: MakeWorker) -> None:
    first = make_worker(SCRIPT, slots=2, log_lines=50, start=False)
    leftovers, warm = Leftovers(), 0
    for number in range(CYCLES):
        with LlamaWorker(first.config) as worker:
            _live(Rig(worker, first.config, first.journal), number)
        del worker
        assert leftovers.wait_none() == [], f"after cycle {number}"
        first.wait_gone(0.0)
        if number == min(WARM_UP, CYCLES - 1):
            warm = _rss()
    assert _rss() - warm < MAX_GROWTH_BYTES
