"""Decides whether a process tree works, by the rates of its CPU time, its wait for a core and its
use of the disk, and when the liveness probes look. Sans-IO.

The probes that read `/proc` and ask the GPU are in `runtime.probes.liveness_probes`.

Single ticks prove nothing: an idle or wedged llama-server shows 0-1 ticks of 10 ms per second, even
while it is probed every second; one that computes shows over 80 per thread, even beside other heavy
load (b11434).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from llama_worker.server.messages import Look
from llama_worker.types.hooks import LivenessEvidence

WINDOW_S = 3.0  # rates are averaged over this, or longer if probes are less frequent
TICK_S = 0.01

# Five times what an idle server shows, a sixteenth of one computing thread. The same number is also
# required in total: else a burst right after watching began, while the window is short, would pass
# for a rate.
MIN_CPU_TICKS = 5
MIN_CPU_TICKS_PER_S = 5.0

# A server that was halted together with this program has computed in the rest of the time only: it
# also passes by what one thread does in that. One that was idle in the lost time has used less,
# unless over nine tenths of the time were lost.
FULL_CPU_TICKS_PER_S = 80.0

# The same numbers hold for the time that the main thread waits for a core: where others leave the
# server less than 5 % of one, it hardly computes, but waits for nearly all of the time. The main
# thread loads the model, runs the task loop and computes (b11434); the other threads also wake for
# HTTP. A thread that sleeps waits for no core.

# A server whose model is paged in from disk (mmap under memory pressure, a slow share at load)
# computes little. An idle or wedged one reads nothing; under pressure a health probe may page in a
# little code, at most 128 KiB of read-ahead per fault, so that 3 faults a second stay below both
# limits. A slow network share or memory card delivers over 1 MiB/s sequentially; a hard disk
# delivers over 60 random faults/s of any size. A server that downloads its model (-hf) writes it.
MIN_DISK_BYTES = 1 << 20
MIN_DISK_BYTES_PER_S = float(1 << 19)
MIN_MAJOR_FAULTS = 20
MIN_MAJOR_FAULTS_PER_S = 20.0

_DISK_BYTES = re.compile(r"^(read_bytes|write_bytes): *(\d+)$", re.MULTILINE)
_UID = re.compile(r"^Uid:\t\d+\t(\d+)\t", re.MULTILINE)
_ANON = re.compile(r"^(?:RssAnon|VmSwap):\s*(\d+) kB$", re.MULTILINE)

# pid and start time: a pid alone may be reused by another process
ProcessKey = tuple[int, float]


class Counters(NamedTuple):
    """What one process has used since it started; None: it cannot be read."""

    cpu_ticks: int  # user + system, in the clock ticks of the system
    read_bytes: int | None = None  # from storage, not from caches
    write_bytes: int | None = None
    major_faults: int | None = None
    waited_ns: int | None = None  # the main thread, which could run, for a core


class ProcessSample(Struct, frozen=True, kw_only=True):
    """One look at a process tree."""

    at: float  # on the system's clock
    lost_s: float = 0.0  # by how much the pausing clock is behind (`clock.py`)
    processes: Mapping[ProcessKey, Counters]


class _Point(NamedTuple):
    """The tree's usage at one instant, summed since watching began."""

    at: float
    lost_s: float = 0.0
    used: tuple[int, ...] = (0, 0, 0, 0, 0)  # in the order of `Counters`


class ProcessActivity(Struct, frozen=True):
    """The usage of a tree during the window; watching begins with
    `ProcessActivity(ticks_per_second)`."""

    ticks_per_second: int  # sysconf SC_CLK_TCK
    last: ProcessSample | None = None
    points: tuple[_Point, ...] = ()  # oldest first; the first is the start of the window

    def observe(self, sample: ProcessSample) -> tuple[ProcessActivity, LivenessEvidence | None]:
        """The window with this sample in it, and its evidence; None: there is nothing to compare
        with yet.

        A process counts from its second sample on: one that appears adds none of its earlier usage,
        one that ends takes none away. If no process of the last sample is left, watching starts
        over.
        """
        if self.last is None or not self.last.processes.keys() & sample.processes.keys():
            start_point = _Point(sample.at, sample.lost_s)
            return ProcessActivity(self.ticks_per_second, sample, (start_point,)), None
        if sample.at <= self.last.at:
            return self, None
        point = _advance(self.points[-1], self.last.processes, sample)
        points = (*self.points, point)
        start = max((i for i, p in enumerate(points) if p.at <= sample.at - WINDOW_S), default=0)
        evidence = self._judge(points[start], point)
        return ProcessActivity(self.ticks_per_second, sample, points[start:]), evidence

    def _judge(self, start: _Point, end: _Point) -> LivenessEvidence:
        span_s = end.at - start.at
        ticks, read_bytes, write_bytes, major_faults, waited_ns = (
            after - before for before, after in zip(start.used, end.used, strict=True)
        )
        cpu_ticks = ticks / self.ticks_per_second / TICK_S
        waited_ticks = waited_ns / 1e9 / TICK_S
        ran_s = span_s - (end.lost_s - start.lost_s)
        least_ticks = min(MIN_CPU_TICKS_PER_S * span_s, FULL_CPU_TICKS_PER_S * ran_s)
        computes = max(cpu_ticks, waited_ticks) >= max(MIN_CPU_TICKS, least_ticks)
        disk_bytes = max(MIN_DISK_BYTES, MIN_DISK_BYTES_PER_S * span_s)
        reads = read_bytes >= disk_bytes or (
            major_faults >= MIN_MAJOR_FAULTS and major_faults >= MIN_MAJOR_FAULTS_PER_S * span_s
        )
        works = computes or reads or write_bytes >= disk_bytes
        detail = (
            f"CPU {cpu_ticks / span_s:.1f} ticks/s, waited for a core {waited_ticks / span_s:.1f} "
            f"ticks/s, read {read_bytes / span_s / 1024:.1f} KiB/s, wrote "
            f"{write_bytes / span_s / 1024:.1f} KiB/s, major faults {major_faults / span_s:.1f}/s "
            f"over {span_s:.2f} s"
        )
        return LivenessEvidence(alive=works, detail=detail, reads=reads)


def _advance(point: _Point, before: Mapping[ProcessKey, Counters], sample: ProcessSample) -> _Point:
    used = list(point.used)
    for key, counts in sample.processes.items():
        for index, (old, new) in enumerate(zip(before.get(key, counts), counts, strict=True)):
            if old is not None and new is not None:
                used[index] += max(0, new - old)
    return _Point(sample.at, sample.lost_s, tuple(used))


class LookRounds:
    """Decides which liveness probes to ask, and which answers count. The caller must send each
    `Look` that a method returns. Not thread-safe.

    The probes are asked in rounds. A host's own probe may hang (NVML does with a lost GPU): it
    delays no other probe, and is not asked again until it has returned.
    """

    def __init__(self, probes_count: int) -> None:
        self._probes = frozenset(range(probes_count))
        self._numbers = itertools.count()
        self._round: int  # the current one
        self._first_round: int  # since watching started over; answers from before are outdated
        self._in_progress: set[int] = set()  # probes that have not returned
        self._awaited: set[int] = set()  # those of them that the current round waits for
        self._to_reset: set[int] = set()  # probes whose next look must drop their earlier state

    def begin(self, *, fresh: bool) -> list[Look]:
        """Begin a round: a look by every probe that has returned. `fresh`: watching starts over."""
        self._round = next(self._numbers)
        if fresh:
            self._first_round = self._round
            self._to_reset = set(self._probes)
        self._awaited = set(self._probes - self._in_progress)
        return [self._look(probe) for probe in sorted(self._awaited)]

    def returned(self, look: Look) -> Look | None:
        """A probe has returned; returns the look that it must take at once if it was out when
        watching started over."""
        self._in_progress.discard(look.probe)
        if look.probe in self._to_reset:
            return self._look(look.probe)
        self._awaited.discard(look.probe)
        return None

    def not_made(self, look: Look) -> None:
        """The look failed for lack of resources: it may not have reset its probe."""
        if look.fresh:
            self._to_reset.add(look.probe)

    def is_current(self, look: Look) -> bool:
        """Whether the look began after watching started over."""
        return look.round >= self._first_round

    @property
    def complete(self) -> bool:
        """Whether every probe that the current round asked has returned."""
        return not self._awaited

    def _look(self, probe: int) -> Look:
        fresh = probe in self._to_reset
        self._to_reset.discard(probe)
        self._in_progress.add(probe)
        return Look(probe=probe, round=self._round, fresh=fresh)


# ---------------------------------------------------------------- what files of /proc/PID say


class ProcessStat(Struct, frozen=True, kw_only=True):
    """The fields of `stat`: one read where psutil needs three, and major faults, which psutil
    lacks."""

    name: str
    state: str
    major_faults: int
    cpu_ticks: int
    threads_count: int
    started_ticks: int  # since boot
    rss_pages: int

    @property
    def dead(self) -> bool:
        return self.state in "ZXx"

    def key(self, pid: int) -> ProcessKey:
        return pid, float(self.started_ticks)


def parse_stat(line: str) -> ProcessStat | None:
    """Parse the text of `stat`; None if it is malformed."""
    try:
        # the name may itself contain parentheses and spaces
        head, tail = line.rsplit(")", 1)
        fields = tail.split()  # fields[0] is field 3 of proc(5)
        return ProcessStat(
            name=head.split("(", 1)[1],
            state=fields[0],
            major_faults=int(fields[9]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            threads_count=int(fields[17]),
            started_ticks=int(fields[19]),
            rss_pages=int(fields[21]),
        )
    except (ValueError, IndexError):
        return None


def parse_io(io: str) -> dict[str, int | None]:
    """`read_bytes` and `write_bytes`: of storage, not of caches. None: the text of `io` does not
    say."""
    said = dict(_DISK_BYTES.findall(io))
    return {
        name: int(said[name]) if name in said else None for name in ("read_bytes", "write_bytes")
    }


def parse_schedstat(schedstat: str) -> int | None:
    """The nanoseconds that the thread has waited for a core; None: the text does not say."""
    try:
        return int(schedstat.split()[1])
    except (ValueError, IndexError):
        return None


def parse_uid(status: str) -> int | None:
    """The effective user id, from the text of `status`; None if it does not say."""
    match = _UID.search(status)
    return int(match[1]) if match else None


def parse_anon(status: str) -> int | None:
    """Bytes of anonymous memory, resident and swapped out, from the `status` texts of one or more
    processes; None if none of them says."""
    amounts = _ANON.findall(status)
    return sum(map(int, amounts)) * 1024 if amounts else None
