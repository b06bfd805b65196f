"""What an image does to those behind it: nobody knows how long one is encoded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.errors import RequestFailed
from llama_worker.types.request import RequestState
from tests.simulation.bench import FAST, IMAGE, LINKED_IMAGE, VIDEO, ready_bench
from tests.simulation.server import Headers, Reply

PROMPT = Reply(prompt_tokens=4000, text_tokens=20, step_tokens=1)
SLOWLY_ENCODED = replace(PROMPT, encode_s=400.0)
NEVER_FETCHED = replace(PROMPT, fetch_s=1e9)


@pytest.mark.parametrize("cancelled_after_s", [0.1, 20.0])
def test_cancelled_requests_image_is_encoded_to_its_end(cancelled_after_s: float) -> None:
    with ready_bench(reply=SLOWLY_ENCODED) as (bench, scheduler, worker):
        bench.answer(worker.ask("so that it is known what a batch takes"))
        worker.submit("job", "", IMAGE)
        scheduler.run_for(cancelled_after_s)
        assert bench.server.exchanges[0].in_batch
        worker.cancel(2)
        assert bench.answer(worker.ask("behind it"), 3600.0)["state"] is RequestState.COMPLETED


def test_image_cancelled_in_queue_is_encoded_after_batch() -> None:
    build = replace(FAST, batch_tokens=8192)  # a prompt takes 8 s, in one batch
    with ready_bench(build, SLOWLY_ENCODED) as (bench, scheduler, worker):
        bench.answer(worker.ask("so that it is known what a batch takes"))
        beside = worker.ask("in the way for 8 s")
        scheduler.run_for(0.1)
        worker.submit("job", "", IMAGE)
        scheduler.run_for(6.0)
        worker.cancel(3)
        assert bench.answer(beside, 3600.0)["state"] is RequestState.COMPLETED


@pytest.mark.parametrize("headers", Headers)
def test_server_waiting_for_an_image_host_is_spared(headers: Headers) -> None:
    two_connects_s = 2 * 127.0  # to hosts that do not answer
    reply = replace(PROMPT, fetch_s=two_connects_s)
    with ready_bench(replace(FAST, headers=headers), reply) as (bench, scheduler, worker):
        look = worker.ask(LINKED_IMAGE)
        scheduler.run_for(two_connects_s / 2)
        assert not bench.server.queue
        assert not bench.server.busy
        assert bench.answer(look, 3600.0)["state"] is RequestState.COMPLETED


@pytest.mark.parametrize("profile", [TimeoutProfile(), TimeoutProfile.fast()])
@pytest.mark.parametrize("cpu_shows", [True, False])
def test_server_decoding_a_video_is_spared(profile: TimeoutProfile, cpu_shows: bool) -> None:
    build, reply = replace(FAST, cpu_shows=cpu_shows), replace(PROMPT, fetch_s=200.0)
    with ready_bench(build, reply, timeouts=profile) as (bench, scheduler, worker):
        look = worker.ask(VIDEO)
        scheduler.run_for(100.0)
        assert not bench.server.queue
        assert not bench.server.busy
        assert bench.answer(look, 3600.0)["state"] is RequestState.COMPLETED


def test_request_whose_video_never_ends_is_lost_alone() -> None:
    endless = replace(PROMPT, text_tokens=10**9, step_tokens=50)
    with ready_bench(reply=endless, timeouts=TimeoutProfile.fast()) as (bench, scheduler, worker):
        beside = worker.ask("hello")
        scheduler.run_for(10.0)
        bench.machine.reply_to = lambda request_id, turn: NEVER_FETCHED
        with pytest.raises(RequestFailed, match="request_lost"):
            bench.answer(worker.ask(VIDEO), 2 * 3600.0)
        assert not beside.done()
        assert bench.answer(worker.get_worker_status())["restart_count"] == 0


def test_server_dying_while_image_is_fetched_is_found() -> None:
    with ready_bench(reply=NEVER_FETCHED) as (bench, _, worker):
        answer = worker.ask(LINKED_IMAGE)
        with pytest.raises(RequestFailed, match="silent_work_timeout_s 3600"):
            bench.answer(answer, 2 * 3600.0)
