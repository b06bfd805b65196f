"""What the worker costs on a real llama-server, and what the server shows meanwhile; on whatever it
computes.

    LLAMA_SERVER=... LLAMA_MODEL=... python -m benchmarks.real_server [--streams 64] [--tokens 64]
    [--json FILE]

With a GPU and the extra `nvidia`, the GPU's part is in the tables, too. Nothing else should use
machine or GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import requests

from benchmarks.common import HOST, interleave, report, table
from llama_worker import LlamaWorker, RestartPolicy, WorkerState
from llama_worker.runtime.probes.liveness_probes import NvidiaProbe, load_nvml, process_evidence
from tools.found import find_model, find_server

ROUNDS, KILLS, TOKENS_PER_SLOT = 10, 10, 512
WATCHED_S, LOOK_EVERY_S = 3.0, 0.2
PHASES = ("idle", "prefill", "decode")


def worker_of(slots: int, context_tokens: int) -> LlamaWorker:
    """READY, without a system prompt, so that both ways send the same."""
    worker = LlamaWorker.from_model(
        find_model(),
        slots=slots,
        executable=find_server(),
        extra_args=["--ctx-size", str(context_tokens), "--no-ui"],
        bios_provider=None,
        restart=RestartPolicy(
            restart_backoff_s=0.01, backoff_factor=1.0, max_restarts_per_window=1000
        ),
    )
    worker.start().get()
    return worker


def params(tokens: int) -> dict[str, Any]:
    return {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def direct(port: int, prompt: str, tokens: int) -> tuple[float, float]:
    """Seconds to the first token and to the end, by a plain `requests` call."""
    began, first = time.monotonic(), 0.0
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, **params(tokens)}
    with requests.post(
        f"http://{HOST}:{port}/v1/chat/completions", json=body, stream=True
    ) as response:
        for line in response.iter_lines(chunk_size=1):
            if not first and b'"content":"' in line:
                first = time.monotonic()
    return first - began, time.monotonic() - began


def through(worker: LlamaWorker, prompt: str, tokens: int) -> tuple[float, float]:
    """The same by the worker: from `submit` to the result."""
    began = time.monotonic()
    admitted = worker.submit("bench", "", prompt, params=params(tokens)).get()
    assert admitted["ok"], admitted
    result = worker.result(admitted["request_id"]).get()
    assert result["ok"], result
    assert result["state"] == "completed", result
    return result["timings"]["ttft_s"], time.monotonic() - began


def single(worker: LlamaWorker, port: int, tokens: int) -> dict[str, dict[str, float]]:
    """One stream at a time, in turn by each way: the median milliseconds to the first token, and
    tokens a second."""
    spans: dict[str, list[tuple[float, float]]] = {"requests": [], "worker": []}

    def measure(way: str, call: Callable[[], tuple[float, float]]) -> Callable[[], float]:
        def once() -> float:
            spans[way].append(call())
            return 0.0

        return once

    prompt = "Count."
    direct(port, prompt, tokens)  # the prompt is cached from here on
    interleave(
        ROUNDS,
        {
            "requests": measure("requests", lambda: direct(port, prompt, tokens)),
            "worker": measure("worker", lambda: through(worker, prompt, tokens)),
        },
    )
    return {
        way: {
            "first_token_ms": statistics.median(first for first, _ in seen) * 1000,
            "tokens_per_s": tokens / statistics.median(total for _, total in seen),
        }
        for way, seen in spans.items()
    }


def many(worker: LlamaWorker, port: int, streams: int, tokens: int) -> dict[str, float]:
    """Tokens a second of so many streams side by side: by a thread each with `requests`, and by the
    worker."""

    def by_threads() -> float:
        began = time.monotonic()
        threads = [
            threading.Thread(target=direct, args=(port, f"{n}", tokens)) for n in range(streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return streams * tokens / (time.monotonic() - began)

    def by_worker() -> float:
        began = time.monotonic()
        admitted = [
            worker.submit("bench", "", f"{n}", params=params(tokens)).get() for n in range(streams)
        ]
        for each in admitted:
            assert each["ok"], each
            worker.result(each["request_id"]).get()
        return streams * tokens / (time.monotonic() - began)

    by_threads()
    seen = interleave(3, {"requests": by_threads, "worker": by_worker})
    return {way: statistics.median(values) for way, values in seen.items()}


class Watch:
    """What the server's process shows during one phase: CPU of its threads, and its use of GPUs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._gpu = gpu_probe()
        self._began, self._ticks = time.monotonic(), self._thread_ticks()
        self._looks: list[bool] = []
        self._look_s: list[float] = []

    def look(self) -> None:
        """Ask NVML, where there is one."""
        time.sleep(LOOK_EVERY_S)
        if self._gpu is not None:
            began = time.perf_counter()
            evidence = self._gpu.probe(self._pid, time.monotonic())
            self._look_s.append(time.perf_counter() - began)
            self._looks.append(evidence is not None and evidence.alive)

    def seen(self) -> dict[str, float | None]:
        """Ticks of 10 ms a second; the share of looks at the GPU that saw work."""
        seconds = time.monotonic() - self._began
        used = [ticks - self._ticks.get(tid, 0) for tid, ticks in self._thread_ticks().items()]
        looks = self._looks[1:]  # the first sets the mark
        return {
            "seconds": seconds,
            "busiest_thread": max(used) / seconds,
            "all_threads": sum(used) / seconds,
            "gpu_at_work": sum(looks) / len(looks) if looks else None,
            "gpu_look_us": statistics.median(self._look_s) * 1e6 if self._look_s else None,
        }

    def _thread_ticks(self) -> dict[int, int]:
        processes = process_evidence(self._pid)["processes"]
        return {
            thread["tid"]: thread["cpu_ticks"]
            for process in processes
            for thread in process["threads"]
        }


def gpu_probe() -> NvidiaProbe | None:
    """None where there is no NVML."""
    try:
        return NvidiaProbe(load_nvml())
    except Exception:  # whatever a missing package or driver raises
        return None


def phases(worker: LlamaWorker, context_tokens: int) -> dict[str, dict[str, float | None]]:
    """Idle, while a long prompt is read, and while an answer is generated."""
    pid, prompt_tokens = worker.get_worker_status().get()["pid"], context_tokens // 3
    seen = {"idle": watched(pid, lambda: True)}
    answer = params(context_tokens - 2 * prompt_tokens)
    admitted = worker.submit("bench", "", "word " * prompt_tokens, params=answer).get()
    assert admitted["ok"], admitted
    request_id = admitted["request_id"]

    def phase() -> str:
        status = worker.get_status(request_id).get()
        assert status["ok"], status
        return status["phase"]

    seen["prefill"] = watched(
        pid, lambda: phase() in ("waiting", "prefill"), at_most_s=float("inf")
    )
    seen["decode"] = watched(pid, lambda: phase() == "generating")
    worker.cancel(request_id).get()
    worker.result(request_id).get()
    return seen


def watched(
    pid: int, goes_on: Callable[[], bool], at_most_s: float = WATCHED_S
) -> dict[str, float | None]:
    """What is seen as long as that is true."""
    watch, until = Watch(pid), time.monotonic() + at_most_s
    while goes_on() and time.monotonic() < until:
        watch.look()
    return watch.seen()


def kills(worker: LlamaWorker) -> list[float]:
    """Seconds until READY again after each of some kills in a row."""
    took_s = []
    for count in range(1, KILLS + 1):
        pid = worker.get_worker_status().get()["pid"]
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while True:
            status = worker.get_worker_status().get()
            if status["state"] is WorkerState.READY and status["restart_count"] == count:
                break
            assert status["state"] is not WorkerState.FAILED, status
            time.sleep(0.005)
        took_s.append(time.monotonic() - killed_at)
    return took_s


@contextlib.contextmanager
def ready(slots: int, context_tokens: int) -> Iterator[tuple[LlamaWorker, int]]:
    """A worker, and its server's port."""
    with contextlib.closing(worker_of(slots, context_tokens)) as worker:
        command = worker.get_debug_info().get()["server_cmd"]
        yield worker, int(command[command.index("--port") + 1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_server")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--context", type=int, default=8192, help="of the server that is watched")
    options, _ = parser.parse_known_args()
    with ready(1, options.context) as (worker, port):
        alone = single(worker, port, options.tokens)
        shown = phases(worker, options.context)
        restarts = kills(worker)
    with ready(options.streams, options.streams * TOKENS_PER_SLOT) as (worker, port):
        together = many(worker, port, options.streams, options.tokens)
    rows: list[list[object]] = [
        [way, alone[way]["first_token_ms"], alone[way]["tokens_per_s"], together[way]]
        for way in alone
    ]
    header = ["", "first token, ms", "tokens/s, 1 stream", f"tokens/s, {options.streams} streams"]
    text = table(header, rows)
    rows = [
        [phase, *("-" if value is None else value for value in shown[phase].values())]
        for phase in PHASES
    ]
    header = [
        "the server",
        "s",
        "busiest thread, ticks/s",
        "all, ticks/s",
        "GPU looks at work",
        "us a look",
    ]
    text += "\n\n" + table(header, rows)
    text += "\n\n" + table(
        ["kill to READY, s", "median", "worst"], [["", statistics.median(restarts), max(restarts)]]
    )
    report(
        "real_server",
        text,
        {"single": alone, "many": together, "phases": shown, "kill_to_ready_s": restarts},
    )


if __name__ == "__main__":
    main()
