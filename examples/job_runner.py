"""Runs thirty jobs on three workers: each takes the next job as soon as it has a free slot.

LLAMA_SERVER=llama-server python examples/job_runner.py model.gguf
"""

import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from llama_worker import LlamaWorker, RequestFailed, RequestRefused

JOBS = deque((f"job-{n}", f"Name a river whose name has {n} letters.") for n in range(1, 31))
ANSWERS: dict[str, str] = {}


def serve(worker: LlamaWorker) -> None:
    """Give the worker jobs until none is left, then collect its answers."""
    asked = {}
    while JOBS:
        try:
            worker.wait_slot().get()
            name, prompt = JOBS.popleft()
        except (RequestRefused, IndexError):
            break  # this worker is FAILED, or another one was first
        asked[name] = worker.ask(prompt, job_name=name, params={"max_tokens": 64})
    for name, answer in asked.items():
        try:
            ANSWERS[name] = answer.get()["text"]
        except (RequestFailed, RequestRefused) as error:
            ANSWERS[name] = f"({error})"


if __name__ == "__main__":
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        fleet = [LlamaWorker.from_model(sys.argv[1], slots=2, name=f"w{n}") for n in range(3)]
        for worker in fleet:
            stack.enter_context(worker)
        list(pool.map(serve, fleet))
        for name, text in ANSWERS.items():
            print(f"{name}: {text!r}")
    if JOBS:
        sys.exit(f"every worker is FAILED; not done: {', '.join(name for name, _ in JOBS)}")
