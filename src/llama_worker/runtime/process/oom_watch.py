"""Finds processes that the kernel killed for lack of memory. Nothing here raises."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from llama_worker.config.server_program import CGROUP
from llama_worker.start_advice import oom_evidence

_PROC = "/proc"
_KMSG = "/dev/kmsg"
_V1_COUNTER = "memory.oom_control"
_RECORD_BYTES = 8192  # the kernel truncates longer records
_MAX_RECORDS = 20_000
_LOOK_AGAIN_S = 1.0


class OomWatch:
    """Watches one process's control group and the kernel's log, from its construction on. `now` is
    monotonic seconds."""

    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self._counter = _counter_file(pid)
        self._before = _count(self._counter)
        self._looked_at = now
        # what it holds already may be about another process with the same pid
        self._log = _end_of_log()
        self._evidence: str | None = None

    def close(self) -> None:
        """Close the kernel's log. Idempotent."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def look(self, now: float) -> None:
        """Follow the process into another group: a wrapper script may have put it there. Looks
        every `_LOOK_AGAIN_S` at most."""
        if now - self._looked_at < _LOOK_AGAIN_S:
            return
        self._looked_at = now
        counter = _counter_file(self._pid)
        # version 1 shows an exiting process in the root group
        if counter not in (None, self._counter, CGROUP / "memory" / _V1_COUNTER):
            self._counter, self._before = counter, _count(counter)

    def evidence(self, returncode: int, log_tail: Sequence[str]) -> str | None:
        """See `oom_evidence`; what was found once stays, since its sources may not."""
        if self._evidence is None:
            self._evidence = oom_evidence(
                returncode,
                oom_kills=self.kills(),
                kernel_line=self.kernel_line() if returncode == -signal.SIGKILL else None,
                log_tail=log_tail,
            )
        return self._evidence

    def kills(self) -> int:
        """How many processes of the group were killed since the watch began; 0 if unknown."""
        return max(0, _count(self._counter) - self._before)

    def kernel_line(self) -> str | None:
        """The kernel log's text about this process's end; None if there is none, or the log may not
        be read."""
        if self._log is None:
            return None
        wanted = f"Killed process {self._pid} ("
        last = None
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(self._log, _RECORD_BYTES).decode(errors="replace")
            except BrokenPipeError:
                continue  # overwritten before it was read: the next one follows
            except OSError:
                break  # no more records
            text = record.partition(";")[2].partition("\n")[0]
            if wanted in text:
                last = text
        return last


def _end_of_log() -> int | None:
    try:
        log = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        os.lseek(log, 0, os.SEEK_END)
    except OSError:  # in a container it is a link to the console
        os.close(log)
        return None
    return log


def _counter_file(pid: int) -> Path | None:
    """The file in which the process's group counts kills: `memory.events`, or that of version 1."""
    try:
        lines = os.fsdecode(Path(f"{_PROC}/{pid}/cgroup").read_bytes())
    except OSError:
        return None
    for line in lines.split("\n")[:-1]:  # a name may hold any other byte
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return CGROUP / "memory" / path.lstrip("/") / _V1_COUNTER
        if not controllers:
            return CGROUP / path.lstrip("/") / "memory.events"
    return None


def _count(counter: Path | None) -> int:
    try:
        lines = counter.read_text().splitlines() if counter is not None else []
    except OSError:
        return 0  # the group does not count kills, or was removed with the server
    counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(counts.get("oom_kill", 0))
