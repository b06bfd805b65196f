"""The last lines of a server's output, whatever it writes."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.runtime.process.log_ring import LogRing

NINE = b"".join(b"%d\n" % n for n in range(9))


def fed(*pieces: bytes, lines: int = 5, api_key: str | None = None) -> LogRing:
    ring = LogRing(lines, api_key=api_key)
    for piece in pieces:
        ring.feed(piece)
    return ring


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        (b"", []),
        (b"one\r\ntwo\n", ["one", "two"]),
        (b"one\nunfinished", ["one", "unfinished"]),
        (b"one\n\ntwo\n", ["one", "", "two"]),
        (b"caf\xc3\xa9 \xff\xfe\n", ["caf\u00e9 \ufffd\ufffd"]),
        (b"cut \xc3", ["cut \ufffd"]),
        (NINE, ["4", "5", "6", "7", "8"]),
    ],
)
def test_the_newest_lines_are_kept(output: bytes, lines: list[str]) -> None:
    assert fed(output).lines() == lines


@given(st.lists(st.binary(max_size=30), max_size=20))
def test_no_bytes_break_it_and_no_split_matters(pieces: list[bytes]) -> None:
    assert fed(*pieces).lines() == fed(b"".join(pieces)).lines()


def test_the_tail_is_of_the_present_launch_alone() -> None:
    ring = fed(b"old\nhalf a li")
    ring.begin_launch()
    assert ring.tail(9) == ()
    ring.feed(b"new\nun")
    assert (ring.tail(9), ring.tail(1)) == (("new", "un"), ("un",))
    assert ring.lines() == ["old", "half a li", "new", "un"]
    ring.feed(b"\n" + NINE)
    assert (ring.tail(2), ring.tail(99)) == (("7", "8"), ("4", "5", "6", "7", "8")), (
        "what is kept, and no more"
    )


def test_endless_line_is_cut_and_memory_stays_bounded() -> None:
    ring = fed(*[b"x" * 10_000] * 100, lines=3)
    lines = ring.lines()
    assert len(lines) <= 4
    assert max(map(len, lines)) <= 8192
    assert len(ring._partial) <= 8192
    assert fed(b"x" * 8192, b"\n").lines() == ["x" * 8192], "a line of that length is whole"


@pytest.mark.parametrize("before", range(8192 - 8, 8192 + 1))
@pytest.mark.parametrize("split", range(8))
def test_key_is_masked_wherever_line_is_cut(before: int, split: int) -> None:
    line = b"x" * before + b"api-key-" + b"y" * 9000
    at = before + split
    lines = fed(line[:at], line[at:], api_key="api-key-").lines()
    assert "".join(lines) == "x" * before + "***" + "y" * 9000


def test_key_end_is_masked_where_server_shows_it() -> None:
    lines = fed(b"api_keys: ****key-\nsome other key-\n", api_key="api-key-").lines()
    assert lines == ["api_keys: ***", "some other key-"]


def test_log_may_be_read_while_fed() -> None:
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
