"""Separates the reasoning and text of one turn, in whichever form the server sends them. Pure.

A server sends reasoning as `reasoning_content`, or tagged at the head of `content`, or (its legacy
form) as both. Which form a stream has is found out from the stream itself.
"""

import io
from collections.abc import Collection
from enum import Enum, auto

CLOSING_TAGS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
}  # by opening tag


class _Position(Enum):
    """How far `content` has come."""

    HEAD = auto()  # nothing yet but whitespace and what may be the start of a tag
    THOUGHT = auto()  # after the opening tag
    GAP = auto()  # after the closing tag, nothing yet but whitespace
    TEXT = auto()  # all that comes now is text, tags too


class ReasoningSplitter:
    """Separates one turn's deltas, split anywhere, into reasoning and text. Returns the
    (reasoning, text) that may be shown, reasoning first. One thread at a time.

    `opened_by_template`: the prompt ended in an opening tag and the server does not parse what
    follows, so content that comes without `reasoning_content` is reasoning up to the closing tag.

    In every form, reasoning is returned without the whitespace around it, and text after a thought
    without the whitespace before it. Tags stand on lines of their own, and a server that removes
    them leaves some of that whitespace (b11434: the newline before the closing tag, and what
    follows that tag except two newlines).

    It holds back only the start of a tag, whitespace that may turn out to be around reasoning (it
    is dropped then, and at the end of the turn, however that came), and content that so far repeats
    the `reasoning_content` inside a leading tag.
    """

    def __init__(self, *, opened_by_template: bool = False) -> None:
        # content was taken for reasoning only due to `opened_by_template`: no tag was seen
        self.only_assumed = False
        self._opened_by_template = opened_by_template
        self._at = _Position.HEAD
        self._undelivered: list[str] = []  # content since the last delivery, as it came
        self._tag_start = ""  # the content's end, if that may be the start of a tag
        self._closing_tags: Collection[str] = ()
        self._reasoning = _Trimmer()  # in whichever form it came
        # `reasoning_content` that came first: a tag may repeat it
        self._original: _Original | None = None

    def feed_reasoning(self, reasoning: str) -> tuple[str, str]:
        """A `reasoning_content` delta."""
        if reasoning and not self._reasoning.has_begun:
            self._original = _Original()  # so far, content may repeat it
        reasoning = self._reasoning.feed(reasoning)
        if self._original is not None:
            self._original.append(reasoning)
        return reasoning, ""

    def feed_text(self, text: str) -> tuple[str, str]:
        """A `content` delta."""
        if self._at is _Position.TEXT:
            return "", text
        if self._at is _Position.GAP:
            return "", self._gap(text)
        self._undelivered.append(text)
        text = self._tag_start + text
        return self._head(text) if self._at is _Position.HEAD else self._thought(text)

    def finish(self) -> tuple[str, str]:
        """End the turn; returns what was held back. Nothing may be fed after it."""
        at, self._at = self._at, _Position.TEXT
        if at is _Position.HEAD and self._opened_by_template and self._original is None:
            self.only_assumed = True
            return self._tag_start, ""
        if at is _Position.HEAD:
            return self._all_is_text()
        if at is not _Position.THOUGHT:
            return "", ""
        if self._original is not None:  # the repetition was cut off; a bare tag repeats nothing
            return ("", "") if self._original.repetition_has_begun else self._all_is_text()
        return self._reasoning.feed(self._tag_start), ""

    def _head(self, text: str) -> tuple[str, str]:
        text = text.lstrip()
        for opening, closing in CLOSING_TAGS.items():
            if text.startswith(opening):
                self._at = _Position.THOUGHT
                self._closing_tags = (closing,)
                return self._thought(text.removeprefix(opening))
        if _start_of_tag(text, CLOSING_TAGS) == 0:  # or there is no text yet
            self._tag_start = text
            return "", ""
        if not self._opened_by_template or self._original is not None:
            return self._all_is_text()
        self._at = _Position.THOUGHT
        self.only_assumed = True
        self._closing_tags = CLOSING_TAGS.values()
        return self._thought(text)

    def _thought(self, text: str) -> tuple[str, str]:
        tag_at, tag = _first_tag(text, self._closing_tags)
        if not tag:
            tag_at = _start_of_tag(text, self._closing_tags)
            self._tag_start = text[tag_at:]
        if self._original is not None:
            if not self._original.continues_with(text[:tag_at]) or (
                tag and not self._original.is_at_end()
            ):
                return self._all_is_text()
            reasoning = ""
        else:
            reasoning = self._reasoning.feed(text[:tag_at])
            if reasoning:
                self._undelivered.clear()
        if not tag:
            return reasoning, ""
        self._at = _Position.GAP
        self.only_assumed = False
        return reasoning, self._gap(text[tag_at + len(tag) :])

    def _gap(self, text: str) -> str:
        text = text.lstrip()
        if text:
            self._at = _Position.TEXT
        return text

    def _all_is_text(self) -> tuple[str, str]:
        self._at = _Position.TEXT
        text = "".join(self._undelivered)
        return "", text.lstrip() if self._original is not None else text


class _Trimmer:
    """Strips whitespace from the start and (so far) the end of a text that comes in pieces."""

    def __init__(self) -> None:
        self.has_begun = False  # it is more than whitespace
        self._trailing: list[str] = []  # whitespace that ends it so far

    def feed(self, piece: str) -> str:
        """What this piece adds to the stripped text."""
        stripped = piece.rstrip()
        if not stripped:
            if self.has_begun:
                self._trailing.append(piece)
            return ""
        trailing = piece[len(stripped) :]
        if not self.has_begun:
            self.has_begun = True
            stripped = stripped.lstrip()
        elif self._trailing:
            stripped = "".join([*self._trailing, stripped])
            self._trailing.clear()
        if trailing:
            self._trailing.append(trailing)
        return stripped


class _Original:
    """The trimmed `reasoning_content` so far, and how much of it content has repeated."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self._repetition = _Trimmer()
        self._repeated_chars = 0

    @property
    def repetition_has_begun(self) -> bool:
        return self._repetition.has_begun

    def append(self, reasoning: str) -> None:
        """Append reasoning, which is trimmed already."""
        self._text.seek(0, io.SEEK_END)
        self._text.write(reasoning)

    def continues_with(self, content: str) -> bool:
        """Whether `content` continues the repetition; counts it as repeated."""
        repeated = self._repetition.feed(content)
        self._text.seek(self._repeated_chars)
        self._repeated_chars += len(repeated)
        return self._text.read(len(repeated)) == repeated

    def is_at_end(self) -> bool:
        """Whether all is repeated; call it after `continues_with`."""
        return not self._text.read()


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
    return start if any(tag.startswith(end) for tag in tags) else len(text)
