"""Planned restarts, canaries and lack of memory, end to end on scripted servers."""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_worker import Recycle, RequestRefused
from llama_worker.runtime.process import oom_watch
from llama_worker.testing.scripts import Flood, Script, scripted_server_cmd
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, eventually, fast_restart


def restarts(rig: Rig) -> list[Any]:
    return rig.debug()["recent_restarts"]


def test_a_server_that_has_grown_is_recycled(make_worker: MakeWorker) -> None:
    rig = make_worker(restart=fast_restart(recycle=Recycle(max_anon_mib=1)))  # any Python has more
    rig.run()
    rig.wait_restarted(1)
    told, *_ = restarts(rig)
    assert "MiB of anonymous memory (limit: max_anon_mib 1)" in told["detail"]


def test_server_never_idle_for_long_is_also_recycled(make_worker: MakeWorker) -> None:
    rig = make_worker(restart=fast_restart(recycle=Recycle(max_anon_mib=1)))
    until = time.monotonic() + WAIT_S
    with contextlib.suppress(RequestRefused):  # it is being replaced
        while not restarts(rig):
            assert time.monotonic() < until
            rig.worker.ask("Hello?").get(timeout=WAIT_S)
    rig.wait_restarted(1)


def test_an_oom_kill_is_named(
    make_worker: MakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control group's file is a stand-in; the next test has a real one where it may make
    one."""
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 4\noom_kill 4\n")
    monkeypatch.setattr(oom_watch, "_counter_file", lambda pid: events)
    rig = make_worker()
    events.write_text("low 0\noom 5\noom_kill 5\n")
    os.kill(rig.status()["pid"], signal.SIGKILL)
    rig.wait_restarted(1)
    assert "oom_kill +1" in rig.status().get("last_error", "")
    os.kill(rig.status()["pid"], signal.SIGKILL)  # and this one was somebody else's
    rig.wait_restarted(2)
    assert [told["reason"] for told in restarts(rig)] == ["out_of_memory", "server_died"]


def test_oom_kill_after_a_move_is_named(
    make_worker: MakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper script puts the server into a control group of its own."""
    first, second, looks = tmp_path / "first", tmp_path / "second", list[int]()
    first.write_text("oom_kill 0\n")
    second.write_text("oom_kill 4\n")

    def counter_file(pid: int) -> Path:
        looks.append(pid)
        return first if len(looks) == 1 else second

    monkeypatch.setattr(oom_watch, "_counter_file", counter_file)
    monkeypatch.setattr(oom_watch, "_LOOK_AGAIN_S", 0.0)
    rig = make_worker(Script(floods=[Flood(lines_per_s=20.0)]))
    eventually(lambda: len(looks) > 2, "two looks at the second group")
    second.write_text("oom_kill 5\n")
    os.kill(rig.status()["pid"], signal.SIGKILL)
    rig.wait_restarted(1)
    assert [told["reason"] for told in restarts(rig)] == ["out_of_memory"]


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 192 MiB; needs root, and a hierarchy that may be written."""
    counter = oom_watch._counter_file(os.getpid())
    sees_all_pids = os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
    if counter is not None and counter.name != "memory.events" and not sees_all_pids:
        pytest.skip("version 1 counts for each group alone, and the kernel's log has other pids")
    try:
        assert counter is not None
        group = Path(tempfile.mkdtemp(prefix="llama-worker-test-", dir=counter.parent))
        limit = group / (
            "memory.max" if counter.name == "memory.events" else "memory.limit_in_bytes"
        )
        limit.write_text(str(192 << 20))
    except (AssertionError, OSError) as error:
        pytest.skip(f"no control group with a limit can be made here: {error}")
    yield group
    eventually(lambda: not (group / "cgroup.procs").read_text(), "the end of the group's processes")
    group.rmdir()


GREEDY = """
import os, runpy, signal, sys
open(sys.argv[1], "w").write(str(os.getpid()))
signal.signal(signal.SIGUSR1, lambda *_: bytes(1 << 30).replace(b"\\0", b"x"))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_kernels_own_kill_is_named(
    small_group: Path, make_worker: MakeWorker, free_port: Any
) -> None:
    port = free_port()
    python, *flags_and_rest = scripted_server_cmd(Script(), host="127.0.0.1", port=port, slots=1)
    rest = [word for word in flags_and_rest if word not in ("-S", "-E")]
    command = (python, "-S", "-E", "-c", GREEDY, str(small_group / "cgroup.procs"), *rest)
    rig = make_worker(server_cmd=command, port=port)
    in_group = small_group / "cgroup.procs"
    eventually(
        lambda: str(rig.status()["pid"]) in in_group.read_text().split(), "the server in its group"
    )
    os.kill(rig.status()["pid"], signal.SIGUSR1)
    rig.wait_restarted(1)
    (told,) = restarts(rig)
    assert told["reason"] == "out_of_memory"
    assert "the kernel killed it for lack of memory" in told["detail"]


def test_oom_kill_of_pids_earlier_process_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,1,1,-;Killed process 7 (of another day)\n")
    monkeypatch.setattr(oom_watch, "_KMSG", log)
    watch = oom_watch.OomWatch(7, now=0.0)
    assert watch.kernel_line() is None
    with log.open("a") as kernel:
        kernel.write("6,2,2,-;Killed process 7 (this one)\n")
    assert watch.kernel_line() == "Killed process 7 (this one)"
    watch.close()


def test_evidence_that_was_found_once_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is read to its end, and a control group may go with its server."""
    log = tmp_path / "kmsg"
    log.touch()
    monkeypatch.setattr(oom_watch, "_KMSG", log)
    watch = oom_watch.OomWatch(7, now=0.0)
    assert watch.evidence(-signal.SIGKILL, ()) is None
    log.write_text("6,1,1,-;Killed process 7 (server)\n")
    for _ in range(2):
        assert "Killed process 7 (server)" in str(watch.evidence(-signal.SIGKILL, ()))
    watch.close()


def test_a_server_that_exits_keeps_its_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 shows an exiting process in the root group."""
    monkeypatch.setattr(oom_watch, "_PROC", tmp_path)
    monkeypatch.setattr(oom_watch, "CGROUP", tmp_path)
    shown, counter = tmp_path / "7" / "cgroup", tmp_path / "memory" / "g" / "memory.oom_control"
    for file, text in ((shown, "4:memory:/g\n"), (counter, "oom_kill 4\n")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    watch = oom_watch.OomWatch(7, now=0.0)
    shown.write_text("4:memory:/\n")
    counter.write_text("oom_kill 5\n")
    watch.look(now=5.0)
    assert watch.kills() == 1
    watch.close()


def test_control_group_name_may_be_any_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_bytes(b"3:cpu,memory:/jobs/\xff\x0b\n0::/\n")
    monkeypatch.setattr(oom_watch, "_PROC", tmp_path)
    counter = oom_watch._counter_file(7)
    assert counter is not None
    assert os.fsencode(counter).endswith(b"/memory/jobs/\xff\x0b/memory.oom_control")


def test_server_starts_where_kernel_log_is_a_console(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    console, terminal = os.openpty()
    monkeypatch.setattr(oom_watch, "_KMSG", os.ttyname(terminal))
    rig = make_worker()
    rig.run()
    rig.worker.close()
    os.close(console)
    os.close(terminal)
