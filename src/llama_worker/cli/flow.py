"""The order in which reasoning and text are shown. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from llama_worker.cli.text import harmless

Channel = Literal["text", "reasoning", "break"]


class Piece(Struct, frozen=True):
    """Harmless text for a channel. A `break` is the line end between channels; it belongs to
    neither."""

    channel: Channel
    text: str


class Flow:
    """One answer as it comes."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._line_open = False

    @property
    def is_empty(self) -> bool:
        return self._channel is None

    @property
    def is_text(self) -> bool:
        """The last that was shown is text, no reasoning."""
        return self._channel == "text"

    def feed(self, reasoning: str, text: str) -> list[Piece]:
        """What is to be shown of what was added."""
        return [*self._add("reasoning", harmless(reasoning)), *self._add("text", harmless(text))]

    def end(self) -> list[Piece]:
        """The line end that the last line lacks; it goes to the last line's channel."""
        if not self._line_open or self._channel is None:
            return []
        self._line_open = False
        return [Piece(self._channel, "\n")]

    def _add(self, channel: Channel, text: str) -> list[Piece]:
        if not text:
            return []
        pieces = []
        if self._channel not in (None, channel):
            pieces.append(Piece("break", "\n" if not self._line_open else "\n\n"))
        self._channel, self._line_open = channel, not text.endswith("\n")
        return [*pieces, Piece(channel, text)]
