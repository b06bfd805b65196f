"""What a server says of itself once it is ready. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from msgspec import Struct

from llama_worker.config.command_flags import commanded_n_ctx
from llama_worker.config.settings import WorkerConfig
from llama_worker.config.validation import as_count
from llama_worker.server.builds import build_number, known_flaws, unseen

_MODALITIES = {
    "image_url": "vision",
    "input_audio": "audio",
    "input_video": "video",
}  # what a kind of part needs
_THINK_OPENINGS = ("<think>", "[THINK]", "<seed:think>")


class ServerTraits(Struct, frozen=True, kw_only=True):
    """None where the server did not say."""

    slots: int | None = None
    tools: bool | None = None  # the model's chat template can offer tools and show calls
    opens_thinking: bool = False  # the template ends the prompt inside a think tag
    n_ctx: int | None = None  # of a slot
    modalities: Mapping[str, bool] | None = None  # what the model takes beside text
    model: str | None = None  # its alias, or its file's name
    build: int | None = None
    is_router: bool = False  # it starts servers of its own


def server_traits(props: Mapping[str, Any], applied_template: Mapping[str, Any]) -> ServerTraits:
    """From the bodies of `/props` and of `/apply-template` for a one-line chat; {} where there was
    none."""
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
        opens_thinking=isinstance(prompt, str) and prompt.rstrip().endswith(_THINK_OPENINGS),
        n_ctx=as_count(generation.get("n_ctx")) if isinstance(generation, Mapping) else None,
        modalities={str(k): v for k, v in modalities.items() if isinstance(v, bool)}
        if isinstance(modalities, Mapping)
        else None,
        model=_text(props.get("model_alias")) or (PurePath(path).name if path else None),
        build=build_number(_text(props.get("build_info")) or ""),
        is_router=props.get("role") == "router",
    )


def unsupported(part_kinds: Iterable[str], traits: ServerTraits) -> str | None:
    """Why the model cannot take content parts of these kinds; None where it can, or the server did
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
                f"{kind} parts need a model with {modality}, which {model} has not as the server "
                "runs it: take another model, or give the server its projector (--mmproj FILE)"
            )
    return None


def shortcomings(traits: ServerTraits, config: WorkerConfig) -> list[str]:
    """What the worker was configured for and the server lacks, and what is wrong with its build:
    lines for a person."""
    lines = known_flaws(traits.build, config.server_cmd) + unseen(traits.build)
    if traits.is_router:
        lines.append(
            "the server is a router: what its own servers do is not seen, and a slow one may be "
            "taken for hung; give --model, and each model a worker"
        )
    if traits.slots is not None and traits.slots < config.slots:
        lines.append(
            f"the server has {traits.slots} slots, fewer than the worker's {config.slots}: requests"
            " beyond them wait in the server without a sign of life; start it with "
            f"--parallel {config.slots}"
        )
    asked = commanded_n_ctx(config.server_cmd, config.env, config.slots)
    if traits.n_ctx is not None and asked is not None and traits.n_ctx < asked:
        lines.append(
            f"a slot has {traits.n_ctx} tokens of context, fewer than the {asked} that the "
            "command asks for: the server"
            " shrank it to fit its memory (--fit), or the model was trained for no more"
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
