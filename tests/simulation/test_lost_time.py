"""Timestamps are wall time, although no limit counts the time that was lost."""

from __future__ import annotations

import pytest

from tests.simulation.bench import ready_bench
from tests.simulation.server import Reply

LONG = Reply(prompt_tokens=10, text_tokens=900, step_tokens=1)
GAP_S = 3600.0


def test_timestamps_count_the_time_that_was_lost() -> None:
    with ready_bench(reply=LONG) as (bench, scheduler, worker):
        worker.submit("job", "", "a long answer")
        scheduler.run_for(5.0)
        before = bench.answer(worker.get_status(1))
        scheduler.halt_host(GAP_S)  # the machine sleeps
        bench.server.stop_signal()
        scheduler.run_for(GAP_S)
        bench.machine.resume(bench.server)
        scheduler.run_for(5.0)
        now = pytest.approx(bench.runtime.unix_now(), abs=0.1)
        running = bench.answer(worker.get_status(1))
        worker.submit("job", "", "another")
        other = bench.answer(worker.get_status(2))
        bench.answer(worker.cancel(1))
        ended, result = bench.answer(worker.get_status(1)), bench.answer(worker.result(1))
        event = bench.answer(worker.get_debug_info())["recent_events"][-1]
    assert before["state"] == running["state"] == "running"
    for status in (running, ended):
        for field in ("created_at", "first_token_at"):
            assert status[field] == before[field]
        for field in ("last_progress_at", "last_stream_byte_at"):
            assert status[field] == now
    assert other["created_at"] <= ended["completed_at"] == event["at"] == now
    assert result["timings"]["total_s"] < 15.0
