"""Which events bring a turn forward. Sans-IO; one `Advance` per turn, one thread at a time.

A server that hangs may go on sending: the same report of prompt progress on every pass of its loop,
role chunks, empty deltas, `{}`. Only what is new shows that it works on the request.
"""

from __future__ import annotations

from typing import assert_never

from llama_worker.stream.events import (
    Done,
    EmptyRecord,
    Finish,
    PromptProgress,
    ReasoningDelta,
    ServerError,
    StreamEvent,
    TextDelta,
    Timings,
    ToolCallDelta,
    UnknownContent,
    Usage,
)


class Advance:
    """Hand it every event, in order."""

    def __init__(self) -> None:
        self._processed = -1  # the most of the prompt that was ever reported as done
        self._once: set[type[StreamEvent]] = set()  # kinds that count once, and have come
        self._call_heads: set[tuple[int, str | None, str | None]] = set()
        self._fingerprints: dict[int, bool] = {}  # of unknown content, the latest last

    def by(self, event: StreamEvent) -> bool:
        """Whether this event is something new.

        Text, reasoning and arguments always are: repeated ones are the loop detector's business.
        Prompt progress is where more is done than ever before, of all that there is to do; the head
        of a call, a finish, usage, timings and what is not understood are the first time.
        """
        match event:
            case TextDelta() | ReasoningDelta():
                return bool(event.text)
            case ToolCallDelta():
                return bool(event.arguments) or self._is_new_call(event)
            case PromptProgress(processed=processed, total=total):
                processed = min(processed, total)
                grown = processed > self._processed
                self._processed = max(processed, self._processed)
                return grown
            case Finish() | Usage() | Timings() | ServerError() | Done():
                is_first = type(event) not in self._once
                self._once.add(type(event))
                return is_first
            case UnknownContent(fingerprint=fingerprint):
                return self._is_new_content(fingerprint)
            case EmptyRecord():
                return False
            case _:
                assert_never(event)

    def _is_new_content(self, fingerprint: int) -> bool:
        is_new = not self._fingerprints.pop(fingerprint, False)
        self._fingerprints[fingerprint] = True
        if len(self._fingerprints) > _MAX_FINGERPRINTS:
            del self._fingerprints[next(iter(self._fingerprints))]
        return is_new

    def _is_new_call(self, event: ToolCallDelta) -> bool:
        head = (event.index, event.call_id, event.name)
        if (event.call_id is None and event.name is None) or len(
            self._call_heads
        ) >= _MAX_CALL_HEADS:
            return False
        is_new = head not in self._call_heads
        self._call_heads.add(head)
        return is_new


_MAX_FINGERPRINTS = 4096  # a circle of more records than that is taken for something new
_MAX_CALL_HEADS = 256  # in one turn; a server that begins calls for ever says nothing
