"""Estimates how long a batch of a prompt takes on this server, from earlier batches. Sans-IO.

While a batch is computed nothing moves, for a second or for minutes, and a livelock looks the same.
The times of earlier batches tell the two apart, with a margin for whatever may slow a working
batch: fewer cores or a lower clock, other requests, a deeper context, other tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from llama_worker.request.progress import Batch

# A standstill is a hang only beyond this many times what such a batch should take, and never before
# the minimum. Both are doubled for the first batch of a launch if no first batch was learnt yet.
PACE_MULTIPLE = 10.0
PACE_MIN_S = 150.0
_COLD_MULTIPLE = 2.0

_KEPT = 16  # batches of each size; sizes differ by a factor of two
_MIN_SIZE_DIVISOR = 4  # batches under a quarter of the tokens are ignored: a pass has a fixed cost


class _BatchTime(NamedTuple):
    tokens: int
    depth: int  # the end of its last token in the context
    seconds: float


class Pace:
    """The batch times learnt for one configuration; they outlive a launch. Not thread-safe."""

    def __init__(self) -> None:
        self._batch_times: dict[int, deque[_BatchTime]] = {}  # by the bit length of the token count
        # seconds of launches' first batches, in which kernels are compiled and pages are read
        self._cold_s: deque[float] = deque(maxlen=_KEPT)
        self._counted_until: dict[int, float] = {}  # by request id: the end of its last batch

    def copy(self) -> Pace:
        """A copy of the learnt times, for the next launch's watch."""
        other = Pace()
        other._batch_times = {size: learnt.copy() for size, learnt in self._batch_times.items()}
        other._cold_s = self._cold_s.copy()
        return other

    def learn(self, request_id: int, batches: Iterable[Batch], *, is_cold: bool = False) -> None:
        """Learn from a request's batches. Each counts once, however often it is passed; one that
        was reported together with the one before never does. `is_cold`: the first of a launch."""
        counted_until = self._counted_until.get(request_id, -math.inf)
        for batch in batches:
            if batch.ended_at <= counted_until:
                continue
            self._counted_until[request_id] = batch.ended_at
            if batch.tokens > 0 and batch.ended_at > batch.began_at:
                learnt = _BatchTime(batch.tokens, batch.depth, batch.ended_at - batch.began_at)
                size = self._batch_times.setdefault(batch.tokens.bit_length(), deque(maxlen=_KEPT))
                size.append(learnt)
                if is_cold:
                    self._cold_s.append(learnt.seconds)

    def forget(self, request_id: int) -> None:
        """Forget which batches of the request were counted: it has ended."""
        self._counted_until.pop(request_id, None)

    def longest_standstill_s(self, tokens: int, depth: int, *, is_cold: bool) -> float | None:
        """How long nothing may move while a batch of `tokens` tokens is computed that ends at
        `depth` in its context; None if nothing was learnt. `is_cold`: the first of a launch."""
        expected_s = self.expected_s(tokens, depth)
        if expected_s is None:
            return None
        if is_cold and self._cold_s:
            expected_s = max(expected_s, *self._cold_s)
        limit_s = max(PACE_MIN_S, PACE_MULTIPLE * expected_s)
        return limit_s * _COLD_MULTIPLE if is_cold and not self._cold_s else limit_s

    def expected_s(self, tokens: int, depth: int) -> float | None:
        """The longest time expected for such a batch; None if nothing was learnt.

        Time grows with the tokens, and the time per token with the depth, at most in proportion.
        """
        known = [learnt for each in self._batch_times.values() for learnt in each]
        if not known:
            return None
        max_tokens = max(learnt.tokens for learnt in known)
        min_tokens = min(max_tokens, max(1, tokens // _MIN_SIZE_DIVISOR))
        known = [learnt for learnt in known if learnt.tokens >= min_tokens]
        # leave out batches shallower than both this one and half the deepest
        min_depth = min(depth, max(learnt.depth for learnt in known) / 2)
        known = [learnt for learnt in known if learnt.depth >= min_depth]
        return max(
            learnt.seconds * max(1.0, tokens / learnt.tokens) * max(1.0, depth / learnt.depth)
            for learnt in known
        )
