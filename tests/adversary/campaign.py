"""`make adversary N= SEED=`: generated servers, the confusion matrix, and the time to each verdict.

Case number i of a campaign is the same wherever it runs: campaigns may be cut into parts and given to processes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from multiprocessing import get_context

from tests.adversary.case import Case, Outcome
from tests.adversary.wedges import WEDGES
from tests.simulation.garbage import collected_by_hand
from tests.simulation.trace import Trace

SHOWN_STEPS = 40
PART = 250  # cases of one part: a process that does more keeps the others waiting at the end
_SEED_STEP, _RETRY_STEP = 1_000_003, 10**12
_UNCOLLECTED = 200  # cases; each leaves some thousand objects in cycles, and a look costs more than they do


@dataclass(slots=True)
class Figures:
    """Of all cases."""

    honest: int = 0
    false_kills: list[str] = field(default_factory=list)
    found: dict[str, list[float]] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    slots_asked: int = 0
    messages: int = 0
    cpu_s: float = 0.0

    @property
    def wrong(self) -> list[str]:
        """Kind, seed and detail of every case that went wrong."""
        return [*self.false_kills, *self.missed, *self.late]

    def add(self, part: Figures) -> None:
        """Those of a part."""
        for name, times in part.found.items():
            self.found.setdefault(name, []).extend(times)
        for each in fields(self):
            if each.name != "found":
                setattr(self, each.name, getattr(self, each.name) + getattr(part, each.name))


def run(count: int, seed: int, kinds: list[str] | None = None, *, first: int = 0) -> Figures:
    """Part of a campaign, from case number `first`: `count` wedged servers, the kinds in turn, and as many honest ones.

    A wedge that found nobody to hurt has left an honest case.
    """
    figures, names = Figures(), kinds or list(WEDGES)
    began = time.process_time()
    with collected_by_hand() as collect:
        for index in range(first, first + count):
            number = seed * _SEED_STEP + index
            honest_before = figures.honest
            _run_wedged(figures, number, names[index % len(names)])
            if figures.honest == honest_before:
                _run_honest(figures, number)
            if index % _UNCOLLECTED == 0:
                collect()
    figures.cpu_s = time.process_time() - began
    return figures


def _run_honest(figures: Figures, number: int) -> None:
    outcome = Case(number).run()
    figures.honest += 1
    _add(figures, outcome)
    if outcome.given_up_after_s is not None:
        figures.false_kills.append(f"honest {number}: {outcome.detail}")


def _run_wedged(figures: Figures, number: int, name: str) -> None:
    while True:
        outcome = Case(number, WEDGES[name]).run()
        _add(figures, outcome)
        if not outcome.is_void:
            break
        figures.honest += 1
        if outcome.given_up_after_s is not None:
            figures.false_kills.append(f"{name} {number}, not yet wedged: {outcome.detail}")
        number += _RETRY_STEP
    after_s, promised_s = outcome.given_up_after_s, outcome.promised_s
    told = f"{name} {number}: {outcome.detail}"
    if after_s is None:
        figures.missed.append(told)
        return
    figures.found.setdefault(name, []).append(after_s)
    if promised_s is not None and after_s > promised_s:
        figures.late.append(f"{told} ({after_s:.1f} s, promised {promised_s:.1f} s)")


def _add(figures: Figures, outcome: Outcome) -> None:
    figures.slots_asked += outcome.slots_asked
    figures.messages += outcome.messages


def run_parts(count: int, seed: int, kinds: list[str] | None, *, first: int, jobs: int) -> Figures:
    """The same, in parts; what goes wrong is printed as soon as its part is done."""
    end = first + count
    sizes = {at: min(PART, end - at) for at in range(first, end, PART)}
    one = partial(_run_part, seed, kinds)
    if jobs == 1:
        return _added(map(one, sizes, sizes.values()), count)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return _added(pool.map(one, sizes, sizes.values()), count)


def _run_part(seed: int, kinds: list[str] | None, first: int, count: int) -> Figures:
    return run(count, seed, kinds, first=first)


def _added(parts: Iterable[Figures], count: int) -> Figures:
    total = Figures()
    for part in parts:
        total.add(part)
        print(*part.wrong, sep="\n", end="\n" * bool(part.wrong), flush=True)
        print(f"{sum(map(len, total.found.values())):,} of {count:,} found", end="\r", file=sys.stderr, flush=True)
    return total


def table(figures: Figures) -> list[str]:
    """The figures, for a person."""
    found = sum(map(len, figures.found.values()))
    lines = [
        f"{'':28}{'spared':>10}{'given up':>10}",
        f"{'honest':28}{figures.honest - len(figures.false_kills):10}{len(figures.false_kills):10}",
        f"{'wedged':28}{len(figures.missed):10}{found:10}",
        "",
        f"{'wedge':28}{'found':>10}{'median s':>10}{'95 % s':>10}{'worst s':>10}",
    ]
    everything: list[float] = []
    for name in sorted(figures.found):
        times = sorted(figures.found[name])
        everything += times
        lines.append(f"{name:28}{_shown(times)}")
    if everything:
        lines.append(f"{'all':28}{_shown(sorted(everything))}")
    lines += [
        "",
        f"later than promised: {len(figures.late)}",
        f"looks at /slots: {figures.slots_asked:,}; messages: {figures.messages:,}",
        f"CPU: {figures.cpu_s:.1f} s",
    ]
    return lines


def _shown(times: list[float]) -> str:
    late = times[min(len(times) - 1, int(0.95 * len(times)))]
    return f"{len(times):10}{statistics.median(times):10.1f}{late:10.1f}{times[-1]:10.1f}"


def _named(told: str) -> tuple[str, int]:
    """Kind and seed of a case that went wrong."""
    name, number = told.split(":", 1)[0].split(", not")[0].rsplit(" ", 1)
    return name, int(number)


def _again(told: str) -> None:
    """The story of a case that went wrong."""
    name, number = _named(told)
    trace = Trace()
    Case(number, WEDGES.get(name), trace=trace).run()
    print("\n".join(trace.story(SHOWN_STEPS)))


def main() -> int:
    """0: nobody was wronged or missed."""
    parser = argparse.ArgumentParser("python -m tests.adversary", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="honest cases, and as many wedged ones")
    parser.add_argument("--first", type=int, default=0, help="number of the first case: a later part of a campaign")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--kind", action="append", choices=sorted(WEDGES))
    given = parser.parse_args()
    seed = time.time_ns() % 2**32 if given.seed is None else given.seed
    print(f"SEED={seed}", flush=True)
    figures = run_parts(given.count, seed, given.kind, first=given.first, jobs=given.jobs)
    print("\n".join(table(figures)))
    if figures.wrong:
        print("failed:", *(f"{name} {number}" for name, number in map(_named, figures.wrong)), sep="\n")
        _again(figures.wrong[0])
    return 1 if figures.wrong else 0
