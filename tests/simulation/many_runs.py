"""What campaigns share: figures that add up, and garbage that is collected once a run is over."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Self, cast


class Figures:
    """Of one run or of many: a dataclass whose fields can be added."""

    def add(self, other: Self) -> None:
        for each in fields(cast(Any, self)):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def times_by_name(found: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """The seconds of each, the shortest first."""
    times: dict[str, list[float]] = {}
    for name, after_s in sorted(found):
        times.setdefault(name, []).append(after_s)
    return times


@contextmanager
def collected_at_the_end() -> Iterator[None]:
    """Only what was made meanwhile: a look at every few hundred objects is an eighth of what runs
    cost."""
    gc.freeze()
    gc.disable()
    try:
        yield
        gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
