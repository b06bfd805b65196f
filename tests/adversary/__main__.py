"""`make adversary N= SEED=`: generated servers, the confusion matrix, and the time to each verdict."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.adversary.case import Case, Outcome
from tests.adversary.wedges import WEDGES
from tests.simulation.trace import Trace

SHOWN_STEPS = 40


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
    void: int = 0


def seeds(seed: int) -> Iterator[int]:
    """Of the cases, one after the other."""
    number = 0
    while True:
        yield seed * 1_000_003 + number
        number += 1


def run(count: int, seed: int, kinds: list[str] | None = None) -> Figures:
    """`count` honest cases and as many wedged ones, the kinds in turn."""
    figures, numbers, names = Figures(), seeds(seed), kinds or list(WEDGES)
    for _ in range(count):
        number = next(numbers)
        outcome = Case(number).run()
        figures.honest += 1
        _add(figures, outcome)
        if outcome.given_up_after_s is not None:
            figures.false_kills.append(f"honest {number}: {outcome.detail}")
    for index in range(count):
        _run_wedged(figures, numbers, names[index % len(names)])
    return figures


def _run_wedged(figures: Figures, numbers: Iterator[int], name: str) -> None:
    while True:
        number = next(numbers)
        outcome = Case(number, WEDGES[name]).run()
        _add(figures, outcome)
        if not outcome.is_void:
            break
        figures.void += 1
        if outcome.given_up_after_s is not None:
            figures.false_kills.append(f"{name} {number}, not yet wedged: {outcome.detail}")
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
        f"looks at /slots: {figures.slots_asked:,}; messages: {figures.messages:,}; nobody to hurt: {figures.void:,}",
    ]
    return lines


def _shown(times: list[float]) -> str:
    late = times[min(len(times) - 1, int(0.95 * len(times)))]
    return f"{len(times):10}{statistics.median(times):10.1f}{late:10.1f}{times[-1]:10.1f}"


def _again(told: str) -> None:
    """The story of a case that went wrong."""
    name, number = told.split(":", 1)[0].split(",")[0].rsplit(" ", 1)
    trace = Trace()
    Case(int(number), WEDGES.get(name), trace=trace).run()
    print("\n".join(trace.story(SHOWN_STEPS)))


def main() -> int:
    """0: nobody was wronged or missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="honest cases, and as many wedged ones")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kind", action="append", choices=sorted(WEDGES))
    given = parser.parse_args()
    seed = time.time_ns() % 2**32 if given.seed is None else given.seed
    print(f"SEED={seed}")
    began = time.process_time()
    figures = run(given.count, seed, given.kind)
    print("\n".join(table(figures)))
    print(f"CPU: {time.process_time() - began:.1f} s")
    wrong = [*figures.false_kills, *figures.missed, *figures.late]
    for told in wrong[:10]:
        print(told)
    if wrong:
        print("causes:", Counter(told.split(" ")[0] for told in wrong).most_common(5))
        _again(wrong[0])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
