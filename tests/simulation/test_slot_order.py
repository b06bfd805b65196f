"""Prompts side by side on slow hardware: whoever waits for its turn in the batches is no hang."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from llama_worker.errors import RequestFailed
from llama_worker.types.request import RequestState
from tests.simulation.bench import FAST, ready_bench
from tests.simulation.server import Build, Headers, Reply
from tests.simulation.strangers import FOREIGN, Unheard

B11434 = Build(
    slots=2, prefill_tokens_per_s=20.0, decode_tokens_per_s=2.0, batch_tokens=512, load_s=1.0
)
A_LONG_PROMPT = partial(Reply, prompt_tokens=7000, text_tokens=40, step_tokens=1)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(B11434, id="b11434"),
        pytest.param(replace(B11434, batch_tokens=2048), id="in batches of 100 s"),
        pytest.param(replace(B11434, batch_tokens=64), id="in batches of 3 s"),
        pytest.param(replace(B11434, shows_slots=False), id="without the slots"),
        pytest.param(replace(B11434, cpu_shows=False), id="without a sign of work"),
        pytest.param(replace(B11434, headers=Headers.AT_ONCE), id="with headers at once"),
        pytest.param(replace(B11434, reports_progress=False), id="without reports"),
    ],
)
def test_two_long_prompts_side_by_side_both_complete(build: Build) -> None:
    with ready_bench(build) as (bench, _, worker):
        bench.machine.reply_to = lambda request_id, turn: A_LONG_PROMPT(key=f"r{request_id}")
        answers = [worker.ask("the first"), worker.ask("the second")]
        results = [bench.answer(each, 2 * 3600.0) for each in answers]
        assert [each["state"] for each in results] == [RequestState.COMPLETED] * 2
        assert max(each["timings"]["ttft_s"] or 0.0 for each in results) > 690.0


def test_prompt_behind_strangers_is_spared_without_slots() -> None:
    """After each of that one's batches it gets its old report again."""
    build, reply = replace(B11434, shows_slots=False), A_LONG_PROMPT(prompt_tokens=9000)
    with ready_bench(build, reply) as (bench, scheduler, worker):
        own = worker.ask("its slot is the higher one")
        scheduler.run_for(30.0)
        stranger: Any = Unheard()
        bench.server.accept(stranger, (FOREIGN, 1), {})
        assert bench.answer(own, 2 * 3600.0)["state"] is RequestState.COMPLETED
        assert bench.answer(worker.get_worker_status())["restart_count"] == 0


def test_request_whose_slot_never_has_turn_ends_alone() -> None:
    """Reported of llama-server: its slot is taken, and only the others go on. It has no headers."""
    endless = Reply(prompt_tokens=9, text_tokens=10**9, step_tokens=1)
    idle_too = replace(FAST, slots=3)  # with one that is idle, it cannot be queued
    with ready_bench(idle_too, endless) as (bench, scheduler, worker):
        worker.submit("job", "", "the first")
        scheduler.run_for(5.0)

        def forget(slot: int, what: str) -> None:
            for exchange in bench.server.busy:
                exchange.dead = not exchange.is_begun

        bench.server.on_slot = forget
        with pytest.raises(RequestFailed, match="its slot makes no progress"):
            bench.answer(worker.ask("the second"), 90.0)
        scheduler.run_for(1.0)
        (first,) = bench.server.exchanges
        assert first.request_id == 1
        assert bench.answer(worker.get_worker_status())["restart_count"] == 0


def test_request_queued_behind_exclusive_task_is_spared() -> None:
    """Such as `/infill`: its slot is taken, and stands still while a chat generates."""
    chat = Reply(prompt_tokens=9, text_tokens=4000, step_tokens=1)
    infill = replace(chat, text_tokens=50, is_infill=True)
    short = replace(chat, text_tokens=50)
    replies = {FOREIGN: infill, 1: chat}
    with ready_bench(replace(FAST, decode_tokens_per_s=10.0)) as (bench, scheduler, worker):
        bench.machine.reply_to = lambda request_id, turn: replies.get(request_id, short)
        first = worker.ask("the first")
        scheduler.run_for(5.0)
        stranger: Any = Unheard()
        bench.server.accept(stranger, (FOREIGN, 1), {})
        second = worker.ask("the second")
        scheduler.run_for(300.0)
        assert len(bench.server.queue) == 1
        for answer in (first, second):
            assert bench.answer(answer, 600.0)["state"] is RequestState.COMPLETED
        assert bench.answer(worker.get_worker_status())["restart_count"] == 0


def test_half_read_prompt_repeats_report_beside_exclusive_task() -> None:
    """Its slot is part of no batch, and sends a report after each (b11434)."""
    chat = Reply(prompt_tokens=2000, text_tokens=9, step_tokens=1)
    infill = replace(chat, prompt_tokens=9, text_tokens=20_000, is_infill=True)
    with ready_bench() as (bench, scheduler, worker):
        bench.machine.reply_to = lambda request_id, turn: infill if request_id == FOREIGN else chat
        answer = worker.ask("in the higher slot")
        scheduler.run_for(1.5)
        stranger: Any = Unheard()
        bench.server.accept(stranger, (FOREIGN, 1), {})
        scheduler.run_for(390.0)
        waits = bench.server.slots[1]
        assert waits is not None
        assert 0 < waits.processed < 2000
        assert scheduler.now - waits.sent_at < 1.0
        assert bench.answer(answer, 600.0)["state"] is RequestState.COMPLETED
