"""How long a request waits for its headers behind one that has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

from llama_worker.types.request import RequestFailReason, RequestPhase, RequestState
from tests.simulation.bench import FAST, Bench, ready_bench
from tests.simulation.server import Build, Reply
from tests.simulation.world import TOOL
from tests.tables import cases

LONG = Reply(prompt_tokens=9000, text_tokens=20, step_tokens=1)
A_LONG_BATCH = Build(  # of 100 s, on a GPU
    slots=2,
    prefill_tokens_per_s=20.0,
    decode_tokens_per_s=20.0,
    batch_tokens=2048,
    load_s=1.0,
    cpu_shows=False,
)
WITHOUT_SLOTS = replace(FAST, shows_slots=False)


def is_cancelled(bench: Bench) -> None:
    bench.worker.submit("job", "", "the first")
    bench.scheduler.run_for(6.0)
    bench.worker.cancel(1)


def is_cancelled_while_its_tool_runs(bench: Bench) -> None:
    calls = replace(LONG, prompt_tokens=10, calls_tool=True)
    bench.machine.reply_to = lambda request_id, turn: calls if request_id == 1 else LONG
    bench.machine.tool_call = lambda request_id: (None, True)
    bench.worker.submit("job", "", "the first")
    in_time = bench.scheduler.now + 60.0
    assert bench.scheduler.run_until(lambda: bool(bench.runtime.tool_threads), in_time)
    assert bench.answer(bench.worker.get_status(1))["phase"] is RequestPhase.TOOL
    bench.worker.cancel(1)


def lacks_a_thread(bench: Bench) -> None:
    bench.machine.lacks_threads = True
    bench.worker.submit("job", "", "the first")
    bench.answer(bench.worker.result(1), 1.0)
    bench.machine.lacks_threads = False


@cases(
    "first, limit",
    {
        "cancelled while its tool runs": (is_cancelled_while_its_tool_runs, "headers_timeout_s"),
        "never sent": (lacks_a_thread, "headers_timeout_s"),
        "cancelled in a batch": (is_cancelled, "idle_stream_timeout_s"),
    },
)
def test_only_broken_off_work_may_hold_headers_back(
    first: Callable[[Bench], None], limit: str
) -> None:
    tools: dict[str, Any] = {"normal_tools": (TOOL,), "tool_runner": Mock()}
    with ready_bench(WITHOUT_SLOTS, LONG, **tools) as (bench, scheduler, worker):
        first(bench)
        bench.answer(worker.result(1), 1.0)
        bench.server.freeze(spins=False)
        submitted = bench.answer(worker.submit("job", "", "the second"))
        sent_at = scheduler.now
        result = bench.answer(worker.result(submitted["request_id"]), 3600.0)
        assert result["fail_reason"] is RequestFailReason.HEADERS_TIMEOUT
        limit_s = getattr(bench.config.timeouts, limit)
        assert 0.0 <= scheduler.now - sent_at - limit_s <= 15.0


def test_batch_begun_after_latest_report_holds_headers_back() -> None:
    short = replace(LONG, prompt_tokens=120, text_tokens=1)
    with ready_bench(A_LONG_BATCH) as (bench, scheduler, worker):
        bench.machine.reply_to = lambda request_id, turn: short if request_id == 1 else LONG
        first = worker.ask("in the way for 6 s")
        scheduler.run_for(0.1)
        worker.submit("job", "", "waits when it is asked, after 5 s")
        bench.answer(first)
        scheduler.run_for(1.0)
        worker.cancel(2)  # in its batch of 100 s
        assert bench.answer(worker.ask("behind it"), 3600.0)["state"] is RequestState.COMPLETED


@cases(
    "build, sent_s, gone_s",
    {
        # That was over long ago, of which there was no sign.
        "the batch of the second": (replace(A_LONG_BATCH, reports_progress=False), 3.0, 1000.0),
        "cancelled before it had any": (A_LONG_BATCH, 6.0, 0.1),
    },
)
def test_headers_are_held_back_where_two_were_cancelled(
    build: Build, sent_s: float, gone_s: float
) -> None:
    """Each `sent_s` after it was sent; the second comes `gone_s` after the first is gone."""
    with ready_bench(build, LONG) as (bench, scheduler, worker):
        for request_id, pause_s in ((1, gone_s), (2, 0.1)):
            worker.submit("job", "", "cancelled")
            scheduler.run_for(sent_s)
            worker.cancel(request_id)
            scheduler.run_for(pause_s)
        assert bench.answer(worker.ask("behind them"), 3600.0)["state"] is RequestState.COMPLETED


@cases(
    "build, waited_s",
    {
        # The slots are seen to move since before it was canceled.
        "one that was looked at": (A_LONG_BATCH, (84.0,)),
        "two, one slot": (replace(A_LONG_BATCH, slots=1), (84.0, 6.0)),
    },
)
def test_batches_of_requests_canceled_while_queued_hold_headers(
    build: Build, waited_s: tuple[float, ...]
) -> None:
    """Behind the batch of another canceled request."""
    with ready_bench(build, LONG, slots=3) as (bench, scheduler, worker):
        is_cancelled(bench)
        scheduler.run_for(0.1)
        for request_id, each_s in enumerate(waited_s, 2):
            worker.submit("job", "", "cancelled in the queue")
            scheduler.run_for(each_s)
            worker.cancel(request_id)
            scheduler.run_for(0.1)
        assert bench.answer(worker.ask("behind them"), 3600.0)["state"] is RequestState.COMPLETED


def test_request_without_batch_holds_no_headers_when_still() -> None:
    with ready_bench(WITHOUT_SLOTS, LONG) as (bench, scheduler, worker):
        bench.server.freeze(spins=False)
        worker.submit("job", "", "cancelled while it waits")
        scheduler.run_for(6.0)
        worker.cancel(1)
        scheduler.run_for(0.1)
        worker.submit("job", "", "behind it")
        sent_at = scheduler.now
        bench.answer(worker.result(2), 3600.0)
        assert scheduler.now - sent_at <= 45.0
