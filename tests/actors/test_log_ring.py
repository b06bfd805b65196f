"""The last lines of a server's output, whatever it writes."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.runtime.log_ring import LogRing


def fed(*pieces: bytes, lines: int = 5) -> LogRing:
    ring = LogRing(lines)
    for piece in pieces:
        ring.feed(piece)
    return ring


@pytest.mark.parametrize(
    ("pieces", "tail"),
    [
        ((), ()),
        ((b"one\ntwo\n",), ("one", "two")),
        ((b"one\r\ntwo\r\n",), ("one", "two")),
        ((b"on", b"e\ntw", b"o\n"), ("one", "two")),
        ((b"one\nunfinished",), ("one", "unfinished")),
        ((b"one\n\ntwo\n",), ("one", "", "two")),
        ((b"caf\xc3", b"\xa9\n"), ("caf\u00e9",)),
        ((b"bad \xff\xfe byte\n",), ("bad \ufffd\ufffd byte",)),
        ((b"cut \xc3",), ("cut \ufffd",)),
        ((b"", b"a\n", b""), ("a",)),
    ],
)
def test_lines_are_put_together_from_any_pieces(pieces: tuple[bytes, ...], tail: tuple[str, ...]) -> None:
    assert fed(*pieces).lines() == list(tail)


def test_the_newest_lines_are_kept() -> None:
    assert fed(b"".join(b"%d\n" % n for n in range(9))).lines() == ["4", "5", "6", "7", "8"]
    assert fed(*(b"%d\n" % n for n in range(9))).lines() == ["4", "5", "6", "7", "8"]


@pytest.mark.parametrize(("count", "tail"), [(2, ("8", "end")), (1, ("end",)), (99, ("4", "5", "6", "7", "8", "end"))])
def test_the_tail_of_a_few_lines_has_the_newest(count: int, tail: tuple[str, ...]) -> None:
    ring = fed(b"".join(b"%d\n" % n for n in range(9)), b"end")
    assert ring.tail(count) == tail


def test_the_tail_is_of_the_present_launch_alone() -> None:
    ring = fed(b"old\nhalf a li")
    ring.begin_launch()
    assert ring.tail(9) == ()
    ring.feed(b"new\nun")
    assert (ring.tail(9), ring.tail(1)) == (("new", "un"), ("un",))
    assert ring.lines() == ["old", "half a li", "new", "un"]


def test_the_tail_of_a_launch_that_said_more_than_is_kept_has_what_is_kept() -> None:
    ring = fed(b"old\n")
    ring.begin_launch()
    ring.feed(b"".join(b"%d\n" % n for n in range(9)))
    assert ring.tail(99) == ("4", "5", "6", "7", "8")


def test_a_line_without_end_is_cut_and_memory_stays_bounded() -> None:
    ring = LogRing(3)
    for _ in range(100):
        ring.feed(b"x" * 10_000)
    lines = ring.lines()
    assert len(lines) <= 4
    assert max(map(len, lines)) <= 8192
    assert len(ring._partial) <= 8192


@given(st.lists(st.binary(max_size=30), max_size=20))
def test_no_bytes_break_it_and_no_split_matters(pieces: list[bytes]) -> None:
    assert fed(*pieces, lines=1000).lines() == fed(b"".join(pieces), lines=1000).lines()


def test_it_may_be_read_while_it_is_fed() -> None:
    ring, stop = LogRing(50), threading.Event()

    def feed() -> None:
        for _ in range(5000):
            ring.feed(b"line\nli")
        stop.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    while not stop.is_set():
        assert len(ring.lines()) <= 51
    feeder.join(30)
    assert not feeder.is_alive()
