"""What servers write is read, and the last of it kept, whatever happens."""

import contextlib
import errno
import fcntl
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from llama_worker import WorkerStartError
from llama_worker.runtime.process import server_process
from llama_worker.runtime.process.log_ring import LogRing
from llama_worker.testing import scripts as fs
from tests.actors.conftest import WAIT_S, MakeWorker, eventually
from tests.conftest import Leftovers


def test_flood_of_output_does_not_hang_the_server(make_worker: MakeWorker) -> None:
    rig = make_worker(fs.Script(floods=[fs.Flood(), fs.Flood(newline=False)]), log_lines=50)
    for _ in range(5):
        assert rig.run(*fs.plain_reply(fs.Tokens(20)))["state"] == "completed"
    assert len(rig.debug()["recent_logs"]) <= 51


def test_output_without_memory_harms_no_server(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Mock(side_effect=MemoryError)
    rig = make_worker(fs.Script(floods=[fs.Flood()]))
    with monkeypatch.context() as lacking:
        lacking.setattr(LogRing, "feed", feed)
        eventually(lambda: feed.call_count >= 2, "output that was not kept")
    assert rig.run()["state"] == "completed"
    assert rig.status()["restart_count"] == 0


def test_failed_connection_without_free_descriptors_leaks_none(
    monkeypatch: pytest.MonkeyPatch, leftovers: Leftovers
) -> None:
    moved: list[int] = []
    move = fcntl.fcntl

    def fcntl_once(fd: int, order: int, least: int) -> int:
        if moved:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        moved.append(move(fd, order, least))
        return moved[-1]

    monkeypatch.setattr(fcntl, "fcntl", fcntl_once)
    with pytest.raises(OSError, match="Too many open files"), contextlib.ExitStack() as cleanup:
        server_process._socket_pair(cleanup)
    assert moved
    assert not leftovers.now()


_WRITES_MUCH_AND_EXITS = """
import fcntl, os, sys
open(sys.argv[1], "w").write(str(os.getppid()))
fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)
os.write(1, b"loading\\n" * 50_000 + b"the reason\\n")
"""


def test_servers_last_lines_are_kept_whatever_pipe_holds(
    make_worker: MakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a kernel with pages of 64 KiB."""
    feed, guard_pid = LogRing.feed, tmp_path / "guard"

    def feed_once_all_have_ended(log: LogRing, data: bytes) -> None:
        guard = psutil.Process(int(guard_pid.read_text()))
        eventually(lambda: guard.status() == psutil.STATUS_ZOMBIE, "the guard's end")
        feed(log, data)

    monkeypatch.setattr(LogRing, "feed", feed_once_all_have_ended)
    command = (sys.executable, "-c", _WRITES_MUCH_AND_EXITS, str(guard_pid))
    rig = make_worker(server_cmd=command, start=False)
    with pytest.raises(WorkerStartError) as failure:
        rig.worker.start().get(timeout=WAIT_S)
    assert failure.value.log_tail[-1] == "the reason"
