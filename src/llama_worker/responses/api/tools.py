"""Translates a request's tools and `tool_choice` into those of a chat completion. Pure.

A chat completion has only functions with flat names. A tool in a namespace is offered as
`namespace__name`; a custom tool, which takes free text, as a function with one string, `input`; the
search for tools that a client has not offered yet as the function `tool_search`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from llama_worker.config.validation import json_of
from llama_worker.responses.errors import ApiError
from llama_worker.stream.events import encodable

Json = Mapping[str, Any]
ToolKind = Literal["function", "custom", "tool_search"]

TOOL_SEARCH = "tool_search"
_JOINT = "__"
_NO_TOOL = "tool_choice 'required' is ignored: there is no tool that the model can call"
_NO_PARAMETERS: Json = {"type": "object", "properties": {}}
_FREE_TEXT: Json = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The tool's whole input, as free text."}
    },
    "required": ["input"],
}


class Tool(Struct, frozen=True, kw_only=True):
    """A tool that the client runs."""

    kind: ToolKind
    name: str
    namespace: str | None = None
    model_name: str  # in the chat completion; unique
    description: str | None = None
    parameters: Json = {}

    def offer(self) -> dict[str, Any]:
        """The tool in the form of a chat completion."""
        function: dict[str, Any] = {"name": self.model_name, "parameters": self.parameters}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolSet(Struct, frozen=True):
    """The tools of one request. `echo`: the tools as the response repeats them. `warnings`: about
    tools that are ignored."""

    by_name: Mapping[tuple[str | None, str], Tool] = {}
    by_model_name: Mapping[str, Tool] = {}
    echo: tuple[Json, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(self.by_name.values())

    def called(self, model_name: object) -> Tool | None:
        """The tool that the model calls by this name; None if it was not offered."""
        return self.by_model_name.get(model_name) if isinstance(model_name, str) else None

    def model_name(self, namespace: object, name: str) -> str:
        """The model's name for a client's tool, even for one that is no longer offered."""
        tool = self._known(namespace, name)
        return tool.model_name if tool else _joined(as_text(namespace), name)

    def find(self, name: object, namespace: object = None) -> Tool | None:
        """The tool by the client's name; the namespace may be given or be the name's prefix."""
        return self._known(namespace, name) or self.called(name)

    def _known(self, namespace: object, name: object) -> Tool | None:
        within = namespace or None
        if not isinstance(name, str) or not isinstance(within, (str, type(None))):
            return None
        return self.by_name.get((within, name))


NO_TOOLS = ToolSet()


def tool_set(*lists: object) -> ToolSet:
    """The tools of all lists. A later tool of the same name replaces the first. Raises ApiError."""
    by_name: dict[tuple[str | None, str], Tool] = {}
    by_model_name: dict[str, Tool] = {}
    echo: list[Json] = []
    warnings: list[str] = []
    for given in lists:
        if given is None:
            continue
        if not isinstance(given, list):
            raise ApiError(400, "tools must be a list", param="tools")
        for entry in given:
            kept = list(_flat(entry, warnings))
            for namespace, tool in kept:
                before = by_name.get((namespace, tool["name"]))
                name = before.model_name if before else _joined(namespace, tool["name"])
                while not before and name in by_model_name:
                    name += "_"
                latest = _tool(tool, namespace, name)
                by_name[namespace, tool["name"]] = by_model_name[name] = latest
            echo += _echo(entry, [tool for _, tool in kept])
    return ToolSet(by_name, by_model_name, tuple(echo), tuple(warnings))


def custom_input(arguments: str) -> str:
    """The free text in the arguments that the model wrote for a custom tool; the arguments as they
    are if they are malformed."""
    value = json_of(arguments)
    text = value.get("input") if isinstance(value, dict) else None
    return encodable(text) if isinstance(text, str) else arguments


def custom_arguments(text: str) -> str:
    """The reverse of `custom_input`: the arguments with which the model is shown what it wrote."""
    return json.dumps({"input": text}, ensure_ascii=False)


# --- reading --------------------------------------------------------------------------------------


def as_object(value: object) -> Json:
    """The value, if it is an object; else an empty one."""
    return value if isinstance(value, Mapping) else {}


def as_text(value: object) -> str | None:
    """The value, if it is a text; else None."""
    return value if isinstance(value, str) else None


def inner(value: Json, name: str) -> Json:
    """The nested object of this name, as in chat completions; `value` itself if it is flat."""
    nested = value.get(name)
    return nested if isinstance(nested, Mapping) else value


def _flat(
    entry: object, warnings: list[str], namespace: str | None = None
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    if not isinstance(entry, Mapping):
        raise ApiError(400, "every tool must be an object", param="tools")
    match entry.get("type"):
        case "function":
            yield namespace, _function(entry)
        case "custom":
            yield namespace, _custom(entry)
        case "tool_search" if entry.get("execution") == "client":
            yield namespace, _tool_search(entry)
        case "namespace" if namespace is None:
            name, tools = entry.get("name"), entry.get("tools")
            if not isinstance(name, str) or not name or not isinstance(tools, list):
                raise ApiError(400, "a namespace needs a name and a list of tools", param="tools")
            for tool in tools:
                yield from _flat(tool, warnings, name)
        case kind:
            warnings.append(f"tools of type {kind!r} are ignored")


def _function(entry: Json) -> dict[str, Any]:
    function = inner(entry, "function")
    parameters, strict = function.get("parameters"), function.get("strict")
    return {
        "type": "function",
        "name": _name(function, "a function tool"),
        "description": as_text(function.get("description")),
        "parameters": dict(parameters) if isinstance(parameters, Mapping) else None,
        "strict": strict if isinstance(strict, bool) else None,
    }


def _custom(entry: Json) -> dict[str, Any]:
    custom = inner(entry, "custom")
    form = custom.get("format")
    tool = {
        "type": "custom",
        "name": _name(custom, "a custom tool"),
        "description": as_text(custom.get("description")),
    }
    return {**tool, "format": _format(form)} if isinstance(form, Mapping) else tool


def _format(form: Json) -> dict[str, Any]:
    """The format of a custom tool's input, flat: a grammar, or else text."""
    grammar = inner(form, "grammar")
    definition = grammar.get("definition")
    if not isinstance(definition, str):
        return {"type": "text"}
    syntax = "regex" if grammar.get("syntax") == "regex" else "lark"
    return {"type": "grammar", "syntax": syntax, "definition": definition}


def _tool_search(entry: Json) -> dict[str, Any]:
    """With it the client looks for tools that it has not offered; its next request has those that
    it finds."""
    parameters = entry.get("parameters")
    return {
        "type": "tool_search",
        "name": TOOL_SEARCH,
        "execution": "client",
        "description": as_text(entry.get("description")),
        "parameters": dict(parameters) if isinstance(parameters, Mapping) else None,
    }


def _name(tool: Json, what: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise ApiError(400, f"{what} needs a name", param="tools")
    return name


def _tool(tool: Json, namespace: str | None, model_name: str) -> Tool:
    custom = tool["type"] == "custom"
    return Tool(
        kind=tool["type"],
        name=tool["name"],
        namespace=namespace,
        model_name=model_name,
        description=_custom_description(tool) if custom else tool["description"],
        parameters=_FREE_TEXT if custom else tool["parameters"] or _NO_PARAMETERS,
    )


def _custom_description(tool: Json) -> str | None:
    """The description with the grammar, which nothing else tells the model."""
    grammar = tool.get("format") or {}
    if "definition" not in grammar:
        return as_text(tool["description"])
    rule = f"`input` must match this grammar ({grammar['syntax']}):\n{grammar['definition']}"
    return f"{tool['description']}\n\n{rule}" if tool["description"] else rule


def _echo(entry: Json, kept: Sequence[Json]) -> list[Json]:
    if entry.get("type") == TOOL_SEARCH:
        return [{key: value for key, value in tool.items() if key != "name"} for tool in kept]
    if entry.get("type") != "namespace":
        return list(kept)
    head = {
        "type": "namespace",
        "name": entry["name"],
        "description": as_text(entry.get("description")) or "",
    }
    return [{**head, "tools": list(kept)}]


def _joined(namespace: str | None, name: str) -> str:
    return f"{namespace}{_JOINT}{name}" if namespace else name


# --- choosing -------------------------------------------------------------------------------------


class Choice(Struct, frozen=True, kw_only=True):
    """A request's tool choice: `mode` and the `offered` tools are for llama-server, `echo` is for
    the response."""

    mode: str
    offered: Sequence[Tool]
    echo: Any
    warnings: tuple[str, ...] = ()


def tool_choice(given: object, tools: ToolSet) -> Choice:
    """The choice to send. llama-server treats an object as "auto", so a choice is forced by
    offering only what is chosen. Raises ApiError."""
    if given == "required" and not tools.tools:
        return Choice(mode="auto", offered=(), echo="auto", warnings=(_NO_TOOL,))
    if given in (None, "auto", "none", "required"):
        mode = str(given or "auto")
        return Choice(mode=mode, offered=tools.tools, echo=mode)
    if not isinstance(given, Mapping):
        raise ApiError(400, f"unknown tool_choice {given!r}", param="tool_choice")
    kind = given.get("type")
    if kind in ("function", "custom"):
        offered = _chosen([inner(given, kind)], tools)
        return Choice(
            mode="required", offered=offered, echo={"type": kind, "name": offered[0].name}
        )
    if kind == "allowed_tools":
        given = inner(given, kind)
        allowed, mode = given.get("tools"), given.get("mode") or "auto"
        allowed = allowed if isinstance(allowed, list) else []
        ours: list[Json] = []
        warnings: list[str] = []
        for tool in allowed:
            kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
            if kind in ("function", "custom"):
                ours.append({"type": kind, **inner(tool, kind)})
            else:
                warnings.append(f"allowed tools of type {kind!r} are ignored")
        if mode not in ("auto", "required"):
            raise ApiError(400, f"unknown mode {mode!r} of allowed_tools", param="tool_choice")
        echo = {"type": "allowed_tools", "mode": mode, "tools": ours}
        offered = _chosen(ours, tools)
        if mode == "required" and not offered:
            mode = "auto"
            warnings.append(_NO_TOOL)
        return Choice(mode=mode, offered=offered, echo=echo, warnings=tuple(warnings))
    warning = f"tool_choice of type {kind!r} is ignored"
    return Choice(mode="auto", offered=tools.tools, echo="auto", warnings=(warning,))


def _chosen(named: Sequence[Json], tools: ToolSet) -> list[Tool]:
    chosen = {}
    for choice in named:
        tool = tools.find(choice.get("name"), choice.get("namespace"))
        if tool is None:
            message = f"Tool choice {choice.get('name')!r} not found in 'tools' parameter."
            raise ApiError(400, message, param="tool_choice")
        chosen[tool.model_name] = tool
    return list(chosen.values())
