"""`make adversary N= SEED=`: generated servers, the confusion matrix, and the time to each verdict.

Case number i of a campaign is the same wherever it runs: its parts may be given to processes.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tests.adversary.case import Case, Outcome
from tests.adversary.wedges import WEDGES
from tests.simulation.many_runs import Figures, collected_at_the_end, done_by
from tests.simulation.trace import Trace

SHOWN_STEPS = 40
# cases of one part at most: a process that does more keeps the others waiting at the end
_PART = 250
_SEED_STEP, _RETRY_STEP = 1_000_003, 10**12


class Found(NamedTuple):
    """A wedged server that was given up, so many seconds after its wedge began."""

    kind: str
    after_s: float
    seed: int


class Wrong(NamedTuple):
    """A case that went wrong."""

    kind: str
    seed: int
    detail: str


@dataclass
class CaseFigures(Figures):
    honest: int = 0
    false_kills: list[Wrong] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    late: list[Wrong] = field(default_factory=list)
    missed: list[Wrong] = field(default_factory=list)
    slots_asked: int = 0
    messages: int = 0

    @property
    def wrong(self) -> list[Wrong]:
        return [*self.false_kills, *self.missed, *self.late]


def run(count: int, seed: int, kinds: Sequence[str] = (), *, jobs: int = 1) -> CaseFigures:
    """`count` wedged servers, the kinds in turn, and as many honest ones.

    What goes wrong is printed as soon as its part is done.
    """
    size = min(_PART, -(-count // jobs))
    parts = [range(at, min(at + size, count)) for at in range(0, count, size)]
    play = partial(_play_part, seed, kinds or tuple(WEDGES))
    total = CaseFigures()
    for part in done_by(jobs, play, parts):
        total.add(part)
        print(*part.wrong, sep="\n", end="\n" * bool(part.wrong), flush=True)
        print(f"{len(total.found):,} of {count:,} found", end="\r", file=sys.stderr, flush=True)
    return total


def _play_part(seed: int, kinds: Sequence[str], indices: range) -> CaseFigures:
    figures = CaseFigures()
    with collected_at_the_end():
        for index in indices:
            _play(figures, seed * _SEED_STEP + index, kinds[index % len(kinds)])
    return figures


def _play(figures: CaseFigures, number: int, name: str) -> None:
    """A wedged server and an honest one; a wedge that found nobody to hurt has left an honest one,
    and comes again."""
    outcome = _counted(figures, number, name)
    if not outcome.is_void:
        _counted(figures, number, "honest")
    while outcome.is_void:
        number += _RETRY_STEP
        outcome = _counted(figures, number, name)
    after_s, promised_s = outcome.given_up_after_s, outcome.promised_s
    if after_s is None:
        figures.missed.append(Wrong(name, number, outcome.detail))
        return
    figures.found.append(Found(name, after_s, number))
    if promised_s is not None and after_s > promised_s:
        figures.late.append(
            Wrong(name, number, f"{outcome.detail} ({after_s:.1f} s, promised {promised_s:.1f} s)")
        )


def _counted(figures: CaseFigures, number: int, name: str) -> Outcome:
    outcome = Case(number, WEDGES.get(name)).run()
    figures.slots_asked += outcome.slots_asked
    figures.messages += outcome.messages
    if outcome.is_void or name == "honest":
        figures.honest += 1
        if outcome.given_up_after_s is not None:
            figures.false_kills.append(Wrong(name, number, outcome.detail))
    return outcome


def table(figures: CaseFigures) -> list[str]:
    """The figures, for a person."""
    by_time = sorted(figures.found, key=lambda each: each.after_s)
    rows = {kind: [each for each in by_time if each.kind == kind] for kind in sorted(WEDGES)}
    rows["all"] = by_time
    return [
        f"{'':28}{'spared':>10}{'given up':>10}",
        f"{'honest':28}{figures.honest - len(figures.false_kills):10}{len(figures.false_kills):10}",
        f"{'wedged':28}{len(figures.missed):10}{len(figures.found):10}",
        "",
        f"{'wedge':28}{'found':>10}{'median s':>10}{'95 % s':>10}{'worst s':>10}  of seed",
        *(
            f"{name:28}{len(row):10}{statistics.median(each.after_s for each in row):10.1f}"
            f"{row[int(0.95 * len(row))].after_s:10.1f}{row[-1].after_s:10.1f}  {row[-1].seed}"
            for name, row in rows.items()
            if row
        ),
        "",
        f"later than promised: {len(figures.late)}",
        f"looks at /slots: {figures.slots_asked:,}; messages: {figures.messages:,}",
    ]


def main() -> int:
    """0: nobody was wronged or missed."""
    parser = argparse.ArgumentParser("python -m tests.adversary", description=__doc__)
    parser.add_argument(
        "--count", type=int, default=300, help="honest cases, and as many wedged ones"
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--kind", action="append", choices=sorted(WEDGES), default=[])
    given = parser.parse_args()
    print(f"SEED={given.seed}", flush=True)
    figures = run(given.count, given.seed, given.kind, jobs=given.jobs)
    print(*table(figures), f"CPU: {sum(os.times()[:4]):.1f} s", sep="\n")
    if not figures.wrong:
        return 0
    print("failed:", *(f"{wrong.kind} {wrong.seed}" for wrong in figures.wrong), sep="\n")
    trace, first = Trace(), figures.wrong[0]
    Case(first.seed, WEDGES.get(first.kind), trace=trace).run()
    print(*trace.story(SHOWN_STEPS), sep="\n")
    return 1
