"""Runs the same model on several machines: Ray places the replicas, and each request goes to
one with a free slot.

    python examples/ray_fleet.py --server llama-server --model model.gguf --gpus 1 \\
        --address 10.0.0.1:6379

Without --address it starts a Ray of its own on this machine. llama_worker, the server and the model
must be present, under these names, on every machine where a replica may run.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import ray

from llama_worker import WorkerConfig, llama_server_cmd
from llama_worker.ray import Fleet

HOST = "127.0.0.1"  # each server is reached only by its replica, on the same machine
PROMPTS = {
    "haiku": "Write a haiku about the sea.",
    "sum": "What is 2 + 2? Answer in one short sentence.",
    "rivers": "Name three rivers.",
}


def main() -> None:
    """Start the fleet, ask, show the output, stop the fleet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", required=True, help="the llama-server executable")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--address", help="of a Ray cluster; 'auto' for the one that runs here")
    parser.add_argument("--replicas", type=int, default=2, help="default: 2")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per replica (default: none)")
    options = parser.parse_args()

    if options.address:
        ray.init(address=options.address)
    else:
        ray.init(num_cpus=options.replicas, include_dashboard=False)
    make_config = partial(config_for, options.server, options.model)
    placing = {"num_gpus": options.gpus, "scheduling_strategy": "SPREAD"}
    with Fleet(make_config, replicas=options.replicas, name="small", options=placing) as fleet:
        for replica in fleet.get_fleet_status().get()["replicas"]:
            place, slots = replica["place"], replica["slots_total"]
            print(
                (
                    f"replica {replica['replica']}: {replica['state']} on {place['node_ip']}, "
                    f"{slots} slots"
                ),
                flush=True,
            )
        jobs = {name: submit(fleet, name, prompt) for name, prompt in PROMPTS.items()}
        show_live(fleet, jobs)
        for name, request_id in jobs.items():
            result = fleet.result(request_id).get(timeout=60)
            assert result["ok"], result
            print(
                f"{name}: {result['state']}, {result.get('fail_detail', result['finish_reason'])}"
            )
    print("stopped.")


def config_for(server: str, model: str, port: int) -> WorkerConfig:
    """Called on the machine where the replica will run, with a port that is free there."""
    command = llama_server_cmd(
        model, host=HOST, port=port, slots=2, executable=server, extra_args=("--ctx-size", "4096")
    )
    return WorkerConfig("small", HOST, port, command, slots=2)


def submit(fleet: Fleet, name: str, prompt: str) -> int:
    """Return the request's id once a replica has taken it. A program with more to do would not wait
    here."""
    while True:
        answer = fleet.submit(name, "You are terse.", prompt, params={"max_tokens": 64}).get()
        if answer["ok"]:
            return answer["request_id"]
        print(f"{name}: {answer['error']}, trying again", flush=True)
        time.sleep(1.0)


def show_live(fleet: Fleet, jobs: dict[str, int]) -> None:
    """Print each request's output as it comes."""
    offsets = dict.fromkeys(jobs, 0)
    running = set(jobs)
    while running:
        for name in sorted(running):
            chunk = fleet.read_output(jobs[name], text_offset=offsets[name]).get()
            assert chunk["ok"], chunk
            offsets[name] = chunk["text_offset"]
            if chunk["text"]:
                print(f"{name:>7} | {chunk['text']!r}", flush=True)
            if chunk["done"]:
                running.discard(name)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
