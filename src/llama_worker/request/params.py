"""What the parameters of a request mean, by llama-server's rules (b11434). Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llama_worker.config.command_flags import cache_ram_mib
from llama_worker.config.settings import WorkerConfig
from llama_worker.config.validation import as_count

OWNED_PARAMS = ("messages", "tools", "stream")  # the worker sets them: a caller's are dropped

# With one of these the prompt may end differently from the one that the server was asked about.
TEMPLATE_PARAMS = frozenset(
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

TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
_MORE_TOKENS = 64


def params_warnings(config: WorkerConfig, params: Mapping[str, Any]) -> Iterator[str]:
    """Lines for the user: what in a request's parameters is ignored, or breaks a promise."""
    given = {**config.default_params, **params}
    for owned in OWNED_PARAMS:
        if owned in given:
            yield f"params: {owned!r} is set by the worker; the given value was ignored"
    may_call = bool(config.normal_tools or config.exit_tools) and given.get("tool_choice") != "none"
    for name, (breaks, why) in {**_PITFALLS, **(_PITFALLS_OF_TOOLS if may_call else {})}.items():
        if breaks(given.get(name)):
            yield f"params: {name!r} {why}; leave it out"
    names_slot = config.slots > 1 and _count(given.get("id_slot")) is not None
    if names_slot and cache_ram_mib(config.server_cmd, config.env):
        yield (
            "params: 'id_slot' may mix two conversations: while that slot is busy, the server may "
            "load another prompt from its cache into it; leave it out, or set --cache-ram 0"
        )


def _is_several(value: object) -> bool:
    return (_count(value) or 1) > 1


def _is_schema(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("type") in ("json_object", "json_schema")


_ONE_ANSWER = (
    "makes the server work on several answers: only the first is kept, the others are cut off when "
    "it ends"
)
_NO_PROBABILITIES = "gives probabilities, which no result has"
_NO_PREFILL = "cannot continue an answer, since the last message is never the assistant's"
_NO_CALLS = "makes the server keep all text to the format: the model can call no tool"

# By the parameter's name: whether a value is one that goes wrong, and how it does (b11434).
_PITFALLS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (_is_several, _ONE_ANSWER),
    "n_cmpl": (_is_several, _ONE_ANSWER),
    "logprobs": (bool, _NO_PROBABILITIES),
    "n_probs": (bool, _NO_PROBABILITIES),
    "continue_final_message": (bool, _NO_PREFILL),
    "add_generation_prompt": (lambda value: value is False, _NO_PREFILL),
}
_PITFALLS_OF_TOOLS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "response_format": (_is_schema, _NO_CALLS),
    "json_schema": (lambda value: value is not None, _NO_CALLS),
}


def runaway_tokens(body: Mapping[str, Any]) -> int | None:
    """If a turn has more tokens than this, its server ignores the limit. None: unlimited.

    Deltas are counted, and a token may come in several: hence a quarter and some above the limit.
    """
    limits: list[float] = []
    for key in TOKEN_LIMITS:
        limit = body.get(key)
        if limit is None:
            continue
        if not isinstance(limit, int | float) or not 0 < limit < math.inf:
            return None
        limits.append(limit)
    if not limits:
        return None
    return int(max(limits)) * 5 // 4 + _MORE_TOKENS  # in integers, which do not overflow


def answers_requested(body: Mapping[str, Any]) -> int:
    """How many answers the body asks for, under either of the server's names."""
    return max(_count(body.get(key)) or 1 for key in ("n", "n_cmpl"))


def needs_specific_slots(body: Mapping[str, Any]) -> bool:
    """Whether the body asks for one slot by its number, or for several answers, so several slots:
    the request waits for those even if another slot is idle (b11434)."""
    return _count(body.get("id_slot")) is not None or answers_requested(body) > 1


def _count(value: object) -> int | None:
    """A count as the server reads it: it may be written as 2.0 (b11434)."""
    return as_count(int(value) if isinstance(value, float) and value.is_integer() else value)
