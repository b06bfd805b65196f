"""A stop takes no longer than it must."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llama_worker import WorkerStartError
from llama_worker.clock import ClockTimer
from llama_worker.server.termination import Signal
from llama_worker.types.worker import WorkerState
from tests.simulation.bench import ready_bench
from tests.simulation.runtime import SimServerProcess
from tests.simulation.server import Reply


def test_sigterm_comes_once_every_stream_is_closed() -> None:
    signals: list[tuple[Signal, float]] = []

    def signaled(process: SimServerProcess, signal: Signal) -> None:
        assert not bench.runtime.streams
        signals.append((signal, scheduler.now))

    long = Reply(prompt_tokens=10, text_tokens=900, step_tokens=1)
    with ready_bench(reply=long) as (bench, scheduler, worker):
        bench.machine.on_signal = signaled
        for _ in range(2):
            worker.submit("job", "", "a long answer")
        scheduler.run_for(5.0)
        assert len(bench.runtime.streams) == 2
        began_at = scheduler.now
        bench.answer(worker.stop())
    (signal, at), *more = signals
    assert signal is Signal.TERMINATE
    assert at - began_at < 0.1
    assert not more


@pytest.mark.parametrize("ignores_term", [True, False])
def test_evidence_is_kept_of_what_sigterm_cannot_end(ignores_term: bool) -> None:
    with ready_bench() as (bench, _, worker):
        pid, bench.server.ignores_term = bench.server.pid, ignores_term
        bench.answer(worker.stop())
        evidence = bench.answer(worker.get_debug_info())["evidence"]
    if ignores_term:
        assert (evidence["pid"], evidence["processes"]["root_pid"]) == (pid, pid)
        assert evidence["log_tail"]
    else:
        assert evidence == {}


def test_what_is_stuck_has_no_next_restart() -> None:
    with ready_bench() as (bench, _, worker):
        bench.server.unkillable = True
        with pytest.raises(WorkerStartError, match="unkillable"):
            bench.answer(worker.restart())
        told = bench.answer(worker.get_worker_status())
        assert (told["state"], "next_restart_at" in told) == (WorkerState.FAILED, False)


def test_no_alarm_outlives_server_whose_handle_was_lost() -> None:
    alarms: list[ClockTimer] = []

    def call_at(at: float, call: Callable[[], object]) -> ClockTimer:
        alarms.append(scheduler.timer(at, call))
        return alarms[-1]

    with ready_bench() as (bench, scheduler, worker), pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.runtime, "call_at", call_at)
        worker._backend.abandon()
        scheduler.run_for(0.5)
        assert all(server.ended for server in bench.machine.launched)
        assert alarms
        assert all(alarm.is_cancelled for alarm in alarms)
