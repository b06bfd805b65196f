"""Output that repeats itself line by line without end. Pure; one watch per text, one thread at a time."""

from collections import deque
from dataclasses import dataclass

from llama_worker.profiles import LoopDetector


@dataclass(frozen=True, slots=True)
class LoopFound:
    """A block of `period` lines came `count` times in a row.

    `line`: the one that decided, whitespace collapsed, in full. `end`: where it ends in all the text that was
    fed, its line end included.
    """

    line: str
    count: int
    period: int
    end: int


class LoopWatch:
    """Feed it the text as it grows, split anywhere. After it has found a loop it is of no use."""

    def __init__(self, config: LoopDetector) -> None:
        self._config = config
        self._fewest_repeats = min(config.short_line_repeats, config.long_line_repeats)
        self._unfinished: list[str] = []  # pieces of the line that has not ended yet
        self._chars = 0  # fed so far
        self._recent: deque[str] = deque(maxlen=config.max_period)  # lines of the run, newest first
        self._same = [0] * (config.max_period + 1)  # [p]: lines in a row that equal the p-th before

    def feed(self, text: str) -> LoopFound | None:
        """The loop that this text completes, if it does; decided by completed lines alone."""
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
        if len(line) < self._config.min_line_chars:
            self._recent.clear()
            self._same = [0] * len(self._same)
            return None
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
