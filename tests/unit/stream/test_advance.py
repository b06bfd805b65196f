"""What brings a turn forward, and what only keeps its connection busy."""

from __future__ import annotations

import pytest

from llama_worker.stream.advance import Advance
from llama_worker.stream.events import (
    Done,
    EmptyRecord,
    Finish,
    PromptProgress,
    ReasoningDelta,
    ServerError,
    StreamEvent,
    TextDelta,
    Timings,
    ToolCallDelta,
    UnknownContent,
    Usage,
)


def advances(*events: StreamEvent) -> list[bool]:
    """For each event, whether it brought the turn forward."""
    return list(map(Advance().by, events))


ALWAYS, ONCE, NEVER = [True, True, True], [True, False, False], [False, False, False]


@pytest.mark.parametrize(
    ("events", "advance"),
    [
        pytest.param([TextDelta("a")] * 3, ALWAYS, id="text"),
        pytest.param([ReasoningDelta("a")] * 3, ALWAYS, id="reasoning"),
        pytest.param([ToolCallDelta(0, "c", None, '{"')] * 3, ALWAYS, id="arguments"),
        pytest.param([ToolCallDelta(0, "c", "look", "")] * 3, ONCE, id="the head of a call"),
        pytest.param([PromptProgress(7, 100, 0)] * 3, ONCE, id="prompt progress"),
        pytest.param(
            [Usage(1, tokens, None) for tokens in range(3)], ONCE, id="usage, also another"
        ),
        pytest.param(
            [Timings(None, None, tokens, None) for tokens in range(3)],
            ONCE,
            id="timings, also others",
        ),
        pytest.param([Finish("stop")] * 3, ONCE, id="a finish"),
        pytest.param([ServerError("no", None, None)] * 3, ONCE, id="an error"),
        pytest.param([Done()] * 3, ONCE, id="the end mark"),
        pytest.param([UnknownContent(7)] * 3, ONCE, id="what has no name here"),
        pytest.param(
            [PromptProgress(processed, 100, 0) for processed in (100, 101, 2**62)],
            ONCE,
            id="more of the prompt than there is",
        ),
        pytest.param([EmptyRecord()] * 3, NEVER, id="a role"),
        pytest.param([TextDelta("")] * 3, NEVER, id="no text"),
        pytest.param([ReasoningDelta("")] * 3, NEVER, id="no reasoning"),
        pytest.param([ToolCallDelta(0, None, None, None)] * 3, NEVER, id="an empty call"),
    ],
)
def test_the_same_again_and_again(events: list[StreamEvent], advance: list[bool]) -> None:
    assert advances(*events) == advance


def test_prompt_progress_advances_only_beyond_all_that_was_reported() -> None:
    in_circles = [PromptProgress(processed, 100, 0) for processed in (0, 40, 80, 0, 40, 80, 81, 80)]
    assert advances(*in_circles) == [True, True, True, False, False, False, True, False]


def test_unknown_content_advances_while_it_changes() -> None:
    words = [UnknownContent(number) for number in range(5000)]
    assert all(advances(*words))
    assert advances(*words[:100], *words[:100]) == [True] * 100 + [False] * 100


def test_calls_that_begin_for_ever_advance_no_more() -> None:
    heads = [ToolCallDelta(number, f"c{number}", "look", "") for number in range(1000)]
    assert advances(*heads) == [True] * 256 + [False] * 744
