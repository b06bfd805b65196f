"""What a turn sends: its messages, and the body that holds them."""

import copy
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_worker.bios import STATUS_CLOSE, STATUS_OPEN, tagged_call
from llama_worker.config.settings import WorkerConfig
from llama_worker.request.prompt import SYSTEM_PROMPT_DELIMITER, Prompts
from llama_worker.request.submission import Submission, validate_submit
from llama_worker.stream.calls import ParsedCall
from llama_worker.types.chat import ChatMessage
from llama_worker.types.hooks import BiosText, SystemPromptMode
from tests.unit.config.cases import config
from tests.unit.request.playbook import ADD, PLAIN, SIGNAL, WITH_TOOLS

CALLS = (
    ParsedCall("c00000001", "add", {"a": 1}, '{"a":1}'),
    ParsedCall("c00000002", "find", {}, "{}"),
)
BIOS = BiosText("BIOS", "T1")
IMAGE = {"type": "image_url", "image_url": {"url": "data:x"}}


class Conversation:
    """The prompts of one request, and the messages that its latest turn sent."""

    def __init__(
        self,
        bios: BiosText | str = BIOS,
        *,
        messages: Sequence[ChatMessage] = (),
        mode: SystemPromptMode = "merged",
        prompted: bool = False,
        **asked: Any,
    ) -> None:
        asked = {"system_prompt": "SYS", "user_prompt": "Hi"} | asked
        submission = Submission(job_name="j", params={}, messages=tuple(messages), **asked)
        self.prompts = Prompts(config(system_prompt_mode=mode), submission, prompted=prompted)
        self.messages: list[Any] = self.prompts.next_body(bios)["messages"]

    def go_on(self, bios: BiosText | str, **said: Any) -> list[Any]:
        """The messages of the next turn, after tools."""
        said = {"text": "Look:", "reasoning": "hm", "calls": CALLS, "results": ("2", "[]")} | said
        turn: Any = SimpleNamespace(**said)
        self.messages = self.prompts.next_body(bios, (turn, turn))["messages"]
        return self.messages


def status(text: str) -> str:
    return f"\n\n{STATUS_OPEN}\n{text}\n{STATUS_CLOSE}"


# ---------------------------------------------------------------- the first turn


@pytest.mark.parametrize(
    ("bios", "system_prompt", "merged", "separate"),
    [
        ("BIOS", "SYS", [f"BIOS{SYSTEM_PROMPT_DELIMITER}SYS"], ["BIOS", "SYS"]),
        ("BIOS", "", ["BIOS"], ["BIOS"]),
        ("", "SYS", ["SYS"], ["SYS"]),
        ("", "", [], []),
        (BiosText("", ""), "", [], []),
    ],
)
def test_system_prompts_are_merged_or_separate(
    bios: BiosText | str, system_prompt: str, merged: list[str], separate: list[str]
) -> None:
    modes: list[tuple[SystemPromptMode, list[str]]] = [("merged", merged), ("separate", separate)]
    for mode, contents in modes:
        messages = Conversation(bios, system_prompt=system_prompt, mode=mode).messages
        assert messages[:-1] == [{"role": "system", "content": content} for content in contents]
        assert messages[-1] == {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_that_begin_a_conversation_are_system_prompts(role: str) -> None:
    earlier: Any = [
        {"role": role, "content": "In French."},
        {"role": "user", "content": "Hello"},
        {"role": role, "content": "Now in English."},
    ]
    first, *rest = Conversation(messages=earlier).messages
    texts = ["BIOS", "SYS", "In French."]
    assert first == {"role": "system", "content": SYSTEM_PROMPT_DELIMITER.join(texts)}
    assert rest[:-1] == earlier[1:]
    assert Conversation(messages=earlier, mode="separate").messages[2:-1] == earlier
    seen: Any = [{"role": role, "content": [PART, IMAGE]}]
    assert Conversation(messages=seen).messages[1:-1] == seen


def test_order_is_bios_system_prompt_messages_user_prompt() -> None:
    prior: list[ChatMessage] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    for user_prompt in ("Hi", ""):  # after an assistant's message an empty one is a message, too
        it = Conversation("BIOS", messages=prior, mode="separate", user_prompt=user_prompt)
        assert [m["content"] for m in it.messages] == ["BIOS", "SYS", "q", "a", user_prompt]
    assert Conversation("BIOS", user_prompt="").messages[-1] == {"role": "user", "content": ""}
    assert Conversation().messages[-1] == {"role": "user", "content": "Hi" + status("T1")}


PART = {"type": "text", "text": "q"}


@pytest.mark.parametrize(
    ("last", "content"),
    [
        ({"role": "user", "content": "q"}, "q" + status("T1")),
        ({"role": "tool", "content": "r", "tool_call_id": "x"}, "r" + status("T1")),
        ({"role": "user", "content": [PART]}, [PART, {"type": "text", "text": status("T1")}]),
        ({"role": "user", "content": None}, status("T1").strip()),
    ],
)
def test_a_needless_empty_prompt_is_left_out(last: Any, content: Any) -> None:
    before = copy.deepcopy(last)
    it = Conversation(messages=[last], user_prompt="")
    assert len(it.messages) == 2
    assert it.messages[-1] == {**before, "content": content}
    assert last == before
    answer = {"role": "assistant", "content": "a"}
    assert it.prompts.since_prompt(text="a", reasoning="", has_answered=True) == [answer]


# ---------------------------------------------------------------- continuation after tools


def test_a_continuation_has_a_message_per_call() -> None:
    functions = [{"name": "add", "arguments": '{"a":1}'}, {"name": "find", "arguments": "{}"}]
    calls = [
        {"id": f"c0000000{number}", "type": "function", "function": function}
        for number, function in enumerate(functions, 1)
    ]
    results = [("c00000001", "add", "2"), ("c00000002", "find", "[]" + status("T2"))]
    assert Conversation().go_on(BiosText("BIOS", "T2"))[2:] == [
        {"role": "assistant", "content": "Look:", "reasoning_content": "hm", "tool_calls": calls},
        *(
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}
            for call_id, name, content in results
        ),
    ]


def test_prompted_calls_go_back_as_written() -> None:
    written = '<tool_call>\n{"name":"add", "arguments":{"a" : 1}}\n</tool_call>'
    calls = [ParsedCall("c00000001", "add", {"a": 1}, '{"a": 1}', written), CALLS[1]]
    sent = Conversation(prompted=True).go_on(BiosText("BIOS", "T2"), text="So:\n", calls=calls)
    said = f"So:\n{written}\n{tagged_call('find', '{}')}"
    results = (
        '<tool_response id="c00000001" name="add">\n2\n</tool_response>\n'
        '<tool_response id="c00000002" name="find">\n[]\n</tool_response>'
    )
    assert sent[2:] == [
        {"role": "assistant", "content": said, "reasoning_content": "hm"},
        {"role": "user", "content": results + status("T2")},
    ]


def test_native_tool_turns_are_rewritten_for_prompted_mode() -> None:
    bios = BiosText("BIOS")
    native, prompted = (Conversation(bios, prompted=mode) for mode in (False, True))
    for each in (native, prompted):
        each.go_on(bios)
    earlier = native.prompts.since_prompt(text="Two.", reasoning="", has_answered=True)
    before = copy.deepcopy(earlier)
    follow_up = Conversation(bios, messages=earlier, user_prompt="So?", prompted=True)
    assert follow_up.messages == [
        *prompted.messages,
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "So?"},
    ]
    assert earlier == before
    assert Conversation(bios, messages=earlier).messages[1:-1] == earlier


def test_result_has_the_name_of_its_own_call() -> None:
    earlier: list[Any] = [
        message
        for name in ("find", "add")  # another program's ids begin anew in each turn
        for message in (
            {"role": "assistant", "tool_calls": [{"id": "call_0", "function": {"name": name}}]},
            {"role": "tool", "tool_call_id": "call_0", "content": "r"},
        )
    ]
    _, said, first, _, second, _ = Conversation(messages=earlier, prompted=True).messages
    assert [first["content"], second["content"]] == [
        f'<tool_response id="call_0" name="{name}">\nr\n</tool_response>'
        for name in ("find", "add")
    ]
    assert said["content"] == tagged_call("find", "{}")


ODD_CALLS: list[Any] = [3, [3], [{}], [{"function": 3}], [{"function": {"arguments": {"a": "é"}}}]]


@pytest.mark.parametrize("calls", ODD_CALLS)
def test_odd_messages_are_no_matter_in_prompted_mode(calls: Any) -> None:
    odd: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": [IMAGE]},
        {"role": "tool", "content": [{"type": "text", "text": "r"}]},
        {"role": "assistant", "content": [IMAGE], "tool_calls": calls},
    ]
    *_, assistant, seen, told, drawn, _ = Conversation(messages=odd, prompted=True).messages
    assert (seen, drawn) == (odd[1], odd[3])
    answer = '<tool_response id="" name="">\nr\n</tool_response>'
    assert told == {"role": "user", "content": answer}
    if calls is ODD_CALLS[-1]:
        said = '<tool_call>{"name": "None", "arguments": {"a": "é"}}</tool_call>'
        assert assistant == {"role": "assistant", "content": said}
    else:
        assert assistant == odd[0]


@pytest.mark.parametrize("prompted", [False, True])
@settings(max_examples=25)
@given(st.lists(st.tuples(st.text(), st.text(), st.text()), min_size=1, max_size=4))
def test_earlier_messages_stay_the_same_byte_by_byte(
    prompted: bool, turns: list[tuple[str, str, str]]
) -> None:
    conversation = Conversation(prompted=prompted)
    for text, reasoning, volatile in turns:
        sent = conversation.messages
        before = json.dumps(sent)
        following = conversation.go_on(BiosText("other", volatile), text=text, reasoning=reasoning)
        assert json.dumps(following).startswith(before.removesuffix("]"))
        assert json.dumps(sent) == before


def test_a_plain_bios_is_put_first_anew() -> None:
    conversation = Conversation("BIOS at 1")
    _, *earlier = conversation.messages
    head, *following = conversation.go_on("BIOS at 2")
    assert head["content"] == f"BIOS at 2{SYSTEM_PROMPT_DELIMITER}SYS"
    assert following[:1] == earlier
    assert STATUS_OPEN not in str(following)


# ---------------------------------------------------------------- the body


def body(
    of: WorkerConfig = PLAIN, params: dict[str, Any] | None = None, *, prompted: bool = False
) -> dict[str, Any]:
    submission = validate_submit("j", "", "u", params, None)
    return Prompts(of, submission, prompted=prompted).next_body("")


def test_the_workers_own_defaults() -> None:
    sent = body()
    assert sent.pop("sse_ping_interval") > 0
    assert sent == {
        "messages": [{"role": "user", "content": "u"}],
        "stream": True,
        "return_progress": True,
        "stream_options": {"include_usage": True},
        "reasoning_format": "deepseek",
        "max_tokens": 4096,
    }


def test_params_beat_default_params_and_those_beat_defaults() -> None:
    instead = {"return_progress": False, "stream_options": {}, "reasoning_format": "none"}
    changed = {**instead, "sse_ping_interval": -1, "max_tokens": 5, "unknown": {"a": [1, None]}}
    of = config(max_tokens=1, default_params=changed)
    assert body(params=changed) == body(of) == body() | changed
    assert body(of, {"max_tokens": 4, "seed": 5}) == body(of) | {"max_tokens": 4, "seed": 5}
    assert "max_tokens" not in body(config(max_tokens=None))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_token_limit_wins_by_any_of_its_names(name: str) -> None:
    of = config(default_params={"max_completion_tokens": 100, "n_predict": 100})
    limited = body(of, {name: 5})
    limits = {"max_tokens", "max_completion_tokens", "n_predict"}
    assert {key: value for key, value in limited.items() if key in limits} == {name: 5}


def test_what_the_worker_owns_is_replaced() -> None:
    owned: dict[str, Any] = {"messages": [], "tools": [{"x": 1}], "stream": False}
    before = copy.deepcopy(owned)
    assert body(config(default_params=owned), owned) == body()
    assert body(WITH_TOOLS, owned)["tools"] == [ADD, SIGNAL]
    assert body(WITH_TOOLS, owned, prompted=True) == body()
    assert owned == before
