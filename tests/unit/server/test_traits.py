"""What servers, new, old and odd, say of themselves."""

import re
from typing import Any

import pytest

from llama_worker.server.traits import (
    ServerTraits,
    build_number,
    known_flaws,
    may_leave_thoughts,
    server_traits,
    shortcomings,
    unsupported,
    visibility_warnings,
)
from tests.unit.config.cases import config, tool


def caps(**told: Any) -> dict[str, Any]:
    return {"chat_template_caps": told}


@pytest.mark.parametrize(
    ("props", "expected"),
    [
        ({}, ServerTraits()),
        ({"total_slots": 4}, ServerTraits(slots=4)),
        *(({"total_slots": odd}, ServerTraits()) for odd in ("4", True)),
        (caps(supports_tools=True, supports_tool_calls=True), ServerTraits(tools=True)),
        (caps(supports_tools=True, supports_tool_calls=False), ServerTraits(tools=False)),
        (caps(supports_tools=False, supports_tool_calls=True), ServerTraits(tools=False)),
        (caps(supports_tools=True), ServerTraits(tools=True)),
        (caps(supports_tool_calls=True), ServerTraits()),
        (caps(), ServerTraits()),
        ({"chat_template_caps": ["supports_tools"]}, ServerTraits()),
        ({"default_generation_settings": {"n_ctx": 4096}}, ServerTraits(n_ctx=4096)),
        ({"default_generation_settings": {"n_ctx": None}}, ServerTraits()),
        ({"default_generation_settings": []}, ServerTraits()),
        (
            {"modalities": {"vision": True, "audio": False}},
            ServerTraits(modalities={"vision": True, "audio": False}),
        ),
        ({"modalities": {"vision": "yes"}}, ServerTraits(modalities={})),
        ({"model_alias": "tiny", "model_path": "/m/t.gguf"}, ServerTraits(model="tiny")),
        ({"model_alias": "", "model_path": "/m/t.gguf"}, ServerTraits(model="t.gguf")),
        ({"model_path": 7}, ServerTraits()),
        ({"build_info": "b11434-unknown"}, ServerTraits(build=11434)),
        ({"build_info": 11434}, ServerTraits()),
        ({"role": "router"}, ServerTraits(is_router=True)),
    ],
)
def test_what_props_say(props: dict[str, Any], expected: ServerTraits) -> None:
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
        *((empty, False) for empty in ("", None, 7)),
    ],
)
def test_whether_the_template_ends_inside_a_think_tag(prompt: Any, opens: bool) -> None:
    assert server_traits({}, {"prompt": prompt}).opens_thinking is opens


@pytest.mark.parametrize(
    ("traits", "command", "params", "leaves"),
    [
        ({"build": 11434}, ("llama-server",), {}, False),
        ({"build": 9093}, ("llama-server",), {"reasoning_format": "deepseek"}, False),
        ({"build": 9092}, ("llama-server",), {}, True),
        ({}, ("llama-server",), {}, True),
        ({"build": 11434}, ("llama-server", "--skip-chat-parsing"), {}, True),
        ({"build": 11434}, ("./serve.sh",), {}, True),
        ({"build": 11434}, ("llama-server",), {"reasoning_format": "none"}, True),
        ({"opens_thinking": False}, ("llama-server",), {}, False),
    ],
)
def test_where_a_thought_may_remain_without_its_tag(
    traits: dict[str, Any], command: tuple[str, ...], params: dict[str, Any], leaves: bool
) -> None:
    said = ServerTraits(**{"opens_thinking": True, **traits})
    of_all = config(server_cmd=command, default_params=params)
    for given in (of_all, {}), (config(server_cmd=command), params):
        assert may_leave_thoughts(said, *given) is leaves


@pytest.mark.parametrize(
    ("kinds", "modalities", "says"),
    [
        ({"text", "of_tomorrow"}, {"vision": False}, None),
        ({"image_url"}, {"vision": True}, None),
        ({"image_url"}, None, None),  # an old build does not say
        ({"image_url"}, {"vision": False, "audio": True}, "parts need a model with vision"),
        ({"input_audio", "text"}, {"vision": True}, "input_audio parts need a model with audio"),
    ],
)
def test_parts_that_the_model_cannot_take(
    kinds: set[str], modalities: Any, says: str | None
) -> None:
    for model, named in (("tiny", "; 'tiny' as served"), (None, "; the model as served")):
        refusal = unsupported(kinds, ServerTraits(modalities=modalities, model=model))
        assert (refusal is None) == (says is None)
        assert (says or "") in (refusal or "")
        assert refusal is None or named in refusal


OFFERS = {"exit_tools": [tool("signal")]}
NATIVE, PROMPTED = ({**OFFERS, "tool_call_mode": mode} for mode in ("native", "prompted"))
TWO_OF_4096 = {"server_cmd": ("s.sh", "-c", "8192"), "slots": 2}
NO_TOOLS, SMALL = ServerTraits(tools=False), ServerTraits(n_ctx=512)


@pytest.mark.parametrize(
    ("traits", "given", "says"),
    [
        (ServerTraits(slots=None), {"slots": 2}, None),
        (ServerTraits(slots=2), {"slots": 2}, None),
        (ServerTraits(slots=3), {"slots": 2}, None),
        (
            ServerTraits(slots=1),
            {"slots": 2},
            r"has 1 slots, fewer than the worker's 2.* --parallel 2$",
        ),
        (NO_TOOLS, {}, None),
        (ServerTraits(tools=None), OFFERS, None),
        (NO_TOOLS, OFFERS, r"does not support tools: .*prompted mode"),
        (NO_TOOLS, PROMPTED, r"does not support tools: .*prompted mode"),
        (NO_TOOLS, NATIVE, r"'auto' would explain them"),
        (ServerTraits(n_ctx=4096), {"server_cmd": ("s", "--ctx-size", "4096")}, None),
        # it rounds up
        (ServerTraits(n_ctx=4352), {"server_cmd": ("s", "--ctx-size", "4096")}, None),
        (ServerTraits(n_ctx=4096), TWO_OF_4096, None),
        (ServerTraits(n_ctx=2048), TWO_OF_4096, r"has 2048 .* the 4096 that"),
        (SMALL, {"env": {"LLAMA_ARG_CTX_SIZE": "4096"}}, r"fewer than the 4096 .*: the model was"),
        (SMALL, {"server_cmd": ("s", "--ctx-size", "0")}, None),  # the model's own
        (SMALL, {}, None),
        (ServerTraits(n_ctx=None), {"server_cmd": ("s.sh", "-c", "4096")}, None),
        (ServerTraits(build=11392), {}, r"^llama-server b11392 has CVE-2026-107183: "),
        (ServerTraits(build=11434), {}, None),
        (ServerTraits(is_router=True), {}, r"^the server is a router: "),
    ],
)
def test_server_with_less_than_configured_gives_warning(
    traits: ServerTraits, given: dict[str, Any], says: str | None
) -> None:
    lines = shortcomings(traits, config(**{"server_cmd": ("llama-server",), **given}))
    assert len(lines) == (says is not None)
    assert re.search(says or "", "".join(lines))


# ------------------------------------------------------------ builds

MODEL = ("llama-server", "--model", "m.gguf")
SLEEPING = (*MODEL, "--sleep-idle-seconds", "60")


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("version: 0.6.0-dev (build 11434, commit unknown)\nbuilt with GNU 12.2.0", 11434),
        ("version: 1.0.0 (build 11902, commit 8f2c1d0)", 11902),
        ("version: 7234 (8f2c1d0)\nbuilt with cc 13.2.0 for x86_64-linux-gnu", 7234),
        ("version: b9093 (8f2c1d0)", 9093),
        ("ggml_cuda_init: found 1 CUDA devices\nversion: 7234 (8f2c1d0)", 7234),
        ("build: 4567 (8f2c1d0) with cc 13.2.0", 4567),
        ("b11434-unknown", 11434),
        ("b4321-8f2c1d0a", 4321),
        ("version: 1.0.0", None),
        ("version: 10.2", None),
        ("version: 0 (unknown)", None),  # built without git
        ("version: 1 (8f2c1d0)", None),  # from a shallow clone, as are those of the next two
        ("b1500-8f2c1d0", 1500),  # the oldest that is told from those
        ("b1499-8f2c1d0", None),
        ("version: 0.2.0-dev (build 433, commit 8f2c1d0)", None),
        ("b452-9558fa4", None),
        ("b0-unknown", None),
        ("built with GNU 12.2.0", None),
        ("", None),
    ],
)
def test_the_number_is_read_in_every_form(said: str, number: int | None) -> None:
    assert build_number(said) == number


@pytest.mark.parametrize(
    ("build", "command", "names"),
    [
        (None, SLEEPING, []),
        (11434, SLEEPING, []),
        (11393, SLEEPING, []),
        (11392, SLEEPING, ["CVE-2026-107183"]),
        (9061, SLEEPING, ["CVE-2026-107183"]),
        (9060, SLEEPING, ["CVE-2026-43631, CVE-2026-43632", "CVE-2026-107183"]),
        (9060, (*MODEL, "--sleep-idle-seconds", "-1"), ["CVE-2026-107183"]),
        (9060, MODEL, ["CVE-2026-107183"]),
        (7492, SLEEPING, ["CVE-2026-43631, CVE-2026-43632", "CVE-2026-107183"]),
        (7491, SLEEPING, ["CVE-2026-107183"]),
    ],
)
def test_the_vulnerabilities_of_a_build_are_named(
    build: int | None, command: tuple[str, ...], names: list[str]
) -> None:
    lines = known_flaws(build, command)
    assert [line.partition(" has ")[2].partition(":")[0] for line in lines] == names


@pytest.mark.parametrize(("build", "warns"), [(None, 0), (9093, 1), (9543, 1), (9544, 0)])
def test_old_builds_give_a_visibility_warning(build: int | None, warns: int) -> None:
    lines = visibility_warnings(build)
    assert len(lines) == warns
    assert all(f"b{build} does not show" in line for line in lines)
