"""Loops of lines and loops without line ends, and the honest texts that look like them."""

import base64
import encodings.cp1252
import html.entities
import json
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llama_worker
from llama_worker.config.profiles import LoopDetector
from llama_worker.stream.loops import (
    LineLoopWatch,
    LoopFound,
    LoopWatch,
    TextLoopFound,
    TextLoopWatch,
)
from tests.tables import cases
from tests.timing import is_linear

SHORT = "qrstuvwxyz" * 3 + "qr"  # the shortest line that counts
# the shortest that need fewer repeats
LONG, LONG_2 = "abcdefghij" * 6 + "abcd", "ABCDEFGHIJ" * 6 + "ABCD"
NO_LINE_LOOPS = LoopDetector(long_line_repeats=10**9, short_line_repeats=10**9)
SMALL = LoopDetector(max_period_chars=64, min_repeated_chars=128, min_text_repeats=4)
SMALLEST = LoopDetector(max_period_chars=8, min_repeated_chars=32, min_text_repeats=4)


def lines(*block: str, times: int = 1) -> str:
    return "".join(line + "\n" for line in block) * times


def words(count: int, seed: int = 1) -> str:
    """Prose, as far as a period finder can tell."""
    choose = random.Random(seed)
    return " ".join(
        "".join(choose.choices("etaoinshrdlu", k=choose.randint(1, 9))) for _ in range(count)
    )


# ---------------------------------------------------------------- lines


def watch(text: str, config: LoopDetector = LoopDetector()) -> LoopFound | None:  # noqa: B008 (frozen)
    return LineLoopWatch(config).feed(text)


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
def test_a_block_loops_at_its_last_repeat(block: list[str], count: int) -> None:
    text = "Here it is.\n" + lines(*block, times=count)
    assert watch(text[:-1]) is None  # the last line has not ended
    assert watch(text + "more") == LoopFound(block[-1], count, len(block), len(text))


SPACED = "".join(f"{' ' * i}y {LONG[:63]}{' ' * i}\r\n" for i in range(8))


@cases(
    "before, loop, after, period",
    {
        "empty lines are skipped": (
            "",
            lines(LONG, "", " \t", times=7) + lines(LONG),
            lines("", LONG),
            1,
        ),
        "whitespace is collapsed": ("", SPACED, "", 1),
        "a block of equal lines has period 1": ("", lines(LONG, LONG, times=4), "", 1),
        "equal pairs have period 2": ("", lines(LONG, LONG_2, LONG, LONG_2, times=4), "", 2),
        "entered in its middle": (
            lines(LONG_2),
            lines(LONG, LONG_2, times=7) + lines(LONG),
            lines(LONG_2),
            2,
        ),
        "behind one of its lines": (lines(LONG, SHORT), lines(LONG, LONG_2, times=8), "", 2),
    },
)
def test_what_else_is_a_loop(before: str, loop: str, after: str, period: int) -> None:
    found = watch(before + loop + after)
    assert found is not None
    assert (found.count, found.period, found.end) == (8, period, len(before + loop))


@pytest.mark.parametrize(
    ("text", "max_period"),
    [
        (lines(SHORT[:31], times=1000), 8),
        (lines("123456789" * 9, times=1000), 8),  # of too few characters
        (lines(LONG, "ok", times=100), 8),  # a table of long tags with short cells
        (lines(*(LONG + c for c in "abcdefghi"), times=30), 8),
        (lines(LONG, LONG_2, times=30), 1),
        (lines(LONG, times=7) + lines(LONG_2, times=7), 8),
        (lines(LONG, times=7) + lines("ok") + lines(LONG, times=7), 8),
    ],
)
def test_no_loop(text: str, max_period: int) -> None:
    assert watch(text, LoopDetector(max_period=max_period)) is None


FEW_REPEATS = {"short_line_repeats": 3, "long_line_repeats": 3}


@pytest.mark.parametrize(
    ("config", "times"),
    [
        (LoopDetector(), 12),
        (LoopDetector(**FEW_REPEATS, min_output_chars=1), 3),
        (LoopDetector(**FEW_REPEATS), 8),  # not before 256 characters: 8 * 33
        (LoopDetector(**FEW_REPEATS, min_output_chars=264), 8),
        (LoopDetector(**FEW_REPEATS, min_output_chars=265), 9),
        (LoopDetector(long_line_chars=32), 8),
        (LoopDetector(min_line_chars=33), None),
    ],
)
def test_the_thresholds_of_lines_are_the_configs(config: LoopDetector, times: int | None) -> None:
    found = watch(lines(SHORT, times=20), config)
    assert (found and found.end) == (times and times * 33)


@given(
    prefix=st.lists(st.text("ab \n", max_size=90), max_size=10).map("\n".join),
    block=st.lists(
        st.text("ab", min_size=22, max_size=60).map("0123456789".__add__), min_size=1, max_size=8
    ),
)
def test_any_block_of_counted_lines_found_after_twelve(prefix: str, block: list[str]) -> None:
    text = prefix + "\n" + lines(*block, times=12)
    found = watch(text)
    assert found is not None
    assert found.end <= len(text)
    assert found.count >= 8
    assert text[: found.end].endswith("\n")
    assert " ".join(text[: found.end].splitlines()[-1].split()) == found.line


# ---------------------------------------------------------------- text without line ends


@cases(
    "block",
    {
        "one character": "/",
        "a word": "items ",
        "empty lines": "\n",
        "short lines": "- yes\n- no\n- maybe\n",
        # llama.cpp#26039
        "more lines than max_period": "".join(f"{n}. {words(3, n)}\n" for n in range(92)),
        "a long paragraph": words(800),
        "not ASCII": "思考" * 40 + words(10),
        "mostly blanks": " " * 3000 + "x" + " " * 2000,
        "it repeats itself but for its last line": lines("a" * 59, times=100) + lines("b" * 59),
    },
)
def test_any_block_that_keeps_repeating_is_found(block: str) -> None:
    needed = max(8192, 4 * len(block))
    repeats = 2 + (needed + 1024) // len(block)
    text = words(1500) + block * repeats
    found = LoopWatch(NO_LINE_LOOPS).feed(text)
    assert isinstance(found, TextLoopFound)
    assert found.end <= len(text)
    assert len(words(1500)) + needed <= found.end + len(block)  # not before there was so much of it
    assert found.chars == max(8192, 4 * found.period_chars)
    assert len(block) % found.period_chars == 0
    end = text[: found.end]
    assert end[-found.chars : -found.period_chars] == end[found.period_chars - found.chars :]


@pytest.mark.parametrize(
    ("text", "config", "is_loop"),
    [
        ("a" * 8191, LoopDetector(), False),  # min_repeated_chars
        ("a" * 8192, LoopDetector(), True),
        (words(3000)[:8192] + "a" * 8192, LoopDetector(), True),
        (words(100)[:64] * 40, SMALL, True),  # max_period_chars
        (words(100)[:65] * 40, SMALL, False),
        (words(9) + words(100)[:60] * 3, SMALL, False),  # min_text_repeats
        (words(9) + words(100)[:60] * 5, SMALL, True),
        ("ab" * 16, SMALLEST, True),
        ("ab" * 15, SMALLEST, False),
        ("aa", LoopDetector(max_period_chars=1, min_repeated_chars=1, min_text_repeats=2), True),
    ],
)
def test_the_thresholds_of_text_are_the_configs(
    text: str, config: LoopDetector, is_loop: bool
) -> None:
    assert (TextLoopWatch(config).feed(text) is not None) is is_loop


def test_only_a_window_of_the_text_is_kept() -> None:
    loop_watch, bits = TextLoopWatch(SMALL), random.Random(7)
    tracemalloc.start()
    try:
        for _ in range(500):
            assert loop_watch.feed(base64.b64encode(bits.randbytes(1000)).decode()) is None
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- both


def test_the_loop_that_comes_first_is_told() -> None:
    assert isinstance(LoopWatch(LoopDetector()).feed(lines(LONG, times=1000)), LoopFound)
    assert isinstance(
        LoopWatch(LoopDetector()).feed("ha " * 9000 + "\n" + lines(LONG, times=20)), TextLoopFound
    )
    at_once = LoopDetector(max_period_chars=65, min_repeated_chars=8 * 65)
    assert isinstance(LoopWatch(at_once).feed(lines(LONG, times=8)), LoopFound)


HONEST = {
    "prose": words(30_000),
    "a table": "".join(f"| {row} | item-{row} | ok | 0.0 |\n" for row in range(3000)),
    "a table whose rows differ in a number": "".join(
        f"| ok | ok | {row * row % 9973} | ok |\n" for row in range(4000)
    ),
    "rulers between paragraphs": "".join(f"{words(40, n)}\n{'-' * 120}\n" for n in range(300)),
    "an array of zeros": "zeros = [" + "0, " * 2000 + "]\n" + words(500),
    "an array of counts": json.dumps(list(range(20_000))),
    "a matrix of identity": "\n".join(
        " ".join("1" if i == j else "0" for j in range(120)) for i in range(120)
    ),
    "base64 of a picture with an empty part": base64.b64encode(
        random.Random(8).randbytes(3000) + bytes(5000) + random.Random(9).randbytes(3000)
    ).decode(),
    "a hex dump of zeros": "".join(
        f"{at:08x}  {'00 ' * 16} |{'.' * 16}|\n" for at in range(0, 65536, 16)
    ),
    "JSON of equal shape": json.dumps(
        [{"id": n, "ok": True, "tags": ["a", "b"]} for n in range(4000)], indent=2
    ),
    "a song": "\n\n".join(f"{words(30, n)}\n" + "la la la la la\n" * 20 for n in range(60)),
    "a CSV of empty cells": "".join(f"{n}{',' * 60}\n" for n in range(2000)),
    "SVG": "".join(
        f'<circle cx="{n * 7 % 500}" cy="{n * 13 % 400}" r="1"/>\n' for n in range(3000)
    ),
    "code": "".join(
        path.read_text() for path in sorted(Path(llama_worker.__file__).parent.rglob("*.py"))
    ),
    "code of a code page": Path(encodings.cp1252.__file__).read_text(),
    "code of the HTML entities": Path(html.entities.__file__).read_text(),
    "a map with walls": "".join(
        f"[{', '.join('1' * 25 if row in (0, 39) else '1' + '0' * 23 + '1')}],\n"
        for row in range(40)
    ),
    "a table to decode base64 with": "".join(
        f"    {' '.join('0xFF,' if (row * 8 + n) % 5 else f'0x{row + n:02x},' for n in range(8))}\n"
        for row in (*[0] * 20, *range(32))
    ),
    "an empty Sudoku": "<table>\n" + f"<tr>{'<td></td>' * 9}</tr>\n" * 9 + "</table>\n",
    "lines to write on": f"{'_' * 70}\n\n" * 20,
    "base64 of an empty picture": lines("A" * 76, times=100),
    "ten thousand times, counted": "".join(f"{n}: I will not loop.\n" for n in range(10_000)),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_text_is_no_loop(name: str) -> None:
    assert LoopWatch(LoopDetector()).feed(HONEST[name]) is None


SOME_LINES = st.lists(st.sampled_from([LONG, LONG_2, SHORT, "ok", ""]), min_size=10, max_size=60)
A_BLOCK = st.tuples(st.text(max_size=300), st.text("ab \n", min_size=1, max_size=64))


@settings(max_examples=60)
@given(
    text=SOME_LINES.map(lambda some: lines(*some, times=3))
    | A_BLOCK.map(lambda it: it[0] + it[1] * (400 // len(it[1]))),
    data=st.data(),
)
def test_splits_do_not_matter(text: str, data: st.DataObject) -> None:
    whole = LoopWatch(SMALL).feed(text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for split in (pieces, list(text)):
        loop_watch = LoopWatch(SMALL)
        assert next((found for piece in split if (found := loop_watch.feed(piece))), None) == whole


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(words(40_000), id="prose"),
        pytest.param(((" " * 63 + "x") * 100 + words(9)) * 30, id="nearly periodic"),
        pytest.param(("a" * 6000 + words(300)) * 25, id="long runs"),
        pytest.param("a" * 400_000, id="one line without end"),
        pytest.param("a  \n" * 50_000, id="short lines"),
        pytest.param(lines(LONG, times=3000), id="equal lines"),
    ],
)
def test_the_cost_per_character_does_not_grow(text: str) -> None:
    def feed(size: int) -> None:
        loop_watch = LoopWatch(NO_LINE_LOOPS)
        for at in range(0, size, 4):
            loop_watch.feed(text[at : at + 4])

    assert is_linear(feed, len(text) // 8)
