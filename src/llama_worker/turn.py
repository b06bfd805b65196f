"""One HTTP exchange of a request: what the model says in it, taken apart. Pure; not thread-safe."""

from __future__ import annotations

from llama_worker.reasoning import ReasoningSplitter
from llama_worker.stream_events import PromptProgress, Timings, ToolCallDelta, Usage
from llama_worker.tagged_calls import TaggedCallFilter
from llama_worker.tooling import MalformedCall, RawCall, ToolCallAssembler


class Turn:
    """Feed it the deltas; each call returns (reasoning, text) that may be shown, reasoning coming first."""

    def __init__(self, *, started_at: float, prompted: bool, with_tools: bool, opens_thinking: bool) -> None:
        self.started_at = started_at
        self.headers_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.last_data_at: float | None = None
        self.last_stream_byte_at: float | None = None
        self.prompt_progress: PromptProgress | None = None
        self.prompt_progress_at: float | None = None
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.finish_reason: str | None = None
        self.calls_taken = False  # told apart, exit calls recorded
        self.is_over = False  # its connection is closed, its tokens are counted
        self._deltas = 0
        self._splitter = ReasoningSplitter(opened_by_template=opens_thinking)
        self._filter = TaggedCallFilter(strict=prompted) if with_tools else None
        self._assembler = ToolCallAssembler()
        self._said: tuple[list[str], list[str]] = ([], [])
        self._finished = False

    @property
    def tokens(self) -> int:
        """Generated so far: as the server counts, else the deltas received."""
        if self.usage is not None:
            return self.usage.completion_tokens
        if self.timings is not None and self.timings.predicted_n is not None:
            return self.timings.predicted_n
        return self._deltas

    @property
    def said_reasoning(self) -> str:
        """The turn's reasoning, as the history of the next turn has it."""
        return "".join(self._said[0])

    @property
    def said_text(self) -> str:
        """The turn's text, likewise: without tool calls."""
        return "".join(self._said[1])

    def tokens_per_second(self) -> float | None:
        """As the server measured it, else over the deltas; None where neither is known."""
        if self.timings is not None and self.timings.predicted_per_second is not None:
            return self.timings.predicted_per_second
        if self.first_token_at is None or self.last_token_at is None or self.last_token_at <= self.first_token_at:
            return None
        return (self._deltas - 1) / (self.last_token_at - self.first_token_at)

    def tokens_came(self, count: int, at: float) -> None:
        """So many deltas with something in them came."""
        self._deltas += count
        self.last_token_at = at
        if self.first_token_at is None:
            self.first_token_at = at

    def text(self, text: str) -> tuple[str, str]:
        """A `content` delta."""
        piece = self._splitter.feed_text(text)
        return self._show(piece.reasoning, piece.text)

    def reasoning(self, text: str) -> tuple[str, str]:
        """A `reasoning_content` delta."""
        piece = self._splitter.feed_reasoning(text)
        return self._show(piece.reasoning, piece.text)

    def tool_call(self, delta: ToolCallDelta) -> None:
        """A fragment of a structured call."""
        self._assembler.feed(delta)

    def finish(self, *, cut_off: bool = True) -> tuple[str, str]:
        """The turn is over, cut off or not: what was held back. A second call returns nothing."""
        if self._finished:
            return "", ""
        self._finished = True
        piece = self._splitter.finish()
        reasoning, text = self._show(piece.reasoning, piece.text)
        if self._splitter.only_assumed and not cut_off:
            # A server that parses reasoning itself, and a model that did not think: it was the answer.
            answer = self.said_reasoning
            self._said[0].clear()
            text += self._show("", answer)[1]
        if self._filter is not None:
            rest = self._filter.finish(structured_calls=bool(self._assembler.calls()))
            self._said[1].append(rest)
            text += rest
        return reasoning, text

    def calls(self) -> list[RawCall | MalformedCall]:
        """The calls of the turn, structured ones and those found in the text. Call `finish` before."""
        tagged = self._filter.calls if self._filter is not None else []
        return [*self._assembler.calls(), *tagged]

    def _show(self, reasoning: str, text: str) -> tuple[str, str]:
        if text and self._filter is not None:
            text = self._filter.feed(text)
        if reasoning:
            self._said[0].append(reasoning)
        if text:
            self._said[1].append(text)
        return reasoning, text
