"""What is a loop of lines, and what only looks like one."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.profiles import LoopDetector
from llama_worker.stream.loops import LineLoopWatch, LoopFound, LoopWatch

SHORT = "x" * 32  # the shortest line that counts
LONG = "y" * 64  # the shortest that needs fewer repeats
SHORT_2, LONG_2 = "s" * 63, "l" * 64


def watch(text: str, config: LoopDetector = LoopDetector()) -> LoopFound | None:  # noqa: B008 (frozen)
    return LineLoopWatch(config).feed(text)


def lines(*block: str, times: int = 1) -> str:
    return "".join(line + "\n" for line in block) * times


@pytest.mark.parametrize(
    ("block", "count"),
    [
        ([SHORT], 12),
        ([LONG], 8),
        ([LONG * 100], 8),
        ([LONG, LONG_2], 8),
        ([LONG, SHORT], 12),
        ([LONG, LONG, LONG_2], 8),
        ([SHORT + c for c in "abcdefgh"], 12),
        ([LONG + c for c in "abcdefgh"], 8),
    ],
)
def test_a_block_is_a_loop_at_its_last_repeat_and_not_before(block: list[str], count: int) -> None:
    text = "Here it is.\n" + lines(*block, times=count)
    assert watch(text[:-1]) is None  # the last line has not ended
    assert watch(text + "more") == LoopFound(block[-1], count, len(block), len(text))


@pytest.mark.parametrize(
    "text",
    [
        lines(SHORT, times=11),
        lines(LONG, times=7),
        lines(LONG, SHORT, times=11),
        lines("x" * 31, times=1000),
        lines("", times=1000),
        lines(LONG, "ok", times=100),  # a table of long tags with short cells
        lines(*(LONG + c for c in "abcdefghi"), times=30),  # a period above 8
        lines(*(f"| {i:5} | a long line of a long table, number {i} of very many |" for i in range(2000))),
        lines(*(f"{i % 7} {i % 3} {i % 11}" + SHORT for i in range(200))),
        SHORT * 1000,
        lines(LONG, times=7) + "other\n" + lines(LONG, times=7),
        lines(LONG, times=7) + lines(LONG_2, times=7),
    ],
)
def test_no_loop(text: str) -> None:
    assert watch(text) is None


@pytest.mark.parametrize(("max_period", "is_loop"), [(1, False), (2, True)])
def test_the_longest_block_is_the_configs(max_period: int, is_loop: bool) -> None:
    found = watch(lines(LONG, LONG_2, times=30), LoopDetector(max_period=max_period))
    assert (found is not None) is is_loop


@pytest.mark.parametrize(
    ("before", "loop", "after", "period"),
    [
        ("", lines(LONG, "", " \t", times=7) + lines(LONG), lines("", LONG), 1),  # empty lines are skipped
        ("", "".join(f"{' ' * i}y {'y' * 63}{' ' * i}\r\n" for i in range(8)), "", 1),  # whitespace is collapsed
        ("", lines(LONG, LONG, times=4), "", 1),  # a block of equal lines has period 1
        ("", lines(LONG, LONG_2, LONG, LONG_2, times=4), "", 2),
        (lines(LONG_2), lines(LONG, LONG_2, times=7) + lines(LONG), lines(LONG_2), 2),  # entered in its middle
        (lines(LONG_2, times=3), lines(LONG, times=8), "", 1),
        (lines(LONG, SHORT), lines(LONG, LONG_2, times=8), "", 2),
        (lines(*(f"{i} {LONG}" for i in range(50))), lines(LONG, times=8), "", 1),
    ],
)
def test_what_else_is_a_loop(before: str, loop: str, after: str, period: int) -> None:
    found = watch(before + loop + after)
    assert found is not None
    assert (found.count, found.period, found.end) == (8, period, len(before + loop))


@pytest.mark.parametrize(
    ("config", "times"),
    [
        (LoopDetector(), 12),
        (LoopDetector(short_line_repeats=3, long_line_repeats=3, min_output_chars=1), 3),
        (LoopDetector(short_line_repeats=3, long_line_repeats=3), 8),  # not before 256 characters: 8 * 33
        (LoopDetector(short_line_repeats=3, long_line_repeats=3, min_output_chars=264), 8),
        (LoopDetector(short_line_repeats=3, long_line_repeats=3, min_output_chars=265), 9),
        (LoopDetector(long_line_chars=32), 8),
        (LoopDetector(min_line_chars=33), None),
    ],
)
def test_thresholds_are_the_configs(config: LoopDetector, times: int | None) -> None:
    found = watch(lines(SHORT, times=20), config)
    assert (found and found.end) == (times and times * 33)


@given(
    text=st.lists(st.sampled_from([LONG, LONG_2, SHORT, "ok", ""]), min_size=10, max_size=60).map("\n".join),
    data=st.data(),
)
def test_splits_do_not_matter(text: str, data: st.DataObject) -> None:
    text = text * 3
    whole = watch(text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for split in (pieces, list(text)):
        loop_watch = LineLoopWatch(LoopDetector())
        assert next((found for piece in split if (found := loop_watch.feed(piece))), None) == whole


@given(
    prefix=st.lists(st.text("ab \n", max_size=90), max_size=10).map("\n".join),
    block=st.lists(st.text("ab", min_size=32, max_size=70), min_size=1, max_size=8),
)
def test_any_block_of_counted_lines_is_found_after_twelve(prefix: str, block: list[str]) -> None:
    text = prefix + "\n" + lines(*block, times=12)
    found = watch(text)
    assert found is not None
    assert found.end <= len(text)
    assert found.count >= 8
    assert text[: found.end].endswith("\n")
    assert " ".join(text[: found.end].splitlines()[-1].split()) == found.line


@pytest.mark.parametrize("unit", ["a", " \n", LONG + "\n", "a" * 63 + "b"])
def test_time_is_in_proportion_to_the_length(unit: str) -> None:
    def seconds(count: int) -> float:
        loop_watch = LoopWatch(LoopDetector(long_line_repeats=10**9, short_line_repeats=10**9))
        started = time.thread_time()
        for _ in range(count):
            loop_watch.feed(unit)
        return time.thread_time() - started

    small = min(seconds(10_000) for _ in range(3))
    assert seconds(80_000) < 8 * small * 4 + 0.2
