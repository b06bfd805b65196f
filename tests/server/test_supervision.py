"""A real server that dies, hangs, works in silence or does not start."""

from __future__ import annotations

import os
import queue
import select
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from llama_worker import (
    Canary,
    LlamaWorker,
    RequestFailReason,
    RequestPhase,
    RequestResult,
    RequestState,
    StartFailReason,
    TimeoutProfile,
    WorkerConfig,
    WorkerStartError,
    WorkerState,
)
from tests.server.conftest import (
    ENDLESS,
    TOKENS_PER_WORD,
    Reached,
    Serve,
    ended,
    forced,
    is_generating,
    is_reading,
    is_ticking,
    pid_of,
    prompt_of,
    submitted,
    wait_ready,
    wait_status,
)
from tests.server.pace import pace, patience, round_trip

pytestmark = pytest.mark.server


class Fall:
    """Hits a request's server with a signal, and takes the time until the result is there.

    Of a signal that ends it, the time counts from when the kernel has done so: that takes long on a busy machine.
    """

    def __init__(self, worker: LlamaWorker, request_id: int, hit: signal.Signals) -> None:
        self._future, self._ends = worker.result(request_id), queue.SimpleQueue[float]()
        self._future.add_done_callback(lambda _: self._ends.put(time.monotonic()))
        pid = pid_of(worker)
        process = os.pidfd_open(pid)  # the server is not ours to reap
        self._hit_at = time.monotonic()
        os.kill(pid, hit)
        if hit is signal.SIGKILL:
            assert select.select([process], (), (), patience())[0]
            self._hit_at = time.monotonic()
        os.close(process)

    def result(self) -> tuple[RequestResult, float]:
        """The result, and the seconds that it took."""
        result = self._future.get(timeout=patience())
        assert result["ok"]
        return result, self._ends.get(timeout=patience()) - self._hit_at


def assert_serves(worker: LlamaWorker) -> None:
    assert ended(worker, submitted(worker, "next", "Hi", **forced("Served.")))["text"] == "Served."


# ---------------------------------------------------------------- death


@pytest.mark.parametrize(
    ("words", "reached"),
    [pytest.param(150, is_reading, id="prefill"), pytest.param(1, is_generating, id="generation")],
)
def test_a_killed_server_fails_its_request_at_once_and_comes_back_by_itself(
    serve: Serve, words: int, reached: Reached
) -> None:
    took_s, message_s = [], 0.0
    with LlamaWorker(serve()) as worker:
        for restarts in range(1, 4):
            pid = pid_of(worker)
            request_id = submitted(worker, "doomed", prompt_of(words, "Count"), **ENDLESS)
            seen = wait_status(worker, request_id, reached)
            message_s = max(message_s, round_trip(worker))
            result, news_s = Fall(worker, request_id, signal.SIGKILL).result()
            assert (result["state"], result["fail_reason"]) == (RequestState.FAILED, RequestFailReason.SERVER_DIED)
            assert len(result["text"]) >= seen["output_chars"]
            assert result["text"] == "" or is_ticking(result["text"])
            took_s.append(news_s)
            assert wait_ready(worker, restarts=restarts)["pid"] != pid
        assert_serves(worker)
    assert min(took_s) < 0.1 + 10 * message_s  # what the machine's other work adds to the others tells nothing


# ---------------------------------------------------------------- a server that does nothing

IMPATIENT = TimeoutProfile(
    headers_timeout_s=1.0,
    prefill_liveness_timeout_s=1.0,
    idle_stream_timeout_s=1.0,
    liveness_probe_interval_s=3.5,  # longer than the window of CPU evidence, so that one look after the halt is enough
)


def is_in_prefill(status: Any) -> bool:
    return bool(status["phase"] is RequestPhase.PREFILL)


def test_a_halted_server_is_given_up_in_time_and_replaced_in_every_phase(serve: Serve) -> None:
    """Before the headers, in prefill without and with progress, in generation: all at once, a worker each."""
    halts: list[tuple[RequestFailReason, Reached | None, int, dict[str, Any]]] = [
        (RequestFailReason.HEADERS_TIMEOUT, None, 150, {}),
        (RequestFailReason.STALL_TIMEOUT, is_in_prefill, 150, {"return_progress": False}),
        (RequestFailReason.STALL_TIMEOUT, is_reading, 150, {}),
        (RequestFailReason.STALL_TIMEOUT, is_generating, 1, {}),
    ]
    with ExitStack() as stack:
        workers = [LlamaWorker(serve(name=f"worker-{number}", timeouts=IMPATIENT)) for number in range(len(halts))]
        for worker in workers:
            stack.callback(worker.close)
        for starting in [worker.start() for worker in workers]:
            starting.get(timeout=patience())
        limit_s = 1.0 + 2 * IMPATIENT.liveness_probe_interval_s + 50 * max(map(round_trip, workers))
        falls = []
        for worker, (_, reached, words, params) in zip(workers, halts, strict=True):
            if reached is None:
                os.kill(pid_of(worker), signal.SIGSTOP)
            request_id = submitted(worker, "halted", prompt_of(words, "Count"), **ENDLESS, **params)
            if reached is not None:
                wait_status(worker, request_id, reached)
            falls.append(Fall(worker, request_id, signal.SIGSTOP))
        for worker, (reason, reached, *_), fall in zip(workers, halts, falls, strict=True):
            result, took_s = fall.result()
            assert result["fail_reason"] is reason, result
            assert took_s <= limit_s, result
            assert bool(result["text"]) == (reached is is_generating), result
            wait_ready(worker, restarts=1)
            evidence = worker.get_debug_info().get(timeout=patience())["evidence"]
            assert evidence["processes"]["processes"][0]["state"] == "T"
            assert_serves(worker)


def test_a_server_halted_for_less_than_the_timeout_goes_on(serve: Serve) -> None:
    halted_s = 1.5
    limit_s = halted_s + 100 * pace().token_s
    timeouts = TimeoutProfile(
        headers_timeout_s=limit_s,
        prefill_liveness_timeout_s=limit_s,
        idle_stream_timeout_s=limit_s,
        liveness_probe_interval_s=0.25,
    )
    with LlamaWorker(serve(whole=True, timeouts=timeouts)) as worker:
        pid = pid_of(worker)
        request_id = submitted(worker, "halted", "Count", **ENDLESS, max_tokens=50)
        seen = wait_status(worker, request_id, is_generating)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(halted_s)  # what is under test is that this much silence does no harm
        os.kill(pid, signal.SIGCONT)
        result = ended(worker, request_id)
        assert result["state"] is RequestState.COMPLETED, result
        assert result["usage"]["completion_tokens"] == 50
        assert len(result["text"]) > seen["output_chars"]
        status = worker.get_worker_status().get(timeout=patience())
        assert (status["state"], status["pid"], status["restart_count"]) == (WorkerState.READY, pid, 0)


# ---------------------------------------------------------------- a server that works in silence


def test_a_request_that_no_server_slot_can_take_waits_without_headers_while_its_neighbour_is_read(serve: Serve) -> None:
    """With the default probe interval of 5 s, which is longer than either timeout."""
    read_s = 8.0  # by the pace of a short prompt, where the slot takes so long a one
    words = min(3600, pace().prompt_tokens(read_s)) // TOKENS_PER_WORD
    timeouts = TimeoutProfile(headers_timeout_s=1.0, prefill_liveness_timeout_s=2.0, idle_stream_timeout_s=2.0)
    config = serve(slots=2, slot_tokens=4096, whole=True, timeouts=timeouts)
    slots_at = config.server_cmd.index("--parallel")
    command = [*config.server_cmd[:slots_at], *config.server_cmd[slots_at + 2 :]]
    with LlamaWorker(replace(config, server_cmd=command, env={"LLAMA_ARG_N_PARALLEL": "1"})) as worker:
        before = worker.get_worker_status().get(timeout=patience())
        (warning,) = before["warnings"]
        assert "the server has 1 slots, fewer than the worker's 2" in warning
        read = submitted(worker, "Alpha", prompt_of(words, "Alpha"), **forced("Read."), return_progress=False)
        wait_status(worker, read, is_in_prefill)
        waiting = submitted(worker, "Omega", "Omega", **forced("Read."), return_progress=False)
        results = [ended(worker, request_id, work_s=2 * read_s) for request_id in (read, waiting)]
        after = worker.get_worker_status().get(timeout=patience())
    assert [result["text"] for result in results] == ["Read.", "Read."]
    assert results[1]["timings"]["ttft_s"] > 5 * timeouts.headers_timeout_s
    assert (after["pid"], after["restart_count"]) == (before["pid"], 0)


# ---------------------------------------------------------------- a server that does not start


def test_a_canary_that_is_refused_fails_the_start_and_one_that_is_accepted_does_not(serve: Serve) -> None:
    heard: list[str] = []

    def refuses_the_first(text: str) -> bool:
        heard.append(text)
        return len(heard) > 1

    canary = Canary(prompt="Count to three.", check=refuses_the_first, max_tokens=4)
    worker = LlamaWorker(serve(whole=True, canary=canary))
    try:
        with pytest.raises(WorkerStartError, match="the canary's check refused the answer") as caught:
            worker.start().get(timeout=patience())
        assert caught.value.reason is StartFailReason.CANARY_FAILED
        assert worker.get_worker_status().get(timeout=patience())["state"] is WorkerState.FAILED
        worker.start().get(timeout=patience())
        assert_serves(worker)
    finally:
        worker.close()
    assert heard[0]
    assert heard == [heard[0]] * 2  # greedy


@pytest.mark.usefixtures("chat")
def test_the_port_of_another_server_is_never_taken_for_ones_own(serve: Serve, chat_config: WorkerConfig) -> None:
    worker = LlamaWorker(serve(port=chat_config.port))
    try:
        with pytest.raises(WorkerStartError) as caught:
            worker.start().get(timeout=patience())
        assert caught.value.reason is StartFailReason.PORT_IN_USE
        assert worker.get_worker_status().get(timeout=patience())["state"] is WorkerState.STOPPED
    finally:
        worker.close()
