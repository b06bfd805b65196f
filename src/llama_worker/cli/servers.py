"""Finds, configures and starts the llama-server of a command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llama_worker.cli import run_report
from llama_worker.cli.exits import Problem, UsageProblem
from llama_worker.cli.gguf import Model
from llama_worker.cli.terminal import Interrupts, Screen
from llama_worker.config import server_program
from llama_worker.config.profiles import RestartPolicy, TimeoutProfile
from llama_worker.config.server_program import FoundServer
from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import ConfigError, WorkerStartError
from llama_worker.types.worker import WorkerState
from llama_worker.worker import LlamaWorker

_STOP_GRACE_S = 2.0  # a person waits at the terminal
_TICK_S = 0.05


def find_server(
    named: str | None, *, option: str = "--server", environment: Mapping[str, str] = os.environ
) -> FoundServer:
    """The program `named`, else the one that the library finds. Raises Problem `no_server`."""
    try:
        return server_program.find_server(named, option=option, environment=environment)
    except server_program.ServerNotFound as error:
        raise Problem("no_server", error.what, error.todo) from error


def worker_config(
    model: Model,
    executable: str,
    *,
    server_args: Sequence[str] = (),
    words: Sequence[str] = (),
    timeouts: TimeoutProfile | None = None,
    **config: Any,
) -> WorkerConfig:
    """A config without automatic restarts: the user at the terminal is told instead.

    `server_args`: what --server-arg adds to the command, after our own `words`. `timeouts`:
    `slow_prefill` if None; `config`: further arguments of `WorkerConfig.for_model`. Raises
    UsageProblem. Pure.
    """
    try:
        return WorkerConfig.for_model(
            model.path,
            name="run",
            executable=executable,
            timeouts=replace(timeouts or TimeoutProfile.slow_prefill(), stop_grace_s=_STOP_GRACE_S),
            restart=RestartPolicy.never(),
            extra_args=(*words, *server_args),
            **config,
        )
    except ConfigError as error:
        hint = "; each word needs its own --server-arg; host, port and slots cannot be set by it"
        raise UsageProblem(f"{error}{hint if server_args else ''}") from error


def make_ready(worker: LlamaWorker, screen: Screen, interrupts: Interrupts) -> None:
    """Start the server unless it is READY, and show its last log line meanwhile. Raises Problem, or
    KeyboardInterrupt if a signal comes."""
    state = worker.get_worker_status().get()["state"]
    if state is WorkerState.READY:
        return
    if state is not WorkerState.STOPPED:
        # after a failure, stop first: otherwise `start` would report that failure
        worker.stop().get()
    starting = worker.start()
    try:
        while not starting.wait(_TICK_S):
            if interrupts.asked:
                worker.stop().get()
                raise KeyboardInterrupt
            screen.activity(run_report.starting(log_tail(worker, 1)))
        starting.get()
    except WorkerStartError as error:
        raise run_report.start_problem(error) from error
    finally:
        screen.activity_over()


def log_tail(worker: LlamaWorker, count: int) -> list[str]:
    return worker.get_debug_info().get()["recent_logs"][-count:]
