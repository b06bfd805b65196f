"""What Python runs as the guard of a launch, and the mark by which the launch's processes are found
if the guard was killed."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import psutil

from llama_worker.errors import is_shortage
from llama_worker.runtime.process import guard

_FILE = Path(guard.__file__)
_VARIABLE = "LLAMA_WORKER_LAUNCH"
_KILL_INTERVAL_S = 1.0  # between looks for processes that are left
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class LaunchMark:
    """An environment variable that the processes of a launch inherit: if the guard was killed,
    nobody else knows them. Made before the launch. `variable`: what to add to its environment."""

    def __init__(self, epoch: int) -> None:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._made_at_ticks = now_ns // _TICK_NS
        self._value = f"{os.getpid()}.{epoch}.{now_ns}"
        self.variable = {_VARIABLE: self._value}

    def kill_all(self) -> None:
        """Send SIGKILL to every process that was started with the mark, until none is left. While
        this machine is short of something, look again. If /proc shows the pids of another PID
        namespace, no process can be found."""
        while guard.proc_is_ours():
            try:
                marked = [each for each in psutil.process_iter() if self._is_on(each)]
            except (psutil.Error, OSError, MemoryError) as error:
                if not is_shortage(error):
                    raise
                time.sleep(guard.RETRY_S)
                continue
            if not marked:
                return
            for process in marked:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            # with a timeout: a zombie has no mark, but its new parent may never reap it
            psutil.wait_procs(marked, timeout=_KILL_INTERVAL_S)

    def _is_on(self, process: psutil.Process) -> bool:
        try:
            # that of an older one is not read: a process that is stuck may keep it locked for ever
            is_younger = _started_at_ticks(process.pid) >= self._made_at_ticks
            return is_younger and process.environ().get(_VARIABLE) == self._value
        except (psutil.Error, OSError) as error:
            if is_shortage(error):  # the process may be one of the launch
                raise
            return False


def _started_at_ticks(pid: int) -> int:
    """When the process was forked, in clock ticks since the boot. Raises OSError."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def guard_program() -> tuple[str, ...]:
    """The words of Python's command: the guard's file, or its source if the file was replaced or
    removed since the import, or is part of an archive. So the guard is of this program's own
    version, even after an upgrade. Lists of processes show the file's name."""
    if _SOURCE is None or _in_file() == _SOURCE:
        return (str(_FILE),)
    return ("-c", _SOURCE)


def _imported() -> str | None:
    """The source; None if this program has none."""
    loader: Any = guard.__loader__
    try:
        source: str | None = loader.get_source(guard.__name__)
    except (AttributeError, ImportError):  # a loader of another program's
        return _in_file()
    return source


def _in_file() -> str | None:
    try:
        return _FILE.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


_SOURCE = _imported()
