"""Decides when a chat completion's stream is over, and if it ended well. Pure; not thread-safe.

A finish reason is not the end: usage, `[DONE]` or an error record may follow it, but the wait for
them is bounded. A stream that ends without a finish reason was cut off, whatever its framing
says.
"""

from __future__ import annotations

from msgspec import Struct

from llama_worker.stream.events import Done, Finish, ServerError
from llama_worker.stream.failure import StreamFailure
from llama_worker.types.request import RequestFailReason

SETTLE_S = 2.0  # after a finish reason: usage, [DONE] or an error record may still follow
NO_FINISH_REASON = "the stream ended without a finish reason"

TurnEndEvent = Finish | ServerError | Done
"""The events that may be the last of a stream."""


class Finished(Struct, frozen=True):
    """The model finished; `reason` as the server names it, None after a bare `[DONE]`."""

    reason: str | None


TurnOutcome = Finished | ServerError | StreamFailure


class TurnEnd:
    """Takes the events that may end a turn; each method returns how it ended, once decided."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None

    def feed(self, event: TurnEndEvent) -> TurnOutcome | None:
        """An event that may be the last."""
        match event:
            case Finish(reason=reason):
                self.finish_reason = reason
                return None
            case ServerError():
                return event
            case Done():
                return Finished(self.finish_reason)

    def closed(self, failure: StreamFailure | None) -> TurnOutcome:
        """The connection is over; `failure`: how it broke, None for a regular end."""
        if self.finish_reason is not None:
            return Finished(self.finish_reason)
        return failure or StreamFailure(
            reason=RequestFailReason.STREAM_DISCONNECTED, detail=NO_FINISH_REASON
        )
