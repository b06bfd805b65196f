"""Real servers whose main thread is held, or that lose a request: what only /slots can tell; and a
long batch."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from llama_worker import LlamaWorker, RequestFailReason, RequestState, RequestStatus, TimeoutProfile
from llama_worker.runtime import real
from llama_worker.server.messages import LookAtSlots
from llama_worker.server.slots import LOOKS_COUNT
from tests.conftest import release, trace, wait_traced
from tests.server.conftest import (
    ENDLESS,
    HOST,
    TOKENS_PER_WORD,
    Serve,
    ended,
    is_generating,
    pid_of,
    prompt_of,
    submitted,
    wait_ready,
    wait_status,
)
from tests.server.pace import SERVER_ARGS, pace, patience

pytestmark = pytest.mark.server


@pytest.fixture
def hold() -> Iterator[Callable[[int, int], None]]:
    """Stops a server's main thread while it computes, from now on; a process that is killed goes
    all the same."""
    reapers = list[threading.Thread]()

    def hold(tid: int, port: int) -> None:
        trace(tid, stop=True)
        # held between two tokens, it has the lock that /slots waits for
        while not _slots_answer(port):
            release(tid)
            while not _slots_answer(port):  # on one core it would not have run at all
                pass
            trace(tid, stop=True)
        # Whoever traces a thread has to see its end, or the server's parent never does.
        reapers.append(threading.Thread(target=wait_traced, args=(tid,), daemon=True))
        reapers[-1].start()

    yield hold
    for reaper in reapers:
        reaper.join(patience())


def _slots_answer(port: int) -> bool:
    """Whether `/slots` answers before anyone would suspect."""
    with contextlib.suppress(requests.Timeout):
        return requests.get(f"http://{HOST}:{port}/slots", timeout=_suspect_after_s() / 2).ok
    return False


def _suspect_after_s() -> float:
    """A multiple of what a token takes here."""
    return 2.0 + 20 * pace().token_s


def suspicious() -> TimeoutProfile:
    after_s = _suspect_after_s()
    return TimeoutProfile(
        suspect_after_s=after_s, liveness_probe_interval_s=0.5, health_probe_interval_s=None
    )


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When /slots was asked about requests: not the one look at each launch's READY."""
    asked: list[float] = []
    ready: set[int] = set()
    look = real.RealRuntime.look_at_slots

    def counted(self: real.RealRuntime, order: LookAtSlots, *args: Any) -> Any:
        if order.epoch in ready:
            asked.append(time.monotonic())
        ready.add(order.epoch)
        return look(self, order, *args)

    monkeypatch.setattr(real.RealRuntime, "look_at_slots", counted)
    return asked


def test_stuck_main_thread_is_found_although_child_computes(
    serve: Serve, hold: Callable[[int, int], None], looks: list[float]
) -> None:
    config = serve(whole=True, timeouts=suspicious())  # it computes most of the time
    busy_child = 'nice -n 19 sh -c "while :; do :; done" & exec "$@"'
    config = replace(config, server_cmd=("sh", "-c", busy_child, "sh", *config.server_cmd))
    with LlamaWorker(config) as worker:
        request_id = submitted(worker, "wedged", "Count.", max_tokens=100_000, **ENDLESS)
        wait_status(worker, request_id, is_generating)
        looks.clear()  # a slow machine's prompt may have been suspected
        hold(pid_of(worker), config.port)
        result = ended(worker, request_id, work_s=60.0)
        assert result["fail_reason"] is RequestFailReason.STALL_TIMEOUT
        assert "none is in prefill" in result["fail_detail"]
        assert len(looks) >= LOOKS_COUNT
        wait_ready(worker, restarts=1)


def test_lost_request_found_by_idle_slot_ends_alone(
    serve: Serve, free_port: Callable[[], int], looks: list[float]
) -> None:
    config = serve(slots=2, slot_tokens=8192, whole=True, timeouts=suspicious())
    swallower = (
        sys.executable,
        str(Path(__file__).with_name("swallower.py")),
        str(free_port()),
        "swallow-this",
    )
    with LlamaWorker(replace(config, server_cmd=(*swallower, *config.server_cmd))) as worker:
        neighbour = submitted(worker, "neighbour", "Count.", max_tokens=100_000, **ENDLESS)
        wait_status(worker, neighbour, is_generating)
        lost = submitted(worker, "lost", "swallow-this", max_tokens=100_000, **ENDLESS)
        result = ended(worker, lost, work_s=60.0)
        assert result["fail_reason"] is RequestFailReason.REQUEST_LOST, result
        assert len(looks) >= LOOKS_COUNT
        status = worker.get_worker_status().get(timeout=patience())
        assert (status["active_request_ids"], status["restart_count"]) == ([neighbour], 0)
        seen = wait_status(worker, neighbour, is_generating)["output_chars"]
        wait_status(worker, neighbour, lambda status: status["output_chars"] > seen)
        assert worker.cancel(neighbour).get(timeout=patience())


@pytest.mark.parametrize("asks", [{"id_slot": 0}, {"n": 2}], ids=["for one slot", "for two slots"])
def test_request_waiting_for_its_slots_is_spared(
    serve: Serve, looks: list[float], asks: dict[str, Any]
) -> None:
    config = serve(slots=2, slot_tokens=8192, whole=True, timeouts=suspicious())
    with LlamaWorker(config) as worker:
        streams = {"max_tokens": 100_000, "id_slot": 0, **ENDLESS}
        neighbour = submitted(worker, "neighbour", "Count.", **streams)
        wait_status(worker, neighbour, is_generating)
        looks.clear()
        waits = submitted(worker, "waits", "Hi.", max_tokens=4, **asks)

        def looked_at(status: RequestStatus) -> bool:
            return len(looks) > LOOKS_COUNT  # one more, so that a round was judged

        wait_status(worker, waits, looked_at)
        assert worker.cancel(neighbour).get(timeout=patience())
        assert ended(worker, waits)["state"] is RequestState.COMPLETED
        assert worker.get_worker_status().get(timeout=patience())["restart_count"] == 0


FOX = "The red fox jumps over the lazy dog near the river bank. " * 20
NUMBERS = "Numbers: one two three four five six seven eight nine ten. " * 20


@pytest.mark.parametrize(
    ("cache", "mixes"),
    [((), True), (("--cache-ram", "0"), False)],
    ids=["with a prompt cache", "without"],
)
def test_slot_requested_while_busy_may_get_another_prompt(
    serve: Serve, cache: tuple[str, ...], mixes: bool
) -> None:
    """The server's own fault (b11434). Once the first case fails, the warning can go."""
    config = serve(slots=2, whole=True, args=(*SERVER_ARGS, *cache))
    here = {"id_slot": 0, "temperature": 0}
    long = {**here, "max_tokens": 200, "ignore_eos": True}
    with LlamaWorker(config) as worker:
        ended(worker, submitted(worker, "cached", FOX, max_tokens=4, **here))
        running = submitted(worker, "running", NUMBERS, **long)
        wait_status(worker, running, is_generating)
        waits = submitted(worker, "waits", f"{FOX} And", max_tokens=4, **here)
        assert ("fox" in ended(worker, running)["text"]) is mixes
        ended(worker, waits)
        warnings = worker.get_worker_status().get(timeout=patience())["warnings"]
        assert any("'id_slot' may mix" in line for line in warnings) is mixes


def test_one_long_batch_is_spared(serve: Serve, looks: list[float]) -> None:
    profile = suspicious()
    long_s = _suspect_after_s() + 7.0  # long enough for four looks
    config = serve(
        slot_tokens=8192, whole=True, args=(*SERVER_ARGS, "--batch-size", "8192"), timeouts=profile
    )
    with LlamaWorker(config) as worker:
        for batch_s in (
            long_s,
            2 * long_s,
            4 * long_s,
            8 * long_s,
        ):  # the machine may have been busier when measured
            words = pace().prompt_tokens(batch_s) // TOKENS_PER_WORD
            request_id = submitted(worker, "long", prompt_of(words, f"{words} items"), max_tokens=4)
            result = ended(worker, request_id, work_s=batch_s)
            assert result["state"] is RequestState.COMPLETED, result
            if looks:
                break
        assert looks, f"the batch of {words} words was too short to be suspected"
        assert worker.get_worker_status().get(timeout=patience())["restart_count"] == 0
