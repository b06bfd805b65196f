"""What a server says of itself once it is ready. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llama_worker.config import WorkerConfig

_THINK_OPENINGS = ("<think>", "[THINK]", "<seed:think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTraits:
    """None where the server did not say."""

    slots: int | None = None
    tools: bool | None = None  # the model's chat template can offer tools and show calls
    opens_thinking: bool = False  # the template ends the prompt inside a think tag


def server_traits(props: Mapping[str, Any], applied_template: Mapping[str, Any]) -> ServerTraits:
    """From the bodies of `/props` and of `/apply-template` for a one-line chat; {} where there was none."""
    slots = props.get("total_slots")
    caps = props.get("chat_template_caps")
    tools = None
    if isinstance(caps, Mapping) and "supports_tools" in caps:
        tools = bool(caps["supports_tools"]) and bool(caps.get("supports_tool_calls", True))
    prompt = applied_template.get("prompt")
    return ServerTraits(
        slots=slots if isinstance(slots, int) and not isinstance(slots, bool) else None,
        tools=tools,
        opens_thinking=isinstance(prompt, str) and prompt.rstrip().endswith(_THINK_OPENINGS),
    )


def shortcomings(traits: ServerTraits, config: WorkerConfig) -> list[str]:
    """What the worker was configured for and the server lacks: lines for a person."""
    lines = []
    if traits.slots is not None and traits.slots < config.slots:
        lines.append(
            f"the server has {traits.slots} slots, fewer than the worker's {config.slots}: requests"
            f" beyond them wait in the server without a sign of life; start it with --parallel {config.slots}"
        )
    if traits.tools is False and (config.normal_tools or config.exit_tools):
        native = config.tool_call_mode == "native"
        how = "lost in native mode; tool_call_mode 'auto' would explain them" if native else "explained"
        mode = "in the system prompt instead (prompted mode)"
        lines.append(f"the model's chat template does not support tools: they are {how} {mode}")
    return lines
