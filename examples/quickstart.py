"""Answers two prompts side by side on two slots, live; a third is refused; stops cleanly.

python examples/quickstart.py --server llama-server --model model.gguf
"""

from __future__ import annotations

import argparse
import queue

from llama_worker import LlamaWorker, NotFound, OutputChunk

WIDTH = 72
PROMPTS = {"sky": "Why is the sky blue?", "story": "Tell me a short story about a lighthouse."}
PARAMS = {"max_tokens": 96, "temperature": 0}


def main() -> None:
    """Run the model on the server and show its output."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", required=True, help="the llama-server executable")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--port", type=int, help="a free port (default: one is chosen)")
    options = parser.parse_args()

    print("starting the server ...", flush=True)
    with LlamaWorker.from_model(
        options.model,
        slots=2,
        name="quickstart",
        port=options.port,
        executable=options.server,
        extra_args=("--ctx-size", "4096"),
    ) as worker:
        status = worker.get_worker_status().get()
        print(f"{status['state']}, pid {status['pid']}, {status['slots_total']} slots\n")

        jobs = {}
        for name, prompt in PROMPTS.items():
            admitted = worker.submit(
                name, "You are a helpful assistant.", prompt, params=PARAMS
            ).get()
            assert admitted["ok"], admitted
            jobs[name] = admitted["request_id"]
        print("a third request:", worker.submit("third", "", "Hello?").get())
        print("active:", worker.get_worker_status().get()["active_jobs"], "\n")

        show_live(worker, jobs)
        for name, request_id in jobs.items():
            result = worker.result(request_id).get(timeout=60)
            assert result["ok"], result
            if result["state"] == "failed":
                raise SystemExit(f"error: {name}: {result['fail_reason']}: {result['fail_detail']}")
            tokens = result.get("usage", {}).get("completion_tokens")
            speed = result["timings"].get("tokens_per_second", 0.0)
            print(
                f"{name}: {tokens} tokens, {speed:.0f} tokens/s, ended by {result['finish_reason']}"
            )
    print("stopped.")


def show_live(worker: LlamaWorker, jobs: dict[str, int]) -> None:
    """Print each request's output line by line as it grows."""
    came: queue.SimpleQueue[tuple[str, OutputChunk | NotFound]] = queue.SimpleQueue()
    lines = dict.fromkeys(jobs, "")

    def wait_for_more(name: str, offset: int) -> None:
        more = worker.read_output(jobs[name], text_offset=offset, wait=True)
        # one loop serves all requests; no thread waits
        more.add_done_callback(lambda more: came.put((name, more.get())))

    for name in jobs:
        wait_for_more(name, 0)
    running = len(jobs)
    while running:
        name, chunk = came.get()
        assert chunk["ok"], chunk
        *whole, lines[name] = broken(lines[name] + chunk["text"])
        if chunk["done"]:
            whole.append(lines[name])
            running -= 1
        else:
            wait_for_more(name, chunk["text_offset"])
        for line in whole:
            print(f"{name:>6} | {line}", flush=True)
    print()


def broken(text: str) -> list[str]:
    """The lines of the text; the last one, which still grows, is broken at spaces if it is too
    long."""
    *whole, last = text.split("\n")
    while len(last) > WIDTH and " " in last[:WIDTH]:
        line, _, _ = last[:WIDTH].rpartition(" ")
        whole.append(line)
        last = last[len(line) + 1 :]
    return [*whole, last]


if __name__ == "__main__":
    main()
