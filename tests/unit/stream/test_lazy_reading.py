"""When what a stream has brought is told, in virtual time."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from llama_worker.stream.events import Finish, PromptReport, StreamEvent, TextDelta
from llama_worker.stream.lazy_reading import (
    HURRY_S,
    LARGE_BYTES,
    MAX_HOLD_S,
    WAKE_INTERVAL_S,
    LazyReading,
    Portion,
)
from tests.tables import cases

FAST_S = 0.01  # between two tokens
SLOW_S = WAKE_INTERVAL_S + 0.01


class Reader:
    """Looks when it is to, as the thread of a stream does, at what `sent` holds by then."""

    def __init__(self, *, max_hold_s: float = MAX_HOLD_S) -> None:
        self.now = 100.0
        self.reading = LazyReading(self.now, max_hold_s=max_hold_s)
        self.told: list[tuple[float, str]] = []  # when, and what
        self.looks = 0
        self._ready: list[StreamEvent] = []
        self._ready_bytes = 0
        self._look_at: float | None = None

    def sends(self, *events: StreamEvent, after_s: float = 0.0, size_bytes: int = 200) -> None:
        self.waits(after_s)
        self._ready += events
        self._ready_bytes += size_bytes
        if self._ready_bytes >= self.reading.low_water_bytes:
            self._look()

    def waits(self, seconds: float) -> None:
        until = self.now + seconds
        while self._look_at is not None and self._look_at <= until:
            self.now = self._look_at
            self._look()
        self.now = until

    def says_and_waits(self, event: StreamEvent) -> None:
        self.sends(event)
        self.waits(WAKE_INTERVAL_S)

    def flushes(self) -> None:
        self._take()
        self._tell(self.reading.all(self.now))

    def hurries(self) -> None:
        self._tell(self.reading.hurry(self.now))
        if self._ready:
            self._look()

    def ends(self) -> None:
        self._take()
        self._tell(self.reading.due(self.now, over=True))

    def _look(self) -> None:
        self.looks += 1
        self._take()
        self._tell(self.reading.due(self.now, over=False))
        wait_s = self.reading.wait_s(self.now)
        self._look_at = None if wait_s is None else self.now + wait_s

    def _take(self) -> None:
        if self._ready_bytes:
            self.reading.received(self._ready, self._ready_bytes, self.now)
        self._ready, self._ready_bytes = [], 0

    def _tell(self, portion: Portion | None) -> None:
        if portion is not None:
            assert portion.at <= self.now
            words = (str(getattr(each, "text", each)) for each in portion.events)
            self.told.append((round(self.now - 100.0, 3), "".join(words)))


@pytest.fixture
def reader() -> Reader:
    """The first text has been told."""
    made = Reader()
    made.sends(TextDelta("1"))
    assert made.told == [(0.0, "1")]
    made.told.clear()
    return made


def test_fast_text_is_told_each_third_look(reader: Reader) -> None:
    for _ in range(1000):
        reader.sends(TextDelta("x"), after_s=FAST_S)
    seconds = 1000 * FAST_S
    assert len(reader.told) == seconds // MAX_HOLD_S
    assert reader.looks <= 3 * seconds / MAX_HOLD_S + 3
    times = [0.0, *(at for at, _ in reader.told)]
    gaps = [later - at for at, later in pairwise(times)]
    assert all(gap == pytest.approx(MAX_HOLD_S, abs=0.002) for gap in gaps)


def test_possible_signal_text_is_told_at_each_look() -> None:
    reader = Reader(max_hold_s=WAKE_INTERVAL_S)
    for _ in range(1000):
        reader.sends(TextDelta("x"), after_s=FAST_S)
    assert len(reader.told) == 1 + 1000 * FAST_S // WAKE_INTERVAL_S


def test_slow_text_is_told_at_once(reader: Reader) -> None:
    for number in range(10):
        reader.sends(TextDelta(str(number)), after_s=SLOW_S, size_bytes=1)
        assert reader.told.pop() == (round(reader.now - 100.0, 3), str(number))
        assert not reader.reading.is_lazy
    reader.waits(2 * MAX_HOLD_S)
    assert reader.looks == 11  # no byte, no look


def test_a_look_without_a_byte_changes_nothing(reader: Reader) -> None:
    assert reader.reading.due(reader.now, over=False) is None
    assert not reader.reading.is_lazy


def test_much_text_is_told_at_once(reader: Reader) -> None:
    reader.sends(TextDelta("a"), size_bytes=LARGE_BYTES)
    assert reader.told == [(0.0, "a")]


STOP, REPORT = Finish("stop"), PromptReport(1, 2, 0)
ONE_LOOK, TWO_LOOKS = FAST_S + WAKE_INTERVAL_S, FAST_S + 2 * WAKE_INTERVAL_S


@cases(
    "happens, told, by_s",
    {
        # "b" was seen at the first look, and may be followed by more
        "one look in a pause": (lambda reader: reader.waits(WAKE_INTERVAL_S), None, 0.0),
        "two looks in a pause": (lambda reader: reader.waits(2 * WAKE_INTERVAL_S), "ab", TWO_LOOKS),
        "a finish": (lambda reader: reader.says_and_waits(STOP), f"ab{STOP}", ONE_LOOK),
        "a report": (lambda reader: reader.says_and_waits(REPORT), f"ab{REPORT}", ONE_LOOK),
        "much": (lambda reader: reader.sends(size_bytes=LARGE_BYTES), "ab", 2 * FAST_S),
        "two flushes": (lambda reader: (reader.flushes(), reader.flushes()), "ab", 2 * FAST_S),
        "the end": (lambda reader: reader.ends(), "ab", 2 * FAST_S),
    },
)
def test_what_tells_the_text_that_waits(
    reader: Reader, happens: Callable[[Reader], object], told: str | None, by_s: float
) -> None:
    reader.sends(TextDelta("a"), after_s=FAST_S)
    reader.sends(TextDelta("b"), after_s=FAST_S)
    happens(reader)
    assert [text for _, text in reader.told] == ([] if told is None else [told])
    assert all(at <= by_s for at, _ in reader.told)
    if by_s > 2 * FAST_S:
        assert not reader.reading.is_lazy


def test_waiter_gets_each_text_immediately_and_first_after(reader: Reader) -> None:
    reader.sends(TextDelta("a"), after_s=FAST_S)
    reader.hurries()
    hurried_at = reader.now
    while reader.now + FAST_S < hurried_at + HURRY_S:
        reader.sends(TextDelta("x"), after_s=FAST_S)
    assert [len(text) for _, text in reader.told] == [1] * len(reader.told)
    count = len(reader.told)
    reader.sends(TextDelta("y"), after_s=FAST_S)  # the first behind it
    assert len(reader.told) == count + 1
    reader.sends(TextDelta("z"), after_s=FAST_S)
    assert len(reader.told) == count + 1


def test_keepalives_are_told_as_bytes_alone(reader: Reader) -> None:
    reader.sends(after_s=SLOW_S)
    assert [text for _, text in reader.told] == [""]


@pytest.mark.parametrize("events", [(), (PromptReport(1, 2, 0),)], ids=["keepalive", "progress"])
def test_only_text_uses_up_first_text_hurry(events: tuple[StreamEvent, ...]) -> None:
    reader = Reader()
    reader.flushes()
    assert reader.told == []
    reader.sends(*events)
    for text in "ab":
        reader.sends(TextDelta(text), after_s=FAST_S)
    assert [text for _, text in reader.told][1:] == ["a"]
