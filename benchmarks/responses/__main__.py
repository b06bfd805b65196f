"""The scenarios of tests/responses/scenarios, against llama-server's own Responses API and through
the proxy.

python -m benchmarks.responses [--json FILE] [--peer COMMAND]

Needs the npm packages that `make test-responses` installs. `--peer`: another proxy, that takes
LLAMA_CPP_URL, PROXY_HOST and PROXY_PORT from its environment, e.g. --peer 'node proxy.mjs'.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from benchmarks.common import HOST, report, table
from benchmarks.responses.load import STREAMS, failing_streams, firehose, slow_reader_rss_bytes
from benchmarks.responses.scenarios import lists
from benchmarks.responses.servers import OURS, llama_server, proxy
from tests.responses.relay import Relay
from tests.responses.scenarios.node import is_installed

DIRECT = "direct"
Figures = dict[str, Any]


def measure(base_url: str, command: Sequence[str] | None) -> Figures:
    """All rows of a column. `command` starts the proxy once more, for its memory; None: there is
    none."""
    failures = {name: run(base_url) for name, (_, run) in lists().items()}
    failed = {
        "new": failing_streams(base_url, kept=False),
        "kept": failing_streams(base_url, kept=True),
    }
    figures: Figures = {"failures": failures, "failed_streams": failed, "memory_bytes": None}
    if command is not None:
        with firehose() as upstream, proxy(command, upstream) as fresh:
            figures["memory_bytes"] = {
                "at rest": fresh.peak_rss_bytes(),
                "slow reader": slow_reader_rss_bytes(fresh),
            }
    return figures


def rows(columns: dict[str, Figures]) -> list[list[object]]:
    """The table."""
    found: list[list[object]] = []
    for name, (count, _) in lists().items():
        passed = [count - len(figures["failures"][name]) for figures in columns.values()]
        found.append([f"{name}, scenarios that go well of {count}", *passed])
    for kind in ("new", "kept"):
        failed = [figures["failed_streams"][kind] for figures in columns.values()]
        found.append([f"streams that fail, of {STREAMS}, connections {kind}", *failed])
    for when in ("at rest", "slow reader"):
        held = [figures["memory_bytes"] for figures in columns.values()]
        found.append(
            [
                f"memory, {when}, MB",
                *("-" if memory is None else round(memory[when] / 1e6) for memory in held),
            ]
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.responses", description="What clients get."
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures, and why what failed did, to this file"
    )
    parser.add_argument(
        "--peer", metavar="COMMAND", type=shlex.split, help="measure this proxy as well"
    )
    peer = parser.parse_args().peer
    if not is_installed():
        raise SystemExit("the clients of npm are not there: run `make test-responses` first")
    columns: dict[str, Figures] = {}
    with llama_server() as port, Relay((HOST, port)) as relay:
        columns[DIRECT] = measure(f"{relay.url}/v1", None)
        for name, command in {"proxy": OURS, **({"peer": peer} if peer else {})}.items():
            with proxy(command, relay.url) as running:
                columns[name] = measure(running.base_url, command)
    report("responses", table(["what", *columns], rows(columns)), columns)
    for name, figures in columns.items():
        for client, failures in figures["failures"].items():
            for scenario, why in failures.items():
                print(f"{name}: {client}: {scenario}: {why}".replace("\n", " ")[:200])


if __name__ == "__main__":
    main()
