"""What servers, new, old and odd, say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from llama_worker.server_traits import ServerTraits, server_traits


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
