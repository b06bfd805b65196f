"""The parameters that a response repeats of its request, and those of sampling. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_worker.config.validation import as_count
from llama_worker.responses.api.tools import Choice, ToolSet, as_object, as_text

# The defaults of llama-server (b11434), unless a request or the server's command sets others.
LLAMA_SERVER_SAMPLING = {
    "temperature": 0.8,
    "top_p": 0.95,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def sampling_of(props: object) -> dict[str, float] | None:
    """The server's sampling parameters, for requests that set none, from the body of its `/props`;
    None if that does not tell."""
    params = as_object(as_object(props).get("default_generation_settings")).get("params")
    if not isinstance(params, Mapping):
        return None
    return sampling_echo(params, LLAMA_SERVER_SAMPLING)


def sampling_echo(params: Mapping[str, Any], defaults: Mapping[str, float]) -> dict[str, float]:
    """The sampling parameters in effect: those in `params`, else those in `defaults`."""
    return {name: _number(params.get(name), default) for name, default in defaults.items()}


def echo_of(
    body: Mapping[str, Any], tools: ToolSet, choice: Choice, text_format: Mapping[str, Any] | None
) -> dict[str, Any]:
    """All repeated parameters but those of sampling, without values that the API does not allow."""
    reasoning = as_object(body.get("reasoning"))
    effort, summary = reasoning.get("effort"), reasoning.get("summary")
    text: dict[str, Any] = {"format": dict(text_format) if text_format else {"type": "text"}}
    verbosity = as_object(body.get("text")).get("verbosity")
    if verbosity in ("low", "medium", "high"):
        text["verbosity"] = verbosity
    metadata = as_object(body.get("metadata"))
    parallel = body.get("parallel_tool_calls")
    return {
        "instructions": as_text(body.get("instructions")),
        "max_output_tokens": as_count(body.get("max_output_tokens")),
        "max_tool_calls": None,
        "metadata": {key: value for key, value in metadata.items() if isinstance(value, str)},
        "model": body["model"] if isinstance(body.get("model"), str) else "default",
        "parallel_tool_calls": parallel if isinstance(parallel, bool) else True,
        "previous_response_id": body.get("previous_response_id") or None,
        "prompt_cache_key": as_text(body.get("prompt_cache_key")),
        "reasoning": {
            "effort": effort if effort in _EFFORTS else None,
            "summary": summary if summary in ("auto", "concise", "detailed") else None,
        },
        "safety_identifier": as_text(body.get("safety_identifier")),
        "service_tier": "default",
        "store": body.get("store") is not False,
        "text": text,
        "tool_choice": choice.echo,
        "tools": [dict(tool) for tool in tools.echo],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": as_text(body.get("user")),
    }


def _number(value: object, default: float) -> float:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default
