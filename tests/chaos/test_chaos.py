"""A moment of the campaign that `make chaos` runs at length."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil
import pytest

from llama_worker import LlamaWorker, TimeoutProfile, WorkerConfig
from llama_worker.testing.scripts import Script, scripted_server_cmd
from tests.actors.conftest import HOST
from tests.chaos.campaign import STEPS_PER_EPISODE, run_campaign


def test_every_request_ends_once_and_nothing_is_left(
    free_port: Callable[[], int],
) -> None:
    """A failure prints the seed: `make chaos SEED=...` runs the same plan again."""
    happened = run_campaign(time.time_ns() % (1 << 32), 4 * STEPS_PER_EPISODE, free_port)
    assert happened["ended", "completed"]


@pytest.mark.parametrize("delay_s", [0.0, 0.006])
def test_guard_stopped_while_obeying_does_not_delay_stop(
    free_port: Callable[[], int], delay_s: float
) -> None:
    port = free_port()
    command = scripted_server_cmd(Script(), host=HOST, port=port, slots=1)
    config = WorkerConfig(
        "stopped-guard", HOST, port, command, timeouts=TimeoutProfile(stop_grace_s=0.0)
    )
    with LlamaWorker(config) as worker:
        guard = psutil.Process(worker.get_worker_status().get()["pid"]).parent()
        assert guard is not None
        stopping = worker.stop()
        time.sleep(delay_s)  # somewhere between the order and its end
        with contextlib.suppress(psutil.NoSuchProcess):
            guard.suspend()
        stopping.get(timeout=10.0)
