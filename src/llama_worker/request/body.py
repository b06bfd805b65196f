"""The body of a turn's request. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llama_worker.config.settings import WorkerConfig
from llama_worker.types import ChatMessage, ToolDef

OWNED_PARAMS = ("messages", "tools", "stream")  # the worker's: a caller's are dropped

# With one of these the prompt may end otherwise than the one that the server was asked about.
_TEMPLATE_PARAMS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "enable_thinking",
        "reasoning_budget",
        "reasoning_budget_tokens",
        "reasoning_effort",
        "thinking_budget_tokens",
    }
)

_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
_MORE_TOKENS = 64


def request_body(
    config: WorkerConfig,
    params: Mapping[str, Any],
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolDef],
) -> dict[str, Any]:
    """The chat request: the worker's defaults yield to the caller's, but for what the worker
    owns."""
    body: dict[str, Any] = {
        "return_progress": True,
        "stream_options": {"include_usage": True},
        "reasoning_format": "deepseek",
        "sse_ping_interval": 10,
    }
    if config.max_tokens is not None:
        body["max_tokens"] = config.max_tokens
    body.update(config.default_params)
    body.update(params)
    for owned in OWNED_PARAMS:
        body.pop(owned, None)
    body["messages"] = list(messages)
    if tools:
        body["tools"] = list(tools)
    body["stream"] = True
    return body


def offered_tools(config: WorkerConfig, *, prompted: bool) -> list[ToolDef]:
    """What the server is told of; in prompted mode the model alone is, by the text of its prompt."""
    return [] if prompted else [*config.normal_tools, *config.exit_tools]


def runaway_tokens(body: Mapping[str, Any]) -> int | None:
    """How many tokens of a turn are far beyond what its body allows: its server keeps to no limit.
    None: unlimited.

    Counted on our side, where a token may come in more than one piece: hence a quarter more, and
    some.
    """
    limits: list[float] = []
    for key in _TOKEN_LIMITS:
        limit = body.get(key)
        if limit is None:
            continue
        if not isinstance(limit, int | float) or not 0 < limit < math.inf:
            return None
        limits.append(limit)
    if not limits:
        return None
    return int(max(limits) * 1.25) + _MORE_TOKENS


def keeps_prompt_end(config: WorkerConfig, params: Mapping[str, Any]) -> bool:
    """Whether the prompt ends as `ServerTraits.opens_thinking` says: no parameter touches the
    template."""
    return _TEMPLATE_PARAMS.isdisjoint(config.default_params.keys() | params.keys())
