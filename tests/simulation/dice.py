"""Every choice that reality leaves open, from one seed.

Only `random.Random.random` and `getrandbits` are used: their output is the same on every Python
version, that of `choice`, `shuffle` and `expovariate` is not promised to be.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A seeded generator. The same seed gives the same draws on every machine and Python
    version."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        self.random = generator.random
        self._bits = generator.getrandbits

    def below(self, count: int) -> int:
        return int(self.random() * count) if count > 1 else 0

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def log_between(self, low: float, high: float) -> float:
        """A float in [low, high) whose order of magnitude is drawn evenly."""
        return float(low * (high / low) ** self.random())

    def waiting_time(self, mean_s: float) -> float:
        """Seconds to the next of events that come at random, `mean_s` apart on average."""
        return -mean_s * math.log(1.0 - self.random())

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def weighted(self, options: Mapping[T, float]) -> T:
        """One of the keys, in proportion to its value."""
        point = self.random() * sum(options.values())
        for option, weight in options.items():
            point -= weight
            if point < 0:
                return option
        return list(options)[-1]

    def fork(self) -> Dice:
        """Another generator: what one draws does not depend on how often the other is asked."""
        return Dice(self._bits(64))
