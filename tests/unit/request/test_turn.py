"""One HTTP exchange of a request, taken apart."""

import pytest

from llama_worker.config.profiles import LoopDetector
from llama_worker.request.turn import Turn
from llama_worker.stream.calls import RawCall
from llama_worker.stream.events import ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta

TAGGED = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CALL = RawCall(None, "add", '{"a": 1}', TAGGED)
BY_TAG = [TextDelta(TAGGED[:20]), TextDelta(TAGGED[20:])]
STRUCTURED = RawCall("x", "add", "{}")
BY_DELTAS = [ToolCallDelta(0, "x", "add", None), ToolCallDelta(0, None, None, "{}")]


def turn(*, prompted: bool = False) -> Turn:
    return Turn(
        started_at=0.0,
        prompted=prompted,
        tool_names=("add", "exit"),
        opens_thinking=False,
        loop_detector=LoopDetector(),
    )


def take(it: Turn, *said: StreamEvent, at: float = 1.0) -> tuple[str, str]:
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
        ([TextDelta("Let me. "), *BY_TAG, TextDelta(" Wait.")], "", "Let me.  Wait.", [CALL]),
    ],
)
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("cut_off", [True, False])
def test_reasoning_text_and_calls_are_told_apart(
    said: list[StreamEvent],
    reasoning: str,
    text: str,
    calls: list[RawCall],
    prompted: bool,
    cut_off: bool,
) -> None:
    it = turn(prompted=prompted)
    shown, rest = take(it, *said), it.finish(cut_off=cut_off)
    assert (shown[0] + rest[0], shown[1] + rest[1]) == (reasoning, text)
    assert (it.reasoning, it.text) == (reasoning, text)
    assert it.calls() == calls


@pytest.mark.parametrize(
    ("said", "text"), [("<tool_c", "<tool_c"), ("<thi", "<thi"), (f"{TAGGED} b", " b")]
)
def test_what_was_held_back_comes_once(said: str, text: str) -> None:
    it = turn()
    assert take(it, TextDelta(said)) == ("", "")
    assert it.finish() == ("", text)
    assert it.finish() == ("", "")
    assert it.text == text


def test_after_a_structured_call_nothing_is_held_back() -> None:
    it = turn()
    assert take(it, TextDelta("a"), *BY_TAG, TextDelta("b <tool_c")) == ("", "a")
    assert take(it, *BY_DELTAS) == ("", f"{TAGGED}b <tool_c")
    assert take(it, TextDelta(f"all>{TAGGED} <tool_call>")) == ("", f"all>{TAGGED} <tool_call>")
    assert it.finish() == ("", "")
    assert it.calls() == [STRUCTURED]
    assert it.text == f"a{TAGGED}b <tool_call>{TAGGED} <tool_call>"


def test_prompted_tagged_calls_count_beside_structured_ones() -> None:
    it = turn(prompted=True)
    assert take(it, TextDelta("a"), *BY_TAG, TextDelta("b"), *BY_DELTAS, *BY_TAG) == ("", "ab")
    assert it.calls() == [STRUCTURED, CALL, CALL]


def test_text_between_calls_breaks_a_loop() -> None:
    it = turn(prompted=True)
    for _ in range(200):
        assert take(it, TextDelta("So. "), *BY_TAG) == ("", "So. ")
    assert it.hidden_loop is None
    take(it, *[TextDelta(TAGGED)] * 200)
    assert it.hidden_loop is not None


class Names(frozenset[str]):
    """Of exit tools; counts how many calls were compared with them."""

    compared = 0

    def __contains__(self, name: object) -> bool:
        self.compared += 1
        return super().__contains__(name)


@pytest.mark.parametrize(
    ("prompted", "compared"),
    # a native call that was not taken is looked at once more when the next one begins
    [(True, 100), (False, 100 + 89)],
)
def test_each_call_is_looked_at_twice_at_most(prompted: bool, compared: int) -> None:
    it, names = turn(prompted=prompted), Names({"exit"})
    exits = []
    for number in range(100):
        name = "exit" if number % 10 == 0 else "add"
        tagged = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
        call = TextDelta(tagged) if prompted else ToolCallDelta(number, None, name, "{}")
        for said in (call, TextDelta("so")):
            take(it, said)
            exits += it.take_exits(names)
    assert (len(exits), len(it.calls())) == (10, 90)
    assert names.compared == compared
