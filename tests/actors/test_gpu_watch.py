"""The thread that waits for errors of GPUs, on a scripted NVML."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Protocol

import pynvml
import pytest

from llama_worker.runtime import gpu_watch
from llama_worker.runtime.gpu_watch import GpuWatch
from llama_worker.server.gpu_faults import GpuFault
from tests.scripted_nvml import Gpu, ScriptedNvml

WAIT_S = 20.0  # for what takes milliseconds
ME = os.getpid()
STRANGER = 2**22 + 7
Told = queue.SimpleQueue[GpuFault]


class Watching(Protocol):
    """`watching`'s type."""

    def __call__(self, nvml: ScriptedNvml) -> Told: ...


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    """Watches this process's GPUs, and returns what is told; everything is ended with the test."""
    begun: list[tuple[GpuWatch, ScriptedNvml]] = []

    def watch(nvml: ScriptedNvml) -> Told:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        told: Told = queue.SimpleQueue()
        begun.append((GpuWatch(ME, told.put, name="test"), nvml))
        return told

    yield watch
    for begun_watch, nvml in begun:
        begun_watch.close()
        nvml.release()
    join_threads()


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "llama_worker-test-gpus":
            thread.join(WAIT_S)
            assert not thread.is_alive()


def wait_for_wait(nvml: ScriptedNvml) -> None:
    assert nvml.waits.acquire(timeout=WAIT_S)


def test_errors_of_the_gpu_in_use_are_told(watching: Watching) -> None:
    nvml = ScriptedNvml(Gpu(), Gpu(pids={STRANGER, ME}))
    told = watching(nvml)
    wait_for_wait(nvml)
    nvml.report(nvml.gpus[1], 31)
    assert told.get(timeout=WAIT_S) == GpuFault(fatal=False, detail="GPU 1: Xid 31, a memory page fault")
    nvml.report(nvml.gpus[1], 79)
    assert told.get(timeout=WAIT_S).fatal
    nvml.report_ecc(nvml.gpus[1])
    assert told.get(timeout=WAIT_S).detail == "GPU 1: a double-bit ECC error"


def test_only_what_is_in_use_and_can_report_is_registered(watching: Watching) -> None:
    nvml = ScriptedNvml(Gpu(pids={STRANGER}), Gpu(pids={ME}, event_types=0x8), Gpu(pids={ME}, event_types=0), Gpu())
    watching(nvml)
    wait_for_wait(nvml)
    assert nvml.sets == {1: [(nvml.gpus[1], 0x8)]}


def test_each_fault_is_told_once_and_what_is_harmless_never(watching: Watching) -> None:
    nvml = ScriptedNvml(Gpu(pids={ME}))
    told = watching(nvml)
    wait_for_wait(nvml)
    for xid in (31, 31, 45, 31, 13):
        nvml.report(nvml.gpus[0], xid)
    assert [told.get(timeout=WAIT_S).detail.split(",")[0] for _ in range(2)] == ["GPU 0: Xid 31", "GPU 0: Xid 13"]
    assert told.empty()


def test_a_lost_gpu_is_told(watching: Watching) -> None:
    nvml = ScriptedNvml(Gpu(pids={ME}), Gpu(pids={ME}))
    told = watching(nvml)
    wait_for_wait(nvml)
    nvml.lose(nvml.gpus[1])
    assert told.get(timeout=WAIT_S) == GpuFault(fatal=True, detail="GPU 1: the GPU is lost")


def test_another_gpu_that_is_lost_is_no_news(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "WAIT_S", 0.01)
    nvml = ScriptedNvml(Gpu(pids={ME}), Gpu(pids={STRANGER}))
    told = watching(nvml)
    wait_for_wait(nvml)
    nvml.lose(nvml.gpus[1])
    nvml.report(nvml.gpus[0], 13)
    assert told.get(timeout=WAIT_S).detail.startswith("GPU 0: Xid 13")


def test_an_event_of_a_gpu_that_cannot_be_asked_any_more_counts(watching: Watching) -> None:
    nvml = ScriptedNvml(Gpu(pids={ME}))
    told = watching(nvml)
    wait_for_wait(nvml)
    nvml.gpus[0].lost = True
    nvml.report(nvml.gpus[0], 79)
    assert told.get(timeout=WAIT_S) == GpuFault(fatal=True, detail="a GPU: Xid 79, the GPU has fallen off the bus")


@pytest.mark.parametrize(
    "nvml",
    [
        ScriptedNvml(),
        ScriptedNvml(Gpu(pids={STRANGER})),  # a server on the CPU
        ScriptedNvml(Gpu(pids={ME}, lost=True)),
        ScriptedNvml(Gpu(pids={ME}, event_types=0)),
    ],
)
def test_where_there_is_nothing_to_watch_no_thread_is_left(watching: Watching, nvml: ScriptedNvml) -> None:
    told = watching(nvml)
    join_threads()
    assert told.empty()
    assert nvml.sets == {}


def test_a_missing_or_broken_library_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[GpuFault] = []
    for module in (None, object()):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        GpuWatch(ME, told.append, name="test")
        join_threads()
    assert told == []


def test_a_watch_that_is_closed_tells_nothing_and_frees_its_set(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = ScriptedNvml(Gpu(pids={ME}))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    told: list[GpuFault] = []
    watch = GpuWatch(ME, told.append, name="test")
    wait_for_wait(nvml)
    watch.close()
    nvml.report(nvml.gpus[0], 79)
    join_threads()
    assert told == []
    assert nvml.freed == set(nvml.sets) == {1}


def test_nvml_that_hangs_holds_up_nobody(watching: Watching) -> None:
    nvml = ScriptedNvml(Gpu(pids={ME}))
    nvml.hang()
    told = watching(nvml)
    wait_for_wait(nvml)
    nvml.report(nvml.gpus[0], 79)
    assert told.empty()
    nvml.release()
    assert told.get(timeout=WAIT_S).fatal


def test_the_scripted_nvml_has_the_names_and_numbers_of_the_real_one() -> None:
    for name, value in vars(ScriptedNvml).items():
        if name.lower().startswith("nvml"):
            real = getattr(pynvml, name)
            assert callable(real) if callable(value) else real == value
