"""Splits what the model says in one turn, which is one HTTP request, into reasoning, text and tool
calls. Not thread-safe."""

from __future__ import annotations

from collections.abc import Collection

from llama_worker.config.profiles import LoopDetector
from llama_worker.request.progress import TurnProgress
from llama_worker.stream.calls import MalformedCall, RawCall, ToolCallAssembler
from llama_worker.stream.events import (
    ReasoningDelta,
    StreamEvent,
    TextDelta,
    ToolCallDelta,
    encodable,
)
from llama_worker.stream.loops import TextLoopFound, TextLoopWatch
from llama_worker.stream.reasoning import ReasoningSplitter
from llama_worker.stream.tagged_calls import TaggedCallFilter
from llama_worker.stream.turn_end import TurnEnd


class Turn(TurnProgress):
    """One turn. Takes events; returns the (reasoning, text) that may be shown, reasoning first."""

    def __init__(
        self,
        *,
        started_at: float,
        prompted: bool,
        with_tools: bool,
        opens_thinking: bool,
        loop_detector: LoopDetector | None,
        runaway_tokens: int | None = None,
    ) -> None:
        super().__init__(started_at)
        self.end = TurnEnd()
        self.had_reasoning_deltas = False  # the server takes reasoning out of the content itself
        self.calls_taken = False  # they were sorted, and exit calls recorded
        self._runaway_tokens = runaway_tokens
        self._prompted = prompted
        self._splitter = ReasoningSplitter(opened_by_template=opens_thinking)
        self._filter = TaggedCallFilter(strict=prompted) if with_tools else None
        self._assembler = ToolCallAssembler()
        # A loop in what is not shown: in the arguments of calls, or in what is held back.
        self.hidden_loop: TextLoopFound | None = None
        self._loop_detector = loop_detector
        self._arguments = TextLoopWatch(loop_detector) if loop_detector is not None else None
        self._held_watch: TextLoopWatch | None = (
            None  # over what came since something was last shown
        )
        self._parts: tuple[list[str], list[str]] = ([], [])
        self._finished = False

    @property
    def is_runaway(self) -> bool:
        """Whether the server ignores the token limit; its own count may stand still."""
        limit = self._runaway_tokens
        if limit is None or self.end.finish_reason is not None:
            return False
        return max(self.tokens, self.deltas) > limit

    @property
    def reasoning(self) -> str:
        """The turn's reasoning, for the history of the next turn."""
        return "".join(self._parts[0])

    @property
    def text(self) -> str:
        """The turn's text without tool calls."""
        return "".join(self._parts[1])

    def take(self, event: StreamEvent, at: float) -> tuple[str, str]:
        """The (reasoning, text) that may be shown after this event."""
        self.record(event, at)
        match event:
            case TextDelta(text=text):
                piece = self._splitter.feed_text(encodable(text))
            case ReasoningDelta(text=text):
                self.had_reasoning_deltas = True
                piece = self._splitter.feed_reasoning(encodable(text))
            case ToolCallDelta():
                self._assembler.feed(event)
                self._watch_arguments(event.arguments)
                return "", self._put_back_tagged_calls()
            case _:  # the model has not said anything that can be shown
                return "", ""
        visible = self._show(*piece)
        self._watch_held("" if any(visible) else event.text)
        return visible

    def finish(self, *, cut_off: bool = True) -> tuple[str, str]:
        """End the turn, cut off or not; returns what was held back. A second call returns none."""
        if self._finished:
            return "", ""
        self._finished = True
        reasoning, text = self._show(*self._splitter.finish())
        if self._splitter.only_assumed and not cut_off:
            # The server parses reasoning itself and the model did not think: this is the answer.
            answer = self.reasoning
            self._parts[0].clear()
            text += self._show("", answer)[1]
        if self._filter is not None:
            rest = self._filter.finish()
            self._parts[1].append(rest)
            text += rest
        return reasoning, text

    def take_exits(self, names: Collection[str]) -> list[RawCall]:
        """The calls of these tools that are complete by now, before the turn ends; `calls` leaves
        them out.

        In native mode calls in the text count only at the end: a structured call would turn them
        into text.
        """
        tagged = self._filter.take(names) if self._filter is not None and self._prompted else []
        return [*self._assembler.take_complete(names), *tagged]

    def calls(self) -> list[RawCall | MalformedCall]:
        """The turn's calls, structured and tagged ones. Call `finish` first."""
        tagged = self._filter.calls if self._filter is not None else []
        return [*self._assembler.calls(), *tagged]

    def _watch_arguments(self, arguments: str | None) -> None:
        if self._arguments is not None and self.hidden_loop is None and arguments:
            self.hidden_loop = self._arguments.feed(arguments)

    def _watch_held(self, text: str) -> None:
        """Search held-back text for loops: whitespace that may end a thought, or an endless call.
        "": something was shown."""
        if not text:
            self._held_watch = None
        elif self._loop_detector is not None and self.hidden_loop is None:
            self._held_watch = self._held_watch or TextLoopWatch(self._loop_detector)
            self.hidden_loop = self._held_watch.feed(text)

    def _put_back_tagged_calls(self) -> str:
        """In native mode, after a structured call, all tagged calls are text."""
        if self._prompted or self._filter is None:
            return ""
        text = self._filter.put_back()
        self._filter = None
        self._parts[1].append(text)
        return text

    def _show(self, reasoning: str, text: str) -> tuple[str, str]:
        if self._filter is not None:
            calls = self._filter.calls
            known_count = len(calls)
            text = self._filter.feed(text)
            if self._prompted:  # in native mode a held-back call may still become text
                for call in calls[known_count:]:
                    if isinstance(call, RawCall):
                        self._watch_arguments(call.arguments)
        if reasoning:
            self._parts[0].append(reasoning)
        if text:
            self._parts[1].append(text)
        return reasoning, text
