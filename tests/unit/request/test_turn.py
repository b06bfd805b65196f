"""One HTTP exchange of a request, taken apart."""

from __future__ import annotations

import pytest

from llama_worker.config.profiles import LoopDetector
from llama_worker.request.progress import Batch
from llama_worker.request.turn import Said, Turn
from llama_worker.stream import events
from llama_worker.stream.calls import RawCall
from llama_worker.stream.events import (
    EmptyRecord,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
)

TAGGED = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CALL = RawCall(None, "add", '{"a": 1}', TAGGED)
BY_TAG = [TextDelta(TAGGED[:20]), TextDelta(TAGGED[20:])]
STRUCTURED = RawCall("x", "add", "{}")
BY_DELTAS = [ToolCallDelta(0, "x", "add", "{"), ToolCallDelta(0, None, None, "}")]


def turn(*, prompted: bool = False) -> Turn:
    return Turn(
        started_at=0.0,
        prompted=prompted,
        with_tools=True,
        opens_thinking=False,
        loop_detector=LoopDetector(),
    )


def take(it: Turn, *said: Said, at: float = 1.0) -> tuple[str, str]:
    """(reasoning, text) that may be shown now."""
    shown = [it.take(event, at) for event in said]
    return "".join(reasoning for reasoning, _ in shown), "".join(text for _, text in shown)


@pytest.mark.parametrize(
    ("said", "reasoning", "text", "calls"),
    [
        ([ReasoningDelta("hm"), TextDelta("Hello"), TextDelta(" you")], "hm", "Hello you", []),
        ([TextDelta("<think>hm\n")], "hm", "", []),
        ([ReasoningDelta("hm\n")], "hm", "", []),
        ([ReasoningDelta("hm\n"), *BY_DELTAS], "hm", "", [STRUCTURED]),
        ([ReasoningDelta("hm\n"), TextDelta("\n\n"), *BY_TAG], "hm", "", [CALL]),
        (
            [TextDelta("Let me add. "), *BY_TAG, TextDelta(" Wait.")],
            "",
            "Let me add.  Wait.",
            [CALL],
        ),
    ],
)
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("cut_off", [True, False])
def test_reasoning_text_and_calls_are_told_apart_and_reasoning_ends_without_whitespace(
    said: list[Said], reasoning: str, text: str, calls: list[RawCall], prompted: bool, cut_off: bool
) -> None:
    it = turn(prompted=prompted)
    shown, rest = take(it, *said), it.finish(cut_off=cut_off)
    assert (
        (shown[0] + rest[0], shown[1] + rest[1])
        == (it.said_reasoning, it.said_text)
        == (reasoning, text)
    )
    assert it.calls() == calls


@pytest.mark.parametrize("held_back", ["<tool_c", "<thi"])
def test_what_was_held_back_comes_at_the_end_and_only_once(held_back: str) -> None:
    it = turn()
    assert take(it, TextDelta(held_back)) == ("", "")
    assert it.finish() == ("", held_back)
    assert it.finish() == ("", "")
    assert it.said_text == held_back


def test_once_there_is_a_structured_call_nothing_is_held_back_any_more() -> None:
    it = turn()
    assert take(it, TextDelta("a"), *BY_TAG, TextDelta("b <tool_c")) == ("", "a")
    assert take(it, *BY_DELTAS) == ("", f"{TAGGED}b <tool_c")
    assert take(it, TextDelta(f"all>{TAGGED} <tool_call>")) == ("", f"all>{TAGGED} <tool_call>")
    assert it.finish() == ("", "")
    assert it.calls() == [STRUCTURED]
    assert it.said_text == f"a{TAGGED}b <tool_call>{TAGGED} <tool_call>"


def test_in_prompted_mode_tagged_calls_count_beside_a_structured_one() -> None:
    it = turn(prompted=True)
    assert take(it, TextDelta("a"), *BY_TAG, TextDelta("b"), *BY_DELTAS, *BY_TAG) == ("", "ab")
    assert it.calls() == [STRUCTURED, CALL, CALL]


def test_tokens_are_the_servers_count_or_else_the_deltas() -> None:
    it = turn()
    take(it, TextDelta("a"), TextDelta("b"), ToolCallDelta(0, "x", "add", "{}"))
    assert it.tokens == 3
    it.timings = Timings(None, None, 7, None)
    assert it.tokens == 7
    it.usage = events.Usage(10, 9, None)
    assert it.tokens == 9
    it.usage, it.timings = None, Timings(None, None, None, None)
    assert it.tokens == 3


def test_speed_is_the_servers_or_else_over_the_deltas() -> None:
    it = turn()
    assert it.tokens_per_second() is None
    take(it, TextDelta("a"), at=1.0)
    assert it.tokens_per_second() is None
    take(it, TextDelta("b"), TextDelta("c"), at=2.0)
    assert it.tokens_per_second() == pytest.approx(2.0)
    assert (it.first_token_at, it.last_token_at) == (1.0, 2.0)
    it.timings = Timings(None, None, None, 40.0)
    assert it.tokens_per_second() == 40.0


def test_prompt_progress_is_data_only_where_it_grows() -> None:
    it = turn()
    for at, processed in ((1.0, 0), (5.0, 40), (6.0, 40), (7.0, 20), (9.0, 60), (10.0, 60)):
        it.take(PromptProgress(processed=processed, total=100, cached=0), at)
    assert (it.last_data_at, it.prompt_progress_at) == (9.0, 9.0)
    assert [batch[:2] for batch in it.batches] == [(1.0, 5.0), (7.0, 9.0)]
    assert it.repeated_at == (10.0,)


def test_a_batch_is_what_was_read_since_the_latest_report_without_what_was_cached() -> None:
    it = turn()
    for at, processed in ((1.0, 0), (3.0, 1400), (20.0, 1400), (22.5, 1912)):
        it.take(PromptProgress(processed=processed, total=2000, cached=900), at)
    assert it.batches == (
        Batch(began_at=1.0, ended_at=3.0, tokens=500, depth=1400),
        Batch(began_at=20.0, ended_at=22.5, tokens=512, depth=1912),
    )


@pytest.mark.parametrize(
    ("timings", "batches"),
    [
        pytest.param(Timings(100, 400, 1, None, 2000.0), (Batch(3.0, 5.0, 400, 500),), id="whole"),
        pytest.param(Timings(None, 400, 1, None, 2000.0), (Batch(3.0, 5.0, 400, 400),), id="old"),
        pytest.param(Timings(100, 0, 1, None, 2000.0), (), id="all of it was cached"),
        pytest.param(Timings(100, 400, 1, None, -1.0), (), id="no duration"),
        pytest.param(Timings(100, 400, 1, None), (), id="no duration told"),
    ],
)
def test_a_prompt_without_reports_is_one_batch(
    timings: Timings, batches: tuple[Batch, ...]
) -> None:
    it = turn()
    take(it, TextDelta("a"), at=5.0)
    take(it, timings, at=9.0)
    assert it.batches == batches


def test_reports_tell_more_of_batches_than_timings_do() -> None:
    it = turn()
    for at, processed in ((1.0, 0), (3.0, 500)):
        it.take(PromptProgress(processed=processed, total=500, cached=0), at)
    take(it, TextDelta("a"), Timings(0, 500, 1, None, 9000.0), at=5.0)
    assert it.batches == (Batch(1.0, 3.0, 500, 500),)


def test_repeats_are_kept_since_the_latest_that_was_new_and_are_no_tokens() -> None:
    it = turn()
    take(
        it,
        *[EmptyRecord()] * 5,
        ToolCallDelta(0, None, None, None),
        ToolCallDelta(0, None, None, ""),
    )
    assert (len(it.repeated_at), it.last_data_at, it.tokens, it.first_token_at) == (
        1,
        None,
        0,
        None,
    )
    take(it, TextDelta("a"), at=2.0)
    assert (it.repeated_at, it.last_data_at) == ((), 2.0)
    for at in (3.0, 3.4, 3.5, 5.0, 5.1, 7.0, 8.0):  # what comes together is one
        take(it, ToolCallDelta(0, None, None, ""), at=at)
    assert (it.repeated_at, it.last_data_at) == ((5.0, 7.0, 8.0), 2.0)
