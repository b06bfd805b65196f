"""Times in which this machine, or this program, did not run: nobody is to blame for a silence
then. Pure.

Instants are monotonic seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

LATE_S = 1.0  # an alarm that is later than this comes after a gap
# gaps without a verdict; on a machine that is always late a hang has to be found, too
FORGIVEN_IN_A_ROW = 3
_KEPT = 256  # an even number; where there are more, the older half is kept more coarsely


def gap_s(due_at: float, now: float) -> float:
    """Seconds that this host did not run, if what was due then is looked at only now; 0.0 if it is
    no later than threads usually are.

    The host was stopped, suspended or starved, or the interpreter was held: whoever finds a gap
    gives no verdict, and grants the lost time again.
    """
    late_s = now - due_at
    return late_s if late_s > LATE_S else 0.0


class Span(NamedTuple):
    """A time of which `lost_s` seconds were lost: one gap, or several and what lies between."""

    begin: float
    end: float
    lost_s: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """All gaps so far. Older ones are joined: how much was lost stays exact, when it was does
    not."""

    spans: tuple[Span, ...] = ()  # oldest first, none overlaps another

    def with_gap(self, end: float, length_s: float) -> Gaps:
        """With a gap of this length that ends at `end`; what it shares with earlier ones counts
        once."""
        begin, served_s, kept = end - length_s, 0.0, list(self.spans)
        while kept and kept[-1].end > begin:
            before = kept.pop()
            served_s += before.end - before.begin - before.lost_s
            begin, end = min(begin, before.begin), max(end, before.end)
        kept.append(Span(begin, end, end - begin - served_s))
        if len(kept) > _KEPT:
            older = kept[: _KEPT // 2]
            kept[: _KEPT // 2] = [
                _joined(*pair) for pair in zip(older[::2], older[1::2], strict=True)
            ]
        return Gaps(tuple(kept))

    def lost_s(self, since: float, until: float = math.inf) -> float:
        """How much of the time between the two instants was lost."""
        lost_s = 0.0
        for span in reversed(self.spans):
            if span.end <= since:
                break
            both_s = min(span.end, until) - max(span.begin, since)
            if both_s > 0:
                lost_s += span.lost_s * both_s / (span.end - span.begin)
        return lost_s


def _joined(one: Span, other: Span) -> Span:
    return Span(one.begin, other.end, one.lost_s + other.lost_s)


NO_GAPS = Gaps()
