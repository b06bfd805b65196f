"""An asyncio program: runs requests side by side with live output while its event loop goes on, and
cancels one request at its deadline.

    python examples/async_host.py --server llama-server --model model.gguf
"""

from __future__ import annotations

import argparse
import asyncio

from llama_worker import LlamaWorker
from llama_worker.async_output import stream

PROMPTS = {
    "haiku": "Write a haiku about the sea.",
    "sum": "What is 2 + 2? Answer in one short sentence.",
}


async def main() -> None:
    """Start the server, ask, stop the server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", required=True, help="the llama-server executable")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--port", type=int, help="a free port (default: one is chosen)")
    options = parser.parse_args()
    worker = LlamaWorker.from_model(
        options.model,
        slots=2,
        name="async",
        port=options.port,
        executable=options.server,
        extra_args=("--ctx-size", "4096"),
    )
    heart = asyncio.create_task(heartbeat())
    try:
        print("starting the server ...", flush=True)
        await worker.start()
        await asyncio.gather(*(ask(worker, name, prompt) for name, prompt in PROMPTS.items()))
        await ask_until(worker, "endless", "Count for ever.", deadline_s=1.0)
    finally:
        await asyncio.to_thread(worker.close)  # it blocks until the server is gone
        heart.cancel()
    print("stopped.")


async def ask(worker: LlamaWorker, name: str, prompt: str) -> None:
    """Submit one request and print its output as it grows."""
    admitted = await worker.submit(name, "You are terse.", prompt, params={"max_tokens": 64})
    assert admitted["ok"], admitted
    async for chunk in stream(worker, admitted["request_id"]):
        if chunk["text"]:
            print(f"{name:>7} | {chunk['text']!r}", flush=True)
    result = await worker.result(admitted["request_id"])
    assert result["ok"], result
    print(f"{name:>7} : {result['state']}, {len(result['text'])} characters", flush=True)


async def ask_until(worker: LlamaWorker, name: str, prompt: str, *, deadline_s: float) -> None:
    """Cancel the request at its deadline; the output until then is kept."""
    admitted = await worker.submit(name, "", prompt, params={"max_tokens": -1, "ignore_eos": True})
    assert admitted["ok"], admitted
    request_id = admitted["request_id"]
    try:
        async with asyncio.timeout(deadline_s):
            async for _ in stream(worker, request_id):
                pass
    except TimeoutError:  # leaving the stream leaves the request running
        await worker.cancel(request_id)
    result = await worker.result(request_id)
    assert result["ok"], result
    print(f"{name:>7} : {result['state']}, {len(result['text'])} characters", flush=True)


async def heartbeat() -> None:
    """Stands for whatever else the program does in its event loop."""
    while True:
        print("      . | the event loop goes on", flush=True)
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main())
