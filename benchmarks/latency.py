"""What the worker adds to the time to the first token, and how quickly it answers under load.

python -m benchmarks.latency [--json FILE]
"""

from __future__ import annotations

import statistics
import time

import requests

from benchmarks.common import HOST, complete, config, free_port, interleave, quantile, report, script, table
from llama_worker import LlamaWorker
from tests.fake_script import Sleep, Text, Tokens, plain_reply

ROUNDS, STREAMS, QUESTIONS = 100, 64, 1000


def first_token_direct(port: int) -> float:
    """Seconds to the first token by a plain `requests` call."""
    began = time.perf_counter()
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with requests.post(f"http://{HOST}:{port}/v1/chat/completions", json=body, stream=True, timeout=30) as response:
        for line in response.iter_lines(chunk_size=1):
            if b'"content"' in line and b"first" in line:
                return time.perf_counter() - began
    raise AssertionError("no token came")


def first_token_worker(worker: LlamaWorker) -> float:
    """Seconds from submit to the token being there to read."""
    began = time.perf_counter()
    admitted = worker.submit("bench", "", "x").get()
    assert admitted["ok"], admitted
    request_id = admitted["request_id"]
    while True:
        chunk = worker.read_output(request_id).get()
        assert chunk["ok"], chunk
        if chunk["text"]:
            seconds = time.perf_counter() - began
            worker.result(request_id).get()
            return seconds


def main() -> None:
    """Measure and print."""
    port = free_port()
    served = script(*plain_reply(Text("first"), Sleep(0.02)))
    with LlamaWorker(config(served, slots=1, port=port)) as worker:
        complete(worker, 1)
        seen = interleave(
            ROUNDS, {"direct": lambda: first_token_direct(port), "worker": lambda: first_token_worker(worker)}
        )
    medians = {name: statistics.median(values) * 1000 for name, values in seen.items()}
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
            worker.get_status(ids[number % STREAMS]).get()
            waits.append((time.perf_counter() - began) * 1000)
            time.sleep(0.002)
    status = {"p50": quantile(waits, 0.5), "p99": quantile(waits, 0.99)}
    rows: list[list[object]] = [
        ["time to first token, direct", medians["direct"]],
        ["time to first token, worker", medians["worker"]],
        ["added", medians["worker"] - medians["direct"]],
        [f"get_status while {STREAMS} streams run, p50", status["p50"]],
        [f"get_status while {STREAMS} streams run, p99", status["p99"]],
    ]
    report("latency", table(["what", "ms"], rows), {"first_token_ms": medians, "status_ms": status})


if __name__ == "__main__":
    main()
