"""What the worker adds on the way to the server and back, and how quickly it answers under load.

    python -m benchmarks.latency [--json FILE]

The server writes down when a request reached it and when it was about to send the first token.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from benchmarks.common import HOST, complete, config, interleave, quantile, report, script, table
from llama_worker import LlamaWorker
from llama_worker.testing.scripts import JournalReader, Note, Sleep, Text, Tokens, plain_reply

ROUNDS, STREAMS, QUESTIONS = 200, 64, 500
BLOCK = 20  # rounds; the best block's medians count, since noise only ever adds
PARTS = ("to the server", "token to the reader", "in all")


def direct(port: int) -> tuple[float, float]:
    """By a plain `requests` call: when it began, and when the first token was there."""
    began = time.time()
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with requests.post(
        f"http://{HOST}:{port}/v1/chat/completions", json=body, stream=True, timeout=30
    ) as response:
        for line in response.iter_lines(chunk_size=1):
            if b"first" in line:
                return began, time.time()
    raise AssertionError("no token came")


def through(worker: LlamaWorker) -> tuple[float, float]:
    """From submit to the token being there to read."""
    began = time.time()
    admitted = worker.submit("bench", "", "x").get()
    assert admitted["ok"], admitted
    chunk = worker.read_output(admitted["request_id"], wait=True).get()
    there = time.time()
    assert chunk["ok"], chunk
    assert chunk["text"], chunk
    worker.result(admitted["request_id"]).get()
    return began, there


def first_token() -> dict[str, dict[str, float]]:
    """The milliseconds of each part, by each way: medians of 20 rounds, the least of them."""
    served = script(*plain_reply(Sleep(0.01), Note("token"), Text("first"), Sleep(0.02)))
    with tempfile.TemporaryDirectory() as directory:
        journal = JournalReader(Path(directory) / "journal")
        settings = config(served, slots=1, journal=journal.path)
        with LlamaWorker(settings) as worker:
            complete(worker, 1)
            spans: dict[str, list[tuple[float, float]]] = {"direct": [], "worker": []}

            def measure(name: str, call: Callable[[], tuple[float, float]]) -> Callable[[], float]:
                def once() -> float:
                    spans[name].append(call())
                    return 0.0

                return once

            interleave(
                ROUNDS,
                {
                    "direct": measure("direct", lambda: direct(settings.port)),
                    "worker": measure("worker", lambda: through(worker)),
                },
            )
        reached = [_at(fact) for fact in journal.facts("request", path="/v1/chat/completions")][1:]
        sent = [_at(fact) for fact in journal.facts("note", name="token")][1:]
    medians = {}
    for offset, name in enumerate(spans):
        rounds = list(zip(spans[name], reached[offset::2], sent[offset::2], strict=True))
        parts = [
            (at - began, there - token, at - began + there - token)
            for (began, there), at, token in rounds
        ]
        blocks = [parts[begin : begin + BLOCK] for begin in range(0, len(parts), BLOCK)]
        medians[name] = {
            part: min(statistics.median(each[number] for each in block) for block in blocks) * 1000
            for number, part in enumerate(PARTS)
        }
    return medians


def status_under_load() -> dict[str, float]:
    """Milliseconds of `get_status` while many streams run."""
    with LlamaWorker(config(script(*plain_reply(Tokens(100_000, 0.01))), slots=STREAMS)) as worker:
        ids = []
        for _ in range(STREAMS):
            admitted = worker.submit("bench", "", "x").get()
            assert admitted["ok"], admitted
            ids.append(admitted["request_id"])
        time.sleep(1.0)
        waits = []
        for number in range(QUESTIONS):
            began = time.perf_counter()
            status = worker.get_status(ids[number % STREAMS]).get()
            waits.append((time.perf_counter() - began) * 1000)
            assert status["ok"], status
            assert status["state"] == "running", status
            time.sleep(0.002)
    return {"p50": quantile(waits, 0.5), "p99": quantile(waits, 0.99)}


def _at(fact: dict[str, Any]) -> float:
    return float(fact["at"])


def main() -> None:
    """Measure and print."""
    medians, status = first_token(), status_under_load()
    added = {part: medians["worker"][part] - medians["direct"][part] for part in PARTS}
    rows: list[list[object]] = [
        [part, medians["direct"][part], medians["worker"][part], added[part]] for part in PARTS
    ]
    text = table(["first token, median ms", "requests", "worker", "added"], rows)
    rows = [["p50", status["p50"]], ["p99", status["p99"]]]
    text += "\n\n" + table([f"get_status while {STREAMS} streams run", "ms"], rows)
    report("latency", text, {"first_token_ms": medians, "added_ms": added, "status_ms": status})


if __name__ == "__main__":
    main()
