"""How long a batch of a prompt takes on this server, as its prompts reported it. Sans-IO.

While a batch is computed nothing moves, for a second or for minutes: a livelock in it looks the
same. What earlier batches took tells the two apart, with a margin for all that may make an honest
batch slower: cores or clock taken away, neighbours, a deeper context, other tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from llama_worker.request.progress import Batch

# A standstill is a hang only beyond this many times what such a batch should take, and never before
# the minimum. Both are doubled for the first batch of a launch where none of that kind was learnt.
PACE_MULTIPLE = 10.0
PACE_MIN_S = 150.0
_COLD_MULTIPLE = 2.0

_KEPT = 16  # batches of each size, up to a factor of two
_SMALLEST_SHARE = 4  # one of fewer tokens tells little: part of its time is the pass itself


class _Learnt(NamedTuple):
    tokens: int
    depth: int  # tokens of the prompt behind it
    seconds: float


class Pace:
    """Of one configuration: it outlives a launch. Not thread-safe."""

    def __init__(self) -> None:
        self._learnt: dict[int, deque[_Learnt]] = {}  # by the tokens' order of magnitude
        # the first batches of launches: kernels are compiled, pages are read
        self._cold_s: deque[float] = deque(maxlen=_KEPT)
        self._known_until: dict[int, float] = {}  # by request, the end of the last batch

    def copy(self) -> Pace:
        """The same knowledge, for another watch to go on with."""
        other = Pace()
        other._learnt = {size: learnt.copy() for size, learnt in self._learnt.items()}
        other._cold_s = self._cold_s.copy()
        return other

    def learn(self, request_id: int, batches: Iterable[Batch], *, is_cold: bool = False) -> None:
        """From what a request tells, again and again: each batch counts once, and one whose report
        came together with the one before not. `is_cold`: they are the first of a launch."""
        known_until = self._known_until.get(request_id, -math.inf)
        for batch in batches:
            if batch.ended_at <= known_until:
                continue
            self._known_until[request_id] = batch.ended_at
            if batch.tokens > 0 and batch.ended_at > batch.began_at:
                learnt = _Learnt(batch.tokens, batch.depth, batch.ended_at - batch.began_at)
                size = self._learnt.setdefault(batch.tokens.bit_length(), deque(maxlen=_KEPT))
                size.append(learnt)
                if is_cold:
                    self._cold_s.append(learnt.seconds)

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._known_until.pop(request_id, None)

    def longest_standstill_s(self, tokens: int, depth: int, *, is_cold: bool) -> float | None:
        """How long nothing may move while a batch of so many tokens is computed, which ends so deep
        in its context; None where nothing was learnt. `is_cold`: it is the first of a launch."""
        expected_s = self.expected_s(tokens, depth)
        if expected_s is None:
            return None
        if is_cold and self._cold_s:
            expected_s = max(expected_s, *self._cold_s)
        limit_s = max(PACE_MIN_S, PACE_MULTIPLE * expected_s)
        return limit_s * _COLD_MULTIPLE if is_cold and not self._cold_s else limit_s

    def expected_s(self, tokens: int, depth: int) -> float | None:
        """The longest that such a batch may take by what was learnt; None where nothing was.

        Time grows with the tokens, and each token's with those before it, at most in proportion.
        """
        known = [learnt for each in self._learnt.values() for learnt in each]
        if not known:
            return None
        most = max(learnt.tokens for learnt in known)
        telling = min(most, max(1, tokens // _SMALLEST_SHARE))
        known = [learnt for learnt in known if learnt.tokens >= telling]
        # what lay deep tells of deeper
        deep = min(depth, max(learnt.depth for learnt in known) / 2)
        known = [learnt for learnt in known if learnt.depth >= deep]
        return max(
            learnt.seconds
            * max(1.0, tokens / learnt.tokens)
            * max(1.0, depth / max(1, learnt.depth))
            for learnt in known
        )
