"""When the stream of a chat completion is over, and whether it ended well. Pure; not thread-safe.

A finish reason is not the end: usage, `[DONE]` or an error record may follow it, but are not waited for without bound.
A stream that ends without a finish reason was cut off, whatever its framing says.
"""

from __future__ import annotations

from msgspec import Struct

from llama_worker.stream.events import Done, Finish, ServerError

SETTLE_S = 2.0  # after a finish reason: usage, [DONE] or an error record may still follow
NO_FINISH_REASON = "the stream ended without a finish reason"

LastWord = Finish | ServerError | Done


class Finished(Struct, frozen=True):
    """The model came to its end; `reason` as the server names it."""

    reason: str


class CutOff(Struct, frozen=True):
    """`detail`: why, for a person. `error`: the server's own record, where it sent one."""

    detail: str
    error: ServerError | None = None


class TurnEnd:
    """Feed it what may end the turn; each entry returns the verdict once there is one, else None."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.settled_at: float | None = None  # monotonic; when `tick` ends a turn that has finished

    def feed(self, event: LastWord, now: float) -> Finished | CutOff | None:
        """An event that may be the last."""
        match event:
            case Finish(reason=reason):
                self.finish_reason = reason
                if self.settled_at is None:  # said again, it gives no more time
                    self.settled_at = now + SETTLE_S
                return None
            case ServerError():
                return CutOff(event.message, event)
            case Done():
                return self.closed(None)

    def closed(self, failure_detail: str | None) -> Finished | CutOff:
        """The connection is over; `failure_detail`: how it broke, None for a regular end."""
        if self.finish_reason is not None:
            return Finished(self.finish_reason)
        return CutOff(failure_detail or NO_FINISH_REASON)

    def tick(self, now: float) -> Finished | CutOff | None:
        """The deadline `settled_at` may have come."""
        return self.closed(None) if self.settled_at is not None and now >= self.settled_at else None
