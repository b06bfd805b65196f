"""What brings a turn forward, and what only keeps its connection busy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llama_worker.stream.advance import Advance
from llama_worker.stream.decoder import StreamDecoder


def frame(**chunk: Any) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def delta(delta: Any, **chunk: Any) -> bytes:
    return frame(choices=[{"index": 0, "delta": delta, "finish_reason": None}], **chunk)


def progress(processed: int, total: int = 100) -> bytes:
    told = {"processed": processed, "total": total, "cache": 0, "time_ms": 1}
    return delta({"role": "assistant", "content": None}, prompt_progress=told)


def call(**function: Any) -> bytes:
    return delta({"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]})


def advances(*frames: bytes) -> list[bool]:
    """For each frame, whether it brought the turn forward."""
    decoder, advance = StreamDecoder(), Advance()
    return [sum(map(advance.by, decoder.feed(data))) > 0 for data in frames]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(delta({"content": "a"}), id="text"),
        pytest.param(delta({"reasoning_content": "a"}), id="reasoning"),
        pytest.param(call(arguments='{"'), id="arguments"),
    ],
)
def test_what_the_model_says_always_advances_even_the_same_again(data: bytes) -> None:
    assert advances(*[data] * 5) == [True] * 5


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(delta({"role": "assistant", "content": None}), id="role"),
        pytest.param(delta({"content": ""}), id="an empty delta"),
        pytest.param(delta({"reasoning_content": ""}), id="an empty piece of reasoning"),
        pytest.param(delta({}), id="nothing in the delta"),
        pytest.param(frame(), id="an empty object"),
        pytest.param(frame(choices=[]), id="no choice"),
        pytest.param(frame(object="chat.completion.chunk", model="m", created=1), id="a chunk about itself"),
        pytest.param(delta({"tool_calls": [{"index": 0}]}), id="an empty call"),
        pytest.param(b": keepalive\n\n", id="a comment"),
    ],
)
def test_what_says_nothing_never_advances(data: bytes) -> None:
    assert advances(*[data] * 3) == [False] * 3


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(progress(7), id="prompt progress"),
        pytest.param(frame(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 1}), id="usage"),
        pytest.param(frame(choices=[], timings={"prompt_n": 1}), id="timings"),
        pytest.param(frame(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]), id="a finish"),
        pytest.param(call(name="look", arguments=""), id="the head of a call"),
    ],
)
def test_the_same_again_advances_once(data: bytes) -> None:
    assert advances(*[data] * 3) == [True, False, False]


def test_a_new_id_time_or_measurement_makes_nothing_new() -> None:
    usage = [
        frame(choices=[], usage={"prompt_tokens": 1, "completion_tokens": n}, id=f"c{n}", created=n) for n in range(3)
    ]
    assert advances(*usage) == [True, False, False]
    timings = [delta({}, timings={"predicted_n": n, "predicted_ms": n / 3}) for n in range(3)]
    assert advances(*timings) == [True, False, False]


def test_prompt_progress_advances_only_beyond_all_that_was_reported() -> None:
    in_circles = [progress(n) for n in (0, 40, 80, 0, 40, 80, 81, 80)]
    assert advances(*in_circles) == [True, True, True, False, False, False, True, False]


def test_calls_that_begin_for_ever_advance_no_more() -> None:
    heads = [
        delta({"tool_calls": [{"index": n, "id": f"c{n}", "function": {"name": "look", "arguments": ""}}]})
        for n in range(1000)
    ]
    told = advances(*heads)
    assert told[:256] == [True] * 256
    assert not any(told[256:])
