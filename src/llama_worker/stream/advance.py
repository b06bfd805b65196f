"""Which events bring a turn forward. Sans-IO; one `Advance` per turn, one thread at a time.

A server that hangs may go on sending: the same report of prompt progress on every pass of its loop,
role chunks, empty deltas, `{}`. Only what is new shows that it works on the request.
"""

from __future__ import annotations

from typing import assert_never

from llama_worker.stream.events import (
    Done,
    Finish,
    PromptProgress,
    ReasoningDelta,
    RoleOnly,
    ServerError,
    StreamEvent,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)


class Advance:
    """Hand it every event, in order."""

    def __init__(self) -> None:
        self._processed = -1  # the most of the prompt that was ever reported as done
        self._once: set[type[StreamEvent]] = set()  # kinds that count once, and have come
        self._call_heads: set[tuple[int, str | None, str | None]] = set()

    def by(self, event: StreamEvent) -> bool:
        """Whether this event is something new.

        Text, reasoning and arguments always are: repeated ones are the loop detector's business.
        Prompt progress is where more is done than ever before; the head of a call, a finish, usage
        and timings are the first time.
        """
        match event:
            case TextDelta() | ReasoningDelta():
                return bool(event.text)
            case ToolCallDelta():
                return bool(event.arguments) or self._is_new_call(event)
            case PromptProgress(processed=processed):
                grown = processed > self._processed
                self._processed = max(processed, self._processed)
                return grown
            case Finish() | Usage() | Timings() | ServerError() | Done():
                is_first = type(event) not in self._once
                self._once.add(type(event))
                return is_first
            case RoleOnly():
                return False
            case _:
                assert_never(event)

    def _is_new_call(self, event: ToolCallDelta) -> bool:
        head = (event.index, event.call_id, event.name)
        if (event.call_id is None and event.name is None) or len(
            self._call_heads
        ) >= _MAX_CALL_HEADS:
            return False
        is_new = head not in self._call_heads
        self._call_heads.add(head)
        return is_new


_MAX_CALL_HEADS = 256  # in one turn; a server that begins calls for ever says nothing
