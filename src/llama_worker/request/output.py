"""What a request has put out so far: it only grows. Pure; not thread-safe."""

from __future__ import annotations

from llama_worker.config.profiles import LoopDetector
from llama_worker.stream.loops import LoopFound, LoopWatch, TextLoopFound
from llama_worker.types import OutputChunk


class _Text:
    """A text that grows by pieces and is read now and then."""

    def __init__(self, detector: LoopDetector | None) -> None:
        self.chars = 0
        self._parts: list[str] = []
        self._watch = LoopWatch(detector) if detector is not None else None

    def add(self, piece: str) -> LoopFound | TextLoopFound | None:
        """Append; where a loop is found, only up to its end."""
        found = self._watch.feed(piece) if self._watch is not None else None
        if found is not None:
            piece = piece[: found.end - self.chars]
        self.append(piece)
        return found

    def append(self, piece: str) -> None:
        self._parts.append(piece)
        self.chars += len(piece)

    def read(self) -> str:
        """All of it; joined once per growth."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


class Output:
    """Text and reasoning of every turn, in order, with nothing inserted. `loop` is set once one was
    found."""

    def __init__(self, detector: LoopDetector | None) -> None:
        self.loop: LoopFound | TextLoopFound | None = None
        self._text = _Text(detector)
        self._reasoning = _Text(detector)

    @property
    def text(self) -> str:
        return self._text.read()

    @property
    def reasoning(self) -> str:
        return self._reasoning.read()

    @property
    def text_chars(self) -> int:
        return self._text.chars

    @property
    def reasoning_chars(self) -> int:
        return self._reasoning.chars

    def add_rest(self, reasoning: str, text: str) -> None:
        """Append what was held back when the request ends for another reason: no loop is looked for
        any more."""
        if self.loop is None:
            self._reasoning.append(reasoning)
            self._text.append(text)

    def add(self, reasoning: str, text: str) -> None:
        """Append reasoning, then text; without effect once a loop was found."""
        if self.loop is None and reasoning:
            self.loop = self._reasoning.add(reasoning)
        if self.loop is None and text:
            self.loop = self._text.add(text)


def read_output(
    text: str, reasoning: str, text_offset: int, reasoning_offset: int, *, done: bool
) -> OutputChunk:
    """What lies behind the offsets: a host's answer. Offsets are in characters."""
    return {
        "ok": True,
        "text": text[text_offset:],
        "reasoning": reasoning[reasoning_offset:],
        "text_offset": max(text_offset, len(text)),
        "reasoning_offset": max(reasoning_offset, len(reasoning)),
        "done": done,
    }
