"""Many runs of different kinds, added up."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from hashlib import sha256

from tests.simulation.dice import Dice
from tests.simulation.many_runs import collected_at_the_end, done_by, times_by_name
from tests.simulation.world import Report, Setting, World


def settings(
    seed: int, hours: float, faults: float, kinds: Mapping[str, float] | None = None
) -> Iterable[Setting]:
    """Runs that make up `hours` worker-hours in all and about `faults` faults.

    Most of the faults come in hectic runs of a few hours, with a request every few minutes; the
    rest in runs of days in which little happens.
    """
    dice = Dice(seed)
    hectic_share = 0.02
    hectic_hours, calm_hours = hours * hectic_share, hours * (1 - hectic_share)
    hectic_rate, calm_rate = 0.6 * faults / hectic_hours, 0.4 * faults / calm_hours
    left = {True: hectic_hours, False: calm_hours}
    while left[True] > 0 or left[False] > 0:
        is_hectic = left[True] > 0 and (left[False] <= 0 or dice.chance(0.7))
        span = min(
            left[is_hectic], dice.between(2.0, 6.0) if is_hectic else dice.between(48.0, 240.0)
        )
        left[is_hectic] -= span
        if left[is_hectic] < 0.01:
            left[is_hectic] = 0.0
        rate = hectic_rate if is_hectic else calm_rate
        yield Setting(
            seed=int(dice.random() * 2**48),
            hours=span,
            requests_per_hour=11 * max(rate, 1.0) if is_hectic else max(1.0, 2 * rate),
            faults_per_hour=rate,
            kinds=dict(kinds or {}),
        )


def run_all(chosen: Iterable[Setting], jobs: int = 1) -> Report:
    """Every run, by so many processes; raises the first Failure."""
    total = Report()
    for report in done_by(jobs, _run, chosen):
        total.add(report)
    total.digest = sha256(total.digest.encode()).hexdigest()[:16]
    return total


def _run(setting: Setting) -> Report:
    with collected_at_the_end():
        return World(setting).run()


def table(total: Report) -> list[str]:
    """The figures, for a person."""
    times = times_by_name(total.found)
    shown = {
        name: f"{statistics.median(each):12.1f}{each[-1]:12.1f}" for name, each in times.items()
    }
    return [
        f"worker-hours   {total.hours:12,.0f}",
        f"requests       {total.requests:12,}",
        f"faults         {sum(total.faults.values()):12,}",
        f"messages       {total.messages:12,}",
        f"restarts       {total.restarts:12,}",
        f"false kills    {0:12,}   (the first one ends the campaign)",
        f"missed wedges  {0:12,}   (the same)",
        f"trace hash     {total.digest:>16}",
        "",
        f"{'fault':32}{'count':>8}{'found':>8}{'median s':>12}{'worst s':>12}",
        *(
            f"{name:32}{count:8}{len(times.get(name, ())):8}{shown.get(name, '')}"
            for name, count in sorted(total.faults.items())
        ),
        "",
        f"{'how requests ended':32}{'count':>8}",
        *(f"{name:32}{count:8}" for name, count in sorted(total.outcomes.items())),
    ]
