"""What servers, new, old and odd, say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from llama_worker.config import WorkerConfig
from llama_worker.server.traits import ServerTraits, server_traits, shortcomings, unsupported
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


@pytest.mark.parametrize(
    ("props", "expected"),
    [
        ({"default_generation_settings": {"n_ctx": 4096}}, ServerTraits(n_ctx=4096)),
        ({"default_generation_settings": {"n_ctx": None}}, ServerTraits()),
        ({"default_generation_settings": []}, ServerTraits()),
        ({"modalities": {"vision": True, "audio": False}}, ServerTraits(modalities={"vision": True, "audio": False})),
        ({"modalities": {"vision": "yes"}}, ServerTraits(modalities={})),
        ({"modalities": None}, ServerTraits()),
        ({"model_alias": "tiny", "model_path": "/m/t.gguf"}, ServerTraits(model="tiny")),
        ({"model_alias": "", "model_path": "/m/t.gguf"}, ServerTraits(model="t.gguf")),
        ({"model_path": 7}, ServerTraits()),
    ],
)
def test_context_modalities_and_model(props: dict[str, Any], expected: ServerTraits) -> None:
    assert server_traits(props, {}) == expected


@pytest.mark.parametrize(
    ("kinds", "modalities", "says"),
    [
        (set(), {"vision": False}, None),
        ({"text", "of_tomorrow"}, {"vision": False}, None),
        ({"image_url"}, {"vision": True}, None),
        ({"image_url"}, None, None),  # an old build does not say
        ({"image_url"}, {"vision": False, "audio": True}, "image_url parts need a model with vision"),
        ({"input_audio", "text"}, {"vision": True}, "input_audio parts need a model with audio"),
    ],
)
def test_parts_that_the_model_cannot_take(kinds: set[str], modalities: Any, says: str | None) -> None:
    refusal = unsupported(kinds, ServerTraits(modalities=modalities, model="tiny"))
    assert (refusal is None) == (says is None)
    assert (says or "") in (refusal or "")


@pytest.mark.parametrize(
    ("words", "env", "slots", "n_ctx", "warned"),
    [
        (("--ctx-size", "4096"), {}, 1, 4096, None),
        (("--ctx-size", "4096"), {}, 1, 4352, None),  # it rounds up
        (("-c", "8192"), {}, 2, 4096, None),
        (("-c", "8192"), {}, 2, 2048, "a slot has 2048 tokens of context, fewer than the 4096"),
        ((), {"LLAMA_ARG_CTX_SIZE": "4096"}, 1, 512, "fewer than the 4096"),
        (("--ctx-size", "0"), {}, 1, 512, None),  # the model's own
        ((), {}, 1, 512, None),
        (("-c", "4096"), {}, 1, None, None),
    ],
)
def test_less_context_than_was_asked_for_is_told(
    words: tuple[str, ...], env: dict[str, str], slots: int, n_ctx: int | None, warned: str | None
) -> None:
    lines = shortcomings(ServerTraits(n_ctx=n_ctx), config(server_cmd=("s", *words), env=env, slots=slots))
    assert len(lines) == (warned is not None)
    assert (warned or "") in "".join(lines)


def test_an_old_server_without_apply_template_opens_no_thinking() -> None:
    assert not server_traits({}, {}).opens_thinking


# ---------------------------------------------------------------- what the server lacks

SIGNAL: ToolDef = {"type": "function", "function": {"name": "signal"}}


def config(**changed: Any) -> WorkerConfig:
    return WorkerConfig(**{"name": "w", "host": "127.0.0.1", "port": 9001, "server_cmd": ("llama-server",), **changed})


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
