"""Finds output that repeats itself without end, by lines or wherever they end. Sans-IO; one watch
per text, one thread.

The thresholds are the `LoopDetector`'s, in `config.profiles`.
"""

from collections import Counter, deque
from collections.abc import Iterator

from msgspec import Struct

from llama_worker.config.profiles import LoopDetector

_STEP_CHARS = 1024
_END_CHARS = 64
_CANDIDATES = 8
_SAMPLE_CHARS = 80
_MIN_DIFFERENT_CHARS = 10  # of a line: fewer are a ruler, a row of a grid or of data


class LoopFound(Struct, frozen=True):
    """A block of `period` lines came `count` times in a row.

    `line`: the line that completed the loop, whitespace collapsed, in full. `end`: where it ends in
    all the text that was fed, including its line end.
    """

    line: str
    count: int
    period: int
    end: int


class TextLoopFound(Struct, frozen=True):
    """The last `chars` characters repeat a piece of `period_chars`, which starts with `sample`.

    `end`: where it was found, in all the text that was fed.
    """

    sample: str
    period_chars: int
    chars: int
    end: int


class LoopWatch:
    """Finds either kind of loop. Feed it growing text, split anywhere, until it has found one."""

    def __init__(self, config: LoopDetector) -> None:
        self._lines = LineLoopWatch(config)
        self._text = TextLoopWatch(config)

    def feed(self, text: str) -> LoopFound | TextLoopFound | None:
        """The first loop that this text completes, if any."""
        by_line, by_text = self._lines.feed(text), self._text.feed(text)
        if by_line is None or (by_text is not None and by_text.end < by_line.end):
            return by_text
        return by_line


class TextLoopWatch:
    """Finds a loop without line ends, of any period up to `max_period_chars`.

    It looks at fixed positions of the text, however that was split. For most text a look costs one
    search for its last few characters.
    """

    def __init__(self, config: LoopDetector) -> None:
        self._config = config
        self._window_chars = max(
            config.min_repeated_chars, config.min_text_repeats * config.max_period_chars
        )
        self._step_chars = max(1, min(_STEP_CHARS, config.min_repeated_chars // 8))
        # The shortest loop contains its end twice: it is two repeats or more.
        self._end_chars = max(1, min(_END_CHARS, config.min_repeated_chars // 2))
        self._next = config.min_repeated_chars  # the position of the next look
        self._chars = 0  # fed so far
        self._pieces: list[str] = []  # the end of what was fed, a window and a step at most

    def feed(self, text: str) -> TextLoopFound | None:
        if self._chars + len(text) < self._next:
            self._pieces.append(text)
            self._chars += len(text)
            return None
        start = 0
        while self._chars + len(text) - start >= self._next:
            cut = start + self._next - self._chars
            self._pieces.append(text[start:cut])
            start, self._chars = cut, self._next
            self._next += self._step_chars
            found = self._search()
            if found is not None:
                return found
        self._pieces.append(text[start:])
        self._chars += len(text) - start
        return None

    def _search(self) -> TextLoopFound | None:
        window = "".join(self._pieces)[-self._window_chars :]
        self._pieces = [window]
        for period_chars in _periods(window, self._config.max_period_chars, self._end_chars):
            chars = max(
                self._config.min_repeated_chars, self._config.min_text_repeats * period_chars
            )
            # of other lengths if the window is shorter
            if window[-chars:-period_chars] == window[period_chars - chars :]:
                return TextLoopFound(
                    window[-period_chars:][:_SAMPLE_CHARS], period_chars, chars, self._chars
                )
        return None


def _periods(window: str, longest: int, end_chars: int) -> Iterator[int]:
    """Possible periods of the window's end: how far back its last characters occur, nearest first.

    If they occur too often to try each, the last one is that of a longer piece: a piece at least as
    long as the period recurs after exactly one period, not earlier.
    """
    size = len(window)
    end = window[-end_chars:]
    before = end_at = size - len(end)
    for _ in range(_CANDIDATES):
        before = window.rfind(end, max(0, end_at - longest), before + len(end) - 1)
        if before < 0:
            return
        yield end_at - before
    backwards = window[::-1]  # a forward search takes linear time for any text
    piece = backwards[: min(longest, size // 2)]
    again = backwards.find(piece, 1, longest + len(piece))
    if again > 0:
        yield again


class LineLoopWatch:
    """Finds a line, or a block of lines, that repeats; only completed lines count, and only those
    that say something: rulers and rows of equal cells are repeated in honest answers."""

    def __init__(self, config: LoopDetector) -> None:
        self._config = config
        self._fewest_repeats = min(config.short_line_repeats, config.long_line_repeats)
        self._unfinished: list[str] = []  # pieces of the line that has not ended yet
        self._chars = 0  # fed so far
        self._recent: deque[str] = deque(maxlen=config.max_period)  # lines of the run, newest first
        self._same = Counter[int]()  # [p]: lines in a row equal to the p-th before

    def feed(self, text: str) -> LoopFound | None:
        start = 0
        while (newline := text.find("\n", start)) >= 0:
            self._unfinished.append(text[start:newline])
            line = " ".join("".join(self._unfinished).split())
            self._unfinished.clear()
            start = newline + 1
            found = self._add_line(line, end=self._chars + start) if line else None
            if found is not None:
                return found
        self._unfinished.append(text[start:])
        self._chars += len(text)
        return None

    def _add_line(self, line: str, end: int) -> LoopFound | None:
        if len(line) < self._config.min_line_chars or len(set(line)) < _MIN_DIFFERENT_CHARS:
            self._recent.clear()  # no line that counts equals this one
            self._same.clear()
        for period, before in enumerate(self._recent, start=1):
            self._same[period] = self._same[period] + 1 if line == before else 0
        self._recent.appendleft(line)
        if end < self._config.min_output_chars:
            return None
        for period in range(1, len(self._recent) + 1):
            count = self._same[period] // period + 1
            if count >= self._fewest_repeats and count >= self._repeats_needed(period):
                return LoopFound(line, count, period, end)
        return None

    def _repeats_needed(self, period: int) -> int:
        block = list(self._recent)[:period]
        if all(len(line) >= self._config.long_line_chars for line in block):
            return self._config.long_line_repeats
        return self._config.short_line_repeats
