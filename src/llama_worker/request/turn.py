"""One turn of a request, which is one HTTP request: what the model says in it, taken apart. Not
thread-safe."""

from __future__ import annotations

from collections.abc import Collection
from typing import assert_never

from llama_worker.profiles import LoopDetector
from llama_worker.request.progress import REPEATS_APART_S, REPEATS_KEPT, Batch
from llama_worker.stream.advance import Advance
from llama_worker.stream.calls import MalformedCall, RawCall, ToolCallAssembler
from llama_worker.stream.events import (
    EmptyRecord,
    PromptProgress,
    ReasoningDelta,
    StreamEvent,
    TextDelta,
    Timings,
    ToolCallDelta,
    UnknownContent,
    Usage,
    encodable,
)
from llama_worker.stream.loops import TextLoopFound, TextLoopWatch
from llama_worker.stream.reasoning import ReasoningSplitter
from llama_worker.stream.tagged_calls import TaggedCallFilter
from llama_worker.stream.turn_end import TurnEnd

_BATCHES_KEPT = 16

TurnId = tuple[int, int]
"""Request id, and the number of the request's turn (one HTTP request each), from 1."""

_Other = ToolCallDelta | PromptProgress | Usage | Timings | EmptyRecord | UnknownContent
Said = TextDelta | ReasoningDelta | _Other
"""What comes while a turn goes on; its last words are the request's."""


class Turn:
    """Feed it the events; each call returns (reasoning, text) that may be shown, reasoning coming
    first."""

    def __init__(
        self,
        *,
        started_at: float,
        prompted: bool,
        with_tools: bool,
        opens_thinking: bool,
        loop_detector: LoopDetector | None,
    ) -> None:
        self.started_at = started_at
        self.headers_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.last_data_at: float | None = None
        self.last_stream_byte_at: float | None = None
        self.prompt_progress: PromptProgress | None = None
        self.prompt_progress_at: float | None = None  # the latest report of more than before
        self.batches: tuple[Batch, ...] = ()  # between two reports, the latest
        self._reported_at: float | None = None  # the latest report, also one that was there before
        self.repeated_at: tuple[float, ...] = ()  # the latest repeats since the latest that was new
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.end = TurnEnd()
        self.had_reasoning_deltas = False  # the server takes reasoning out of the content itself
        self.calls_taken = False  # told apart, exit calls recorded
        self.is_over = False  # its connection is closed, its tokens are counted
        self._deltas = 0
        self._advance = Advance()
        self._prompted = prompted
        self._splitter = ReasoningSplitter(opened_by_template=opens_thinking)
        self._filter = (
            TaggedCallFilter(strict=prompted, loop_detector=loop_detector) if with_tools else None
        )
        self._assembler = ToolCallAssembler()
        # A loop in what is not shown: in the arguments of calls, or in what is held back.
        self.hidden_loop: TextLoopFound | None = None
        self._loop_detector = loop_detector
        self._arguments = TextLoopWatch(loop_detector) if loop_detector is not None else None
        self._held: TextLoopWatch | None = None  # over what came since the last that was shown
        self._said: tuple[list[str], list[str]] = ([], [])
        self._finished = False

    @property
    def deltas(self) -> int:
        """With something generated in them, so far."""
        return self._deltas

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
        if (
            self.first_token_at is None
            or self.last_token_at is None
            or self.last_token_at <= self.first_token_at
        ):
            return None
        return (self._deltas - 1) / (self.last_token_at - self.first_token_at)

    def take(self, event: Said, at: float) -> tuple[str, str]:
        """What the event adds to what may be shown."""
        match event:
            case TextDelta(text=text, count=count):
                self._count(count, at)
                piece = self._splitter.feed_text(encodable(text))
            case ReasoningDelta(text=text, count=count):
                self._count(count, at)
                self.had_reasoning_deltas = True
                piece = self._splitter.feed_reasoning(encodable(text))
            case _:
                return "", self._take_other(event, at)
        shown = self._show(piece.reasoning, piece.text)
        self._watch_held("" if any(shown) else event.text)
        return shown

    def finish(self, *, cut_off: bool = True) -> tuple[str, str]:
        """The turn is over, cut off or not: what was held back. A second call returns nothing."""
        if self._finished:
            return "", ""
        self._finished = True
        piece = self._splitter.finish()
        reasoning, text = self._show(piece.reasoning, piece.text)
        if self._splitter.only_assumed and not cut_off:
            # A server that parses reasoning itself, and a model that did not think: it was the
            # answer.
            answer = self.said_reasoning
            self._said[0].clear()
            text += self._show("", answer)[1]
        if self._filter is not None:
            rest = self._filter.finish()
            self._said[1].append(rest)
            text += rest
        return reasoning, text

    def take_exits(self, names: Collection[str]) -> list[RawCall]:
        """Calls of these tools that are complete by now, before the turn ends; `calls` leaves them
        out.

        In native mode those in the text count at the end only: a structured call would make text of
        them.
        """
        tagged = self._filter.take(names) if self._filter is not None and self._prompted else []
        return [*self._assembler.take_complete(names), *tagged]

    def calls(self) -> list[RawCall | MalformedCall]:
        """The calls of the turn, structured ones and those found in the text. Call `finish`
        before."""
        tagged = self._filter.calls if self._filter is not None else []
        return [*self._assembler.calls(), *tagged]

    def note(self, event: StreamEvent, at: float) -> bool:
        """Whether the event brings the turn forward: then it is its latest data."""
        advanced = self._advance.by(event)
        if advanced:
            self.last_data_at = at
            self.repeated_at = ()
        elif not self.repeated_at or at - self.repeated_at[-1] >= REPEATS_APART_S:
            self.repeated_at = (*self.repeated_at, at)[-REPEATS_KEPT:]
        return advanced

    def _take_other(self, event: _Other, at: float) -> str:
        """What is no text; returns text that was held back and may be shown now."""
        advanced = self.note(event, at)
        match event:
            case ToolCallDelta():
                if advanced:
                    self._count(1, at)
                self._assembler.feed(event)
                if self._arguments is not None and self.hidden_loop is None and event.arguments:
                    self.hidden_loop = self._arguments.feed(event.arguments)
                return self._put_back_tagged_calls()
            case PromptProgress():
                if advanced:
                    self._batch_done(event, at)
                self.prompt_progress, self._reported_at = event, at
            case Usage():
                self.usage = event
            case Timings():
                self.timings = event
            case EmptyRecord() | UnknownContent():
                pass  # the model has not said anything that can be shown
            case _:
                assert_never(event)
        return ""

    def _watch_held(self, text: str) -> None:
        """Whitespace that may be the end of a thought, or a call that goes on and on: nobody sees
        it. "": something was shown."""
        if not text:
            self._held = None
        elif self._loop_detector is not None and self.hidden_loop is None:
            self._held = self._held or TextLoopWatch(self._loop_detector)
            self.hidden_loop = self._held.feed(text)

    def _batch_done(self, told: PromptProgress, at: float) -> None:
        """It began with the latest report: until then the batches were its neighbours'."""
        before = self.prompt_progress
        if before is not None and self._reported_at is not None:
            tokens = told.processed - max(before.processed, told.cached)
            batch = Batch(self._reported_at, at, tokens, told.processed)
            self.batches = (*self.batches, batch)[-_BATCHES_KEPT:]
        self.prompt_progress_at = at

    def _put_back_tagged_calls(self) -> str:
        """In native mode: beside a structured call tagged ones are text, and so is all that
        comes."""
        if self._prompted or self._filter is None:
            return ""
        text = self._filter.put_back()
        self._filter = None
        self._said[1].append(text)
        return text

    def _count(self, tokens: int, at: float) -> None:
        """So many deltas with something in them came."""
        self._deltas += tokens
        self.last_token_at = self.last_data_at = at
        self.repeated_at = ()
        if self.first_token_at is None:
            self.first_token_at = at

    def _show(self, reasoning: str, text: str) -> tuple[str, str]:
        if text and self._filter is not None:
            text = self._filter.feed(text)
        if reasoning:
            self._said[0].append(reasoning)
        if text:
            self._said[1].append(text)
        return reasoning, text
