"""Errors of GPUs, on a scripted NVML: what is told of them, and what a worker does about it."""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pynvml
import pytest

from llama_worker.runtime.probes import gpu_watch
from llama_worker.server.blame import GpuFault
from llama_worker.server.messages import GpuFaulted
from llama_worker.testing.scripts import Finish, Text, WaitClose
from tests.actors.conftest import WAIT_S, MakeWorker, eventually
from tests.scripted_nvml import Gpu, NVMLError, ScriptedNvml
from tests.tables import cases

STRANGER = 2**22 + 7


class Watching:
    """A process that is watched for errors of GPUs; the watch's mailbox."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.faults: queue.SimpleQueue[GpuFault] = queue.SimpleQueue()
        self._monkeypatch = monkeypatch
        self._server = subprocess.Popen(["sleep", "1000"])
        self.pid = self._server.pid
        self._thread = threading.Thread(
            target=gpu_watch.watch_gpus, args=(self.pid, 3, self), daemon=True
        )

    def tell(self, message: GpuFaulted) -> bool:
        assert message.epoch == 3
        self.faults.put(message.fault)
        return True

    def next(self) -> GpuFault:
        return self.faults.get(timeout=WAIT_S)

    def begin(self, nvml: object) -> None:
        self._monkeypatch.setitem(sys.modules, "pynvml", nvml)
        self._thread.start()

    def begin_on(self, *gpus: Gpu) -> ScriptedNvml:
        """Until it waits for the first event."""
        self.nvml = ScriptedNvml(*gpus)
        self.begin(self.nvml)
        assert self.nvml.waits.acquire(timeout=WAIT_S)
        return self.nvml

    def join(self) -> None:
        """Until the thread has ended by itself."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def end_server(self) -> None:
        self._server.kill()
        self._server.wait()


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    made = Watching(monkeypatch)
    yield made
    made.end_server()
    if hasattr(made, "nvml"):
        made.nvml.release()
    made.join()


@pytest.fixture
def used(watching: Watching) -> Gpu:
    """A GPU that the server uses."""
    return Gpu(pids={STRANGER, watching.pid})


def test_gpu_faults_are_reported_once_harmless_ones_never(watching: Watching, used: Gpu) -> None:
    nvml = watching.begin_on(Gpu(), used)
    for xid in (31, 31, 45, 31, 79):
        nvml.report(used, xid)
    nvml.report_ecc(used)
    assert watching.next() == GpuFault(fatal=False, detail="GPU 1: Xid 31, a memory page fault")
    assert watching.next() == GpuFault(
        fatal=True, detail="GPU 1: Xid 79, the GPU has fallen off the bus"
    )
    assert watching.next().detail == "GPU 1: a double-bit ECC error"


def test_only_used_gpus_that_report_errors_are_registered(watching: Watching) -> None:
    pids = {watching.pid}
    able, unable = Gpu(pids=pids, event_types=0x8), Gpu(pids=pids, event_types=0)
    assert watching.begin_on(Gpu(pids={STRANGER}), able, unable, Gpu()).sets == {1: [(able, 0x8)]}


def test_a_lost_gpu_is_reported_once(
    watching: Watching, used: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: queue.SimpleQueue[float] = queue.SimpleQueue()

    def pause(seconds: float) -> None:
        pauses.put(seconds)
        time.sleep(0.01)  # lets the test read: without it the loop would spin

    monkeypatch.setattr(gpu_watch, "time", SimpleNamespace(sleep=pause))
    nvml = watching.begin_on(used, Gpu(pids={watching.pid}), Gpu(pids={STRANGER}))
    nvml.lose(nvml.gpus[2])  # another's
    nvml.lose(nvml.gpus[1])
    assert watching.next() == GpuFault(fatal=True, detail="GPU 1: the GPU is lost")
    assert [pauses.get(timeout=WAIT_S) for _ in range(2)] == [gpu_watch.WAIT_S] * 2
    nvml.report(used, 13)
    assert watching.next().detail.startswith("GPU 0: Xid 13")


def test_an_event_of_an_unreachable_gpu_counts(
    watching: Watching, used: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = watching.begin_on(used)

    def fail(gpu: Gpu) -> int:
        raise NVMLError(nvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(nvml, "nvmlDeviceGetIndex", fail)
    nvml.report(used, 79)
    assert watching.next() == GpuFault(
        fatal=True, detail="a GPU: Xid 79, the GPU has fallen off the bus"
    )


@cases(
    "nvml",
    {
        "no GPU": ScriptedNvml(),
        "another's GPU": ScriptedNvml(Gpu(pids={STRANGER})),
        "a lost GPU": ScriptedNvml(Gpu(lost=True)),
        "a GPU that reports nothing": ScriptedNvml(Gpu(pids=None, event_types=0)),
        "no library": None,
        "a broken library": object(),
    },
)
def test_the_gpu_watch_ends_without_gpus(watching: Watching, nvml: object) -> None:
    watching.begin(nvml)
    watching.join()
    assert getattr(nvml, "sets", {}) == {}
    if isinstance(nvml, ScriptedNvml):
        assert not nvml.waits.acquire(blocking=False)


def test_a_server_that_is_gone_is_not_watched(watching: Watching, used: Gpu) -> None:
    watching.end_server()
    watching.begin(ScriptedNvml(used))
    watching.join()


def test_watch_ends_with_server_and_frees_its_set(watching: Watching, used: Gpu) -> None:
    nvml = watching.begin_on(used)
    watching.end_server()
    nvml.release()
    watching.join()
    assert nvml.freed == set(nvml.sets) == {1}


@pytest.mark.parametrize(
    ("nvml", "in_use"),
    [
        (ScriptedNvml(Gpu(), Gpu(pids={STRANGER, os.getpid()})), ("GPU 1",)),
        (ScriptedNvml(Gpu(pids={STRANGER})), ()),
        (ScriptedNvml(Gpu(lost=True)), ()),
        (ScriptedNvml(), None),
        (None, None),
    ],
)
def test_gpus_in_use_are_where_driver_sees_tree(
    monkeypatch: pytest.MonkeyPatch, nvml: object, in_use: object
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_watch.gpus_in_use(os.getpid()) == in_use


def test_scripted_nvml_has_real_names_and_numbers() -> None:
    for name, value in vars(ScriptedNvml).items():
        if name.lower().startswith("nvml"):
            real = getattr(pynvml, name)
            assert callable(real) if callable(value) else real == value


# ------------------------------------------------------------ a worker


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedNvml]:
    """With one GPU, which every process uses. To be asked for before the workers: it outlives
    them."""
    monkeypatch.setattr(gpu_watch, "WAIT_S", 0.1)
    scripted = ScriptedNvml(Gpu(pids=None))
    monkeypatch.setitem(sys.modules, "pynvml", scripted)
    yield scripted
    scripted.release()


def test_gpu_failure_restarts_server_and_requests_keep_output(
    nvml: ScriptedNvml, make_worker: MakeWorker
) -> None:
    rig = make_worker()
    assert nvml.waits.acquire(timeout=WAIT_S)
    request_id = rig.submit(Text("half an ans"), WaitClose())
    rig.wait_text(request_id, "half an ans")
    nvml.report(nvml.gpus[0], 79)
    result = rig.ended(request_id)
    told = "gpu_failed: GPU 0: Xid 79, the GPU has fallen off the bus"
    assert (result["text"], result["fail_reason"]) == ("half an ans", "worker_restarted")
    assert result["fail_detail"] == told
    assert rig.wait_restarted()["restart_count"] == 1
    (restart,) = rig.debug()["recent_restarts"]
    assert restart["reason"] == "gpu_failed"
    eventually(lambda: len(nvml.sets) == 2, "the watch of the next launch")


def test_hanging_nvml_delays_no_request_and_no_stop(
    nvml: ScriptedNvml, make_worker: MakeWorker
) -> None:
    nvml.hang()
    rig = make_worker()
    assert nvml.waits.acquire(timeout=WAIT_S)
    assert rig.run(Text("a"), Finish())["text"] == "a"
    rig.stop()
    rig.worker.close()
