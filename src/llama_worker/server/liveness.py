"""Whether a process tree works, judged by the rate of what it uses, and when its probes look.
Sans-IO.

The probes that read `/proc` and ask the GPU are in `runtime.probes.liveness_probes`.

Single ticks prove nothing: an idle or wedged llama-server shows 0-1 ticks of 10 ms per second, also
while it is probed every second; one that computes shows over 80 per thread, also under heavy load
beside it (b11434).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from llama_worker.server.messages import Look
from llama_worker.types.hooks import LivenessEvidence

WINDOW_S = 3.0  # rates are averaged over this, or longer where probes are rarer
TICK_S = 0.01

# Five times what an idle server shows, a sixteenth of one computing thread. The same number *in
# all* keeps a burst right after watching began, when the window is still short, from passing for a
# rate.
MIN_CPU_TICKS = 5
MIN_CPU_TICKS_PER_S = 5.0

# A model paged in from disk (mmap under memory pressure, a slow share at load) computes little. An
# idle or wedged server reads nothing; under pressure a health probe may bring back a few pages of
# code, at most 128 KiB of read-ahead each, so that 3 a second stay below both limits. A slow
# network share or memory card delivers over 1 MiB/s in sequence; a hard disk read at random over 60
# faults/s, whatever their size.
MIN_READ_BYTES = 1 << 20
MIN_READ_BYTES_PER_S = float(1 << 19)
MIN_MAJOR_FAULTS = 20
MIN_MAJOR_FAULTS_PER_S = 20.0

_READ_BYTES = re.compile(r"^read_bytes: *(\d+)$", re.MULTILINE)
_UID = re.compile(r"^Uid:\t\d+\t(\d+)\t", re.MULTILINE)
_ANON = re.compile(r"^(?:RssAnon|VmSwap):\s*(\d+) kB$", re.MULTILINE)

# pid and creation time: a pid alone may come back as another process
ProcessKey = tuple[int, float]


class Counters(Struct, frozen=True, kw_only=True):
    """What one process used since it began; None where it cannot be read."""

    cpu_ticks: int  # user + system, in the clock ticks of the system
    read_bytes: int | None = None  # from storage, not from caches
    major_faults: int | None = None


class ProcessSample(Struct, frozen=True, kw_only=True):
    """One look at a process tree."""

    at: float
    processes: Mapping[ProcessKey, Counters]


class _Point(Struct, frozen=True, kw_only=True):
    """Use summed up since watching began."""

    at: float
    cpu_ticks: int = 0
    read_bytes: int = 0
    major_faults: int = 0


class ProcessActivity(Struct, frozen=True):
    """What was seen of a tree during the window; watching begins with `ProcessActivity()`."""

    ticks_per_second: int = 100  # sysconf SC_CLK_TCK
    last: ProcessSample | None = None
    points: tuple[_Point, ...] = ()  # oldest first; the first is the start of the window

    def observe(self, sample: ProcessSample) -> tuple[ProcessActivity, LivenessEvidence | None]:
        """The window with this sample in it, and what it shows; None: there is nothing to compare
        with yet.

        A process counts from the second look at it, as long as it is there: one that appears brings
        in nothing of its past, one that vanishes takes nothing away. If none is left of the last
        look, watching begins anew.
        """
        if self.last is None or not self.last.processes.keys() & sample.processes.keys():
            return ProcessActivity(self.ticks_per_second, sample, (_Point(at=sample.at),)), None
        if sample.at <= self.last.at:
            return self, None
        point = _advance(self.points[-1], self.last.processes, sample)
        points = (*self.points, point)
        start = max((i for i, p in enumerate(points) if p.at <= sample.at - WINDOW_S), default=0)
        evidence = self._judge(points[start], point)
        return ProcessActivity(self.ticks_per_second, sample, points[start:]), evidence

    def _judge(self, start: _Point, end: _Point) -> LivenessEvidence:
        span_s = end.at - start.at
        cpu_ticks = (end.cpu_ticks - start.cpu_ticks) / self.ticks_per_second / TICK_S
        read_bytes = end.read_bytes - start.read_bytes
        major_faults = end.major_faults - start.major_faults
        computes = cpu_ticks >= MIN_CPU_TICKS and cpu_ticks >= MIN_CPU_TICKS_PER_S * span_s
        reads = (read_bytes >= MIN_READ_BYTES and read_bytes >= MIN_READ_BYTES_PER_S * span_s) or (
            major_faults >= MIN_MAJOR_FAULTS and major_faults >= MIN_MAJOR_FAULTS_PER_S * span_s
        )
        detail = (
            f"CPU {cpu_ticks / span_s:.1f} ticks/s, read {read_bytes / span_s / 1024:.1f} KiB/s, "
            f"major faults {major_faults / span_s:.1f}/s over {span_s:.2f} s"
        )
        return LivenessEvidence(alive=computes or reads, detail=detail, reads=reads)


def _advance(point: _Point, before: Mapping[ProcessKey, Counters], sample: ProcessSample) -> _Point:
    cpu_ticks, read_bytes, major_faults = point.cpu_ticks, point.read_bytes, point.major_faults
    for key, new in sample.processes.items():
        old = before.get(key)
        if old is not None:
            cpu_ticks += _grown(old.cpu_ticks, new.cpu_ticks)
            read_bytes += _grown(old.read_bytes, new.read_bytes)
            major_faults += _grown(old.major_faults, new.major_faults)
    return _Point(
        at=sample.at, cpu_ticks=cpu_ticks, read_bytes=read_bytes, major_faults=major_faults
    )


def _grown(old: int | None, new: int | None) -> int:
    return 0 if old is None or new is None else max(0, new - old)


class LookRounds:
    """Which liveness probes are to be asked, and which answers count. Each `Look` that a method
    returns is to be taken. Not thread-safe.

    The probes are asked in rounds. A host's own probe may hang (NVML does with a lost GPU): it
    delays no other probe, and is not asked again until it has returned.
    """

    def __init__(self, probes_count: int) -> None:
        self._probes = frozenset(range(probes_count))
        self._round = 0
        # of the present watching; what was seen in an older one is out of date
        self._first_round = 0
        self._out: set[int] = set()  # probes that have not returned
        self._pending: set[int] = set()  # those of them that the present round waits for
        self._to_reset: set[int] = set()  # probes that still have to forget what they saw before

    def begin(self, *, fresh: bool) -> list[Look]:
        """A round: a look by every probe that is not still out. `fresh`: watching begins anew."""
        self._round += 1
        if fresh:
            self._first_round = self._round
            self._to_reset = set(self._probes)
        self._pending = set(self._probes - self._out)
        return [self._look(probe) for probe in sorted(self._pending)]

    def returned(self, look: Look) -> Look | None:
        """A probe is back; the look that it has to take at once, if it was out when watching began
        anew."""
        self._out.discard(look.probe)
        if look.probe in self._to_reset:
            return self._look(look.probe)
        self._pending.discard(look.probe)
        return None

    def counts(self, look: Look) -> bool:
        """Whether the look was begun since watching began."""
        return look.round >= self._first_round

    @property
    def complete(self) -> bool:
        """Every probe that the present round asked is back."""
        return not self._pending

    def _look(self, probe: int) -> Look:
        fresh = probe in self._to_reset
        self._to_reset.discard(probe)
        self._out.add(probe)
        return Look(probe=probe, round=self._round, fresh=fresh)


# ---------------------------------------------------------------- what files of /proc/PID say


class ProcessStat(Struct, frozen=True, kw_only=True):
    """The line of `stat`: one read for what costs psutil three, and major faults, which it
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
    """None where it is no such line."""
    try:
        # the name may itself hold brackets and blanks
        head, tail = line.rsplit(")", 1)
        fields = tail.split()  # from the third on, in the count of proc(5)
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


def parse_read_bytes(io: str) -> int | None:
    """What was read from storage, by `io`; None where that does not say."""
    match = _READ_BYTES.search(io)
    return int(match[1]) if match else None


def parse_uid(status: str) -> int | None:
    """The effective user, by `status`; None where that does not say."""
    match = _UID.search(status)
    return int(match[1]) if match else None


def parse_anon(status: str) -> int | None:
    """Bytes of anonymous memory, resident and swapped out, by the `status` of one or more
    processes; None where none of them says."""
    amounts = _ANON.findall(status)
    return sum(map(int, amounts)) * 1024 if amounts else None
