"""The tools of a request, and which of them the model is to call. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_worker.responses.refusal import RequestRefused


def function_tools(given: object) -> tuple[list[dict[str, Any]], list[str]]:
    """The function tools, in the form of the Responses API, and warnings about the others."""
    if given is None:
        return [], []
    if not isinstance(given, list):
        raise RequestRefused(400, "tools must be a list", param="tools")
    tools: list[dict[str, Any]] = []
    warnings: list[str] = []
    for tool in given:
        if not isinstance(tool, Mapping):
            raise RequestRefused(400, "every tool must be an object", param="tools")
        if tool.get("type") != "function":
            warnings.append(f"tools of type {tool.get('type')!r} are ignored")
            continue
        function = tool.get("function")
        function = function if isinstance(function, Mapping) else tool  # as in chat completions, or flat
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise RequestRefused(400, "a function tool needs a name", param="tools")
        description, strict = function.get("description"), function.get("strict")
        tools.append({
            "type": "function",
            "name": name,
            "description": description if isinstance(description, str) else None,
            "parameters": dict(parameters) if isinstance(parameters, Mapping) else None,
            "strict": strict if isinstance(strict, bool) else None,
        })  # fmt: skip
    return tools, list(dict.fromkeys(warnings))


def chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function as a chat completion has it."""
    function = {"name": tool["name"], "parameters": tool["parameters"] or {"type": "object", "properties": {}}}
    if tool["description"] is not None:
        function["description"] = tool["description"]
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What llama-server is told (`mode`, and the tools that are `offered`), and what the response says of it."""

    mode: str
    offered: Sequence[Mapping[str, Any]]
    echo: Any
    warnings: tuple[str, ...] = ()


def tool_choice(given: object, tools: Sequence[Mapping[str, Any]]) -> Choice:
    """llama-server takes an object for "auto": a choice is forced by offering only what is chosen."""
    if given is None:
        return Choice(mode="auto", offered=tools, echo="auto")
    if given in ("auto", "none", "required"):
        if given == "required" and not tools:
            warning = "tool_choice 'required' is ignored: there is no function tool"
            return Choice(mode="auto", offered=(), echo="auto", warnings=(warning,))
        return Choice(mode=str(given), offered=tools, echo=given)
    if not isinstance(given, Mapping):
        raise RequestRefused(400, f"unknown tool_choice {given!r}", param="tool_choice")
    kind = given.get("type")
    if kind == "function":
        function = given.get("function")
        name = given.get("name") or (function.get("name") if isinstance(function, Mapping) else None)
        return Choice(mode="required", offered=_chosen([name], tools), echo={"type": "function", "name": name})
    if kind == "allowed_tools":
        allowed, mode = given.get("tools"), given.get("mode", "auto")
        allowed = [tool for tool in allowed if isinstance(tool, Mapping)] if isinstance(allowed, list) else []
        names = [tool.get("name") for tool in allowed if tool.get("type", "function") == "function"]
        if mode not in ("auto", "required"):
            raise RequestRefused(400, f"unknown mode {mode!r} of allowed_tools", param="tool_choice")
        echo = {"type": "allowed_tools", "mode": mode, "tools": [dict(tool) for tool in allowed]}
        offered = _chosen(names, tools)
        return Choice(mode=mode if offered else "auto", offered=offered, echo=echo)
    return Choice(mode="auto", offered=tools, echo="auto", warnings=(f"tool_choice of type {kind!r} is ignored",))


def _chosen(names: Sequence[object], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    known = {tool["name"]: tool for tool in tools}
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise RequestRefused(400, f"Tool choice {name!r} not found in 'tools' parameter.", param="tool_choice")
    return [known[name] for name in dict.fromkeys(names)]
