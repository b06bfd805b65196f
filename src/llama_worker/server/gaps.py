"""Times in which this machine, or this program, did not run: what was silent meanwhile is not to
blame. Pure.

Instants are monotonic seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# an alarm that rings so late rings after a gap: stopped, suspended, starved, the interpreter held
LATE_S = 1.0
FORGIVEN_IN_A_ROW = (
    3  # gaps without a verdict; on a machine that is always late a hang has to be found, too
)
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Gaps:
    """The latest gaps."""

    entries: tuple[tuple[float, float], ...] = ()  # (end, length), oldest first

    def with_gap(self, end: float, length_s: float) -> Gaps:
        """With one that ends now."""
        return Gaps((*self.entries, (end, length_s))[-_KEPT:])

    def lost_s(self, since: float, until: float = math.inf) -> float:
        """How much of the time between the two instants was lost."""
        spans = (min(end, until) - max(end - length_s, since) for end, length_s in self.entries)
        return sum(span_s for span_s in spans if span_s > 0)


NO_GAPS = Gaps()
