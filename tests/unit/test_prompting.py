"""The BIOS text and the conversation."""

import asyncio
import copy
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_worker import exit_tools
from llama_worker.bios import STATUS_CLOSE, STATUS_OPEN, PromptError, default_bios, prompted_tools_text, run_bios
from llama_worker.request.conversation import SYSTEM_PROMPT_DELIMITER, Conversation
from llama_worker.request.submission import Submission
from llama_worker.stream.calls import ParsedCall, RawCall
from llama_worker.stream.tagged_calls import TaggedCallFilter, tagged_call
from llama_worker.types import BiosContext, BiosText, ChatMessage, SystemPromptMode, ToolCallMode, ToolDef
from tests.conftest import Speechless

ADD: ToolDef = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
ESCALATE: ToolDef = {"type": "function", "function": {"name": "escalate"}}
CALLS = (
    ParsedCall("c00000001", "add", {"a": 1}, '{"a":1}'),
    ParsedCall("c00000002", "find", {}, "{}"),
)
BIOS = BiosText("BIOS", "T1")


def context(
    *,
    now: datetime = datetime(2026, 10, 1, 12, 30, 5, tzinfo=timezone(timedelta(hours=2))),
    iterations: int = 8,
    normal: tuple[ToolDef, ...] = (ADD,),
    exits: tuple[ToolDef, ...] = (ESCALATE,),
    mode: ToolCallMode = "native",
) -> BiosContext:
    return BiosContext(
        now=now,
        timezone_name="Europe/Berlin",
        worker_name="w-1",
        tool_iters_remaining=iterations,
        normal_tools=normal,
        exit_tools=exits,
        tool_call_mode=mode,
    )


def begin(
    bios: BiosText | str = BIOS,
    *,
    system_prompt: str = "SYS",
    messages: list[ChatMessage] | None = None,
    user_prompt: str = "Hi",
    mode: SystemPromptMode = "merged",
    prompted: bool = False,
) -> Conversation:
    return Conversation.begin(
        bios,
        Submission(
            job_name="j",
            system_prompt=system_prompt,
            user_prompt=user_prompt,
            params={},
            messages=tuple(messages or ()),
        ),
        system_prompt_mode=mode,
        prompted=prompted,
    )


def after_tools(
    conversation: Conversation, bios: BiosText | str, *, text: str = "Look:", reasoning: str = "hm"
) -> Conversation:
    return conversation.after_tools(bios, text=text, reasoning=reasoning, calls=CALLS, results=["2", "[]"])


def status(text: str) -> str:
    return f"\n\n{STATUS_OPEN}\n{text}\n{STATUS_CLOSE}"


def dumped(conversation: Conversation) -> list[str]:
    return [json.dumps(message) for message in conversation.messages()]


# --- the default BIOS -----------------------------------------------------------------------------------


def test_the_default_bios_says_who_and_with_what_in_its_stable_part() -> None:
    stable = default_bios(context()).stable
    assert stable.splitlines()[0] == "bios-v1"
    for said in ("hivemind", "'w-1'", "add", "escalate", "unless the matter is urgent"):
        assert said in stable


def test_the_default_bios_has_time_with_zone_and_iterations_in_its_volatile_part() -> None:
    bios = default_bios(context())
    for said in ("2026-10-01 12:30:05+02:00", "Europe/Berlin", "Tool iterations left: 8"):
        assert said in bios.volatile
        assert said not in bios.stable


@pytest.mark.parametrize("mode", ["native", "prompted", "auto"])
def test_the_stable_part_is_the_same_for_the_whole_request(mode: ToolCallMode) -> None:
    later = default_bios(context(now=datetime(2027, 1, 2, tzinfo=UTC), iterations=0, mode=mode))
    assert later.stable == default_bios(context(mode=mode)).stable


def test_only_in_prompted_mode_the_bios_lists_the_tools_and_the_convention() -> None:
    stable = default_bios(context(mode="prompted")).stable
    assert prompted_tools_text((ADD,), (ESCALATE,)) in stable
    assert json.dumps(ADD["function"]) in stable
    assert json.dumps(ESCALATE["function"]) in stable
    assert "XML" not in stable
    without_tools = default_bios(context(normal=(), exits=(), mode="prompted")).stable
    for said in ("<tool_call>", "Tools that answer", "Exit tools", "XML"):
        assert said not in without_tools


@pytest.mark.parametrize("mode", ["native", "auto"])
def test_in_native_mode_the_bios_says_what_to_do_without_tool_calls(mode: ToolCallMode) -> None:
    stable = default_bios(context(mode=mode)).stable
    assert "an XML element named tool_call" in stable
    assert "<tool_call>" not in stable
    assert "XML" not in default_bios(context(normal=(), exits=(), mode=mode)).stable


@pytest.mark.parametrize(
    ("tool", "use"),
    [
        (exit_tools.SIGNAL_ISSUE, "your confidence is low"),
        (exit_tools.REQUEST_ESCALATION, "you need information from outside"),
        (exit_tools.REQUEST_DECISION, "a decision has to be taken by others"),
        (exit_tools.DECLARE_OUTCOME, "how the work ended"),
        (ESCALATE, "as its description says"),
    ],
)
def test_the_bios_says_what_each_exit_tool_is_for(tool: ToolDef, use: str) -> None:
    name = tool["function"]["name"]
    assert f"- {name}: {use}" in default_bios(context(exits=(tool,))).stable
    assert use not in default_bios(context(exits=())).stable


@pytest.mark.parametrize(
    ("shown", "strict"),
    [
        (prompted_tools_text((ADD,), ()), True),
        ('<tool_call>{"name": "escalate", "arguments": {"reason": "x"}}</tool_call>', False),  # as told in native mode
    ],
)
def test_the_convention_shown_is_one_that_the_parser_reads(shown: str, strict: bool) -> None:
    tool_filter = TaggedCallFilter(strict=strict)
    text = tool_filter.feed(shown) + tool_filter.finish()
    (call,) = tool_filter.calls
    assert isinstance(call, RawCall)
    assert "<tool_call>" not in text


# --- providers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bios", ["text", "", BiosText("a", "b"), BiosText("a")])
def test_text_of_a_provider_is_taken_as_it_is(bios: BiosText | str) -> None:
    assert run_bios(lambda ctx: bios, context()) == bios


@pytest.mark.parametrize(
    "error",
    [
        *(RuntimeError("boom"), RecursionError("boom"), SystemExit("boom"), KeyboardInterrupt("boom")),
        *(GeneratorExit("boom"), asyncio.CancelledError("boom"), Speechless("boom")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_provider_that_raises_is_a_prompt_error(error: BaseException) -> None:
    def provider(ctx: BiosContext) -> str:
        raise error

    with pytest.raises(PromptError, match=rf"raised .*\b{type(error).__name__}: ") as caught:
        run_bios(provider, context())
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("value", [None, b"x", 1, ("a", "b"), BiosText(None, ""), BiosText("", 1), "\ud800"])  # type: ignore[arg-type]
def test_a_provider_that_returns_no_string_is_a_prompt_error(value: Any) -> None:
    with pytest.raises(PromptError, match="the BIOS provider"):
        run_bios(lambda ctx: value, context())


# --- the first turn -------------------------------------------------------------------------------------


def test_merged_is_one_system_message_with_a_delimiter_and_separate_is_two() -> None:
    user = {"role": "user", "content": "Hi" + status("T1")}
    bios, system = ({"role": "system", "content": text} for text in ("BIOS", "SYS"))
    assert begin().messages() == [{"role": "system", "content": f"BIOS{SYSTEM_PROMPT_DELIMITER}SYS"}, user]
    assert begin(mode="separate").messages() == [bios, system, user]


@pytest.mark.parametrize("mode", ["merged", "separate"])
@pytest.mark.parametrize(
    ("bios", "system_prompt", "contents"),
    [("BIOS", "", ["BIOS"]), ("", "SYS", ["SYS"]), ("", "", []), (BiosText("", ""), "", [])],
)
def test_an_empty_prompt_leaves_no_message_and_no_delimiter(
    mode: SystemPromptMode, bios: BiosText | str, system_prompt: str, contents: list[str]
) -> None:
    messages = begin(bios, system_prompt=system_prompt, mode=mode).messages()
    assert [m["content"] for m in messages if m["role"] == "system"] == contents


def test_the_order_is_bios_system_prompt_messages_user_prompt() -> None:
    prior: list[ChatMessage] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for user_prompt in ("Hi", ""):  # after an assistant's message an empty one is a message, too
        messages = begin("BIOS", messages=prior, mode="separate", user_prompt=user_prompt).messages()
        assert [m["content"] for m in messages] == ["BIOS", "SYS", "q", "a", user_prompt]
    assert begin("BIOS", user_prompt="").messages()[-1] == {"role": "user", "content": ""}


@pytest.mark.parametrize(
    ("last", "content"),
    [
        ({"role": "user", "content": "q"}, "q" + status("T1")),
        ({"role": "tool", "content": "r", "tool_call_id": "x"}, "r" + status("T1")),
        (
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            [{"type": "text", "text": "q"}, {"type": "text", "text": status("T1")}],
        ),
        ({"role": "user", "content": None}, status("T1").strip()),
    ],
)
def test_an_empty_user_prompt_is_left_out_after_a_message_to_answer(last: Any, content: Any) -> None:
    before = copy.deepcopy(last)
    messages = begin(messages=[last], user_prompt="").messages()
    assert len(messages) == 2
    assert messages[-1] == {**before, "content": content}
    assert last == before


# --- continuation after tools ---------------------------------------------------------------------------


def test_the_continuation_holds_the_normal_calls_and_one_tool_message_per_call() -> None:
    added = after_tools(begin(), BiosText("BIOS", "T2")).messages()[2:]
    assert added == [
        {
            "role": "assistant",
            "content": "Look:",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c00000001", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                {"id": "c00000002", "type": "function", "function": {"name": "find", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c00000001", "name": "add", "content": "2"},
        {"role": "tool", "tool_call_id": "c00000002", "name": "find", "content": "[]" + status("T2")},
    ]


def test_content_is_empty_never_null_and_no_reasoning_is_no_field() -> None:
    assistant = after_tools(begin(), BIOS, text="", reasoning="").messages()[2]
    assert assistant["content"] == ""
    assert "reasoning_content" not in assistant


def test_in_prompted_mode_the_results_are_one_user_message() -> None:
    added = after_tools(begin(prompted=True), BiosText("BIOS", "T2"), text="Look:\n").messages()[2:]
    first, second = tagged_call("add", '{"a":1}'), tagged_call("find", "{}")
    assert added == [
        {"role": "assistant", "content": f"Look:\n{first}\n{second}", "reasoning_content": "hm"},
        {
            "role": "user",
            "content": '<tool_response id="c00000001" name="add">\n2\n</tool_response>\n'
            '<tool_response id="c00000002" name="find">\n[]\n</tool_response>' + status("T2"),
        },
    ]


def test_in_prompted_mode_a_call_goes_back_as_the_model_wrote_it() -> None:
    written = '<tool_call>\n{"name":"add", "arguments":{"a" : 1}}\n</tool_call>'
    call = ParsedCall("c00000001", "add", {"a": 1}, '{"a": 1}', written)
    conversation = begin(prompted=True).after_tools(BIOS, text="So: ", reasoning="", calls=[call], results=["2"])
    assert conversation.messages()[2]["content"] == f"So: {written}"


@pytest.mark.parametrize(("calls", "results"), [((), []), (CALLS, ["2"]), (CALLS[:1], ["2", "3"])])
def test_a_result_for_each_call_is_required(calls: tuple[ParsedCall, ...], results: list[str]) -> None:
    with pytest.raises(ValueError, match="one result per call"):
        begin().after_tools(BIOS, text="", reasoning="", calls=calls, results=results)


@pytest.mark.parametrize("prompted", [False, True])
@settings(max_examples=25)
@given(st.lists(st.tuples(st.text(), st.text(), st.text()), min_size=1, max_size=4))
def test_earlier_messages_stay_to_the_byte_the_same_after_a_tool_turn(
    prompted: bool, turns: list[tuple[str, str, str]]
) -> None:
    conversation = begin(prompted=prompted)
    for text, reasoning, volatile in turns:
        before = dumped(conversation)
        following = after_tools(conversation, BiosText("other", volatile), text=text, reasoning=reasoning)
        assert dumped(following)[: len(before)] == before
        assert dumped(conversation) == before
        conversation = following


def test_a_str_is_put_first_anew_and_the_rest_stays() -> None:
    conversation = begin("BIOS at 1")
    following = after_tools(conversation, "BIOS at 2")
    assert following.messages()[0]["content"] == f"BIOS at 2{SYSTEM_PROMPT_DELIMITER}SYS"
    assert dumped(following)[1:2] == dumped(conversation)[1:]
    assert STATUS_OPEN not in str(following.messages())
