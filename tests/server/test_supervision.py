"""A real server that dies, hangs, works in silence or babbles."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from llama_worker import (
    LlamaWorker,
    RequestFailReason,
    RequestPhase,
    RequestResult,
    RequestState,
    RequestStatus,
    StartFailReason,
    TimeoutProfile,
    WorkerConfig,
    WorkerStartError,
    WorkerState,
)
from tests.server.conftest import (
    ENDLESS,
    TOKENS_PER_WORD,
    Serve,
    ended,
    forced,
    is_generating,
    is_reading,
    is_ticking,
    prompt_of,
    submitted,
    wait_ready,
    wait_status,
)
from tests.server.pace import pace, patience, round_trip

pytestmark = pytest.mark.server


def pid_of(worker: LlamaWorker) -> int:
    return worker.get_worker_status().get(timeout=patience())["pid"]


class Pidfd:
    """Tells when a process is over, also of one that is not ours to reap."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def wait_end(self) -> float:
        """The instant; AssertionError where it does not come."""
        ended, _, _ = select.select([self._fd], (), (), patience())
        assert ended
        return time.monotonic()

    def close(self) -> None:
        os.close(self._fd)


class Fall:
    """Hits the server with a signal, and takes the time until the request's result is there.

    Of a signal that ends it, the time counts from when the kernel has done so: that takes long on a busy machine.
    """

    def __init__(self, worker: LlamaWorker, request_id: int, hit: signal.Signals) -> None:
        self._ends: list[float] = []
        self._future = worker.result(request_id)
        self._future.add_done_callback(lambda _: self._ends.append(time.monotonic()))
        pid = pid_of(worker)
        with contextlib.closing(Pidfd(pid)) as process:
            self._hit_at = time.monotonic()
            os.kill(pid, hit)
            if hit is signal.SIGKILL:
                self._hit_at = process.wait_end()

    def result(self) -> tuple[RequestResult, float]:
        """The result, and the seconds that it took."""
        result = self._future.get(timeout=patience())
        assert result["ok"]
        deadline = time.monotonic() + patience()
        while not self._ends:  # the callback may be a moment behind
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return result, self._ends[0] - self._hit_at


# ---------------------------------------------------------------- death


@pytest.fixture
def mortal(serve: Serve, free_port: Callable[[], int]) -> Iterator[LlamaWorker]:
    with LlamaWorker(serve(port=free_port())) as worker:
        yield worker


@pytest.mark.parametrize(
    ("words", "reached"),
    [pytest.param(150, is_reading, id="prefill"), pytest.param(1, is_generating, id="generation")],
)
def test_a_killed_server_fails_its_request_at_once_and_comes_back_by_itself(
    mortal: LlamaWorker,
    words: int,
    reached: Callable[[RequestStatus], bool],
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Which of the two news is waited for is decided in virtual time (tests/unit): here, either may be late.
    monkeypatch.setattr("llama_worker.request.state.DEATH_NEWS_S", patience())
    took_s, message_s = [], 0.0
    for _ in range(3):
        before = mortal.get_worker_status().get(timeout=patience())
        request_id = submitted(mortal, "doomed", prompt_of(words, "Count"), **ENDLESS)
        seen = wait_status(mortal, request_id, reached)
        message_s = max(message_s, round_trip(mortal))
        result, news_s = Fall(mortal, request_id, signal.SIGKILL).result()
        assert (result["state"], result["fail_reason"]) == (RequestState.FAILED, RequestFailReason.SERVER_DIED)
        assert len(result["text"]) >= seen["output_chars"]
        assert result["text"] == "" or is_ticking(result["text"])
        took_s.append(news_s)
        after = wait_ready(mortal, restarts=before["restart_count"] + 1)
        assert after["pid"] != before["pid"]
    assert ended(mortal, submitted(mortal, "next", "Hi", **forced("Served.")))["text"] == "Served."
    record_property("server_died_after_s", took_s)
    print("server_died after", *(f"{seconds * 1000:.0f} ms" for seconds in took_s))
    assert min(took_s) < 0.1 + 10 * message_s  # what the machine's other work adds to the others tells nothing


# ---------------------------------------------------------------- a server that does nothing


@dataclass(frozen=True)
class Halt:
    """Where a request is when its server is stopped, and what has to come of it."""

    name: str
    reason: RequestFailReason
    reached: Callable[[RequestStatus], bool] | None = None  # None: stopped before the request is sent
    words: int = 150
    params: dict[str, Any] = field(default_factory=dict)


HALTS = [
    Halt("before the headers", RequestFailReason.HEADERS_TIMEOUT),
    Halt(
        "in prefill, no progress reported",
        RequestFailReason.STALL_TIMEOUT,
        lambda status: status["phase"] is RequestPhase.PREFILL,
        params={"return_progress": False},
    ),
    Halt("in prefill, progress reported", RequestFailReason.STALL_TIMEOUT, is_reading),
    Halt("in generation", RequestFailReason.STALL_TIMEOUT, is_generating, words=1),
]
IMPATIENT = TimeoutProfile(
    headers_timeout_s=1.0,
    prefill_liveness_timeout_s=1.0,
    idle_stream_timeout_s=1.0,
    liveness_probe_interval_s=3.5,  # longer than the window of CPU evidence, so that one look after the halt is enough
)


def test_a_halted_server_is_given_up_in_time_and_replaced_in_every_phase(
    serve: Serve, free_port: Callable[[], int], record_property: Callable[[str, object], None]
) -> None:
    with ExitStack() as stack:
        workers = [LlamaWorker(serve(port=free_port(), name=halt.name, timeouts=IMPATIENT)) for halt in HALTS]
        for worker in workers:
            stack.callback(worker.close)
        for starting in [worker.start() for worker in workers]:
            starting.get(timeout=patience())
        message_s = max(map(round_trip, workers))
        falls = [halted(worker, halt) for worker, halt in zip(workers, HALTS, strict=True)]
        limit_s = 1.0 + 2 * IMPATIENT.liveness_probe_interval_s + 50 * message_s
        for halt, fall in zip(HALTS, falls, strict=True):
            result, took_s = fall.result()
            record_property(f"given up {halt.name} after_s", took_s)
            print(f"given up {halt.name} after {took_s:.2f} s: {result.get('fail_detail')}")
            assert result["fail_reason"] is halt.reason, result
            assert took_s <= limit_s, halt
            assert bool(result["text"]) == (halt.reached is is_generating), result
        for worker in workers:
            wait_ready(worker, restarts=1)
            evidence = worker.get_debug_info().get(timeout=patience())["evidence"]
            assert evidence["processes"]["processes"][0]["state"] == "T"
            assert ended(worker, submitted(worker, "next", "Hi", **forced("Served.")))["text"] == "Served."


def halted(worker: LlamaWorker, halt: Halt) -> Fall:
    """A request whose server has been stopped."""
    prompt = prompt_of(halt.words, "Count")
    if halt.reached is None:
        os.kill(pid_of(worker), signal.SIGSTOP)
        return Fall(worker, submitted(worker, halt.name, prompt, **ENDLESS), signal.SIGSTOP)
    request_id = submitted(worker, halt.name, prompt, **ENDLESS, **halt.params)
    wait_status(worker, request_id, halt.reached)
    return Fall(worker, request_id, signal.SIGSTOP)


def test_a_server_halted_for_less_than_the_timeout_goes_on(serve: Serve, free_port: Callable[[], int]) -> None:
    halted_s = 1.5
    limit_s = halted_s + 100 * pace().token_s
    timeouts = TimeoutProfile(
        headers_timeout_s=limit_s,
        prefill_liveness_timeout_s=limit_s,
        idle_stream_timeout_s=limit_s,
        liveness_probe_interval_s=0.25,
    )
    with LlamaWorker(serve(port=free_port(), timeouts=timeouts)) as worker:
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


def test_a_request_that_no_server_slot_can_take_waits_without_headers_while_its_neighbour_is_read(
    serve: Serve, free_port: Callable[[], int]
) -> None:
    """With the default probe interval of 5 s, which is longer than either timeout."""
    read_s = 12.0  # by the pace of a short prompt, where the slot takes so long a one
    words = min(3600, pace().prompt_tokens(read_s)) // TOKENS_PER_WORD
    headers_s, prefill_s, idle_s = 1.0, 2.0, 2.0
    timeouts = TimeoutProfile(
        headers_timeout_s=headers_s, prefill_liveness_timeout_s=prefill_s, idle_stream_timeout_s=idle_s
    )
    with LlamaWorker(one_slot_too_few(serve, free_port(), timeouts)) as worker:
        before = worker.get_worker_status().get(timeout=patience())
        (warning,) = before["warnings"]
        assert "the server has 1 slots, fewer than the worker's 2" in warning
        read = submitted(worker, "Alpha", prompt_of(words, "Alpha"), **forced("Read."), return_progress=False)
        wait_status(worker, read, lambda status: status["phase"] is RequestPhase.PREFILL)
        waiting = submitted(worker, "Omega", "Omega", **forced("Read."), return_progress=False)
        results = [ended(worker, request_id, work_s=2 * read_s) for request_id in (read, waiting)]
        after = worker.get_worker_status().get(timeout=patience())
    assert [result["text"] for result in results] == ["Read.", "Read."]
    assert results[1]["timings"]["ttft_s"] > 5 * timeouts.headers_timeout_s
    assert (after["pid"], after["restart_count"]) == (before["pid"], 0)


def one_slot_too_few(serve: Serve, port: int, timeouts: TimeoutProfile) -> WorkerConfig:
    """Two slots of the worker on a server that has one."""
    served = serve(port=port, slots=2, slot_tokens=4096)
    words = list(served.server_cmd)
    at = words.index("--parallel")
    del words[at : at + 2]
    return WorkerConfig(
        name="short",
        host=served.host,
        port=port,
        slots=2,
        server_cmd=words,
        env={"LLAMA_ARG_N_PARALLEL": "1"},
        bios_provider=served.bios_provider,
        timeouts=timeouts,
    )


# ---------------------------------------------------------------- a server that babbles


# ---------------------------------------------------------------- a server that does not start


def test_the_port_of_another_server_is_never_taken_for_ones_own(serve: Serve, chat: LlamaWorker, chat_url: str) -> None:
    worker = LlamaWorker(serve(port=int(chat_url.rpartition(":")[2])))
    try:
        with pytest.raises(WorkerStartError) as caught:
            worker.start().get(timeout=patience())
        assert caught.value.reason is StartFailReason.PORT_IN_USE
        assert worker.get_worker_status().get(timeout=patience())["state"] is WorkerState.STOPPED
    finally:
        worker.close()
