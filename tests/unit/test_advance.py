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


def progress(processed: int) -> bytes:
    told = {"processed": processed, "total": 100, "cache": 0, "time_ms": 1}
    return delta({"role": "assistant", "content": None}, prompt_progress=told)


def call(number: int = 0, **function: Any) -> bytes:
    return delta({"tool_calls": [{"index": number, "id": f"c{number}", "type": "function", "function": function}]})


def advances(*frames: bytes) -> list[bool]:
    """For each frame, whether it brought the turn forward."""
    decoder, advance = StreamDecoder(), Advance()
    return [sum(map(advance.by, decoder.feed(data))) > 0 for data in frames]


ALWAYS, ONCE, NEVER = [True, True, True], [True, False, False], [False, False, False]


@pytest.mark.parametrize(
    ("data", "advance"),
    [
        pytest.param(delta({"content": "a"}), ALWAYS, id="text"),
        pytest.param(delta({"reasoning_content": "a"}), ALWAYS, id="reasoning"),
        pytest.param(call(arguments='{"'), ALWAYS, id="arguments"),
        pytest.param(progress(7), ONCE, id="prompt progress"),
        pytest.param(frame(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 1}), ONCE, id="usage"),
        pytest.param(frame(choices=[], timings={"prompt_n": 1}), ONCE, id="timings"),
        pytest.param(frame(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]), ONCE, id="a finish"),
        pytest.param(call(name="look", arguments=""), ONCE, id="the head of a call"),
        pytest.param(delta({"role": "assistant", "content": None}), NEVER, id="role"),
        pytest.param(delta({"content": ""}), NEVER, id="an empty delta"),
        pytest.param(delta({"reasoning_content": ""}), NEVER, id="an empty piece of reasoning"),
        pytest.param(delta({}), NEVER, id="nothing in the delta"),
        pytest.param(frame(), NEVER, id="an empty object"),
        pytest.param(frame(choices=[]), NEVER, id="no choice"),
        pytest.param(frame(object="chat.completion.chunk", model="m", created=1), NEVER, id="a chunk about itself"),
        pytest.param(delta({"tool_calls": [{"index": 0}]}), NEVER, id="an empty call"),
        pytest.param(b": keepalive\n\n", NEVER, id="a comment"),
    ],
)
def test_the_same_again_and_again(data: bytes, advance: list[bool]) -> None:
    assert advances(data, data, data) == advance


def test_a_new_id_time_or_measurement_makes_nothing_new() -> None:
    usages = [{"prompt_tokens": 1, "completion_tokens": n} for n in range(3)]
    assert advances(*(frame(choices=[], usage=usage, id=f"c{n}", created=n) for n, usage in enumerate(usages))) == ONCE
    assert advances(*(delta({}, timings={"predicted_n": n, "predicted_ms": n / 3}) for n in range(3))) == ONCE


def test_prompt_progress_advances_only_beyond_all_that_was_reported() -> None:
    in_circles = [progress(n) for n in (0, 40, 80, 0, 40, 80, 81, 80)]
    assert advances(*in_circles) == [True, True, True, False, False, False, True, False]


def test_calls_that_begin_for_ever_advance_no_more() -> None:
    heads = [call(number, name="look", arguments="") for number in range(1000)]
    assert advances(*heads) == [True] * 256 + [False] * 744
