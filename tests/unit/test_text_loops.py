"""Loops without line ends, and the honest texts that look like them."""

from __future__ import annotations

import base64
import encodings.cp1252
import html.entities
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llama_worker
from llama_worker.profiles import LoopDetector
from llama_worker.stream.loops import LoopFound, LoopWatch, TextLoopFound, TextLoopWatch

SMALL = LoopDetector(max_period_chars=64, min_repeated_chars=128, min_text_repeats=4)


def look(text: str) -> LoopFound | TextLoopFound | None:
    return LoopWatch(LoopDetector()).feed(text)


def words(count: int, seed: int = 1) -> str:
    """Prose, as far as a period finder can tell."""
    choose = random.Random(seed)
    return " ".join("".join(choose.choices("etaoinshrdlu", k=choose.randint(1, 9))) for _ in range(count))


MANY_LINES = "".join(f"{number}. {words(3, number)}\n" for number in range(92))  # llama.cpp#26039
SHORT_LINES = "- yes\n- no\n- maybe\n"
ALMOST_EQUAL = ("a" * 59 + "\n") * 100 + "b" * 59 + "\n"  # most of its pieces come again within it


@pytest.mark.parametrize(
    "block",
    [
        pytest.param("/", id="one character"),
        pytest.param("items ", id="a word"),
        pytest.param("\n", id="empty lines"),
        pytest.param(SHORT_LINES, id="short lines"),
        pytest.param(MANY_LINES, id="more lines than max_period"),
        pytest.param(words(800), id="a long paragraph"),
        pytest.param("思考" * 40 + words(10), id="not ASCII"),
        pytest.param(" " * 3000 + "x" + " " * 2000, id="mostly blanks"),
        pytest.param(ALMOST_EQUAL, id="a block that repeats itself but for its last line"),
    ],
)
def test_any_block_that_comes_again_and_again_is_found(block: str) -> None:
    config = LoopDetector(long_line_repeats=10**9, short_line_repeats=10**9)
    needed = max(8192, 4 * len(block))
    repeats = 2 + (needed + 1024) // len(block)
    text = words(1500) + block * repeats
    found = LoopWatch(config).feed(text)
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
        (words(100)[:64] * 40, SMALL, True),  # max_period_chars
        (words(100)[:65] * 40, SMALL, False),
        (words(9) + words(100)[:60] * 3, SMALL, False),  # min_text_repeats
        (words(9) + words(100)[:60] * 5, SMALL, True),
    ],
)
def test_thresholds_are_the_configs(text: str, config: LoopDetector, is_loop: bool) -> None:
    assert (TextLoopWatch(config).feed(text) is not None) is is_loop


def test_a_line_loop_that_comes_first_is_told_as_such() -> None:
    assert isinstance(look(("y" * 64 + "\n") * 1000), LoopFound)


SOURCES = sorted(Path(llama_worker.__file__).parent.rglob("*.py"))

HONEST = {
    "prose": words(30_000),
    "a table": "".join(f"| {row} | item-{row} | ok | 0.0 |\n" for row in range(3000)),
    "a table whose rows differ in one number": "".join(
        f"| ok | ok | {row * row % 9973} | ok |\n" for row in range(4000)
    ),
    "rulers between paragraphs": "".join(f"{words(40, n)}\n{'-' * 120}\n" for n in range(300)),
    "an array of zeros": "zeros = [" + "0, " * 2000 + "]\n" + words(500),
    "an array of counts": json.dumps(list(range(20_000))),
    "a matrix of identity": "\n".join(" ".join("1" if i == j else "0" for j in range(120)) for i in range(120)),
    "base64 of a picture with an empty part": base64.b64encode(
        random.Random(8).randbytes(3000) + bytes(5000) + random.Random(9).randbytes(3000)
    ).decode(),
    "a hex dump of zeros": "".join(f"{at:08x}  {'00 ' * 16} |{'.' * 16}|\n" for at in range(0, 65536, 16)),
    "JSON of equal shape": json.dumps([{"id": n, "ok": True, "tags": ["a", "b"]} for n in range(4000)], indent=2),
    "a song": "\n\n".join(f"{words(30, n)}\n" + "la la la la la\n" * 20 for n in range(60)),
    "a CSV of empty cells": "".join(f"{n}{',' * 60}\n" for n in range(2000)),
    "SVG": "".join(f'<circle cx="{n * 7 % 500}" cy="{n * 13 % 400}" r="1"/>\n' for n in range(3000)),
    "code": "".join(path.read_text() for path in SOURCES),
    "code of a code page": Path(encodings.cp1252.__file__).read_text(),
    "code of the HTML entities": Path(html.entities.__file__).read_text(),
    "ten thousand times, counted": "".join(f"{n}: I will not loop.\n" for n in range(10_000)),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_text_is_no_loop(name: str) -> None:
    assert look(HONEST[name]) is None


@settings(max_examples=40)
@given(head=st.text(max_size=300), block=st.text("ab \n", min_size=1, max_size=64), data=st.data())
def test_splits_do_not_matter(head: str, block: str, data: st.DataObject) -> None:
    text = head + block * (400 // len(block))
    whole = TextLoopWatch(SMALL).feed(text)
    assert whole is not None
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for split in (pieces, list(text)):
        watch = TextLoopWatch(SMALL)
        assert next((found for piece in split if (found := watch.feed(piece))), None) == whole


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(words(40_000), id="prose"),
        pytest.param(((" " * 63 + "x") * 100 + words(9)) * 30, id="nearly periodic"),
        pytest.param(("a" * 6000 + words(300)) * 25, id="long runs"),
    ],
)
def test_the_cost_per_character_is_small(text: str) -> None:
    def seconds(feed: Callable[[str], object]) -> float:
        started = time.thread_time()
        for at in range(0, len(text), 4):
            feed(text[at : at + 4])
        return time.thread_time() - started

    pieces: list[str] = []
    bare = min(seconds(pieces.append) for _ in range(3))
    watch = TextLoopWatch(LoopDetector())
    assert min(seconds(watch.feed) for _ in range(3)) < 20 * bare + 0.1
