"""Runs the scenarios and prints the table of docs/responses.md.

python -m tests.responses.clients [--only TEXT] [--record]
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from tests.responses.clients import browser, codex, opencode
from tests.responses.clients.recorded import record
from tests.responses.clients.stage import Json

Scenario = Callable[[], list[Json]]
CLIENTS: dict[str, Sequence[Scenario]] = {
    "codex": codex.SCENARIOS,
    "opencode": opencode.SCENARIOS,
    "chromium": browser.SCENARIOS,
}


def passes(client: str, scenario: Scenario, *, keep: bool) -> bool:
    """Whether it does; why not goes to stderr."""
    began = time.monotonic()
    try:
        bodies = scenario()
    except Exception:
        traceback.print_exc()
        return False
    finally:
        print(f"{client} {scenario.__name__}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    if keep:
        record(client, scenario.__name__, bodies)
    return True


def main() -> None:
    """Exit code 1 where one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.responses.clients")
    parser.add_argument("--only", metavar="TEXT", default="", help="the scenarios whose names contain it")
    parser.add_argument("--record", action="store_true", help="keep what the clients sent")
    given = parser.parse_args()
    failed = 0
    print("| scenario | client | |\n| --- | --- | --- |")
    for client, scenarios in CLIENTS.items():
        for scenario in scenarios:
            if given.only in f"{client} {scenario.__name__}":
                good = passes(client, scenario, keep=given.record)
                failed += not good
                name = scenario.__name__.replace("_", " ")
                print(f"| {name} | {client} | {'passes' if good else 'fails'} |", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
