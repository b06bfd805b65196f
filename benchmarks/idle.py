"""What idle workers cost: CPU, wake-ups, threads, memory; 16 workers without a health probe, and
256 with it.

python -m benchmarks.idle [--json FILE]
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from benchmarks.common import config, report, script, table
from llama_worker import LlamaWorker, TimeoutProfile
from llama_worker.testing.scripts import Text, plain_reply

SLOTS, SIDE_BY_SIDE = 4, 8
WORKERS = 256
PROBE_EVERY_S = TimeoutProfile.normal().health_probe_interval_s
WATCHED_S = 31.0  # a health probe of each worker
ROUNDS = 2  # what else the machine does comes and goes: the least counts


@dataclass(frozen=True)
class Idle:
    """Per worker, over the watched time."""

    cpu_percent: float  # of a core
    wakeups_per_s: float
    threads: float
    memory_mb: float  # unique to this process, beyond what it had before the first worker
    guard_mb: float  # unique to the guard process
    polling: int  # threads that woke more than once a second


def wakeups() -> int:
    """Voluntary context switches of all threads of this process so far, those that have ended
    included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def wakeups_by_thread() -> dict[str, int]:
    """The same of each thread that lives."""
    counts = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/task/{task}/status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    counts[task] = int(line.split()[1])
    return counts


def watch() -> tuple[float, float, int]:
    """For a while: CPU seconds and wake-ups per second, and how many threads woke more than once a
    second."""
    by_thread = wakeups_by_thread()  # first: reading all that takes as long as several probes
    cpu, woken, began = time.process_time(), wakeups(), time.monotonic()
    time.sleep(WATCHED_S)
    cpu, woken, elapsed = time.process_time() - cpu, wakeups() - woken, time.monotonic() - began
    rises = [count - by_thread.get(task, 0) for task, count in wakeups_by_thread().items()]
    return cpu / elapsed, woken / elapsed, sum(rise > elapsed for rise in rises)


def measure(workers: int, *, probed: bool) -> Idle:
    """Run so many idle workers for a while, with the health probe of `TimeoutProfile.normal()` or
    without."""
    with LlamaWorker(config(script(*plain_reply(Text("x"))), slots=1)):
        pass  # what is imported and started once
    memory = psutil.Process().memory_full_info().uss
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(workers):
            served = script(*plain_reply(Text("x")))
            idle = config(served, slots=SLOTS, name=f"idle-{number}")
            if not probed:
                idle = replace(idle, timeouts=replace(idle.timeouts, health_probe_interval_s=None))
            worker = LlamaWorker(idle)
            stack.callback(worker.close)
            started.append(worker.start())
            if len(started) % SIDE_BY_SIDE == 0:
                started[-SIDE_BY_SIDE].get()
        for start in started:
            start.get()
        time.sleep(3.0)
        used = psutil.Process().memory_full_info().uss - memory
        guards = [
            child
            for child in psutil.Process().children()
            if "guard.py" in " ".join(child.cmdline())
        ]
        guard_mb = sum(guard.memory_full_info().uss for guard in guards) / len(guards) / 1e6
        alive = threading.active_count() - threads
        seen = [watch() for _ in range(ROUNDS)]
        cpu, woken, polling = (min(each) for each in zip(*seen, strict=True))
        return Idle(
            cpu_percent=cpu / workers * 100,
            wakeups_per_s=woken / workers,
            threads=alive / workers,
            memory_mb=used / workers / 1e6,
            guard_mb=guard_mb,
            polling=int(polling),
        )


def main() -> None:
    """Measure and print."""
    assert PROBE_EVERY_S is not None
    header = [
        "workers",
        "CPU % of a core, all",
        "wake-ups/s of one without probes",
        "per probe",
        "threads of one",
    ]
    header += ["that poll", "memory MB, all", "guard MB"]
    bare, full = measure(16, probed=False), measure(WORKERS, probed=True)
    per_probe = (full.wakeups_per_s - bare.wakeups_per_s) * PROBE_EVERY_S
    row: list[object] = [
        WORKERS,
        f"{full.cpu_percent * WORKERS:.2f}",
        bare.wakeups_per_s,
        per_probe,
    ]
    row += [full.threads, bare.polling, full.memory_mb * WORKERS, full.guard_mb]
    data = {**asdict(full), "wakeups_per_s": bare.wakeups_per_s, "wakeups_per_probe": per_probe}
    data |= {
        "all_cpu_percent": full.cpu_percent * WORKERS,
        "all_memory_mb": full.memory_mb * WORKERS,
    }
    report("idle", table(header, [row]), data)


if __name__ == "__main__":
    main()
