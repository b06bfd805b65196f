"""64 streams at 30 tokens a second, eight models with eight slots each: CPU, threads, how fresh a
waiting reader is.

    python -m benchmarks.fleet [--json FILE]

Against 64 threads that each run a bare loop, or the `openai` client, on the same servers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.common import config, interleave, quantile, report, script, table
from benchmarks.stream import bare_loop, cpu_us, openai_client
from llama_worker import LlamaWorker
from llama_worker.testing.scripts import Tokens, plain_reply

WORKERS, SLOTS, RATE_HZ, SECONDS, ROUNDS = 8, 8, 30, 20, 3
STREAMS, EVENTS = WORKERS * SLOTS, RATE_HZ * SECONDS


class Fleet:
    """Workers that run."""

    def __init__(self, workers: dict[int, LlamaWorker]) -> None:
        self._workers = workers  # by port

    def submit(self) -> list[tuple[LlamaWorker, int]]:
        """A request for every slot."""
        found = []
        for worker in self._workers.values():
            for _ in range(SLOTS):
                admitted = worker.submit("bench", "", "x").get()
                assert admitted["ok"], admitted
                found.append((worker, admitted["request_id"]))
        return found

    def complete(self) -> None:
        """Run them to their end."""
        for worker, request_id in self.submit():
            result = worker.result(request_id).get()
            assert result["ok"], result
            assert result["state"] == "completed", result

    def read(self) -> list[float]:
        """The same with a waiting reader each: the seconds from the server's send until the text
        was there."""
        waits: list[float] = []

        def follow(worker: LlamaWorker, request_id: int) -> None:
            for chunk in worker.iter_output(request_id):
                there = time.time()
                waits.extend(there - float(sent_at) for sent_at in chunk["text"].split())

        _side_by_side([partial(follow, *job) for job in self.submit()])
        return waits

    def by_threads(self, client: Callable[[int], object]) -> None:
        """As many streams by another client, a thread each."""
        _side_by_side([partial(client, port) for port in self._workers for _ in range(SLOTS)])


def _side_by_side(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def fleet() -> Iterator[Fleet]:
    """Eight workers of eight slots."""
    served = script(*plain_reply(Tokens(EVENTS, 1 / RATE_HZ, text="{at} ")))
    with contextlib.ExitStack() as stack:
        workers = {}
        for number in range(WORKERS):
            settings = config(served, slots=SLOTS, name=f"w{number}")
            workers[settings.port] = stack.enter_context(LlamaWorker(settings))
        yield Fleet(workers)


def threads_of_one() -> int:
    """How many threads a worker with 64 slots adds to the process while 64 streams are open."""
    with LlamaWorker(config(script(*plain_reply(Tokens(10_000, 0.05))), slots=1)) as warm:
        warm.get_worker_status().get()
    before = threading.active_count()
    with LlamaWorker(config(script(*plain_reply(Tokens(10_000, 0.05))), slots=64)) as worker:
        ids = []
        for _ in range(64):
            admitted = worker.submit("bench", "", "x").get()
            assert admitted["ok"], admitted
            ids.append(admitted["request_id"])
        for request_id in ids:
            chunk = worker.read_output(request_id, wait=True).get()
            assert chunk["ok"], chunk
        return threading.active_count() - before


def main() -> None:
    """Measure and print."""
    with fleet() as running:
        running.complete()
        events = STREAMS * EVENTS
        cpu = interleave(
            ROUNDS,
            {
                "bare loop": lambda: cpu_us(events, lambda: running.by_threads(bare_loop)),
                "worker": lambda: cpu_us(events, running.complete),
            },
        )
        least = {name: min(values) for name, values in cpu.items()}
        least["openai"] = cpu_us(events, lambda: running.by_threads(openai_client))
        waits = running.read()
    fresh = {"p50": quantile(waits, 0.5) * 1000, "p99": quantile(waits, 0.99) * 1000}
    threads = threads_of_one()
    rows: list[list[object]] = [[name, us, us / least["bare loop"]] for name, us in least.items()]
    text = table([f"{STREAMS} streams at {RATE_HZ} Hz", "us per event", "x bare"], rows)
    text += "\n\n" + table(
        ["from the server's send to a waiting reader", "ms"], list(fresh.items())
    )
    text += f"\n\nthreads of a worker with 64 slots and 64 open streams: {threads}"
    report("fleet", text, {"us": least, "fresh_ms": fresh, "threads": threads})


if __name__ == "__main__":
    main()
