"""Keeps a request's output, which only grows, and the questions that wait for an answer. Sans-IO;
not thread-safe."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from msgspec import structs

from llama_worker.config.profiles import LoopDetector
from llama_worker.mailbox import Reply
from llama_worker.request.messages import Question, ReadOutput
from llama_worker.stream.loops import LoopFound, LoopWatch, TextLoopFound
from llama_worker.types.request import OutputChunk

Q = TypeVar("Q", bound=Question)
_SWEEP_MIN = 16


class _Text:
    """A text that grows piece by piece and is read rarely."""

    def __init__(self, detector: LoopDetector | None) -> None:
        self.chars = 0
        self._parts: list[str] = []
        self._detector = detector
        self.begin_turn()

    def begin_turn(self) -> None:
        """Start the search for loops anew: a model may say the same before each of its calls."""
        self._watch = LoopWatch(self._detector) if self._detector is not None else None
        self._watched_from = self.chars

    def add(self, piece: str) -> LoopFound | TextLoopFound | None:
        """Append the piece, or, if it completes a loop, its part up to the loop's end."""
        loop = self._watch.feed(piece) if self._watch is not None else None
        if loop is not None:
            piece = piece[: self._watched_from + loop.end - self.chars]
        self.append(piece)
        return loop

    @property
    def turn_chars(self) -> int:
        """Characters that the current turn has added."""
        return self.chars - self._watched_from

    def append(self, piece: str) -> None:
        self._parts.append(piece)
        self.chars += len(piece)

    def read(self) -> str:
        """The whole text."""
        self._parts = ["".join(self._parts)]  # which copies no text that has not grown
        return self._parts[0]


class Output:
    """Text and reasoning of every turn, in order. `loop` is set once one was found."""

    def __init__(self, detector: LoopDetector | None) -> None:
        self.loop: LoopFound | TextLoopFound | None = None
        self.text = _Text(detector)
        self.reasoning = _Text(detector)

    def cut_as_shown(self, reasoning: str, text: str) -> tuple[str, str]:
        """What the current turn said, up to where the output ends: a loop is cut there."""
        return reasoning[: self.reasoning.turn_chars], text[: self.text.turn_chars]

    def begin_turn(self) -> None:
        self.text.begin_turn()
        self.reasoning.begin_turn()

    def add_held_back(self, reasoning: str, text: str) -> None:
        """Append what was held back when the request ends; it is not searched for loops."""
        if self.loop is None:
            self.reasoning.append(reasoning)
            self.text.append(text)

    def add(self, reasoning: str, text: str) -> None:
        """Append reasoning, then text; without effect once a loop was found."""
        if self.loop is None and reasoning:
            self.loop = self.reasoning.add(reasoning)
        if self.loop is None and text:
            self.loop = self.text.add(text)


def read_output(
    text: str, reasoning: str, text_offset: int, reasoning_offset: int, *, done: bool
) -> OutputChunk:
    """The answer to a host: the output after the offsets, which are in characters."""
    return {
        "ok": True,
        "text": text[text_offset:],
        "reasoning": reasoning[reasoning_offset:],
        "text_offset": max(text_offset, len(text)),
        "reasoning_offset": max(reasoning_offset, len(reasoning)),
        "done": done,
    }


def can_answer(question: ReadOutput, text_chars: int, reasoning_chars: int) -> bool:
    """Whether output of this length answers the question, while the request still runs."""
    behind = question.text_offset < text_chars or question.reasoning_offset < reasoning_chars
    return behind or not question.wait


class OpenQuestions(Generic[Q]):
    """Questions that may be unanswered. Held weakly: a host may wait with a timeout many times."""

    def __init__(self) -> None:
        self._questions: list[tuple[weakref.ref[Reply[Any]], Q]] = []  # each without its reply
        self._sweep_at = _SWEEP_MIN

    def __len__(self) -> int:
        return len(self._questions)

    def add(self, question: Q) -> None:
        """Keep it; now and then, forget those that are answered, or that the host has dropped."""
        kept = structs.replace(question, reply=None)
        self._questions.append((weakref.ref(question.reply), kept))
        if len(self._questions) >= self._sweep_at:
            self._questions = [each for each in self._questions if _is_open(each[0]())]
            self._sweep_at = max(_SWEEP_MIN, 2 * len(self._questions))

    def take(self, can_answer: Callable[[Q], bool] = lambda _: True) -> list[Q]:
        """Remove and return the unanswered ones that can be answered now."""
        taken: list[Q] = []
        left = []
        for each in self._questions:
            reply, question = each[0](), each[1]
            if _is_open(reply):
                if can_answer(question):
                    taken.append(structs.replace(question, reply=reply))
                else:
                    left.append(each)
        self._questions = left
        return taken


def _is_open(reply: Reply[Any] | None) -> bool:
    return reply is not None and not reply.done()
