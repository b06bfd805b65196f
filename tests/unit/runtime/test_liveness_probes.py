"""The probes, on real processes and on a scripted NVML."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import psutil
import pytest

from llama_worker.errors import is_shortage
from llama_worker.runtime.probes import liveness_probes as probes
from llama_worker.runtime.probes.liveness_probes import NvidiaProbe, ProcessProbe, process_evidence
from llama_worker.runtime.probes.readiness import owns_port
from llama_worker.types.hooks import LivenessEvidence
from tests.conftest import no_descriptors
from tests.scripted_nvml import NVMLError, ScriptedNvml
from tests.tables import cases

pytestmark = pytest.mark.timeout(60)

Start = Callable[[str], int]
ME = os.getpid()
NOBODY = 2**22 + 7  # beyond the kernel's highest pid
BUSY = "print('up', flush=True)\nwhile True: pass"
IDLE = "import time\nprint('up', flush=True)\ntime.sleep(600)"
PARENT = (
    "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; "
    f"time.sleep(600)'])\n{IDLE}"
)
LISTENS = "import socket; listener = socket.create_server(('127.0.0.1', 0))\n"
THREADS = (
    "import threading, time\n"
    "for _ in range(70): threading.Thread(target=time.sleep, args=(600,), "
    f"daemon=True).start()\n{IDLE}"
)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts real processes that say when they are up, each in a session of its own; all are killed
    at the end."""
    started = []

    def start(code: str) -> int:
        command = (sys.executable, "-c", code)
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        return child.pid

    yield start
    for child in started:
        with child, suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def wait_for_work(pid: int) -> None:
    """Until the process has computed for 0.2 s more, as user and system."""
    process = psutil.Process(pid)
    until = sum(process.cpu_times()[:2]) + 0.2
    while sum(process.cpu_times()[:2]) < until:
        time.sleep(0.01)


def saw_work(evidence: LivenessEvidence | None) -> bool | None:
    return None if evidence is None else evidence.alive


# ---------------------------------------------------------------- ProcessProbe


def test_busy_process_gives_evidence_and_stopped_one_none(start: Start) -> None:
    pid, probe = start(BUSY), ProcessProbe()
    assert probe.probe(pid, 0.0) is None
    wait_for_work(pid)
    assert saw_work(probe.probe(pid, 1.0))
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    probe.probe(pid, 5.0)
    assert saw_work(probe.probe(pid, 9.0)) is False


def root_with(child: str, *, listens: bool) -> str:
    """The code of a process that waits beside such a child."""
    return (
        f"{LISTENS if listens else ''}import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        f"child.stdout.readline()\n{IDLE}"
    )


@pytest.mark.parametrize(
    ("root_listens", "child_listens", "counts"),
    [
        pytest.param(True, False, False, id="a tool or a log shipper"),
        pytest.param(True, True, True, id="a child that serves, as in router mode"),
        pytest.param(False, True, True, id="a server started by a script"),
        pytest.param(False, False, True, id="a start in which nobody listens yet"),
    ],
)
def test_work_of_a_child_counts_if_it_serves(
    start: Start, root_listens: bool, child_listens: bool, counts: bool
) -> None:
    child = f"{LISTENS if child_listens else ''}{BUSY}"
    pid, probe = start(root_with(child, listens=root_listens)), ProcessProbe()
    assert probe.probe(pid, 0.0) is None
    wait_for_work(psutil.Process(pid).children()[0].pid)
    assert saw_work(probe.probe(pid, 1.0)) is counts


@pytest.mark.parametrize("name", ["ffmpeg", "ffprobe"])
def test_child_that_decodes_a_video_counts(start: Start, name: str) -> None:
    child = f"open('/proc/self/comm', 'w').write({name!r})\n{BUSY}"
    pid, probe = start(root_with(child, listens=True)), ProcessProbe()
    assert probe.probe(pid, 0.0) is None
    wait_for_work(psutil.Process(pid).children()[0].pid)
    assert saw_work(probe.probe(pid, 1.0))


def test_a_look_without_a_descriptor_does_not_count(start: Start) -> None:
    pid, probe = start(IDLE), ProcessProbe()
    probe.probe(pid, 0.0)
    with no_descriptors(), pytest.raises(OSError) as raised:
        probe.probe(pid, 5.0)
    assert is_shortage(raised.value)
    assert probe.probe(pid, 10.0) is not None


def test_a_partial_look_without_descriptors_is_no_evidence(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may be a child of what was started: it was taken for a stranger on its port."""
    pid = start(PARENT)
    lack = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(os, "listdir", Mock(side_effect=lack))
    for look in (lambda: owns_port(pid, 1, "127.0.0.1"), lambda: ProcessProbe().probe(pid, 0.0)):
        with pytest.raises(OSError, match="Too many open files"):
            look()
    assert process_evidence(pid) == {"root_pid": pid, "processes_count": 1, "processes": []}
    assert probes.anon_bytes(pid) is None


def test_a_process_that_ends_meanwhile_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "tree_pids", lambda root_pid: (root_pid, NOBODY))
    assert probes.anon_bytes(ME)


def test_children_are_looked_up_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Mock(wraps=probes.tree_pids)
    monkeypatch.setattr(probes, "tree_pids", walk)
    probe = ProcessProbe()
    for now, walks in ((0.0, 1), (1.0, 1), (4.9, 1), (5.0, 2), (6.0, 2), (9.9, 2)):
        probe.probe(ME, now)
        assert walk.call_count == walks


def test_tree_is_root_its_children_and_theirs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = start(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {PARENT!r}]).wait()"
    )
    for lists_children in (True, False):
        monkeypatch.setattr(probes, "_LISTS_CHILDREN", lists_children)
        tree = probes.tree_pids(root)
        assert tree[0] == root
        assert [psutil.Process(pid).ppid() for pid in tree[1:]] == list(tree[:2])
        assert probes.tree_pids(NOBODY) == (NOBODY,)


def test_new_root_or_reset_begins_anew_ignoring_dead(start: Start) -> None:
    pid, probe = start(IDLE), ProcessProbe()
    told = [probe.probe(root, now) for now, root in enumerate((ME, ME, pid, pid))]
    assert [evidence is None for evidence in told] == [True, False, True, False]
    probe.reset()
    assert probe.probe(pid, 4.0) is None
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert probe.probe(pid, 5.0) is None
    assert probe.probe(NOBODY, 6.0) is None


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this process in a /proc that the test writes."""
    monkeypatch.setattr(probes, "PROC", str(tmp_path))
    folder = tmp_path / str(ME)
    folder.mkdir()
    return folder


def stat_line(*, faults: int = 0, utime: int = 0, stime: int = 0) -> bytes:
    return (
        f"77 (we(ird ) \xff name) S 1 77 77 0 -1 4194560 500 0 {faults} 0 {utime} {stime} "
        "0 0 20 0 9 0 4242 1000000 300 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0"
    ).encode("latin-1")


def test_unreadable_proc_files_give_no_evidence(proc: Path) -> None:
    probe = ProcessProbe()
    assert probe.probe(ME, 0.0) is None, "no file"
    for stat in (b"", b"garbage", b"77 (x) S 1", b"77 (x) S " + b"x " * 40):
        (proc / "stat").write_bytes(stat)
        assert [probe.probe(ME, now) for now in (1.0, 2.0)] == [None, None]


@cases(
    "after, read_bytes, alive",
    {
        "CPU time": (stat_line(utime=3, stime=2), 0, True),
        "too little of it": (stat_line(utime=2, stime=2), 0, False),
        "major faults": (stat_line(faults=100), 0, True),
        "reads": (stat_line(), 1 << 20, True),
        "nothing, and reads that cannot be seen": (stat_line(), None, False),
    },
)
def test_counts_cpu_faults_and_reads(
    proc: Path, after: bytes, read_bytes: int | None, alive: bool
) -> None:
    probe = ProcessProbe()
    for now, stat, was_read in ((0.0, stat_line(), 7), (1.0, after, 7 + (read_bytes or 0))):
        (proc / "stat").write_bytes(stat)
        if read_bytes is not None:
            (proc / "io").write_text(
                f"rchar: 999999999\nwchar: 1\nread_bytes: {was_read}\nwrite_bytes: 99999999\n"
            )
        evidence = probe.probe(ME, now)
    assert saw_work(evidence) is alive


@pytest.mark.parametrize(("waited_ns", "alive"), [(50_000_000, True), (40_000_000, False)])
def test_counts_the_wait_for_a_core(proc: Path, waited_ns: int, alive: bool) -> None:
    probe = ProcessProbe()
    (proc / "stat").write_bytes(stat_line())
    for now, waits in ((0.0, 7), (1.0, 7 + waited_ns)):
        (proc / "schedstat").write_text(f"999999999999 {waits} 12\n")
        evidence = probe.probe(ME, now)
    assert saw_work(evidence) is alive


def test_an_unreadable_look_between_two_loses_nothing(proc: Path) -> None:
    probe = ProcessProbe()
    evidence = []
    for now, stat in enumerate((stat_line(), b"", stat_line(utime=200))):
        (proc / "stat").write_bytes(stat)
        evidence.append(probe.probe(ME, float(now)))
    detail = (
        "CPU 100.0 ticks/s, waited for a core 0.0 ticks/s, read 0.0 KiB/s, wrote 0.0 KiB/s, "
        "major faults 0.0/s over 2.00 s"
    )
    assert evidence == [None, None, LivenessEvidence(alive=True, detail=detail)]


# ---------------------------------------------------------------- NvidiaProbe


class Sample(NamedTuple):
    pid: int
    timeStamp: int
    smUtil: int = 0
    memUtil: int = 0


Device = list[Sample] | Exception  # its samples, or the error it answers with


class NvmlOfSamples(ScriptedNvml):
    """Whose devices tell who used them; the number of a device is the handle to it."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[Device] = []
        self.asked: list[tuple[int, int]] = []

    def nvmlDeviceGetCount(self) -> int:
        if not self.devices:
            raise NVMLError(1)
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return index

    def nvmlDeviceGetProcessUtilization(self, gpu: Any, since: int) -> list[Sample]:
        self.asked.append((gpu, since))
        device = self.devices[gpu]
        if isinstance(device, Exception):
            raise device
        if newer := [sample for sample in device if sample.timeStamp > since]:
            return newer
        raise NVMLError(self.NVML_ERROR_NOT_FOUND)


def mine(at: int, **use: int) -> Sample:
    return Sample(ME, at, **use)


WORK, OLD_WORK, STRANGERS = mine(2, smUtil=50), mine(1, smUtil=99), Sample(NOBODY, 2, smUtil=100)


@cases(
    "looks, seen",
    {
        "what was before the first look": ([[[OLD_WORK]], [[OLD_WORK]]], [None, None]),
        "a device that was idle at the first look": ([[[]], [[mine(1, memUtil=4)]]], [None, True]),
        "idle, and a stranger": (
            [[[]], [[STRANGERS, mine(2)]], [[STRANGERS]]],
            [None, False, None],
        ),
        "what was before an idle look": ([[[OLD_WORK]], [[]], [[OLD_WORK]]], [None, None, None]),
        "a device that recovers": ([[NVMLError(15)], [[OLD_WORK]], [[WORK]]], [None, None, True]),
        "devices that cannot even be counted": ([[], []], [None, None]),
        **{
            f"error {code}": (
                [[NVMLError(code), [OLD_WORK]], [NVMLError(code), [WORK]]],
                [None, True],
            )
            for code in (3, 6, 15, 999)
        },
    },
)
def test_gpu_use_is_evidence_errors_affect_one_device(
    looks: list[list[Device]], seen: list[bool | None]
) -> None:
    """At each look: what the devices answer, and whether our process was at work (None: no news of
    it)."""
    nvml = NvmlOfSamples()
    probe = NvidiaProbe(nvml)
    for now, (nvml.devices, alive) in enumerate(zip(looks, seen, strict=True)):
        assert saw_work(probe.probe(ME, float(now))) == alive


def test_evidence_names_the_device_and_the_peak() -> None:
    nvml = NvmlOfSamples()
    probe = NvidiaProbe(nvml)
    nvml.devices = [[], [mine(10, smUtil=99)]]
    assert probe.probe(ME, 0.0) is None
    nvml.devices = [[], [mine(10, smUtil=99), mine(20, smUtil=3), mine(30, smUtil=87)]]
    detail = f"GPU 1: process {ME} used 87 % compute, 0 % memory"
    assert probe.probe(ME, 1.0) == LivenessEvidence(alive=True, detail=detail)
    assert nvml.asked[-1] == (1, 10)
    assert probe.probe(ME, 2.0) is None, "no new sample"
    probe.reset()
    nvml.devices = [[mine(40, smUtil=9)]]
    assert probe.probe(ME, 3.0) is None


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (NvmlOfSamples(), ["ProcessProbe", "NvidiaProbe"]),
        (None, ["ProcessProbe"]),
        (object(), ["ProcessProbe", "NvidiaProbe"]),
    ],
    ids=["NVIDIA's library", "none", "a broken one, which brings no news"],
)
def test_default_probes_are_made_for_what_exists(
    monkeypatch: pytest.MonkeyPatch, module: Any, names: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    first, second = probes.default_probes(), probes.default_probes()
    assert [type(probe).__name__ for probe in first] == names
    assert not {id(probe) for probe in first} & {id(probe) for probe in second}
    for probe in first[1:]:
        assert probe.probe(ME, 0.0) is None


def test_nvml_is_initialised_at_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hang: whoever makes a worker does not wait for it."""
    nvml, begins = NvmlOfSamples(), Mock()
    monkeypatch.setattr(nvml, "nvmlInit", begins)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    _, probe = probes.default_probes()
    begins.assert_not_called()
    for now in (0.0, 1.0):
        probe.probe(ME, now)
        begins.assert_called_once()


def test_process_evidence_shows_threaded_tree_and_fits_json(start: Start) -> None:
    parent = start(PARENT)
    os.kill(parent, signal.SIGSTOP)
    os.waitid(os.P_PID, parent, os.WSTOPPED | os.WNOWAIT)
    evidence = process_evidence(parent)
    assert json.loads(json.dumps(evidence)) == evidence
    assert evidence["processes_count"] == 2
    root, child = evidence["processes"]
    assert (root["pid"], root["threads_count"], root["uid"]) == (parent, 1, os.geteuid())
    assert root["rss_bytes"] > 1 << 20
    (thread,) = root["threads"]
    assert (thread["tid"], thread["state"]) == (parent, "T")
    assert thread["name"].startswith("python")
    assert child["pid"] in {process.pid for process in psutil.Process(parent).children()}


def test_process_evidence_shows_where_the_kernel_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / str(NOBODY)
    folder.mkdir()
    (folder / "stat").write_text(Path("/proc/self/stat").read_text())
    (folder / "wchan").write_text("nfs_wait")
    (folder / "stack").write_text("[<0>] nfs_wait+0x1/0x2\n[<0>] vfs_read+0x3/0x4\n")
    monkeypatch.setattr(probes, "PROC", str(tmp_path))
    (process,) = process_evidence(NOBODY)["processes"]
    assert (process["wchan"], process["stack"]) == ("nfs_wait", "[<0>] nfs_wait+0x1/0x2")


def test_thread_states_are_bounded_and_empty_without_process(start: Start) -> None:
    assert len(probes.thread_states(start(THREADS))) == 64
    assert probes.thread_states(NOBODY) == []
    assert process_evidence(NOBODY) == {"root_pid": NOBODY, "processes_count": 1, "processes": []}
