"""What an image does to those behind it: nobody knows how long one is encoded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llama_worker.config.profiles import TimeoutProfile
from llama_worker.errors import RequestFailed
from llama_worker.types.request import RequestState
from tests.simulation.bench import FAST, IMAGE, LINKED_IMAGE, VIDEO, quiet_bench
from tests.simulation.server import Headers, Reply

PROMPT = Reply(key="p", prompt_tokens=4000, reasoning_tokens=0, text_tokens=20, step_tokens=1)
ENCODE_S = 400.0
STUCK_VIDEO = replace(PROMPT, fetch_s=1e9)


@pytest.mark.parametrize("cancelled_after_s", [0.1, 20.0])
def test_cancelled_requests_image_is_encoded_to_its_end(cancelled_after_s: float) -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    bench.machine.reply_to = lambda request_id, turn: replace(PROMPT, encode_s=ENCODE_S)
    with bench.ready():
        bench.answer(worker.ask("so that it is known what a batch takes"))
        worker.submit("job", "", IMAGE)
        scheduler.run_for(cancelled_after_s)
        assert bench.server.exchanges[0].in_batch
        worker.cancel(2)
        assert bench.answer(worker.ask("behind it"), 3600.0)["state"] is RequestState.COMPLETED


def test_image_cancelled_in_queue_is_encoded_after_batch() -> None:
    bench = quiet_bench(replace(FAST, batch_tokens=8192))  # a prompt takes 8 s, in one batch
    scheduler, worker = bench.scheduler, bench.worker
    bench.machine.reply_to = lambda request_id, turn: replace(PROMPT, encode_s=ENCODE_S)
    with bench.ready():
        bench.answer(worker.ask("so that it is known what a batch takes"))
        beside = worker.ask("in the way for 8 s")
        scheduler.run_for(0.1)
        worker.submit("job", "", IMAGE)
        scheduler.run_for(6.0)
        worker.cancel(3)
        assert bench.answer(beside, 3600.0)["state"] is RequestState.COMPLETED


@pytest.mark.parametrize("headers", Headers)
def test_server_waiting_for_an_image_host_is_spared(headers: Headers) -> None:
    bench = quiet_bench(replace(FAST, headers=headers))
    two_connects_s = 2 * 127.0  # to hosts that do not answer
    bench.machine.reply_to = lambda request_id, turn: replace(PROMPT, fetch_s=two_connects_s)
    with bench.ready():
        look = bench.worker.ask(LINKED_IMAGE)
        bench.scheduler.run_for(two_connects_s / 2)
        assert not bench.server.queue
        assert not bench.server.busy
        assert bench.answer(look, 3600.0)["state"] is RequestState.COMPLETED


@pytest.mark.parametrize("profile", [TimeoutProfile(), TimeoutProfile.fast()])
@pytest.mark.parametrize("cpu_shows", [True, False])
def test_server_decoding_a_video_is_spared(profile: TimeoutProfile, cpu_shows: bool) -> None:
    bench = quiet_bench(replace(FAST, cpu_shows=cpu_shows), timeouts=profile)
    bench.machine.reply_to = lambda request_id, turn: replace(PROMPT, fetch_s=200.0)
    with bench.ready():
        look = bench.worker.ask(VIDEO)
        bench.scheduler.run_for(100.0)
        assert not bench.server.queue
        assert not bench.server.busy
        assert bench.answer(look, 3600.0)["state"] is RequestState.COMPLETED


def test_request_whose_video_never_ends_is_lost_alone() -> None:
    bench = quiet_bench(timeouts=TimeoutProfile.fast())
    endless = replace(PROMPT, text_tokens=10**9, step_tokens=50)
    bench.machine.reply_to = lambda request_id, turn: endless if request_id == 1 else STUCK_VIDEO
    with bench.ready():
        beside = bench.worker.ask("hello")
        bench.scheduler.run_for(10.0)
        with pytest.raises(RequestFailed, match="request_lost"):
            bench.answer(bench.worker.ask(VIDEO), 2 * 3600.0)
        assert not beside.done()
        assert bench.answer(bench.worker.get_worker_status())["restart_count"] == 0


def test_server_dying_while_image_is_fetched_is_found() -> None:
    bench = quiet_bench()
    bench.machine.reply_to = lambda request_id, turn: replace(PROMPT, fetch_s=1e9)
    with bench.ready(), pytest.raises(RequestFailed, match="silent_work_timeout_s 3600"):
        bench.answer(bench.worker.ask(LINKED_IMAGE), 2 * 3600.0)
