"""The probes, on real processes and on a scripted NVML."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_worker.runtime import liveness_probes as probes
from llama_worker.runtime.liveness_probes import (
    NvidiaProbe,
    ProcessProbe,
    default_probes,
    process_evidence,
    thread_states,
)
from llama_worker.runtime.shortage import is_shortage
from llama_worker.types import LivenessEvidence

pytestmark = pytest.mark.timeout(60)

BUSY = "print('up', flush=True)\nwhile True: pass"
IDLE = "import time\nprint('up', flush=True)\ntime.sleep(600)"
PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
    "print('up', flush=True)\n"
    "time.sleep(600)"
)
THREADS = (
    "import threading, time\n"
    "for _ in range(70): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    "print('up', flush=True)\n"
    "time.sleep(600)"
)


@dataclass
class Children:
    """Real child processes, each in a session of its own, killed as groups at the end."""

    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, code: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        return child

    def end(self) -> None:
        for child in self.started:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(timeout=10)
            if child.stdout is not None:
                child.stdout.close()


@pytest.fixture
def children() -> Iterator[Children]:
    owned = Children()
    yield owned
    owned.end()


def look(probe: ProcessProbe, pid: int, *, seconds: float, interval_s: float = 0.1) -> list[bool]:
    """What a probe tells over so many seconds of the real clock."""
    told = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        evidence = probe.probe(pid, time.monotonic())
        if evidence is not None:
            told.append(evidence.alive)
        time.sleep(interval_s)
    return told


# ---------------------------------------------------------------------------------------- ProcessProbe


def test_a_busy_process_gives_evidence_and_a_stopped_one_none(children: Children) -> None:
    child = children.start(BUSY)
    probe = ProcessProbe()
    assert look(probe, child.pid, seconds=1.5)[-1]
    os.kill(child.pid, signal.SIGSTOP)
    assert not look(probe, child.pid, seconds=4.0)[-1]


@pytest.mark.parametrize(
    ("root_listens", "child_listens", "counts"),
    [
        pytest.param(True, False, False, id="a tool or a log shipper"),
        pytest.param(True, True, True, id="a child that serves, as in router mode"),
        pytest.param(False, True, True, id="a server started by a script"),
        pytest.param(False, False, True, id="a start in which nobody listens yet"),
    ],
)
def test_work_of_a_child_counts_where_it_serves(
    children: Children, root_listens: bool, child_listens: bool, counts: bool
) -> None:
    listens = "import socket; listener = socket.create_server(('127.0.0.1', 0))\n"
    child = f"{listens if child_listens else ''}print('up', flush=True)\nwhile True: pass"
    root = (
        f"{listens if root_listens else ''}import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    assert look(ProcessProbe(), children.start(root).pid, seconds=1.5)[-1] is counts


def test_a_look_without_a_descriptor_is_no_look(children: Children) -> None:
    pid = children.start(IDLE).pid
    probe = ProcessProbe()
    probe.probe(pid, 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(OSError) as raised:
            probe.probe(pid, 5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert is_shortage(raised.value)
    assert probe.probe(pid, 10.0) is not None


def test_a_child_is_found_at_the_next_refresh(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = children.start(PARENT)
    walks = []
    real = probes.tree_pids

    def walked(root_pid: int) -> tuple[int, ...]:
        walks.append(root_pid)
        return (root_pid,) if len(walks) == 1 else real(root_pid)

    monkeypatch.setattr(probes, "tree_pids", walked)
    probe = ProcessProbe()
    for now in (0.0, 1.0, 4.9, 5.0, 6.0, 9.9):
        probe.probe(parent.pid, now)
    assert len(walks) == 2


@pytest.mark.parametrize("lists_children", [True, False])
def test_a_tree_is_the_root_its_children_and_theirs(
    children: Children, monkeypatch: pytest.MonkeyPatch, lists_children: bool
) -> None:
    monkeypatch.setattr(probes, "_LISTS_CHILDREN", lists_children)
    root = children.start(f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {PARENT!r}]).wait()")
    while len(tree := probes.tree_pids(root.pid)) < 3:
        time.sleep(0.01)
    assert tree[0] == root.pid
    assert [psutil.Process(pid).ppid() for pid in tree[1:]] == list(tree[:2])
    assert probes.tree_pids(2**22 + 1) == (2**22 + 1,)


def test_a_process_that_is_gone_or_a_zombie_is_no_news(children: Children) -> None:
    child = children.start(BUSY)
    probe = ProcessProbe()
    look(probe, child.pid, seconds=0.3)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert probe.probe(child.pid, time.monotonic()) is None
    child.wait(timeout=10)
    assert probe.probe(child.pid, time.monotonic()) is None
    assert probe.probe(2**22 + 1, time.monotonic()) is None


def test_another_root_and_a_reset_begin_anew(children: Children) -> None:
    first, second = children.start(BUSY), children.start(BUSY)
    probe = ProcessProbe()
    assert probe.probe(first.pid, 0.0) is None
    assert probe.probe(first.pid, 1.0) is not None
    assert probe.probe(second.pid, 2.0) is None
    assert probe.probe(second.pid, 3.0) is not None
    probe.reset()
    assert probe.probe(second.pid, 4.0) is None


def fake_proc(tmp_path: Path, *, stat: bytes | None, io: str | None = None) -> tuple[ProcessProbe, int, Path]:
    pid = os.getpid()
    folder = tmp_path / str(pid)
    folder.mkdir(exist_ok=True)
    if stat is not None:
        (folder / "stat").write_bytes(stat)
    if io is not None:
        (folder / "io").write_text(io)
    return ProcessProbe(proc=str(tmp_path)), pid, folder


def stat_line(*, state: str = "S", faults: int = 0, utime: int = 0, stime: int = 0) -> bytes:
    return (
        f"77 (we(ird ) \xff name) {state} 1 77 77 0 -1 4194560 500 0 {faults} 0 {utime} {stime} "
        "0 0 20 0 9 0 4242 1000000 300 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0"
    ).encode("latin-1")


@pytest.mark.parametrize("stat", [None, b"", b"garbage", b"77 (x) S 1", b"77 (x) S " + b"x " * 40])
def test_what_cannot_be_read_is_no_news(tmp_path: Path, stat: bytes | None) -> None:
    probe, pid, _ = fake_proc(tmp_path, stat=stat)
    assert [probe.probe(pid, now) for now in (0.0, 1.0, 2.0)] == [None, None, None]


@pytest.mark.parametrize(
    ("before", "after", "io", "alive"),
    [
        (stat_line(), stat_line(utime=3, stime=2), (0, 0), True),
        (stat_line(), stat_line(utime=2, stime=2), (0, 0), False),
        (stat_line(), stat_line(faults=100), (0, 0), True),
        (stat_line(), stat_line(), (7, 7 + (1 << 20)), True),
        (stat_line(), stat_line(), None, False),
    ],
)
def test_counts_cpu_faults_and_reads(
    tmp_path: Path, before: bytes, after: bytes, io: tuple[int, int] | None, alive: bool
) -> None:
    def io_text(read_bytes: int) -> str:
        return f"rchar: 999999999\nwchar: 1\nsyscr: 1\nread_bytes: {read_bytes}\nwrite_bytes: 99999999\n"

    probe, pid, folder = fake_proc(tmp_path, stat=before, io=None if io is None else io_text(io[0]))
    assert probe.probe(pid, 0.0) is None
    (folder / "stat").write_bytes(after)
    if io is not None:
        (folder / "io").write_text(io_text(io[1]))
    evidence = probe.probe(pid, 1.0)
    assert evidence is not None
    assert evidence.alive is alive


def test_an_unreadable_look_between_two_loses_nothing(tmp_path: Path) -> None:
    probe, pid, folder = fake_proc(tmp_path, stat=stat_line())
    assert probe.probe(pid, 0.0) is None
    (folder / "stat").write_bytes(b"")
    assert probe.probe(pid, 1.0) is None
    (folder / "stat").write_bytes(stat_line(utime=200))
    assert probe.probe(pid, 2.0) == LivenessEvidence(
        alive=True, detail="CPU 100.0 ticks/s, read 0.0 KiB/s, major faults 0.0/s over 2.00 s"
    )


# ----------------------------------------------------------------------------------------- NvidiaProbe


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


@dataclass
class Sample:
    pid: int
    timeStamp: int
    smUtil: int = 0
    memUtil: int = 0


@dataclass
class FakeNvml:
    """The part of pynvml that the probe uses; a device is its samples, or the error it answers with."""

    devices: list[list[Sample] | NVMLError]
    inits_count: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_GPU_IS_LOST = 15

    def nvmlInit(self) -> None:
        self.inits_count += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetProcessUtilization(self, handle: int, since: int) -> list[Sample]:
        self.asked.append((handle, since))
        device = self.devices[handle]
        if isinstance(device, NVMLError):
            raise device
        newer = [sample for sample in device if sample.timeStamp > since]
        if not newer:
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return newer


ME = os.getpid()
STRANGER = 2**22 + 7


def test_use_of_a_gpu_by_our_process_is_evidence_on_any_device() -> None:
    nvml = FakeNvml([[], [Sample(ME, 10, smUtil=99)]])
    probe = NvidiaProbe(nvml)
    assert probe.probe(ME, 0.0) is None, "what happened before watching began"
    nvml.devices[1] = [Sample(ME, 10, smUtil=99), Sample(ME, 20, smUtil=3), Sample(ME, 30, smUtil=87)]
    evidence = probe.probe(ME, 1.0)
    assert evidence == LivenessEvidence(alive=True, detail=f"GPU 1: process {ME} used 87 % compute, 0 % memory")
    assert nvml.asked[-1] == (1, 10)
    assert probe.probe(ME, 2.0) is None, "no new sample"


def test_a_device_that_was_idle_at_the_first_look_is_watched_from_then_on() -> None:
    nvml = FakeNvml([[]])
    probe = NvidiaProbe(nvml)
    assert probe.probe(ME, 0.0) is None
    nvml.devices[0] = [Sample(ME, 5, memUtil=4)]
    evidence = probe.probe(ME, 1.0)
    assert evidence is not None
    assert evidence.alive


def test_an_idle_context_is_no_evidence_and_a_stranger_is_no_news() -> None:
    nvml = FakeNvml([[]])
    probe = NvidiaProbe(nvml)
    probe.probe(ME, 0.0)
    nvml.devices[0] = [Sample(STRANGER, 5, smUtil=100)]
    assert probe.probe(ME, 1.0) is None
    nvml.devices[0] = [Sample(STRANGER, 6, smUtil=100), Sample(ME, 6)]
    evidence = probe.probe(ME, 2.0)
    assert evidence is not None
    assert not evidence.alive


@pytest.mark.parametrize("code", [3, 6, 15, 999])
def test_errors_of_nvml_are_no_news_and_spare_the_other_devices(code: int) -> None:
    nvml = FakeNvml([NVMLError(code), [Sample(ME, 1)]])
    probe = NvidiaProbe(nvml)
    assert probe.probe(ME, 0.0) is None
    nvml.devices[1] = [Sample(ME, 2, smUtil=50)]
    evidence = probe.probe(ME, 1.0)
    assert evidence is not None
    assert evidence.alive


def test_a_device_that_recovers_tells_nothing_old() -> None:
    nvml = FakeNvml([NVMLError(15)])
    probe = NvidiaProbe(nvml)
    probe.probe(ME, 0.0)
    nvml.devices[0] = [Sample(ME, 5, smUtil=100)]
    assert probe.probe(ME, 1.0) is None
    nvml.devices[0] = [Sample(ME, 6, smUtil=100)]
    assert probe.probe(ME, 2.0) is not None


def test_nvml_that_cannot_even_count_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([])
    probe = NvidiaProbe(nvml)

    def fail() -> int:
        raise NVMLError(1)

    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", fail)
    assert probe.probe(ME, 0.0) is None


def test_a_reset_forgets_what_was_seen() -> None:
    nvml = FakeNvml([[Sample(ME, 1, smUtil=9)]])
    probe = NvidiaProbe(nvml)
    probe.probe(ME, 0.0)
    probe.reset()
    nvml.devices[0] = [Sample(ME, 2, smUtil=9)]
    assert probe.probe(ME, 1.0) is None


# -------------------------------------------------------------------------------------- default_probes


def test_default_probes_are_new_ones_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    first, second = default_probes(), default_probes()
    assert [type(probe).__name__ for probe in first] == ["ProcessProbe", "NvidiaProbe"]
    assert not {id(probe) for probe in first} & {id(probe) for probe in second}


@pytest.mark.parametrize("module", [None, object()])
def test_default_probes_do_without_an_nvidia_library_that_is_missing_or_broken(
    monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert [type(probe).__name__ for probe in default_probes()] == ["ProcessProbe"]


# -------------------------------------------------------------------------------------------- evidence


def test_thread_states_tell_what_each_thread_does(children: Children) -> None:
    child = children.start(IDLE)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    (thread,) = thread_states(child.pid)
    assert (thread["tid"], thread["state"]) == (child.pid, "T")
    assert thread["name"].startswith("python")


def test_thread_states_are_bounded_and_empty_where_the_process_is_gone(children: Children) -> None:
    assert len(thread_states(children.start(THREADS).pid)) == 64
    assert thread_states(STRANGER) == []


def test_process_evidence_shows_the_tree_and_fits_json(children: Children) -> None:
    parent = children.start(PARENT)
    evidence = process_evidence(parent.pid)
    assert json.loads(json.dumps(evidence)) == evidence
    assert evidence["processes_count"] == 2
    root, child = evidence["processes"]
    assert root["pid"] == parent.pid
    assert root["rss_bytes"] > 1 << 20
    assert root["threads_count"] == len(root["threads"]) == 1
    assert child["pid"] in {process.pid for process in psutil.Process(parent.pid).children()}


def test_process_evidence_of_nothing_is_empty() -> None:
    assert process_evidence(STRANGER) == {"root_pid": STRANGER, "processes_count": 1, "processes": []}
