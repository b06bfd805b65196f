"""What campaigns share: processes, figures that add up, garbage collected once a run is over."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing import get_context
from typing import Any, Self, TypeVar, cast

Part = TypeVar("Part")
Done = TypeVar("Done")


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


def done_by(jobs: int, work: Callable[[Part], Done], parts: Iterable[Part]) -> Iterator[Done]:
    """The work on each part, in their order, by so many processes."""
    if jobs > 1:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            yield from pool.map(work, parts)
    else:
        for part in parts:  # not `map`, which a StopIteration of the work would end as if all done
            yield work(part)


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
