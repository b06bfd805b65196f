"""What an idle worker costs: CPU, wake-ups, threads, memory; 1 and 16 workers with 4 slots each.

python -m benchmarks.idle [--json FILE]
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.common import config, free_port, report, script, table
from llama_worker import LlamaWorker
from tests.fake_script import Text, plain_reply

SLOTS, WATCHED_S = 4, 65.0


@dataclass(frozen=True)
class Idle:
    """Per worker, over the watched time; the health probe's part is in it."""

    cpu_percent: float  # of a core
    wakeups_per_s: float
    threads: float
    memory_mb: float  # unique to this process, beyond what it had before the first worker
    guard_mb: float  # unique to the guard process


def wakeups() -> int:
    """Voluntary context switches of all threads of this process, so far."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/task/{task}/status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    total += int(line.split()[1])
    return total


def measure(workers: int) -> Idle:
    """Run so many idle workers for a while."""
    with LlamaWorker(config(script(*plain_reply(Text("x"))), slots=1)):
        pass  # what is imported and started once
    memory = psutil.Process().memory_full_info().uss
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for number in range(workers):
            served = script(*plain_reply(Text("x")))
            stack.enter_context(LlamaWorker(config(served, slots=SLOTS, port=free_port(), name=f"idle-{number}")))
        time.sleep(3.0)
        used = psutil.Process().memory_full_info().uss - memory
        guards = [child for child in psutil.Process().children() if "guard.py" in " ".join(child.cmdline())]
        guard_mb = sum(guard.memory_full_info().uss for guard in guards) / len(guards) / 1e6
        alive = threading.active_count() - threads
        cpu, woken, began = time.process_time(), wakeups(), time.monotonic()
        time.sleep(WATCHED_S)
        elapsed = time.monotonic() - began
        return Idle(
            cpu_percent=(time.process_time() - cpu) / elapsed / workers * 100,
            wakeups_per_s=(wakeups() - woken) / elapsed / workers,
            threads=alive / workers,
            memory_mb=used / workers / 1e6,
            guard_mb=guard_mb,
        )


def main() -> None:
    """Measure and print."""
    found = {workers: measure(workers) for workers in (1, 16)}
    header = ["workers", "CPU % of a core", "wake-ups/s", "threads", "memory MB", "guard MB"]
    rows = [[n, f"{i.cpu_percent:.4f}", i.wakeups_per_s, i.threads, i.memory_mb, i.guard_mb] for n, i in found.items()]
    report("idle", table(header, rows), {str(n): asdict(i) for n, i in found.items()})


if __name__ == "__main__":
    main()
