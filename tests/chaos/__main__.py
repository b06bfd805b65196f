"""A chaos campaign from the command line: `python -m tests.chaos --steps 2000 --seed 1`."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import random
import subprocess
import sys
import time

from llama_worker import free_port
from tests.chaos.campaign import Campaign, Violation


def main() -> int:
    """0 where everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--burners", type=int, default=0, help="processes that keep so many cores busy meanwhile")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    faulthandler.enable()
    campaign = Campaign(seed=seed, steps=options.steps, take_port=free_port, say=lambda line: print(line, flush=True))
    began_at = time.monotonic()
    with contextlib.ExitStack() as burners:
        for _ in range(options.burners):
            burner = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
            burners.callback(burner.wait)
            burners.callback(burner.kill)
        try:
            campaign.run()
        except Violation as violation:
            print(f"{campaign.report()}\nFAILED: {violation}", flush=True)
            return 1
    print(f"{campaign.report()}\nheld, in {time.monotonic() - began_at:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
