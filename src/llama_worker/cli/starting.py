"""The start of a server, as it is shown."""

from __future__ import annotations

import time

from llama_worker import LlamaWorker, WorkerState
from llama_worker.cli import run_report
from llama_worker.cli.interrupts import Interrupts
from llama_worker.cli.screen import Screen

_TICK_S = 0.05


class Stopped(Exception):
    """Somebody wanted the command to end."""


def make_ready(worker: LlamaWorker, screen: Screen, interrupts: Interrupts) -> None:
    """Start the server unless it is there. Raises WorkerStartError, Stopped."""
    state = worker.get_worker_status().get()["state"]
    if state is WorkerState.READY:
        return
    if state is not WorkerState.STOPPED:
        # a server that died: what is left of it goes first, or a start would share its failure
        worker.stop().get()
    starting = worker.start()
    while not starting.done():
        if interrupts.asked:
            worker.stop().get()
            raise Stopped
        screen.activity(run_report.starting(log_tail(worker, 1)))
        time.sleep(_TICK_S)
    screen.activity_over()
    starting.get()


def log_tail(worker: LlamaWorker, count: int) -> list[str]:
    """The last lines that the server wrote."""
    return worker.get_debug_info().get()["recent_logs"][-count:]
