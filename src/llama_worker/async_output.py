"""A running request's output as an asynchronous iterator, for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from llama_worker.config.validation import checked_seconds
from llama_worker.types.request import OutputChunk
from llama_worker.worker import LlamaWorker, no_such_request


def stream(
    worker: LlamaWorker,
    request_id: int,
    *,
    text_offset: int = 0,
    reasoning_offset: int = 0,
    poll_interval_s: float = 0.1,
) -> AsyncGenerator[OutputChunk, None]:
    """Yield the request's output from the offsets on; only the last chunk has `done` True.

    Each chunk holds the output since the previous one. There is at most one per `poll_interval_s`
    seconds, and nothing is polled. The result is not released, and an iteration that ends early
    (`break`, a cancelled task) leaves the request running. A request that has already ended gives
    one chunk.

    Raises:
        LookupError: the id is unknown, or the result was taken or has expired.
        WorkerClosed: after `close`.
    """
    checked_seconds("poll_interval_s", poll_interval_s, above=0)
    return _chunks(worker, request_id, text_offset, reasoning_offset, poll_interval_s)


async def _chunks(
    worker: LlamaWorker,
    request_id: int,
    text_offset: int,
    reasoning_offset: int,
    poll_interval_s: float,
) -> AsyncGenerator[OutputChunk, None]:
    now = asyncio.get_running_loop().time
    while True:
        next_at = now() + poll_interval_s
        chunk = await worker.read_output(
            request_id, text_offset=text_offset, reasoning_offset=reasoning_offset, wait=True
        )
        if not chunk["ok"]:
            raise LookupError(no_such_request(request_id))
        text_offset, reasoning_offset = chunk["text_offset"], chunk["reasoning_offset"]
        yield chunk.copy()  # the caller may change it
        if chunk["done"]:
            return
        await asyncio.sleep(max(0.0, next_at - now()))
