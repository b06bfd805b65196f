"""What only a real GPU shows: whose work is seen, a server that hangs, the memory after a kill."""

import os
import signal
import time

import pytest

from llama_worker import LlamaWorker, RequestFailReason, TimeoutProfile
from llama_worker.runtime.probes.liveness_probes import NvidiaProbe
from tests.actors.conftest import eventually
from tests.gpu.conftest import GpuHolder, MakeWorker, used_bytes
from tests.server.conftest import (
    ENDLESS,
    ended,
    forced,
    is_generating,
    is_ticking,
    pid_of,
    submitted,
    wait_ready,
    wait_status,
)
from tests.server.pace import patience

pytestmark = pytest.mark.gpu

LOOKS, BETWEEN_LOOKS_S = 5, 0.5  # a small model on a fast GPU fills its context within seconds
SLACK_BYTES = 64 << 20  # what other programs may take and give back meanwhile
RESTARTS = 10
IDLE_S = 5.0
LONG_S, FOR_EVER_S = 4 * IDLE_S, 300.0  # a kernel that is slow, and one that a kill has to end


def begin_endless_answer(worker: LlamaWorker) -> int:
    """The id of a request whose first words have come."""
    request_id = submitted(worker, "endless", "Count.", **ENDLESS)
    wait_status(worker, request_id, is_generating)
    return request_id


def looks(probe: NvidiaProbe, pid: int) -> list[bool]:
    """Whether each look saw work; the first, which only sets the mark, is left out."""
    seen = []
    probe.probe(pid, time.monotonic())
    for _ in range(LOOKS):
        time.sleep(BETWEEN_LOOKS_S)
        evidence = probe.probe(pid, time.monotonic())
        seen.append(evidence is not None and evidence.alive)
    return seen


def test_server_work_and_idleness_are_both_seen(on_gpu: MakeWorker) -> None:
    worker, probe = on_gpu(), NvidiaProbe()
    request_id = begin_endless_answer(worker)
    assert all(looks(probe, pid_of(worker)))
    worker.cancel(request_id).get(timeout=patience())
    ended(worker, request_id)
    time.sleep(2 * BETWEEN_LOOKS_S)  # a sample may be of the work that is over
    assert not any(looks(probe, pid_of(worker)))


def test_two_servers_sharing_a_gpu_show_separate_work(on_gpu: MakeWorker) -> None:
    busy, idle = on_gpu(), on_gpu()
    begin_endless_answer(busy)
    assert all(looks(NvidiaProbe(), pid_of(busy)))
    assert not any(looks(NvidiaProbe(), pid_of(idle)))


def test_stopped_server_is_found_beside_a_working_neighbour(on_gpu: MakeWorker) -> None:
    timeouts = TimeoutProfile(
        idle_stream_timeout_s=5.0, liveness_probe_interval_s=0.5, health_probe_interval_s=None
    )
    stopped, neighbour = on_gpu(timeouts=timeouts), on_gpu(timeouts=timeouts)
    endless = begin_endless_answer(neighbour)
    request_id = begin_endless_answer(stopped)
    os.kill(pid_of(stopped), signal.SIGSTOP)
    result = ended(stopped, request_id)
    assert result["fail_reason"] is RequestFailReason.STALL_TIMEOUT
    assert is_ticking(result["text"])
    wait_ready(stopped, restarts=1)
    neighbour.cancel(endless).get(timeout=patience())
    assert is_ticking(ended(neighbour, endless)["text"])
    wait_ready(neighbour, restarts=0)


def limits(suspect_after_s: float | None) -> TimeoutProfile:
    return TimeoutProfile(
        idle_stream_timeout_s=IDLE_S,
        silent_work_timeout_s=2 * LONG_S,
        suspect_after_s=suspect_after_s,
        liveness_probe_interval_s=1.0,
        stop_grace_s=1.0,
    )


def chars_of(worker: LlamaWorker, request_id: int) -> int:
    status = worker.get_status(request_id).get(timeout=patience())
    assert status["ok"], status
    return status["output_chars"]


@pytest.mark.parametrize(
    ("suspect_after_s", "found_by"),
    [(None, "silent_work_timeout_s"), (LONG_S, "none is in prefill")],
)
def test_endless_kernel_is_found_despite_busy_gpu_cpu(
    on_gpu: MakeWorker, gpu_holder: GpuHolder, suspect_after_s: float | None, found_by: str
) -> None:
    before = used_bytes()
    worker = on_gpu(timeouts=limits(suspect_after_s), executable=gpu_holder.server)
    request_id = begin_endless_answer(worker)
    gpu_holder.hold(FOR_EVER_S)
    result = ended(worker, request_id, work_s=2 * LONG_S)
    assert result["fail_reason"] is RequestFailReason.STALL_TIMEOUT
    assert found_by in result["fail_detail"]
    assert is_ticking(result["text"])
    wait_ready(worker, restarts=1)
    assert ended(worker, submitted(worker, "after", "Say it.", **forced("well")))["text"] == "well"
    worker.stop().get(timeout=patience())
    eventually(lambda: used_bytes() < before + SLACK_BYTES, "the memory is free", patience())


def test_a_kernel_that_takes_long_is_waited_for(on_gpu: MakeWorker, gpu_holder: GpuHolder) -> None:
    worker = on_gpu(timeouts=limits(None), executable=gpu_holder.server)
    text = "word " * 1500
    request_id = submitted(worker, "slow", "Say it.", **forced(text))
    wait_status(worker, request_id, is_generating)
    began_at = time.monotonic()
    gpu_holder.hold(LONG_S)
    time.sleep(LONG_S / 2)
    said = chars_of(worker, request_id)
    time.sleep(IDLE_S)
    assert chars_of(worker, request_id) == said < len(text)
    result = ended(worker, request_id, work_s=LONG_S)
    assert time.monotonic() - began_at > LONG_S
    assert result["text"] == text
    wait_ready(worker, restarts=0)


@pytest.mark.parametrize("restart_backoff_s", [0.01, 5.0], ids=["at once", "after a pause"])
def test_killed_server_memory_returns_ten_times_in_succession(
    on_gpu: MakeWorker, restart_backoff_s: float
) -> None:
    before = used_bytes()
    worker = on_gpu(restart_backoff_s=restart_backoff_s)
    loaded = used_bytes()
    assert loaded > before + SLACK_BYTES
    for count in range(1, RESTARTS + 1):
        os.kill(pid_of(worker), signal.SIGKILL)
        if restart_backoff_s > 1.0:
            eventually(
                lambda: used_bytes() < before + SLACK_BYTES, "the memory is free", patience()
            )
        wait_ready(worker, restarts=count)
        assert abs(used_bytes() - loaded) < SLACK_BYTES
    worker.stop().get(timeout=patience())
    eventually(lambda: used_bytes() < before + SLACK_BYTES, "the memory is free", patience())
