"""The BIOS text and the conversation."""

import asyncio
import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_worker import exit_tools
from llama_worker.bios import (
    STATUS_CLOSE,
    STATUS_OPEN,
    PromptError,
    default_bios,
    prompted_tools_text,
    run_bios,
)
from llama_worker.request.conversation import SYSTEM_PROMPT_DELIMITER, Conversation
from llama_worker.request.submission import Submission
from llama_worker.stream.calls import ParsedCall, RawCall
from llama_worker.stream.tagged_calls import TaggedCallFilter, tagged_call
from llama_worker.types import (
    BiosContext,
    BiosText,
    ChatMessage,
    SystemPromptMode,
    ToolCallMode,
    ToolDef,
)
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
CONTEXT = BiosContext(
    now=datetime(2026, 10, 1, 12, 30, 5, tzinfo=timezone(timedelta(hours=2))),
    timezone_name="Europe/Berlin",
    worker_name="w-1",
    tool_iters_remaining=8,
    normal_tools=(ADD,),
    exit_tools=(ESCALATE,),
    tool_call_mode="native",
)


def begin(
    bios: BiosText | str = BIOS,
    *,
    system_prompt: str = "SYS",
    messages: Sequence[ChatMessage] = (),
    user_prompt: str = "Hi",
    mode: SystemPromptMode = "merged",
    prompted: bool = False,
) -> Conversation:
    prompts: Any = {
        "system_prompt": system_prompt,
        "user_prompt": user_prompt,
        "messages": tuple(messages),
    }
    submission = Submission(job_name="j", params={}, **prompts)
    return Conversation.begin(bios, submission, system_prompt_mode=mode, prompted=prompted)


def after_tools(conversation: Conversation, bios: BiosText | str, **said: Any) -> Conversation:
    said = {"text": "Look:", "reasoning": "hm", "calls": CALLS, "results": ["2", "[]"]} | said
    return conversation.after_tools(bios, **said)


def status(text: str) -> str:
    return f"\n\n{STATUS_OPEN}\n{text}\n{STATUS_CLOSE}"


# --- the BIOS -------------------------------------------------------------------------------------------


every_mode = pytest.mark.parametrize("mode", ["native", "prompted", "auto"])


@every_mode
def test_the_default_bios_is_the_same_for_the_whole_request_but_for_time_and_iterations(
    mode: ToolCallMode,
) -> None:
    bios = default_bios(replace(CONTEXT, tool_call_mode=mode))
    assert (
        bios.volatile == "Time: 2026-10-01 12:30:05+02:00 (Europe/Berlin)\nTool iterations left: 8"
    )
    assert bios.stable.splitlines()[0] == "bios-v1"
    for said in ("hivemind", "'w-1'", "add", "escalate", "unless the matter is urgent"):
        assert said in bios.stable
    later = replace(
        CONTEXT, tool_call_mode=mode, now=datetime(2027, 1, 2, tzinfo=UTC), tool_iters_remaining=0
    )
    assert default_bios(later).stable == bios.stable


@every_mode
def test_how_to_call_a_tool_is_said_as_the_mode_needs_it_and_only_where_there_are_tools(
    mode: ToolCallMode,
) -> None:
    stable = default_bios(replace(CONTEXT, tool_call_mode=mode)).stable
    shown = prompted_tools_text((ADD,), (ESCALATE,))
    for said in (
        shown,
        json.dumps(ADD["function"]),
        json.dumps(ESCALATE["function"]),
        "<tool_call>",
    ):
        assert (said in stable) is (mode == "prompted")
    assert ("an XML element named tool_call" in stable) is (mode != "prompted")
    without_tools = default_bios(
        replace(CONTEXT, normal_tools=(), exit_tools=(), tool_call_mode=mode)
    )
    assert without_tools.stable.splitlines() == [
        "bios-v1",
        "You are worker 'w-1' in a hivemind of co-operating models.",
        "What <worker_status> says is from your worker, not the user.",
    ]
    assert without_tools.volatile == "Time: 2026-10-01 12:30:05+02:00 (Europe/Berlin)"


def test_iterations_are_told_where_a_tool_costs_any() -> None:
    assert "iterations" not in default_bios(replace(CONTEXT, normal_tools=())).volatile
    assert "iterations left: 8" in default_bios(replace(CONTEXT, exit_tools=())).volatile


def test_without_a_provider_nothing_is_sent_but_tools_that_no_template_brings() -> None:
    prompted = replace(CONTEXT, tool_call_mode="prompted")
    assert run_bios(None, CONTEXT) == ""
    assert run_bios(None, prompted) == prompted_tools_text((ADD,), (ESCALATE,))
    assert run_bios(None, replace(prompted, normal_tools=(), exit_tools=())) == ""


def test_the_bios_says_what_each_ready_made_exit_tool_is_for_and_refers_to_the_description_of_others() -> (
    None
):
    stable = default_bios(
        replace(CONTEXT, exit_tools=(*exit_tools.ALL_EXIT_TOOLS, ESCALATE))
    ).stable
    uses = dict(
        line.removeprefix("- ").split(": ", 1) for line in stable.splitlines() if ": " in line
    )
    said = {
        "signal_issue": "confidence is low",
        "request_escalation": "from outside",
        "escalate": "description says",
    }
    for name, use in {
        **said,
        "request_decision": "decision has to",
        "declare_outcome": "how the work ended",
    }.items():
        assert use in uses[name]


TOLD_IN_NATIVE_MODE = '<tool_call>{"name": "escalate", "arguments": {"reason": "x"}}</tool_call>'


@pytest.mark.parametrize(
    ("shown", "strict"), [(prompted_tools_text((ADD,), ()), True), (TOLD_IN_NATIVE_MODE, False)]
)
def test_the_convention_shown_is_one_that_the_parser_reads(shown: str, strict: bool) -> None:
    tool_filter = TaggedCallFilter(strict=strict)
    text = tool_filter.feed(shown) + tool_filter.finish()
    (call,) = tool_filter.calls
    assert isinstance(call, RawCall)
    assert "<tool_call>" not in text


@pytest.mark.parametrize("bios", ["text", "", BiosText("a", "b"), BiosText("a")])
def test_text_of_a_provider_is_taken_as_it_is(bios: BiosText | str) -> None:
    assert run_bios(lambda ctx: bios, CONTEXT) == bios


@pytest.mark.parametrize(
    "kind", [RecursionError, SystemExit, GeneratorExit, asyncio.CancelledError, Speechless]
)
def test_a_provider_that_raises_is_a_prompt_error(kind: type[BaseException]) -> None:
    with pytest.raises(PromptError, match=rf"raised .*\b{kind.__name__}: ") as caught:
        run_bios(Mock(side_effect=kind("boom")), CONTEXT)
    assert type(caught.value.__cause__) is kind


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"x",
        1,
        ("a", "b"),
        BiosText(None, ""),  # type: ignore[arg-type]
        BiosText("", 1),  # type: ignore[arg-type]
        "\ud800",
    ],
)
def test_a_provider_that_returns_no_string_is_a_prompt_error(value: Any) -> None:
    with pytest.raises(PromptError, match="the BIOS provider"):
        run_bios(lambda ctx: value, CONTEXT)


# --- the first turn -------------------------------------------------------------------------------------


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
def test_merged_is_one_system_message_separate_is_two_and_an_empty_prompt_leaves_none(
    bios: BiosText | str, system_prompt: str, merged: list[str], separate: list[str]
) -> None:
    modes: list[tuple[SystemPromptMode, list[str]]] = [("merged", merged), ("separate", separate)]
    for mode, contents in modes:
        messages = begin(bios, system_prompt=system_prompt, mode=mode).messages()
        assert messages[:-1] == [{"role": "system", "content": content} for content in contents]
        assert messages[-1] == {"role": "user", "content": "Hi"}


def test_the_order_is_bios_system_prompt_messages_user_prompt() -> None:
    prior: list[ChatMessage] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    for user_prompt in ("Hi", ""):  # after an assistant's message an empty one is a message, too
        messages = begin(
            "BIOS", messages=prior, mode="separate", user_prompt=user_prompt
        ).messages()
        assert [m["content"] for m in messages] == ["BIOS", "SYS", "q", "a", user_prompt]
    assert begin("BIOS", user_prompt="").messages()[-1] == {"role": "user", "content": ""}
    assert begin().messages()[-1] == {"role": "user", "content": "Hi" + status("T1")}


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
def test_an_empty_user_prompt_is_left_out_after_a_message_to_answer(
    last: Any, content: Any
) -> None:
    before = copy.deepcopy(last)
    messages = begin(messages=[last], user_prompt="").messages()
    assert len(messages) == 2
    assert messages[-1] == {**before, "content": content}
    assert last == before


# --- continuation after tools ---------------------------------------------------------------------------


def test_the_continuation_holds_the_normal_calls_and_one_tool_message_per_call() -> None:
    calls = [
        {
            "id": "c00000001",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a":1}'},
        },
        {"id": "c00000002", "type": "function", "function": {"name": "find", "arguments": "{}"}},
    ]
    assert after_tools(begin(), BiosText("BIOS", "T2")).messages()[2:] == [
        {"role": "assistant", "content": "Look:", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c00000001", "name": "add", "content": "2"},
        {
            "role": "tool",
            "tool_call_id": "c00000002",
            "name": "find",
            "content": "[]" + status("T2"),
        },
    ]


def test_content_is_empty_never_null_and_no_reasoning_is_no_field() -> None:
    assistant = after_tools(begin(), BIOS, text="", reasoning="").messages()[2]
    assert assistant["content"] == ""
    assert "reasoning_content" not in assistant


def test_in_prompted_mode_a_call_goes_back_as_the_model_wrote_it_and_the_results_are_one_user_message() -> (
    None
):
    written = '<tool_call>\n{"name":"add", "arguments":{"a" : 1}}\n</tool_call>'
    calls = [ParsedCall("c00000001", "add", {"a": 1}, '{"a": 1}', written), CALLS[1]]
    conversation = after_tools(
        begin(prompted=True), BiosText("BIOS", "T2"), text="So:\n", calls=calls
    )
    said = f"So:\n{written}\n{tagged_call('find', '{}')}"
    results = (
        '<tool_response id="c00000001" name="add">\n2\n</tool_response>\n'
        '<tool_response id="c00000002" name="find">\n[]\n</tool_response>'
    )
    assert conversation.messages()[2:] == [
        {"role": "assistant", "content": said, "reasoning_content": "hm"},
        {"role": "user", "content": results + status("T2")},
    ]


@pytest.mark.parametrize(("calls", "results"), [((), []), (CALLS, ["2"]), (CALLS[:1], ["2", "3"])])
def test_a_result_for_each_call_is_required(
    calls: tuple[ParsedCall, ...], results: list[str]
) -> None:
    with pytest.raises(ValueError, match="one result per call"):
        after_tools(begin(), BIOS, calls=calls, results=results)


@pytest.mark.parametrize("prompted", [False, True])
@settings(max_examples=25)
@given(st.lists(st.tuples(st.text(), st.text(), st.text()), min_size=1, max_size=4))
def test_earlier_messages_stay_to_the_byte_the_same_after_a_tool_turn(
    prompted: bool, turns: list[tuple[str, str, str]]
) -> None:
    conversation = begin(prompted=prompted)
    for text, reasoning, volatile in turns:
        before = json.dumps(conversation.messages())
        following = after_tools(
            conversation, BiosText("other", volatile), text=text, reasoning=reasoning
        )
        assert json.dumps(following.messages()).startswith(before.removesuffix("]"))
        assert json.dumps(conversation.messages()) == before
        conversation = following


def test_a_str_is_put_first_anew_and_the_rest_stays() -> None:
    conversation = begin("BIOS at 1")
    following = after_tools(conversation, "BIOS at 2")
    assert following.messages()[0]["content"] == f"BIOS at 2{SYSTEM_PROMPT_DELIMITER}SYS"
    assert following.messages()[1:2] == conversation.messages()[1:]
    assert STATUS_OPEN not in str(following.messages())
