"""`stream`: a request's output as an asynchronous iterator."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_worker import ConfigError, OutputChunk, WorkerClosed
from llama_worker.async_output import stream
from llama_worker.testing import scripts as fs
from tests.actors.conftest import MakeWorker, Rig, run_async


async def collect(rig: Rig, request_id: int, **how: Any) -> list[OutputChunk]:
    chunks = []
    async for chunk in stream(rig.worker, request_id, poll_interval_s=0.01, **how):
        chunks.append(chunk.copy())
        chunk.clear()  # type: ignore[attr-defined]  # a caller may change what it gets
    return chunks


async def first_then(rig: Rig, request_id: int, act: Callable[[], Awaitable[Any]]) -> None:
    """Follow a request, and do something once the first piece has come."""
    async for _ in stream(rig.worker, request_id, poll_interval_s=0.01):
        await act()


def test_pieces_make_the_output_the_last_is_done(rig: Rig) -> None:
    request_id = rig.submit(*fs.plain_reply(fs.Reasoning("hm "), fs.Tokens(50, interval_s=0.002)))
    chunks = run_async(collect(rig, request_id))
    assert [chunk["done"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk["text"] or chunk["reasoning"] for chunk in chunks[:-1])
    (late,) = run_async(collect(rig, request_id, text_offset=1, reasoning_offset=1))
    result = rig.ended(request_id)  # streaming has not released it
    assert (
        "".join(chunk["text"] for chunk in chunks)
        == result["text"]
        == "".join(f"tok{i} " for i in range(50))
    )
    assert "".join(chunk["reasoning"] for chunk in chunks) == "hm"
    assert (late["text"], late["reasoning"]) == (result["text"][1:], "m")


def test_the_event_loop_goes_on_while_it_waits(rig: Rig, gate: Path) -> None:
    request_id = rig.submit(*fs.plain_reply(fs.Text("first"), fs.Gate(gate), fs.Text(" second")))

    async def main() -> list[OutputChunk]:
        chunks = stream(rig.worker, request_id, poll_interval_s=0.01)
        first = await anext(chunks)
        # never, where waiting for the rest blocks the loop
        asyncio.get_running_loop().call_later(0.05, gate.touch)
        return [first, *[chunk async for chunk in chunks]]

    first, *rest = run_async(main())
    assert (first["text"], "".join(chunk["text"] for chunk in rest)) == ("first", " second")


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["left", "cancelled"])
def test_ending_an_iteration_early_leaves_the_request_running(
    rig: Rig, gate: Path, is_cancelled: bool
) -> None:
    request_id = rig.submit(*fs.plain_reply(fs.Text("a"), fs.Gate(gate), fs.Text("b")))

    async def main() -> None:
        async with aclosing(stream(rig.worker, request_id, poll_interval_s=0.01)) as chunks:
            assert (await anext(chunks))["text"] == "a"
            if is_cancelled:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(anext(chunks), 0.05)

    run_async(main())
    assert rig.request(request_id)["state"] == "running"
    gate.touch()
    assert rig.ended(request_id)["text"] == "ab"


def test_a_result_taken_meanwhile_is_a_lookup_error(rig: Rig, gate: Path) -> None:
    request_id = rig.submit(*fs.plain_reply(fs.Text("a"), fs.Gate(gate), fs.Text("b")))

    async def take() -> None:
        gate.touch()
        assert (await rig.worker.result(request_id))["ok"]

    with pytest.raises(LookupError, match="taken or has expired"):
        run_async(first_then(rig, request_id, take))


def test_a_closed_worker_ends_it(rig: Rig) -> None:
    request_id = rig.submit(fs.Headers(), fs.Text("a"), fs.WaitClose())
    with pytest.raises(WorkerClosed):
        run_async(first_then(rig, request_id, partial(asyncio.to_thread, rig.worker.close)))


def test_bad_arguments_are_refused(make_worker: MakeWorker) -> None:
    worker = make_worker(start=False).worker
    with pytest.raises(ConfigError, match="poll_interval_s"):
        stream(worker, 1, poll_interval_s=0)
    with pytest.raises(TypeError, match="poll_interval_s"):
        stream(worker, 1, poll_interval_s="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="text_offset"):
        run_async(anext(stream(worker, 1, text_offset=-1)))
