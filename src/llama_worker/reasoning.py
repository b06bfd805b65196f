"""Reasoning and text of one turn, told apart whichever way the server sends them. Pure.

A server sends reasoning as `reasoning_content`, or tagged at the head of `content`, or (its legacy form) as
both. Which of them a stream does is seen from the stream itself.
"""

import io
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

_CLOSING = {"<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>"}  # by opening tag


@dataclass(frozen=True, slots=True)
class Piece:
    """What may be shown now; the reasoning comes before the text. Either may be empty."""

    reasoning: str
    text: str


_NOTHING = Piece("", "")


class _At(Enum):
    """How far `content` has come."""

    HEAD = auto()  # nothing yet but whitespace and what may be the start of a tag
    THOUGHT = auto()  # after the opening tag
    GAP = auto()  # after the closing tag, nothing yet but whitespace
    TEXT = auto()  # all that comes now is text, tags too


class ReasoningSplitter:
    """One turn's deltas, split anywhere, to reasoning and text. One thread at a time.

    `opened_by_template`: the prompt ended in an opening tag and the server does not parse what follows, so
    content that comes without `reasoning_content` is reasoning up to the closing tag.

    Held back is no more than the start of a tag, whitespace that may turn out to be next to a tag (there it
    is dropped), and content that so far repeats the `reasoning_content` inside a leading tag.
    """

    def __init__(self, *, opened_by_template: bool = False) -> None:
        self.only_assumed = False  # content was taken for reasoning on `opened_by_template` alone, no tag was seen
        self._opened_by_template = opened_by_template
        self._at = _At.HEAD
        self._undelivered: list[str] = []  # content since the last delivery, as it came
        self._tag_start = ""  # the content's end, where that may be the start of a tag
        self._closing_tags: Collection[str] = ()
        self._thought_begun = False  # the thought is more than whitespace
        self._spaces: list[str] = []  # whitespace that ends the thought so far
        self._original: _Original | None = None  # `reasoning_content` that came first: a tag may repeat it

    def feed_reasoning(self, reasoning: str) -> Piece:
        """A `reasoning_content` delta."""
        if reasoning and self._at in (_At.HEAD, _At.THOUGHT):
            if self._original is None and not self._thought_begun:
                self._original = _Original()
            if self._original is not None:
                self._original.append(reasoning)
        return Piece(reasoning, "")

    def feed_text(self, text: str) -> Piece:
        """A `content` delta."""
        if self._at is _At.TEXT:
            return Piece("", text)
        if self._at is _At.GAP:
            return self._gap(text)
        self._undelivered.append(text)
        text = self._tag_start + text
        self._tag_start = ""
        return self._head(text) if self._at is _At.HEAD else self._thought(text)

    def finish(self) -> Piece:
        """The turn is over: what was held back. Nothing may be fed after it."""
        at, self._at = self._at, _At.TEXT
        if at is _At.HEAD and self._opened_by_template and self._original is None:
            self.only_assumed = bool(self._tag_start)
            return Piece(self._tag_start, "")
        if at is _At.HEAD:
            return self._all_is_text()
        if at is not _At.THOUGHT:
            return _NOTHING
        if self._original is not None:  # the repetition was cut off; a bare tag repeats nothing
            return _NOTHING if self._thought_begun else self._all_is_text()
        return Piece("".join(self._spaces) + self._tag_start if self._tag_start else "", "")

    def _head(self, text: str) -> Piece:
        text = text.lstrip()
        for opening, closing in _CLOSING.items():
            if text.startswith(opening):
                self._at = _At.THOUGHT
                self._closing_tags = (closing,)
                return self._thought(text.removeprefix(opening))
        opened = self._opened_by_template and self._original is None
        possible_tags = (*_CLOSING, *_CLOSING.values()) if opened else _CLOSING.keys()
        if not text or _start_of_tag(text, possible_tags) == 0:
            self._tag_start = text
            return _NOTHING
        if not opened:
            return self._all_is_text()
        self._at = _At.THOUGHT
        self.only_assumed = True
        self._closing_tags = _CLOSING.values()
        return self._thought(text)

    def _thought(self, text: str) -> Piece:
        tag_at, tag = _first_tag(text, self._closing_tags)
        if not tag:
            tag_at = _start_of_tag(text, self._closing_tags)
            self._tag_start = text[tag_at:]
        reasoning = self._trimmed(text[:tag_at])
        if self._original is not None:
            if not self._original.goes_on_with(reasoning) or (tag and not self._original.is_at_end()):
                return self._all_is_text()
            reasoning = ""
        elif reasoning:
            self._undelivered.clear()
        if not tag:
            return Piece(reasoning, "")
        self._at = _At.GAP
        self.only_assumed = False
        self._undelivered.clear()
        self._original = None
        return Piece(reasoning, self._gap(text[tag_at + len(tag) :]).text)

    def _trimmed(self, thought: str) -> str:
        """More of the thought, without the whitespace at its start and (so far) its end."""
        if not self._thought_begun:
            thought = thought.lstrip()
        stripped = thought.rstrip()
        trailing = thought[len(stripped) :]
        if not stripped:
            self._spaces.append(trailing)
            return ""
        self._thought_begun = True
        trimmed = "".join(self._spaces) + stripped
        self._spaces = [trailing]
        return trimmed

    def _gap(self, text: str) -> Piece:
        text = text.lstrip()
        if text:
            self._at = _At.TEXT
        return Piece("", text)

    def _all_is_text(self) -> Piece:
        self._at = _At.TEXT
        text = "".join(self._undelivered)
        self._undelivered.clear()
        self._original = None
        return Piece("", text)


class _Original:
    """The `reasoning_content` so far, and how much of it the content has repeated; outer whitespace aside."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self._repeated_chars = 0

    def append(self, reasoning: str) -> None:
        end = self._text.seek(0, io.SEEK_END)
        self._text.write(reasoning if end else reasoning.lstrip())

    def goes_on_with(self, text: str) -> bool:
        """Whether `text` is what follows after what was repeated; counts it as repeated."""
        self._text.seek(self._repeated_chars)
        self._repeated_chars += len(text)
        return self._text.read(len(text)) == text

    def is_at_end(self) -> bool:
        self._text.seek(self._repeated_chars)
        return not self._text.read().strip()


def _first_tag(text: str, tags: Collection[str]) -> tuple[int, str]:
    """Where the first of the tags begins, and which it is; (len(text), "") if there is none."""
    found = [(text.index(tag), tag) for tag in tags if tag in text]
    return min(found) if found else (len(text), "")


def _start_of_tag(text: str, tags: Collection[str]) -> int:
    """Where at the end of the text an unfinished tag begins; len(text) if none does."""
    start = max(text.rfind("<"), text.rfind("["))  # no tag has its first character twice
    if start < 0:
        return len(text)
    end = text[start:]
    return start if any(tag.startswith(end) and tag != end for tag in tags) else len(text)
