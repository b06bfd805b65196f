"""Spreads many prompts over all workers of a fleet, each to a worker with a free slot, and prints
the answers.

    python examples/fleet.py fleet.toml "What is 2 + 2?" "Name three rivers."
    python examples/fleet.py model.gguf --gpus 0,1 "What is 2 + 2?" "Name three rivers."

With --gpus, each named GPU gets a worker with the model; a GPU that is named twice gets two.
A worker that is busy, restarting or locked out is passed over. A request that failed because its
server died or was restarted is submitted again, to another worker if need be: a worker replays
nothing by itself, but the program that routes may.
"""

from __future__ import annotations

import argparse
import queue
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from llama_worker import LlamaWorker, RequestFailReason, RequestResult, WorkerState, load_config

TRIES = 3
WORTH_ANOTHER_TRY = {
    RequestFailReason.SERVER_DIED,
    RequestFailReason.WORKER_RESTARTED,
    RequestFailReason.STREAM_DISCONNECTED,
    RequestFailReason.CONNECT_FAILED,
}


@dataclass(frozen=True)
class Job:
    """A prompt, and how often it was tried before."""

    name: str
    prompt: str
    tries: int = 0


@dataclass(frozen=True)
class Placed:
    """A job that holds a slot of a worker."""

    job: Job
    worker_name: str
    request_id: int


def main() -> None:
    """Start the fleet, answer the prompts, stop it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("fleet", help="a TOML file with the workers; with --gpus a model")
    parser.add_argument("--gpus", metavar="0,1", help="numbers as nvidia-smi gives them, or UUIDs")
    parser.add_argument("prompts", nargs="+", metavar="prompt")
    options = parser.parse_args()
    jobs = [Job(f"job-{number}", prompt) for number, prompt in enumerate(options.prompts, start=1)]
    with ExitStack() as stack:
        workers = (
            on_gpus(options.fleet, options.gpus.split(","))
            if options.gpus
            else from_file(options.fleet)
        )
        for worker in workers.values():
            stack.callback(worker.close)
        start(workers)
        for placed, result in answers(workers, jobs):
            reason = result["fail_reason"] or result["finish_reason"]
            print(
                f"{placed.job.name} by {placed.worker_name}, {reason}: {result['text']!r}",
                flush=True,
            )
        # stop them side by side; close() alone would stop one after the other
        for stopping in [worker.stop() for worker in workers.values()]:
            stopping.get()
    print("stopped.")


def from_file(path: str) -> dict[str, LlamaWorker]:
    """The workers of a fleet file."""
    return {name: LlamaWorker(config) for name, config in load_config(path).items()}


def on_gpus(model: str, gpus: list[str]) -> dict[str, LlamaWorker]:
    """A worker for each GPU; its server sees no other GPU."""
    workers = {}
    for number, gpu in enumerate(gpus, start=1):
        env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu}
        workers[f"worker-{number}"] = LlamaWorker.from_model(
            model, slots=2, name=f"worker-{number}", env=env
        )
    return workers


def start(workers: Mapping[str, LlamaWorker]) -> None:
    """Start all servers side by side. Raises WorkerStartError for the first that fails."""
    starting = {name: worker.start() for name, worker in workers.items()}
    for name, future in starting.items():
        status = future.get()
        print(
            f"{name}: {status['state']}, pid {status['pid']}, {status['slots_total']} slots",
            flush=True,
        )


def answers(
    workers: Mapping[str, LlamaWorker], jobs: list[Job]
) -> Iterator[tuple[Placed, RequestResult]]:
    """Yield every job's result as it comes. Raises RuntimeError if every worker is locked out."""
    waiting = deque(jobs)
    running = 0
    ended: queue.SimpleQueue[Placed] = queue.SimpleQueue()
    while waiting or running:
        while waiting and (placed := place(workers, waiting[0])):
            waiting.popleft()
            running += 1
            tell_when_ended(workers[placed.worker_name], placed, ended)
        if waiting and not running and all_failed(workers):
            raise RuntimeError(f"every worker is locked out; {len(waiting)} jobs are left")
        try:
            # after 1 s at the latest, ask again: a worker that was restarting may be ready
            placed = ended.get(timeout=1.0)
        except queue.Empty:
            continue
        running -= 1
        result = workers[placed.worker_name].get_result(placed.request_id).get()
        assert result["ok"], result
        job = placed.job
        if result["fail_reason"] in WORTH_ANOTHER_TRY and job.tries + 1 < TRIES:
            waiting.append(Job(job.name, job.prompt, job.tries + 1))
        else:
            yield placed, result


def place(workers: Mapping[str, LlamaWorker], job: Job) -> Placed | None:
    """Submit the job to the worker with most free slots that takes it; None where none does now.

    The free slots are only a hint: somebody else may have taken the last one since. The answer to
    `submit` decides.
    """
    for name in sorted(workers, key=lambda name: free_slots(workers[name]), reverse=True):
        admitted = (
            workers[name]
            .submit(job.name, "You are terse.", job.prompt, params={"max_tokens": 64})
            .get()
        )
        if admitted["ok"]:
            return Placed(job, name, admitted["request_id"])
    return None


def tell_when_ended(worker: LlamaWorker, placed: Placed, ended: queue.SimpleQueue[Placed]) -> None:
    """Put `placed` into the queue once its request has ended; no thread waits for that."""
    worker.result(placed.request_id).add_done_callback(lambda _: ended.put(placed))


def free_slots(worker: LlamaWorker) -> int:
    """How many requests the worker would take at this instant."""
    status = worker.get_worker_status().get()
    return (
        status["slots_total"] - status["slots_used"] if status["state"] is WorkerState.READY else 0
    )


def all_failed(workers: Mapping[str, LlamaWorker]) -> bool:
    """Whether every worker is FAILED: none takes a job again until `start()` is called."""
    return all(
        worker.get_worker_status().get()["state"] is WorkerState.FAILED
        for worker in workers.values()
    )


if __name__ == "__main__":
    main()
