"""A chaos campaign from the command line: `python -m tests.chaos --steps 2000 --seed 1`."""

import argparse
import contextlib
import faulthandler
import time

from llama_worker import free_port
from tests.chaos.campaign import run_campaign
from tests.reality.campaign import burner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add, new = parser.add_argument, time.time_ns() % (1 << 32)
    add("--steps", type=int, default=2000)
    add("--seed", type=int, default=new, help="default: a new one, printed")
    add("--burners", type=int, default=0, help="processes that keep so many cores busy meanwhile")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    faulthandler.enable()
    began_at = time.monotonic()
    with contextlib.ExitStack() as burning:
        for _ in range(options.burners):
            burning.enter_context(burner())
        happened = run_campaign(options.seed, options.steps, free_port)
    for (title, text), count in sorted(happened.items()):
        print(f"{title:10}{text:32}{count:6}")
    print(f"held, in {time.monotonic() - began_at:.0f} s")


if __name__ == "__main__":
    main()
