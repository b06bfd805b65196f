"""What a worker tells a model before the host's own prompt."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from unittest.mock import Mock

import pytest

from llama_worker import exit_tools
from llama_worker.bios import PromptError, default_bios, prompted_tools_text, run_bios
from llama_worker.stream.calls import RawCall
from llama_worker.stream.tagged_calls import TaggedCallFilter
from llama_worker.types.chat import ToolDef
from llama_worker.types.hooks import BiosContext, BiosText, ToolCallMode
from tests.conftest import OwnText, Speechless

ADD: ToolDef = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
ESCALATE: ToolDef = {"type": "function", "function": {"name": "escalate"}}
CONTEXT = BiosContext(
    now=datetime(2026, 10, 1, 12, 30, 5, tzinfo=timezone(timedelta(hours=2))),
    timezone_name="Europe/Berlin",
    worker_name="w-1",
    tool_iters_remaining=8,
    normal_tools=(ADD,),
    exit_tools=(ESCALATE,),
    tool_call_mode="native",
)


every_mode = pytest.mark.parametrize("mode", ["native", "prompted", "auto"])


@every_mode
def test_the_stable_bios_stays_the_same(mode: ToolCallMode) -> None:
    bios = default_bios(replace(CONTEXT, tool_call_mode=mode))
    time = "Time: 2026-10-01 12:30:05+02:00 (Europe/Berlin)"
    assert bios.volatile == f"{time}\nTool iterations left: 8"
    assert bios.stable.splitlines()[0] == "bios-v1"
    for said in ("hivemind", "'w-1'", "add", "escalate", "unless the matter is urgent"):
        assert said in bios.stable
    later = replace(
        CONTEXT, tool_call_mode=mode, now=datetime(2027, 1, 2, tzinfo=UTC), tool_iters_remaining=0
    )
    assert default_bios(later).stable == bios.stable


@every_mode
def test_the_bios_says_how_to_call_a_tool(mode: ToolCallMode) -> None:
    stable = default_bios(replace(CONTEXT, tool_call_mode=mode)).stable
    shown = prompted_tools_text((ADD,), (ESCALATE,))
    functions = (json.dumps(tool["function"]) for tool in (ADD, ESCALATE))
    for said in (shown, *functions, "<tool_call>"):
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


def test_without_a_provider_only_prompted_tools_are_sent() -> None:
    prompted = replace(CONTEXT, tool_call_mode="prompted")
    assert run_bios(None, CONTEXT) == ""
    assert run_bios(None, prompted) == prompted_tools_text((ADD,), (ESCALATE,))
    assert run_bios(None, replace(prompted, normal_tools=(), exit_tools=())) == ""


def test_the_bios_says_what_exit_tools_are_for() -> None:
    stable = default_bios(
        replace(CONTEXT, exit_tools=(*exit_tools.ALL_EXIT_TOOLS, ESCALATE))
    ).stable
    uses = dict(
        line.removeprefix("- ").split(": ", 1) for line in stable.splitlines() if ": " in line
    )
    for name, use in (
        ("signal_issue", "confidence is low"),
        ("request_escalation", "from outside"),
        ("request_decision", "decision has to"),
        ("declare_outcome", "how the work ended"),
        ("escalate", "description says"),
    ):
        assert use in uses[name]


TOLD_IN_NATIVE_MODE = '<tool_call>{"name": "escalate", "arguments": {"reason": "x"}}</tool_call>'


@pytest.mark.parametrize(
    ("shown", "strict"), [(prompted_tools_text((ADD,), ()), True), (TOLD_IN_NATIVE_MODE, False)]
)
def test_the_parser_reads_the_convention_that_is_shown(shown: str, strict: bool) -> None:
    tool_filter = TaggedCallFilter(["escalate"], strict=strict)
    text = tool_filter.feed(shown) + tool_filter.finish()
    (call,) = tool_filter.calls
    assert isinstance(call, RawCall)
    assert "<tool_call>" not in text


@pytest.mark.parametrize(
    "bios", ["", OwnText("a"), BiosText("a"), BiosText(OwnText("a"), OwnText("b"))]
)
def test_the_text_of_a_provider_is_unchanged_and_plain(bios: BiosText | str) -> None:
    text = run_bios(lambda ctx: bios, CONTEXT)
    assert text == bios
    parts = (text.stable, text.volatile) if isinstance(text, BiosText) else (text,)
    assert {type(part) for part in parts} == {str}


def test_a_provider_that_is_empty_is_asked() -> None:
    class Sections(list[str]):
        def __call__(self, ctx: BiosContext) -> str:
            return "its own"

    assert run_bios(Sections(), CONTEXT) == "its own"


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
        pytest.param(Mock(spec=str), id="a proxy of a text"),
    ],
)
def test_a_provider_must_return_text(value: Any) -> None:
    with pytest.raises(PromptError, match="the BIOS provider"):
        run_bios(lambda ctx: value, CONTEXT)
