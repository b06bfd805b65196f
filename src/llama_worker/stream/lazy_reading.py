"""Decides when a stream's reader wakes, and when it delivers what it has read. Sans-IO; one per
stream, one thread at a time.

A reader sleeps while text comes fast, since each wake-up of a thread costs more than a token does:

    eager  every byte wakes it: before the first text, and while text comes slowly
    lazy   text comes fast: it wakes every `WAKE_INTERVAL_S`, or for `LARGE_BYTES` in the socket

Delivered at once: anything that is not text and the first text behind it, the end, `LARGE_BYTES`,
text after a pause of `WAKE_INTERVAL_S`, and text that somebody waits for (`hurry`). Other text is
delivered `max_hold_s` after the last delivery, or when the next wake-up finds no more of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from llama_worker.stream.events import ReasoningDelta, StreamEvent, TextDelta

WAKE_INTERVAL_S = (
    0.28  # a call, an error or the end behind fast text is seen this late: within 0.3 s
)
MAX_HOLD_S = (
    0.84  # three wake-ups, and below the 1 s in which another request's data counts as recent
)
LARGE_BYTES = 32 * 1024
HURRY_S = 0.25
_TEXT = frozenset({TextDelta, ReasoningDelta})


class Portion(Struct, frozen=True):
    """What came since the previous portion; no events if only keepalives or parts of a record.

    `at`: when the last of it was read, in monotonic seconds.
    """

    events: tuple[StreamEvent, ...]
    at: float


class LazyReading:
    """One stream's timing: pass what was read to `received`; deliver what `due`, `hurry` and `all`
    return.

    `max_hold_s`: how long text may be held back, at least `WAKE_INTERVAL_S`.
    """

    def __init__(self, now: float, *, max_hold_s: float = MAX_HOLD_S) -> None:
        self.is_lazy = False
        self._max_hold_s = max_hold_s
        self._events: list[StreamEvent] = []  # not delivered yet
        self._bytes_count = 0  # not delivered yet
        self._received_at = now  # when the latest bytes came
        self._delivered_at = -math.inf
        self._hurried_at = -math.inf
        self._is_hurried = True  # the next text is delivered at once

    @property
    def low_water_bytes(self) -> int:
        """How many bytes must be in the socket before the reader wakes."""
        return LARGE_BYTES if self.is_lazy else 1

    def received(self, events: Sequence[StreamEvent], size_bytes: int, now: float) -> None:
        """`size_bytes` bytes were read just now, which completed these events."""
        self._is_hurried |= not self.is_lazy and now >= self._received_at + WAKE_INTERVAL_S
        self._events += events
        self._bytes_count += size_bytes
        self._received_at = now

    def due(self, now: float, *, over: bool) -> Portion | None:
        """What to deliver once all bytes in the socket were taken. `over`: no more will come."""
        is_text = all(type(event) in _TEXT for event in self._events)
        has_paused = now >= self._received_at + WAKE_INTERVAL_S
        if not is_text or has_paused:
            self.is_lazy = False
        if not self._bytes_count:
            return None
        if (
            over
            or not is_text
            or has_paused
            or self._is_hurried
            or self._bytes_count >= LARGE_BYTES
            or now >= self._delivered_at + self._max_hold_s
        ):
            return self.all(now)
        self.is_lazy = True
        return None

    def all(self, now: float) -> Portion | None:
        """All that was not delivered yet; None if nothing."""
        if not self._bytes_count:
            return None
        portion = Portion(tuple(self._events), self._received_at)
        if now >= self._hurried_at + HURRY_S:
            self._is_hurried = not any(type(event) in _TEXT for event in self._events)
        self._events, self._bytes_count, self._delivered_at = [], 0, now
        return portion

    def hurry(self, now: float) -> Portion | None:
        """A reader waits: returns what to deliver now. What comes within `HURRY_S`, and the
        first text after that, is due at once. From now on every byte wakes the thread."""
        self._is_hurried, self._hurried_at, self.is_lazy = True, now, False
        return self.all(now)

    def wait_s(self, now: float) -> float | None:
        """Seconds until `due` must be called again; None: not before bytes come."""
        if not self.is_lazy:
            return None
        left_s = self._delivered_at + self._max_hold_s - now
        return min(WAKE_INTERVAL_S, max(left_s, 0.0))
