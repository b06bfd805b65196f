"""`make simulate`: worker-hours in virtual time, with the figures, or the story of the first failure."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.campaign import run_all, settings, table
from tests.simulation.faults import KINDS
from tests.simulation.world import Failure, Setting

YEAR_H = 8760.0


def main() -> int:
    """0: nothing broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of the campaign; a new one each time if left out")
    parser.add_argument("--hours", type=float, default=YEAR_H, help="worker-hours")
    parser.add_argument("--faults", type=float, default=None, help="how many, about; 1,000 a year if left out")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="of faults; all if left out")
    parser.add_argument("--run", type=int, default=None, help="only the run with this seed, for --hours hours")
    parser.add_argument("--requests", type=float, default=None, help="per hour, for --run")
    given = parser.parse_args()
    seed = time.time_ns() % 2**32 if given.seed is None else given.seed
    faults = given.hours * 1000 / YEAR_H if given.faults is None else given.faults
    kinds = dict.fromkeys(given.kind or (), 1.0)
    began = time.process_time()
    try:
        if given.run is not None:
            chosen = [
                Setting(
                    seed=given.run,
                    hours=given.hours,
                    faults_per_hour=faults / given.hours,
                    requests_per_hour=given.requests or 10.0,
                    kinds=kinds,
                )
            ]
        else:
            print(f"SEED={seed}")
            chosen = list(settings(seed, given.hours, faults, kinds))
        total = run_all(chosen)
    except Failure as failure:
        told(failure)
        return 1
    print("\n".join(table(total)))
    print(f"CPU            {time.process_time() - began:12.1f} s")
    return 0


def told(failure: Failure) -> None:
    """The story of a failure, and how to see it again."""
    setting = failure.setting
    print("The last steps:", *failure.story, sep="\n")
    print(f"\n{failure}")
    kinds = "".join(f" --kind {name!r}" for name in setting.kinds)
    faults = setting.faults_per_hour * setting.hours
    print(
        f"again: python -m tests.simulation --run {setting.seed} --hours {setting.hours!r} --faults {faults!r}"
        f" --requests {setting.requests_per_hour!r}{kinds}"
    )


if __name__ == "__main__":
    sys.exit(main())
