"""`make simulate`: worker-hours in virtual time, with the figures, or the story of the first
failure."""

from __future__ import annotations

import argparse
import os
import random
import sys

from tests.simulation.campaign import run_all, settings, table
from tests.simulation.faults import KINDS
from tests.simulation.world import Failure, Setting

YEAR_H = 8760.0


def main() -> int:
    """0: nothing broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    new, kinds = random.randrange(2**32), sorted(KINDS)
    add("--seed", type=int, default=new, help="of the campaign; a new one each time")
    add("--hours", type=float, default=YEAR_H, help="worker-hours")
    add("--faults", type=float, help="beside those of single requests; 1,000 a year if left out")
    add("--kind", action="append", choices=kinds, default=[], help="of faults; all if left out")
    add("--run", type=int, help="only the run with this seed, for --hours hours")
    add("--requests", type=float, default=10.0, help="per hour, for --run")
    add("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args()
    faults = given.hours * 1000 / YEAR_H if given.faults is None else given.faults
    weights = dict.fromkeys(given.kind, 1.0)
    if given.run is None:
        print(f"SEED={given.seed}")
        chosen = list(settings(given.seed, given.hours, faults, weights))
    else:
        rates = {"requests_per_hour": given.requests, "faults_per_hour": faults / given.hours}
        chosen = [Setting(seed=given.run, hours=given.hours, kinds=weights, **rates)]
    try:
        total = run_all(chosen, given.jobs)
    except Failure as failure:
        setting = failure.setting
        again = "".join(f" --kind {name!r}" for name in setting.kinds)
        played = chosen[: chosen.index(setting) + 1]
        print("The last steps:", *failure.story, "", failure, sep="\n")
        print(f"within {sum(each.hours for each in played):.1f} worker-hours")
        print(
            f"again: python -m tests.simulation --run {setting.seed} --hours {setting.hours!r}"
            f" --faults {setting.faults_per_hour * setting.hours!r} --requests "
            f"{setting.requests_per_hour!r}{again}"
        )
        return 1
    print(*table(total), f"CPU            {sum(os.times()[:4]):12.1f} s", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
