"""What the benchmarks share: a scripted server in a process of its own, interleaved rounds,
tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_worker import LlamaWorker, TimeoutProfile, WorkerConfig
from llama_worker.testing.scripts import Script, ScriptedReply, scripted_server_cmd
from tests.ports import held_ports

HOST = "127.0.0.1"
_held = contextlib.ExitStack()  # as long as the process lives
# no test that runs on this machine meanwhile takes it away
take_port = _held.enter_context(held_ports())


def script(*steps: Any) -> Script:
    """A server that always replies with these steps and takes any number of requests at once."""
    return Script(replies=[ScriptedReply(list(steps))], limit_slots=False)


def config(
    served: Script, *, slots: int, name: str = "bench", journal: Path | None = None
) -> WorkerConfig:
    """A worker's configuration for the scripted server."""
    port = take_port()
    return WorkerConfig(
        name,
        HOST,
        port,
        scripted_server_cmd(served, host=HOST, port=port, slots=slots, journal=journal),
        slots=slots,
        max_tokens=None,
        timeouts=TimeoutProfile.normal(),
    )


@contextlib.contextmanager
def server(served: Script, *, slots: int = 1) -> Iterator[str]:
    """The scripted server without a worker; its base URL."""
    port = take_port()
    process = subprocess.Popen(scripted_server_cmd(served, host=HOST, port=port, slots=slots))
    try:
        url = f"http://{HOST}:{port}"
        deadline = time.monotonic() + 10
        while True:
            try:
                urllib.request.urlopen(f"{url}/v1/models", timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        yield url
    finally:
        process.kill()
        process.wait()


def complete(worker: LlamaWorker, requests: int) -> list[int]:
    """Run so many requests side by side to their end; the characters of each."""
    ids = []
    for _ in range(requests):
        admitted = worker.submit("bench", "", "x").get()
        assert admitted["ok"], admitted
        ids.append(admitted["request_id"])
    chars = []
    for request_id in ids:
        result = worker.result(request_id).get()
        assert result["ok"], result
        assert result["state"] == "completed", result
        chars.append(len(result["text"]))
    return chars


def interleave(rounds: int, measures: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Each measure once per round, in turn, so that a slow spell of the machine meets them all."""
    seen: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            seen[name].append(measure())
    return seen


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns, aligned."""
    cells = [
        [str(cell) if not isinstance(cell, float) else f"{cell:.2f}" for cell in row]
        for row in [header, *rows]
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile of a sample."""
    return (
        statistics.quantiles(values, n=100, method="inclusive")[round(q * 100) - 1]
        if len(values) > 1
        else values[0]
    )


def report(name: str, text: str, data: Mapping[str, Any]) -> None:
    """Print the table; write the JSON where --json says."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options, _ = parser.parse_known_args(sys.argv[1:])
    print(f"{name}\n{text}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
