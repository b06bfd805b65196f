"""What servers, new, old and odd, say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from llama_worker.config import WorkerConfig
from llama_worker.server.traits import ServerTraits, server_traits, shortcomings
from llama_worker.types import ToolCallMode, ToolDef


def caps(**told: Any) -> dict[str, Any]:
    return {"chat_template_caps": told}


@pytest.mark.parametrize(
    ("props", "expected"),
    [
        ({}, ServerTraits()),
        ({"total_slots": 4}, ServerTraits(slots=4)),
        ({"total_slots": "4"}, ServerTraits()),
        ({"total_slots": True}, ServerTraits()),
        ({"total_slots": None}, ServerTraits()),
        (caps(supports_tools=True, supports_tool_calls=True), ServerTraits(tools=True)),
        (caps(supports_tools=True, supports_tool_calls=False), ServerTraits(tools=False)),
        (caps(supports_tools=False, supports_tool_calls=True), ServerTraits(tools=False)),
        (caps(supports_tools=True), ServerTraits(tools=True)),
        (caps(supports_tool_calls=True), ServerTraits()),
        (caps(), ServerTraits()),
        ({"chat_template_caps": None}, ServerTraits()),
        ({"chat_template_caps": ["supports_tools"]}, ServerTraits()),
    ],
)
def test_slots_and_tools(props: dict[str, Any], expected: ServerTraits) -> None:
    assert server_traits(props, {}) == expected


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("[INST]hi[/INST][THINK]", True),
        ("assistant: <seed:think>\n\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<think> about it<|im_start|>assistant\n", False),
        ("", False),
        (None, False),
        (7, False),
    ],
)
def test_whether_the_template_ends_inside_a_think_tag(prompt: Any, opens: bool) -> None:
    assert server_traits({}, {"prompt": prompt}).opens_thinking is opens


def test_an_old_server_without_apply_template_opens_no_thinking() -> None:
    assert not server_traits({}, {}).opens_thinking


# ---------------------------------------------------------------- what the server lacks

SIGNAL: ToolDef = {"type": "function", "function": {"name": "signal"}}


def config(**changed: Any) -> WorkerConfig:
    return WorkerConfig(name="w", host="127.0.0.1", port=9001, server_cmd=("llama-server",), **changed)


@pytest.mark.parametrize("slots", [None, 2, 3])
def test_slots_that_are_enough_or_unknown_are_no_shortcoming(slots: int | None) -> None:
    assert shortcomings(ServerTraits(slots=slots), config(slots=2)) == []


def test_fewer_slots_than_the_workers_are_told_with_what_to_do() -> None:
    (line,) = shortcomings(ServerTraits(slots=1), config(slots=2))
    assert line.startswith("the server has 1 slots, fewer than the worker's 2")
    assert line.endswith("start it with --parallel 2")


@pytest.mark.parametrize(
    ("mode", "how"), [("auto", "prompted mode"), ("prompted", "prompted mode"), ("native", "'auto' would explain them")]
)
def test_tools_that_the_template_lacks_are_told(mode: ToolCallMode, how: str) -> None:
    (line,) = shortcomings(ServerTraits(tools=False), config(exit_tools=[SIGNAL], tool_call_mode=mode))
    assert how in line


def test_a_template_without_tools_lacks_nothing_where_there_are_none() -> None:
    assert shortcomings(ServerTraits(tools=False), config()) == []
    assert shortcomings(ServerTraits(tools=None), config(exit_tools=[SIGNAL])) == []
