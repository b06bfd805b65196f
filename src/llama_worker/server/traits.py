"""Reads what a ready server says about itself, and lists what is known about its build. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from msgspec import Struct

from llama_worker.config.command import flag_values
from llama_worker.config.command_flags import commanded_n_ctx, parses_chats
from llama_worker.config.settings import WorkerConfig
from llama_worker.config.validation import as_count
from llama_worker.stream.reasoning import CLOSING_TAGS

_MODALITIES = {
    "image_url": "vision",
    "input_audio": "audio",
    "input_video": "video",
}  # content part kind -> the modality that it needs


class ServerTraits(Struct, frozen=True, kw_only=True):
    """What the server says about itself. None: it did not say."""

    slots: int | None = None
    tools: bool | None = None  # the model's chat template can offer tools and show calls
    opens_thinking: bool = False  # the template ends the prompt inside a think tag
    n_ctx: int | None = None  # tokens of context per slot
    modalities: Mapping[str, bool] | None = None  # what the model takes besides text
    model: str | None = None  # its alias, or its file's name
    build: int | None = None
    is_router: bool = False  # it starts servers of its own


def server_traits(props: Mapping[str, Any], applied_template: Mapping[str, Any]) -> ServerTraits:
    """The traits in the bodies of `/props` and of `/apply-template` for a one-line chat; {}: there
    was no body."""
    slots = props.get("total_slots")
    caps = props.get("chat_template_caps")
    tools = None
    if isinstance(caps, Mapping) and "supports_tools" in caps:
        tools = bool(caps["supports_tools"]) and bool(caps.get("supports_tool_calls", True))
    prompt = applied_template.get("prompt")
    generation, modalities = props.get("default_generation_settings"), props.get("modalities")
    path = _text(props.get("model_path"))
    return ServerTraits(
        slots=as_count(slots),
        tools=tools,
        opens_thinking=isinstance(prompt, str) and prompt.rstrip().endswith(tuple(CLOSING_TAGS)),
        n_ctx=as_count(generation.get("n_ctx")) if isinstance(generation, Mapping) else None,
        modalities={str(k): v for k, v in modalities.items() if isinstance(v, bool)}
        if isinstance(modalities, Mapping)
        else None,
        model=_text(props.get("model_alias")) or (PurePath(path).name if path else None),
        build=build_number(_text(props.get("build_info")) or ""),
        is_router=props.get("role") == "router",
    )


def may_leave_thoughts(
    traits: ServerTraits, config: WorkerConfig, params: Mapping[str, Any]
) -> bool:
    """Whether content may begin inside a thought, without a tag: the template opened it, and the
    server may not parse it."""
    if not traits.opens_thinking:
        return False
    if traits.build is None or traits.build < _PARSES_OPENED_THOUGHTS_FROM:
        return True
    asked = {**config.default_params, **params}.get("reasoning_format")
    return asked == "none" or not parses_chats(config.server_cmd, config.env)


def unsupported(part_kinds: Iterable[str], traits: ServerTraits) -> str | None:
    """Why the model cannot take content parts of these kinds; None if it can, or if the server did
    not say."""
    for kind in sorted(part_kinds):
        modality = _MODALITIES.get(kind)
        if (
            modality is not None
            and traits.modalities is not None
            and not traits.modalities.get(modality, False)
        ):
            model = f"{traits.model!r}" if traits.model else "the model"
            return (
                f"{kind} parts need a model with {modality}; {model} as served has none: use "
                "another model, or pass its projector to the server (--mmproj FILE)"
            )
    return None


def shortcomings(traits: ServerTraits, config: WorkerConfig) -> list[str]:
    """Lines for a person: what the worker was configured for and the server lacks, and known
    problems of its build."""
    lines = known_flaws(traits.build, config.server_cmd) + visibility_warnings(traits.build)
    if traits.is_router:
        lines.append(
            "the server is a router: the servers behind it cannot be watched, and a slow one may "
            "be mistaken for a hung one; use --model, with one worker per model"
        )
    if traits.slots is not None and traits.slots < config.slots:
        lines.append(
            f"the server has {traits.slots} slots, fewer than the worker's {config.slots}: further "
            "requests wait inside the server, with no visible progress; start it with "
            f"--parallel {config.slots}"
        )
    asked = commanded_n_ctx(config.server_cmd, config.env, config.slots)
    if traits.n_ctx is not None and asked is not None and traits.n_ctx < asked:
        lines.append(
            f"a slot has {traits.n_ctx} tokens of context, fewer than the {asked} that the "
            "command asks for: the model was trained for no more, the server has more slots than "
            "the worker, or --kv-unified-per-slot limits it"
        )
    if traits.tools is False and (config.normal_tools or config.exit_tools):
        native = config.tool_call_mode == "native"
        how = (
            "lost in native mode; tool_call_mode 'auto' would explain them"
            if native
            else "explained"
        )
        mode = "in the system prompt instead (prompted mode)"
        lines.append(f"the model's chat template does not support tools: they are {how} {mode}")
    return lines


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


# ---------------------------------------------------------------- builds

# A build number counts commits: of a shallow clone only those that it has, which may be hundreds.
_MIN_BUILD = 1500  # of January 2024: older than any that is of use here
_VERSION_PATTERNS = (
    re.compile(r"\bbuild\b[ :=]*b?(\d+)"),  # version: 0.6.0-dev (build 11434, commit 8f2c1d0)
    re.compile(r"^version:\s*b?(\d+)\b(?!\.)", re.MULTILINE),  # version: 7234 (8f2c1d0)
    re.compile(r"^b(\d+)\b"),  # b11434-8f2c1d0, as build_info of /props
)


class _Flaw(Struct, frozen=True, kw_only=True):
    """A vulnerability of the builds from `first` to `last`; `flag`: only if the command has it."""

    names: str
    first: int
    last: int
    what: str
    flag: str | None = None


_FLAWS = (
    _Flaw(
        names="CVE-2026-43631, CVE-2026-43632",
        first=7492,
        last=9060,
        what="use after free when the server goes to sleep",
        flag="--sleep-idle-seconds",
    ),
    _Flaw(
        names="CVE-2026-107183", first=0, last=11392, what="use after free while a reply is parsed"
    ),
)


# The oldest build on which tests/server/test_reasoning.py found all formats alike.
_PARSES_OPENED_THOUGHTS_FROM = 9093
# The oldest builds that were measured to do so: docs/servers.md.
_SHOWS_PROMPT_PROGRESS_FROM = 9544
_ANSWERS_DURING_BATCHES_FROM = 10453


def visibility_warnings(build: int | None) -> list[str]:
    """Lines for a person: what a server of this build does not show of its work. [] if the build is
    unknown."""
    if build is None or build >= _SHOWS_PROMPT_PROGRESS_FROM:
        return []
    return [
        f"llama-server b{build} does not show prompt progress in /slots: a hang is detected only "
        f"after silent_work_timeout_s; use b{_SHOWS_PROMPT_PROGRESS_FROM} or later"
    ]


def answers_during_batches(build: int | None) -> bool:
    """Whether a server of that build is known to answer `/slots` in the middle of a batch."""
    return build is not None and build >= _ANSWERS_DURING_BATCHES_FROM


def build_number(text: str) -> int | None:
    """The build number in the output of `llama-server --version`, or in `build_info` of `/props`;
    None if it holds none."""
    for pattern in _VERSION_PATTERNS:
        match = pattern.search(text)
        if match is not None and int(match[1]) >= _MIN_BUILD:
            return int(match[1])
    return None


def known_flaws(build: int | None, command: Sequence[str]) -> list[str]:
    """Lines for a person: the published vulnerabilities of a server of this build, run with
    `command`. [] if the build is unknown."""
    return [
        f"llama-server b{build} has {flaw.names}: {flaw.what}"
        f"{f' ({flaw.flag})' if flaw.flag else ''}; use a build later than b{flaw.last}"
        for flaw in _FLAWS
        if build is not None
        and flaw.first <= build <= flaw.last
        and (flaw.flag is None or any(v != "-1" for _, v in flag_values(command, (flaw.flag,))))
    ]
