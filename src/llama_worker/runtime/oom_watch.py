"""What the kernel says of processes that it killed for lack of memory. Nothing here raises."""

from __future__ import annotations

import os
from pathlib import Path

from llama_worker.runtime.machine import CGROUP

_KMSG = "/dev/kmsg"
_RECORD_BYTES = 8192  # longer ones the kernel cuts off
_MAX_RECORDS = 20_000


class OomWatch:
    """One process's control group (version 2), from the construction on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._events = _events_file(pid)
        self._before = self._count()

    def kills(self) -> int:
        """How many processes of the group were killed since; 0 where that cannot be seen."""
        return max(0, self._count() - self._before)

    def kernel_line(self) -> str | None:
        """What the kernel's log says of this process's end; None where it says nothing, or may not be read."""
        wanted = f"Killed process {self._pid} ("
        try:
            log = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        found = None
        try:
            for _ in range(_MAX_RECORDS):
                try:
                    record = os.read(log, _RECORD_BYTES).decode(errors="replace")
                except BrokenPipeError:
                    continue  # overwritten before it was read: the next one follows
                text = record.partition(";")[2].partition("\n")[0]
                if wanted in text:
                    found = text
        except OSError:
            pass  # the end of what there is
        finally:
            os.close(log)
        return found

    def _count(self) -> int:
        try:
            lines = self._events.read_text().splitlines() if self._events is not None else []
        except OSError:
            return 0  # the group has gone with the server
        counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
        return int(counts.get("oom_kill", 0))


def _events_file(pid: int) -> Path | None:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    return CGROUP / path.lstrip("/") / "memory.events" if path is not None else None
