"""Short requests that come and go beside it hide no request that hangs."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.errors import RequestFailed
from tests.simulation.bench import FAST, ready_bench
from tests.simulation.server import Exchange, LlamaServer, Reply

IDLE_S = TimeoutProfile.normal().idle_stream_timeout_s or 0.0


def dies(server: LlamaServer, exchange: Exchange) -> None:
    exchange.dead = True


def is_lost(server: LlamaServer, exchange: Exchange) -> None:
    server.release_slot(exchange)
    exchange.dead = True


@pytest.mark.parametrize(
    ("hangs", "slots", "pause_s", "reason", "limit_s"),
    [
        (dies, 4, 0.05, "stall_timeout", 60.0),
        (dies, 2, 5.0, "stall_timeout", 4 * IDLE_S),  # nothing moves in a pause
        (is_lost, 4, 0.05, "request_lost", 60.0),
        (is_lost, 2, 5.0, "request_lost", 60.0),
    ],
)
def test_a_stream_that_hangs_beside_short_requests_is_found(
    hangs: Callable[[LlamaServer, Exchange], None],
    slots: int,
    pause_s: float,
    reason: str,
    limit_s: float,
) -> None:
    build = replace(FAST, slots=slots, takes_media=False)
    timeouts = TimeoutProfile.normal()
    with ready_bench(build, slots=slots, timeouts=timeouts) as (bench, scheduler, worker):
        bench.machine.reply_to = lambda request_id, turn: Reply(
            key=f"r{request_id}",
            prompt_tokens=50,
            text_tokens=10**9 if request_id == 1 else 50,
            step_tokens=1,
        )
        stream = worker.ask("a long one")
        scheduler.run_for(5.0)
        hangs(bench.server, bench.server.exchanges[0])
        ends_at = scheduler.now + limit_s + 15.0
        while scheduler.now < ends_at and not stream.done():
            bench.answer(worker.ask("a short one"))
            scheduler.run_for(pause_s)
        assert stream.done()
        with pytest.raises(RequestFailed, match=reason):
            stream.get(timeout=0)
