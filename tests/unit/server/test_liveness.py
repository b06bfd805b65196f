"""Evidence of work from samples of a process tree, with a literal clock, and what /proc says."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.server.liveness import (
    Counters,
    ProcessActivity,
    ProcessKey,
    ProcessSample,
    parse_anon,
    parse_io,
    parse_schedstat,
    parse_stat,
    parse_uid,
)
from llama_worker.types.hooks import LivenessEvidence
from tests.tables import cases

ROOT: ProcessKey = (100, 5.0)
CHILD: ProcessKey = (101, 6.0)
MIB = 1 << 20


def watch(
    *looks: dict[ProcessKey, Counters], every_s: float = 1.0, ticks_per_second: int = 100
) -> list[LivenessEvidence | None]:
    activity, told = ProcessActivity(ticks_per_second), []
    for number, processes in enumerate(looks):
        activity, evidence = activity.observe(
            ProcessSample(at=50.0 + number * every_s, processes=processes)
        )
        told.append(evidence)
    return told


def alive(*looks: dict[ProcessKey, Counters], **clock: Any) -> list[bool | None]:
    return [None if evidence is None else evidence.alive for evidence in watch(*looks, **clock)]


def steady(
    interval_s: float, *, ticks_per_second: int = 100, **per_second: float
) -> list[bool | None]:
    """What one process tells in four windows that uses so much of each per second."""
    looks = []
    for number in range(int(4 * max(interval_s, 3.0) / interval_s) + 1):
        use = {name: int(rate * number * interval_s + 1e-6) for name, rate in per_second.items()}
        looks.append({ROOT: Counters(**{"cpu_ticks": 0, **use})})
    return alive(*looks, every_s=interval_s, ticks_per_second=ticks_per_second)


@pytest.mark.parametrize("interval_s", [0.05, 0.5, 1.0, 5.0, 30.0, 60.0])
@pytest.mark.parametrize(("ticks", "works"), [(0.0, False), (100.0, True), (3200.0, True)])
def test_computing_is_evidence_from_the_second_look_on(
    interval_s: float, ticks: float, works: bool
) -> None:
    first, *others = steady(interval_s, cpu_ticks=ticks)
    assert first is None
    assert set(others) == {works}


def test_slow_rate_needs_five_ticks_before_counting() -> None:
    assert steady(0.5, cpu_ticks=8.0)[:5] == [None, False, True, True, True]
    assert steady(1.0, cpu_ticks=5.0)[:5] == [None, True, True, True, True]


def test_burst_is_forgotten_when_window_has_passed() -> None:
    use = [0, 20, 20, 20, 20, 20, 20]
    told = alive(*({ROOT: Counters(cpu_ticks=ticks)} for ticks in use))
    assert told == [None, True, True, True, False, False, False]


def test_ticks_are_ten_milliseconds_whatever_the_system_clock() -> None:
    assert steady(1.0, cpu_ticks=50.0, ticks_per_second=1000)[-1] is True
    assert steady(1.0, cpu_ticks=49.0, ticks_per_second=1000)[-1] is False


@pytest.mark.parametrize("interval_s", [0.05, 1.0, 5.0, 60.0])
@cases(
    "read_bytes, write_bytes, faults, works",
    {
        "a few pages of code for a health probe": (3 * 128 * 1024.0, 0.0, 3.0, False),
        "a slow share": (2.0 * MIB, 0.0, 0.0, True),
        "a hard disk read at random": (60 * 4096.0, 0.0, 60.0, True),
        "an SSD": (2000.0 * MIB, 0.0, 15000.0, True),
        "a download": (0.0, 2.0 * MIB, 0.0, True),
        "a log": (0.0, 3 * 128 * 1024.0, 0.0, False),
    },
)
def test_disk_use_and_major_faults_count_by_rate(
    interval_s: float, read_bytes: float, write_bytes: float, faults: float, works: bool
) -> None:
    told = steady(interval_s, read_bytes=read_bytes, write_bytes=write_bytes, major_faults=faults)
    assert told[-1] is works


@pytest.mark.parametrize(
    ("use", "least"), [("read_bytes", MIB), ("write_bytes", MIB), ("major_faults", 20)]
)
def test_a_burst_from_disk_needs_a_minimum(use: str, least: int) -> None:
    for amount, works in ((least - 1, False), (least, True)):
        before, after = (Counters(0, **{use: value}) for value in (0, amount))
        assert alive({ROOT: before}, {ROOT: after}, every_s=0.5) == [None, works]


@pytest.mark.parametrize(("busy_share", "works"), [(0.0, False), (0.01, False), (1.0, True)])
@pytest.mark.parametrize("neighbours", [25, 40, 1000])
def test_wait_for_a_core_counts_as_work(neighbours: int, busy_share: float, works: bool) -> None:
    """Beside so many that never sleep, on one core, for the share of the time that it would run."""
    computes = busy_share / neighbours
    waits = busy_share - computes
    told = steady(5.0, cpu_ticks=100.0 * computes, waited_ns=1e9 * waits)
    assert told[-1] is works


@pytest.mark.parametrize(
    ("ticks", "lost_s", "works"),
    [(1600, 361.0, True), (1600, 28_800.0, True), (1190, 361.0, False), (361, 361.0, False)],
)
def test_work_halted_with_the_program_counts(ticks: int, lost_s: float, works: bool) -> None:
    """Over 15 s besides the time that was lost; more was lost before."""
    activity = ProcessActivity(100)
    for at, lost, used in ((0.0, 900.0, 0), (15.0 + lost_s, 900.0 + lost_s, ticks)):
        activity, evidence = activity.observe(
            ProcessSample(at=at, lost_s=lost, processes={ROOT: Counters(used)})
        )
    assert evidence is not None
    assert evidence.alive is works


def test_counters_that_cannot_be_read_are_left_out() -> None:
    told = alive(
        {ROOT: Counters(cpu_ticks=0)},
        {ROOT: Counters(cpu_ticks=0, read_bytes=900 * MIB, major_faults=10_000)},
        {ROOT: Counters(cpu_ticks=100)},
    )
    assert told == [None, False, True]


def test_new_process_adds_none_of_its_earlier_usage() -> None:
    told = alive(
        {ROOT: Counters(cpu_ticks=10)},
        {ROOT: Counters(cpu_ticks=10), CHILD: Counters(cpu_ticks=99_999, read_bytes=900 * MIB)},
        {ROOT: Counters(cpu_ticks=10), CHILD: Counters(cpu_ticks=100_099, read_bytes=900 * MIB)},
    )
    assert told == [None, False, True]


def test_an_ended_process_takes_no_usage_away() -> None:
    *_, last = watch(
        {ROOT: Counters(cpu_ticks=0), CHILD: Counters(cpu_ticks=5000)},
        {ROOT: Counters(cpu_ticks=50), CHILD: Counters(cpu_ticks=5050)},
        {ROOT: Counters(cpu_ticks=100)},
    )
    assert last is not None
    assert last.detail.startswith("CPU 75.0 ticks/s")


def test_a_pid_that_comes_back_is_another_process() -> None:
    again: ProcessKey = (100, 7.0)
    told = alive(
        {ROOT: Counters(cpu_ticks=9000)},
        {again: Counters(cpu_ticks=3)},
        {again: Counters(cpu_ticks=4)},
    )
    assert told == [None, None, False]


def test_look_at_same_instant_gives_no_evidence() -> None:
    looks = ({ROOT: Counters(cpu_ticks=ticks)} for ticks in (0, 9))
    assert watch(*looks, every_s=0.0) == [None, None]


def test_detail_tells_the_rates() -> None:
    first = Counters(0, read_bytes=0, write_bytes=0, major_faults=0, waited_ns=0)
    last = Counters(150, read_bytes=4096, write_bytes=1024, major_faults=3, waited_ns=10**8)
    told = watch({ROOT: first}, {ROOT: last}, every_s=2.0)
    detail = (
        "CPU 75.0 ticks/s, waited for a core 5.0 ticks/s, read 2.0 KiB/s, wrote 0.5 KiB/s, "
        "major faults 1.5/s over 2.00 s"
    )
    assert told[1] == LivenessEvidence(alive=True, detail=detail)


counters = st.builds(
    Counters,
    cpu_ticks=st.integers(0, 10**6),
    read_bytes=st.none() | st.integers(0, 10**12),
    major_faults=st.none() | st.integers(0, 10**6),
    waited_ns=st.none() | st.integers(0, 10**15),
)
keys = st.sampled_from([ROOT, CHILD, (101, 5.0), (102, 5.0)])
intervals = st.floats(0.05, 60.0)


@given(st.lists(st.tuples(intervals, st.dictionaries(keys, counters)), max_size=30))
def test_no_rate_is_negative_and_window_is_bounded(
    steps: list[tuple[float, dict[ProcessKey, Counters]]],
) -> None:
    activity, at = ProcessActivity(100), 0.0
    for interval_s, processes in steps:
        at += interval_s
        activity, evidence = activity.observe(ProcessSample(at=at, processes=processes))
        assert evidence is None or "-" not in evidence.detail
        assert len(activity.points) <= 62
        assert all(point.at > at - 3.0 for point in activity.points[1:])


@given(st.lists(st.tuples(intervals, st.integers(0, 4)), min_size=1, max_size=60))
def test_under_five_ticks_a_second_are_never_evidence(steps: list[tuple[float, int]]) -> None:
    activity, _ = ProcessActivity(100).observe(
        ProcessSample(at=0.0, processes={ROOT: Counters(cpu_ticks=0)})
    )
    at, ticks = 0.0, 0.0
    for interval_s, rate in steps:
        at += interval_s
        ticks += rate * interval_s
        sample = ProcessSample(at=at, processes={ROOT: Counters(cpu_ticks=int(ticks))})
        activity, evidence = activity.observe(sample)
        assert evidence is not None
        # Whole ticks may lag by one: at the window's start one less, at its end none.
        assert not evidence.alive or rate == 4


# ---------------------------------------------------------------- what files of /proc/PID say


def test_name_may_look_like_fields_behind_it() -> None:
    stat = parse_stat(
        "77 (we(ird ) 1 name) S 1 77 77 0 -1 4194560 500 0 6 0 3 2 0 0 20 0 9 0 4242 1000 300 1 1"
    )
    assert stat is not None
    assert (stat.name, stat.state, stat.dead) == ("we(ird ) 1 name", "S", False)
    assert (stat.major_faults, stat.cpu_ticks, stat.threads_count) == (6, 5, 9)
    assert (stat.key(77), stat.rss_pages) == ((77, 4242.0), 300)


def test_status_and_io_say_what_they_have() -> None:
    status = "Name:\tx\nUid:\t1\t2\t3\t4\nRssAnon:\t   8 kB\nRssFile:\t 9 kB\nVmSwap:\t  1 kB\n"
    assert (parse_uid(status), parse_anon(status)) == (2, 9216)
    assert (parse_uid(""), parse_anon("")) == (None, None)
    said = "rchar: 99\nread_bytes: 7\nwrite_bytes: 8\ncancelled_write_bytes: 9\n"
    assert parse_io(said) == {"read_bytes": 7, "write_bytes": 8}
    nothing = {"read_bytes": None, "write_bytes": None}
    assert parse_io("cancelled_write_bytes: 7\nread_bytes: no\n") == nothing


@cases(
    "text, waited_ns",
    {
        "on a core, waiting, slices": ("2041807161 1916745594 31", 1916745594),
        "another kernel": ("2041807161", None),
        "no file": ("", None),
        "not numbers": ("a b c", None),
    },
)
def test_second_number_of_schedstat_is_the_wait(text: str, waited_ns: int | None) -> None:
    assert parse_schedstat(text) == waited_ns
