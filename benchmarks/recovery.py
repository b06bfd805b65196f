"""How quickly the server's death is known, and the server is back.

python -m benchmarks.recovery [--json FILE]
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from dataclasses import replace

from benchmarks.common import config, report, script, server, table
from llama_worker import LlamaWorker, RestartPolicy
from llama_worker.testing.scripts import Reset, Role, Script, Text, Tokens, plain_reply

ROUNDS = 10


def death(served: Script) -> tuple[float, float]:
    """Seconds from SIGKILL to the terminal status, and to READY again."""
    policy = RestartPolicy(restart_backoff_s=0.0)
    with LlamaWorker(replace(config(served, slots=1), restart=policy)) as worker:
        admitted = worker.submit("bench", "", "x").get()
        assert admitted["ok"], admitted
        while not (worker.read_output(admitted["request_id"]).get())["text"]:  # type: ignore[typeddict-item]
            time.sleep(0.001)
        began = time.perf_counter()
        os.kill(worker.get_worker_status().get()["pid"], signal.SIGKILL)
        result = worker.result(admitted["request_id"]).get(timeout=10)
        ended = time.perf_counter() - began
        assert result["ok"], result
        assert result["fail_reason"] == "server_died", result
        worker.start().get(timeout=10)
        return ended, time.perf_counter() - began


def broken_connection(served: Script) -> float:
    """Seconds from submit to the terminal status, where the connection breaks at once."""
    with LlamaWorker(config(served, slots=1)) as worker:
        began = time.perf_counter()
        admitted = worker.submit("bench", "", "x").get()
        assert admitted["ok"], admitted
        worker.result(admitted["request_id"]).get(timeout=10)
        return time.perf_counter() - began


def own_start(served: Script) -> float:
    """Seconds that the server takes by itself to answer."""
    began = time.perf_counter()
    with server(served):
        return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    served = script(*plain_reply(Tokens(100_000, 0.01)))
    deaths = [death(served) for _ in range(ROUNDS)]
    broken = [broken_connection(script(Role(), Text("x"), Reset())) for _ in range(ROUNDS)]
    starts = [own_start(served) for _ in range(ROUNDS)]
    medians = {
        "death to terminal status": statistics.median(seconds for seconds, _ in deaths) * 1000,
        "death to READY again, no backoff": statistics.median(seconds for _, seconds in deaths)
        * 1000,
        "the server's own start": statistics.median(starts) * 1000,
        "broken connection to terminal status": statistics.median(broken) * 1000,
    }
    report("recovery", table(["what", "ms (median)"], list(medians.items())), medians)


if __name__ == "__main__":
    main()
