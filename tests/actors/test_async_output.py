"""`stream`: a request's output as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import pytest

from llama_worker import ConfigError, OutputChunk, WorkerClosed
from llama_worker.async_output import stream
from tests.actors.conftest import WAIT_S, GatePath, MakeWorker, Rig
from tests.fake_script import Gate, Headers, Reasoning, Text, Tokens, WaitClose, plain_reply

T = TypeVar("T")
MakeGate = Callable[[], GatePath]


def run(main: Coroutine[Any, Any, T]) -> T:
    """In an event loop of its own, within a generous time."""
    return asyncio.run(asyncio.wait_for(main, WAIT_S))


async def collect(rig: Rig, request_id: int, **how: Any) -> list[OutputChunk]:
    return [chunk async for chunk in stream(rig.worker, request_id, poll_interval_s=0.01, **how)]


def text_of(chunks: list[OutputChunk]) -> str:
    return "".join(chunk["text"] for chunk in chunks)


def test_the_pieces_are_the_whole_output_in_order_and_the_last_alone_is_done(make_worker: MakeWorker) -> None:
    rig = make_worker()
    request_id = rig.submit(*plain_reply(Reasoning("hm "), Tokens(50, interval_s=0.002)))
    chunks = run(collect(rig, request_id))
    assert [chunk["done"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk["text"] or chunk["reasoning"] for chunk in chunks[:-1])
    result = rig.ended(request_id)  # streaming has not released it
    assert (text_of(chunks), "".join(chunk["reasoning"] for chunk in chunks)) == (result["text"], "hm")
    assert result["text"] == "".join(f"tok{i} " for i in range(50))


def test_a_piece_comes_while_the_request_still_runs_and_the_event_loop_goes_on(
    make_worker: MakeWorker, make_gate: MakeGate
) -> None:
    rig, gate = make_worker(), make_gate()
    request_id = rig.submit(*plain_reply(Text("first"), Gate(gate.path), Text(" second")))
    turns = 0

    async def main() -> list[str]:
        async def ticker() -> None:
            nonlocal turns
            while turns < 100:
                turns += 1
                await asyncio.sleep(0)
            gate.open()  # the server waits for the event loop to turn

        texts, ticking = [], None
        async for chunk in stream(rig.worker, request_id, poll_interval_s=0.01):
            texts.append(chunk["text"])
            ticking = ticking or asyncio.create_task(ticker())
        assert ticking is not None
        await ticking
        return texts

    texts = run(main())
    assert texts[0] == "first"
    assert "".join(texts) == "first second"
    assert turns == 100


def test_a_cancelled_task_leaves_the_request_running(make_worker: MakeWorker, make_gate: MakeGate) -> None:
    rig, gate = make_worker(), make_gate()
    request_id = rig.submit(*plain_reply(Text("a"), Gate(gate.path), Text("b")))

    async def main() -> None:
        seen = asyncio.Event()

        async def consume() -> None:
            async for _ in stream(rig.worker, request_id, poll_interval_s=0.01):
                seen.set()

        task = asyncio.create_task(consume())
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert rig.request(request_id)["state"] == "running"
    gate.open()
    assert rig.ended(request_id)["text"] == "ab"


def test_an_iteration_that_is_left_early_ends_there(make_worker: MakeWorker, make_gate: MakeGate) -> None:
    rig, gate = make_worker(), make_gate()
    request_id = rig.submit(*plain_reply(Text("a"), Gate(gate.path), Text("b")))

    async def main() -> str:
        async with aclosing(stream(rig.worker, request_id, poll_interval_s=0.01)) as chunks:
            async for chunk in chunks:
                return chunk["text"]
        raise AssertionError("no chunk")

    assert run(main()) == "a"
    gate.open()
    assert rig.ended(request_id)["text"] == "ab"


def test_cancelling_the_request_ends_the_iteration(make_worker: MakeWorker) -> None:
    rig = make_worker()
    request_id = rig.submit(Headers(), Text("a"), WaitClose())

    async def main() -> list[OutputChunk]:
        chunks = []
        async for chunk in stream(rig.worker, request_id, poll_interval_s=0.01):
            chunks.append(chunk)
            if not chunk["done"]:
                assert await rig.worker.cancel(request_id)
        return chunks

    chunks = run(main())
    assert text_of(chunks) == "a"
    assert chunks[-1]["done"]


def test_a_result_that_is_taken_from_under_the_stream_is_no_silent_end(
    make_worker: MakeWorker, make_gate: MakeGate
) -> None:
    rig, gate = make_worker(), make_gate()
    request_id = rig.submit(*plain_reply(Text("a"), Gate(gate.path), Text("b")))

    async def main() -> None:
        async for _ in stream(rig.worker, request_id, poll_interval_s=0.01):
            gate.open()
            assert (await rig.worker.result(request_id))["ok"]

    with pytest.raises(LookupError, match="taken"):
        run(main())


def test_a_closed_worker_ends_it(make_worker: MakeWorker) -> None:
    rig = make_worker()
    request_id = rig.submit(Headers(), Text("a"), WaitClose())

    async def main() -> None:
        async for _ in stream(rig.worker, request_id, poll_interval_s=0.01):
            await asyncio.to_thread(rig.worker.close)

    with pytest.raises(WorkerClosed):
        run(main())


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"poll_interval_s": 0}, ConfigError),
        ({"poll_interval_s": "fast"}, TypeError),
    ],
)
def test_a_bad_interval_is_refused_at_once(
    make_worker: MakeWorker, how: dict[str, Any], error: type[Exception]
) -> None:
    rig = make_worker(start=False)
    with pytest.raises(error, match="poll_interval_s"):
        stream(rig.worker, 1, **how)


def test_it_goes_on_from_the_offsets(make_worker: MakeWorker) -> None:
    rig = make_worker()
    request_id = rig.submit(*plain_reply(Reasoning("abcd"), Text("efgh")))
    rig.wait_ended(request_id)
    (chunk,) = run(collect(rig, request_id, text_offset=1, reasoning_offset=3))
    assert (chunk["text"], chunk["reasoning"]) == ("fgh", "d")


def test_a_bad_offset_is_refused(make_worker: MakeWorker) -> None:
    rig = make_worker(start=False)
    with pytest.raises(ValueError, match="text_offset"):
        run(collect(rig, 1, text_offset=-1))
