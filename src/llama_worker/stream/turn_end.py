"""When the stream of a chat completion is over, and whether it ended well. Pure; not thread-safe.

A finish reason is not the end: usage, `[DONE]` or an error record may follow it, but are not waited
for without bound. A stream that ends without a finish reason was cut off, whatever its framing
says.
"""

from __future__ import annotations

from msgspec import Struct

from llama_worker.stream.events import Done, Finish, ServerError
from llama_worker.stream.failure import StreamFailure
from llama_worker.types.request import RequestFailReason

SETTLE_S = 2.0  # after a finish reason: usage, [DONE] or an error record may still follow
NO_FINISH_REASON = "the stream ended without a finish reason"

LastWord = Finish | ServerError | Done
"""What may be the last that a stream says."""


class Finished(Struct, frozen=True):
    """The model finished; `reason` as the server names it, None after a bare `[DONE]`."""

    reason: str | None


TurnOutcome = Finished | ServerError | StreamFailure


class TurnEnd:
    """Takes what may end the turn; each method returns how it ended, once that is decided."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        # monotonic; when nothing more is waited for behind a last word; it may be put off
        self.settled_at: float | None = None

    def feed(self, event: LastWord, now: float) -> TurnOutcome | None:
        """An event that may be the last."""
        if self.settled_at is None:  # said again, it gives no more time
            self.settled_at = now + SETTLE_S
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

    def tick(self, now: float) -> TurnOutcome | None:
        """The deadline `settled_at` may have come."""
        return (
            Finished(self.finish_reason)
            if self.settled_at is not None and now >= self.settled_at
            else None
        )
