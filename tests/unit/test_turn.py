"""One HTTP exchange of a request, taken apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llama_worker.profiles import LoopDetector
from llama_worker.request.turn import Said, Turn
from llama_worker.stream.calls import RawCall
from llama_worker.stream.events import (
    PromptProgress,
    ReasoningDelta,
    RoleOnly,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)

TAGGED = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CALL = RawCall(None, "add", '{"a": 1}', TAGGED)


def turn(*, prompted: bool = False, with_tools: bool = True, opens_thinking: bool = False) -> Turn:
    return Turn(
        started_at=0.0,
        prompted=prompted,
        with_tools=with_tools,
        opens_thinking=opens_thinking,
        loop_detector=LoopDetector(),
    )


def take(it: Turn, events: Sequence[Said], at: float) -> tuple[str, str]:
    shown = [it.take(event, at) for event in events]
    return "".join(reasoning for reasoning, _ in shown), "".join(said for _, said in shown)


def text(it: Turn, *pieces: str, at: float = 1.0) -> tuple[str, str]:
    return take(it, [TextDelta(piece) for piece in pieces], at)


def reasoning(it: Turn, *pieces: str) -> tuple[str, str]:
    return take(it, [ReasoningDelta(piece) for piece in pieces], 1.0)


def tool_call(it: Turn, *pieces: str) -> tuple[str, str]:
    """A call of `add` whose arguments come in these pieces."""
    first, *others = pieces
    deltas = [ToolCallDelta(0, "x", "add", first), *(ToolCallDelta(0, None, None, piece) for piece in others)]
    return take(it, deltas, 1.0)


def say(it: Turn, *pieces: str) -> tuple[str, str]:
    """(reasoning, text) of the whole turn."""
    shown = [*(text(it, piece) for piece in pieces), it.finish()]
    return "".join(reasoning for reasoning, _ in shown), "".join(said for _, said in shown)


def test_text_and_reasoning_are_told_apart_and_remembered() -> None:
    it = turn()
    assert reasoning(it, "hm") == ("hm", "")
    assert text(it, "Hello") == ("", "Hello")
    assert text(it, " you") == ("", " you")
    assert it.finish() == ("", "")
    assert (it.said_reasoning, it.said_text) == ("hm", "Hello you")


@pytest.mark.parametrize("cut_off", [True, False])
def test_whitespace_at_the_end_of_reasoning_is_dropped_however_the_turn_ends(cut_off: bool) -> None:
    unparsed, parsed = turn(), turn()
    text(unparsed, "<think>hm\n")
    reasoning(parsed, "hm\n")
    assert unparsed.finish(cut_off=cut_off) == parsed.finish(cut_off=cut_off) == ("", "")
    assert unparsed.said_reasoning == parsed.said_reasoning == "hm"


def test_reasoning_before_a_structured_call_ends_without_whitespace() -> None:
    it = turn()
    reasoning(it, "hm\n")
    tool_call(it, "{}")
    assert it.finish(cut_off=False) == ("", "")
    assert it.said_reasoning == "hm"
    assert it.calls() == [RawCall("x", "add", "{}")]


@pytest.mark.parametrize("prompted", [True, False])
def test_a_tagged_call_after_reasoning_leaves_no_whitespace_before_it(prompted: bool) -> None:
    it = turn(prompted=prompted)
    reasoning(it, "hm\n")
    assert say(it, "\n\n", TAGGED[:20], TAGGED[20:]) == ("", "")
    assert it.said_reasoning == "hm"
    assert it.calls() == [CALL]


@pytest.mark.parametrize(("with_tools", "held_back"), [(True, "<tool_c"), (True, "<thi"), (False, "<thi")])
def test_what_was_held_back_comes_at_the_end_and_only_once(with_tools: bool, held_back: str) -> None:
    it = turn(with_tools=with_tools)
    assert text(it, held_back) == ("", "")
    assert it.finish() == ("", held_back)
    assert it.finish() == ("", "")
    assert it.said_text == held_back


@pytest.mark.parametrize("prompted", [True, False])
def test_a_tagged_call_is_a_call_and_no_text(prompted: bool) -> None:
    it = turn(prompted=prompted)
    assert say(it, "Let me add. ", TAGGED[:20], TAGGED[20:], " Wait.") == ("", "Let me add.  Wait.")
    assert it.calls() == [CALL]
    assert it.said_text == "Let me add.  Wait."


def test_once_there_is_a_structured_call_nothing_is_held_back_any_more() -> None:
    it = turn()
    assert text(it, "a", TAGGED, "b <tool_c") == ("", "a")
    assert tool_call(it, "{", "}") == ("", f"{TAGGED}b <tool_c")
    assert text(it, f"all>{TAGGED} <tool_call>") == ("", f"all>{TAGGED} <tool_call>")
    assert it.finish() == ("", "")
    assert it.calls() == [RawCall("x", "add", "{}")]
    assert it.said_text == f"a{TAGGED}b <tool_call>{TAGGED} <tool_call>"


def test_in_prompted_mode_tagged_calls_count_beside_a_structured_one() -> None:
    it = turn(prompted=True)
    assert text(it, "a", TAGGED, "b") == ("", "ab")
    assert tool_call(it, "{}") == ("", "")
    assert say(it, TAGGED) == ("", "")
    assert it.calls() == [RawCall("x", "add", "{}"), CALL, CALL]


def test_tokens_are_the_servers_count_or_else_the_deltas() -> None:
    it = turn()
    text(it, "a", "b")
    tool_call(it, "{}")
    assert it.tokens == 3
    it.timings = Timings(None, None, 7, None)
    assert it.tokens == 7
    it.usage = Usage(10, 9, None)
    assert it.tokens == 9
    it.usage, it.timings = None, Timings(None, None, None, None)
    assert it.tokens == 3


def test_speed_is_the_servers_or_else_over_the_deltas() -> None:
    it = turn()
    assert it.tokens_per_second() is None
    text(it, "a", at=1.0)
    assert it.tokens_per_second() is None
    text(it, "b", "c", at=2.0)
    assert it.tokens_per_second() == pytest.approx(2.0)
    assert (it.first_token_at, it.last_token_at) == (1.0, 2.0)
    it.timings = Timings(None, None, None, 40.0)
    assert it.tokens_per_second() == 40.0


# ---------------------------------------------------------------- what brings it forward


def test_prompt_progress_is_data_only_where_it_grows() -> None:
    it = turn()
    for at, processed in ((1.0, 0), (5.0, 40), (6.0, 40), (7.0, 20), (9.0, 60), (10.0, 60)):
        it.take(PromptProgress(processed=processed, total=100, cached=0), at)
    assert (it.last_data_at, it.prompt_progress_at) == (9.0, 9.0)
    assert [batch.length_s() for batch in it.longest_batches] == [4.0, 4.0]
    assert it.repeats == 1


def test_repeats_are_counted_from_the_latest_that_was_new_and_are_no_tokens() -> None:
    it = turn()
    for _ in range(5):
        it.take(RoleOnly(), 1.0)
    assert (it.repeats, it.last_data_at, it.first_token_at) == (5, None, None)
    for nothing in (None, ""):
        it.take(ToolCallDelta(0, None, None, nothing), 1.5)
    assert (it.tokens, it.first_token_at) == (0, None)
    text(it, "a", at=2.0)
    assert (it.repeats, it.last_data_at) == (0, 2.0)
    for _ in range(4):
        it.take(ToolCallDelta(0, None, None, ""), 3.0)
    assert (it.repeats, it.last_data_at) == (4, 2.0)
