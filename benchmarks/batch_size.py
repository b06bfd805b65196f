"""What the server's logical batch (`--batch-size`) costs a prompt, and whoever waits for one.

    LLAMA_SERVER=... LLAMA_MODEL=... python -m benchmarks.batch_size [--write] [--json FILE]

`--write` puts the table into docs/how-to/slow-hardware.md. Two slots; a batch is what everything
waits for: a neighbour's next token, and the notice that a client has gone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import requests

from benchmarks.common import HOST, interleave, report, table, take_port
from llama_worker import llama_server_cmd
from tools.found import find_model, find_server
from tools.pages import DOCS, write_part

PAGE = DOCS / "how-to" / "slow-hardware.md"
SIZES = (2048, 512)
PROMPT_TOKENS, ROUNDS, STARTING_S = 4032, 2, 60.0


@contextlib.contextmanager
def server(batch_tokens: int) -> Iterator[int]:
    """A server with that logical batch; its port."""
    port = take_port()
    words = ("--batch-size", str(batch_tokens), "--ctx-size", str(4 * PROMPT_TOKENS), "--no-ui")
    command = llama_server_cmd(
        find_model(), host=HOST, port=port, slots=2, executable=find_server(), extra_args=words
    )
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        try:
            wait_ready(port)
            yield port
        finally:
            process.kill()


def wait_ready(port: int) -> None:
    give_up_at = time.monotonic() + STARTING_S
    while time.monotonic() < give_up_at:
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(f"http://{HOST}:{port}/health").ok:
                return
        time.sleep(0.05)
    raise TimeoutError(f"no server on port {port}")


@contextlib.contextmanager
def stream(port: int, prompt_tokens: int, **params: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The records of a completion, as they come; the connection is closed at the end of the
    block."""
    body = {
        "prompt": [17] * prompt_tokens,
        "cache_prompt": False,
        "ignore_eos": True,
        "stream": True,
        "return_progress": True,
        **params,
    }
    with requests.post(f"http://{HOST}:{port}/completion", json=body, stream=True) as response:
        response.raise_for_status()
        lines = response.iter_lines(chunk_size=1)
        yield (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))


def alone(port: int) -> tuple[float, int]:
    """(seconds to the first token of a prompt that has the server to itself, progress reports)."""
    began_at, reports = time.monotonic(), 0
    with stream(port, PROMPT_TOKENS, n_predict=1) as records:
        for record in records:
            if "prompt_progress" not in record:
                break
            reports += 1
    return time.monotonic() - began_at, reports


def beside(port: int) -> tuple[float, float]:
    """(the longest wait of a generating neighbour for a token, seconds to the first token of the
    prompt)."""
    tokens_at, is_over = [], threading.Event()

    def generate() -> None:
        with stream(port, 16, n_predict=-1) as records:
            for _ in records:
                tokens_at.append(time.monotonic())
                if is_over.is_set():
                    return

    neighbour = threading.Thread(target=generate)
    neighbour.start()
    while len(tokens_at) < 10:
        time.sleep(0.01)
    began_at = time.monotonic()
    first_token_s, _ = alone(port)
    is_over.set()
    neighbour.join()
    during = [at for at in tokens_at if at >= began_at]
    return max(b - a for a, b in itertools.pairwise(during)), first_token_s


def cancelled(port: int) -> float:
    """Seconds from the close of a connection, early in a prompt, until its slot takes the next
    request."""
    with stream(port, PROMPT_TOKENS, n_predict=1, id_slot=0) as records:
        next(records)
        time.sleep(0.2)
    closed_at = time.monotonic()
    with stream(port, 16, n_predict=1, id_slot=0) as records:
        next(records)
    return time.monotonic() - closed_at


Measured = dict[str, list[float]]


def measured() -> dict[int, Measured]:
    """For each size the values of each measure, of all rounds."""
    values: dict[int, Measured] = {size: {} for size in SIZES}

    def round_of(size: int) -> Callable[[], float]:
        def once() -> float:
            began_at = time.monotonic()
            with server(size) as port:
                prompt_s, reports = alone(port)
                gap_s, beside_s = beside(port)
                cancel_s = cancelled(port)
            told = {
                "prompt_s": prompt_s,
                "reports": float(reports),
                "gap_s": gap_s,
                "beside_s": beside_s,
                "cancel_s": cancel_s,
            }
            print(f"--batch-size {size}: {told}", file=sys.stderr, flush=True)
            for name, value in told.items():
                values[size].setdefault(name, []).append(value)
            return time.monotonic() - began_at

        return once

    interleave(ROUNDS, {str(size): round_of(size) for size in SIZES})
    return values


def main() -> None:
    """Measure and print: of each measure the least of the rounds, since other work only ever
    adds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_size")
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    options, _ = parser.parse_known_args()
    values = measured()
    best = {size: {name: min(seen) for name, seen in of.items()} for size, of in values.items()}
    header = [
        "--batch-size",
        "prompt alone, s",
        "reports",
        "beside a generation, s",
        "its longest gap, s",
        "cancel to next, s",
    ]
    rows: list[list[object]] = [
        [size, of["prompt_s"], int(of["reports"]), of["beside_s"], of["gap_s"], of["cancel_s"]]
        for size, of in best.items()
    ]
    text = table(header, rows)
    report("batch_size", text, {str(size): of for size, of in best.items()})
    if options.write:
        write_part(PAGE, "batch-size", f"```text\n{text}\n```")


if __name__ == "__main__":
    main()
