"""Runs the scenarios and prints the table of docs/responses.md; with `--publish` it is written
there.

python -m tests.responses.clients [--only TEXT] [--record] [--publish]
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from inspect import signature
from types import ModuleType

from tests.responses.clients import browser, codex, hangs, opencode
from tests.responses.clients.coding import CodingClient
from tests.responses.clients.recorded import record
from tests.responses.clients.stage import Stage
from tools.pages import DOCS, write_part

Scenario = Callable[[Stage], object]


def scenarios(module: ModuleType) -> list[Scenario]:
    """All that plays on a stage alone: its client's methods, or its own function in the place of
    one."""
    of_all = [one for one in vars(module).values() if isinstance(one, CodingClient)]
    methods = {name: getattr(client, name) for client in of_all for name in vars(CodingClient)}
    own = {
        name: one
        for name, one in vars(module).items()
        if getattr(one, "__module__", "") == module.__name__
    }
    found = [
        one
        for name, one in {**methods, **own}.items()
        if callable(one) and not name.startswith("_")
    ]
    return [one for one in found if list(signature(one).parameters) == ["on"]]


CLIENTS = {
    "Codex": [*scenarios(codex), *scenarios(hangs)],
    "OpenCode": scenarios(opencode),
    "Chromium": scenarios(browser),
}


def passes(client: str, scenario: Scenario, *, keep: bool) -> bool:
    """Whether it does; why not goes to stderr."""
    began = time.monotonic()
    print(f"{client} {scenario.__name__}", end=" ", file=sys.stderr, flush=True)
    try:
        with Stage() as on:
            scenario(on)
    except Exception:
        traceback.print_exc()
        return False
    print(f"passes, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    if keep:
        record(client.lower(), scenario.__name__, on.bodies)
    return True


def table(verdicts: dict[tuple[str, str], bool]) -> str:
    """By client and scenario: whether it passes."""
    lines = [f"| scenario | {' | '.join(CLIENTS)} |", "| --- |" + " --- |" * len(CLIENTS)]
    for name in dict.fromkeys(scenario for _, scenario in verdicts):
        cells = [
            {True: "passes", False: "fails", None: ""}[verdicts.get((client, name))]
            for client in CLIENTS
        ]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    passed = [[good for (of, _), good in verdicts.items() if of == client] for client in CLIENTS]
    lines.append(f"| passed | {' | '.join(f'{sum(goods)} of {len(goods)}' for goods in passed)} |")
    return "\n".join(lines)


def main() -> None:
    """Exit code 1 where one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.responses.clients")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="the scenarios whose names contain it"
    )
    parser.add_argument("--record", action="store_true", help="keep what the clients sent")
    parser.add_argument(
        "--publish", action="store_true", help="write the table into docs/responses.md"
    )
    given = parser.parse_args()
    if given.only and given.publish:
        parser.error("--publish is for a run of all of them")
    verdicts = {
        (client, scenario.__name__): passes(client, scenario, keep=given.record)
        for client, scenarios in CLIENTS.items()
        for scenario in scenarios
        if given.only in f"{client.lower()} {scenario.__name__}"
    }
    text = table(verdicts)
    print(text)
    if given.publish:
        write_part(DOCS / "responses.md", "clients", text)
    sys.exit(0 if all(verdicts.values()) else 1)


if __name__ == "__main__":
    main()
