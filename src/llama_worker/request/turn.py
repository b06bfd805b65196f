"""What the model says in one turn, which is one HTTP request: split into reasoning, text and tool
calls, and what came of each call. Not thread-safe."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llama_worker.config.profiles import LoopDetector
from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import described_error
from llama_worker.request.messages import SignalEmitted
from llama_worker.request.progress import TurnProgress
from llama_worker.request.report import RequestTotals
from llama_worker.stream.calls import (
    MalformedCall,
    ParsedCall,
    Partition,
    RawCall,
    ToolCallAssembler,
    latest_call_number,
    partition,
)
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
from llama_worker.types.chat import ChatMessage
from llama_worker.types.request import ExitSignal, ToolTraceEntry


class Turn(TurnProgress):
    """One turn. Takes events; returns the (reasoning, text) that may be shown, reasoning first."""

    def __init__(
        self,
        *,
        started_at: float,
        prompted: bool,
        tool_names: Collection[str],
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
        self._filter = TaggedCallFilter(tool_names, strict=prompted) if tool_names else None
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


# ---------------------------------------------------------------- calls


class ToolBatch(Struct, frozen=True, kw_only=True):
    """The calls of one turn, which run one after the other."""

    calls: tuple[ParsedCall, ...]
    started_at: float  # of the call that runs; monotonic seconds
    results: tuple[str, ...] = ()  # of those that returned

    @property
    def is_done(self) -> bool:
        return len(self.results) == len(self.calls)

    @property
    def call(self) -> ParsedCall:
        """The call that runs."""
        return self.calls[len(self.results)]


class ToolUse:
    """Keeps signals, trace and iteration budget in the request's totals."""

    def __init__(
        self, config: WorkerConfig, totals: RequestTotals, earlier: Iterable[ChatMessage]
    ) -> None:
        """`earlier`: the messages that the request continues."""
        self._normal_names = [tool["function"]["name"] for tool in config.normal_tools]
        self.exit_names = [tool["function"]["name"] for tool in config.exit_tools]
        self._max_iterations = config.max_tool_iterations
        self._totals = totals
        self._earlier_calls = latest_call_number(earlier)
        self._new_signals: list[ExitSignal] = []  # that `take_new_signals` is to return
        self._iteration: int  # of the latest calls, from 1
        self._not_run: tuple[RawCall | MalformedCall, ...] = ()  # of the latest calls, so far

    @property
    def names(self) -> list[str]:
        return [*self._normal_names, *self.exit_names]

    @property
    def offered(self) -> bool:
        return bool(self.names)

    def take_new_signals(self) -> list[SignalEmitted]:
        """The signals recorded since the last time."""
        signals, self._new_signals = self._new_signals, []
        request_id, job_name = self._totals.request_id, self._totals.job_name
        return [
            SignalEmitted(request_id=request_id, job_name=job_name, signal=copy.deepcopy(signal))
            for signal in signals
        ]

    def record_exits(self, turn: Turn, now: float) -> None:
        """Record the exit calls that are complete so far, while the turn goes on."""
        if exits := turn.take_exits(self.exit_names):
            self._sort_calls(exits, now)

    def take_calls(self, turn: Turn, now: float, *, cut_off: bool) -> Partition:
        """Sort the calls of a turn that is over, once, and record its exit calls. `cut_off`: it did
        not come to its own end."""
        turn.calls_taken = True
        self._iteration = self._max_iterations - self._totals.iterations_left + 1
        calls = self._sort_calls(turn.calls(), now, cut_off=cut_off)
        self._not_run = calls.unrun
        return calls

    def begin(self, calls: tuple[ParsedCall, ...], now: float) -> ToolBatch:
        """Spend an iteration on these calls."""
        self._totals.iterations_left -= 1
        self._totals.calls_count += len(calls)
        return ToolBatch(calls=calls, started_at=now)

    def record_result(
        self, batch: ToolBatch, result: str, at: float, *, error: str | None = None
    ) -> ToolBatch:
        """Record that the running call returned, or failed: then `result` tells the model so."""
        self._add_run({**self._entry(batch, at, error), "result": result})
        return replace(batch, results=(*batch.results, result), started_at=at)

    def record_failure(self, batch: ToolBatch, error: str, at: float) -> None:
        """Record that the running call failed or was dropped; the calls after it do not run."""
        self._add_run(self._entry(batch, at, error))

    def record_not_run(self, why: str, now: float) -> None:
        """Add the calls that never ran to the trace: what they hold is output, too."""
        for call in self._not_run:
            raw = call if isinstance(call, RawCall) else RawCall(None, "", call.text)
            self._totals.trace.append(
                {
                    "tool_call_id": raw.call_id or "",
                    "tool_name": raw.name,
                    "arguments": raw.arguments,
                    "iteration": self._iteration,
                    "started_at": self._totals.unix(now),
                    "duration_s": 0.0,
                    "ok": False,
                    "error": f"not run: {why}",
                }
            )

    def _add_run(self, entry: ToolTraceEntry) -> None:
        """Add `entry` to the trace: the first of the latest calls that has not run so far."""
        self._not_run = self._not_run[1:]
        self._totals.trace.append(entry)

    def _sort_calls(
        self, calls: Sequence[RawCall | MalformedCall], now: float, *, cut_off: bool = False
    ) -> Partition:
        parts = partition(
            calls,
            self._normal_names,
            self.exit_names,
            emitted_at=self._totals.unix(now),
            first_number=self._earlier_calls + self._totals.calls_count + 1,
            cut_off=cut_off,
        )
        self._totals.signals += parts.exits
        self._new_signals += parts.exits
        return parts

    def _entry(self, batch: ToolBatch, at: float, error: str | None) -> ToolTraceEntry:
        entry: ToolTraceEntry = {
            "tool_call_id": batch.call.id,
            "tool_name": batch.call.name,
            "arguments": batch.call.arguments,
            "iteration": self._iteration,
            "started_at": self._totals.unix(batch.started_at),
            "duration_s": at - batch.started_at,
            "ok": error is None,
        }
        if error is not None:
            entry["error"] = error
        return entry


# ---------------------------------------------------------------- results


def call_result(name: str, call: Callable[[], Any]) -> tuple[bool, str]:
    """Call the tool; returns whether it worked, and the text for the model. Never raises."""
    try:
        value = call()
        try:
            return True, encode_result(value)
        except Exception as unfit:
            why = f"a {type(value).__name__} ({str(unfit) or type(unfit).__name__})"
            return False, f"tool {name!r} returned a value that JSON cannot represent: {why}"
    except BaseException as raised:
        # SystemExit and KeyboardInterrupt in a tool only fail its call.
        return False, f"tool {name!r} raised {described_error(raised)}"


def encode_result(value: Any) -> str:
    """The text of a tool message: a str as it is, any other JSON value dumped. Raises what its
    encoding raises.

    It runs code of the value (a subclass of dict may do anything): call it on the tool's thread.
    """
    if isinstance(value, str):
        text = str.__str__(value)  # the value of a string enum, not its name
    else:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        _check_keys(value)
    text.encode()
    return text


def _check_keys(value: Any) -> None:
    """Raise TypeError for a key that is not a str: `json.dumps` would make a str of it."""
    unchecked = [value]
    while unchecked:
        item = unchecked.pop()
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is not a str")
            unchecked.extend(item.values())
        elif isinstance(item, (list, tuple)):
            unchecked.extend(item)
