"""A request of the Responses API to one for chat completions. Pure.

Everything that neither API knows (llama.cpp's sampling parameters above all) passes through as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_worker.responses.conversation import Item, chat_messages, item_type, plain_text
from llama_worker.responses.refusal import RequestRefused

ENCRYPTED_REASONING = "reasoning.encrypted_content"

# What the Responses API knows and a chat completion does not; `null` for it means that it was not given.
_OWN_KEYS = frozenset({
    "background", "client_metadata", "context_management", "conversation", "include", "input", "instructions",
    "max_output_tokens", "max_tool_calls", "messages", "metadata", "previous_response_id", "prompt",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning", "safety_identifier",
    "service_tier", "store", "stream", "stream_options", "text", "tool_choice", "tools", "top_logprobs",
    "truncation", "user",
})  # fmt: skip
_IGNORED_WITH_A_WARNING = ("background", "conversation", "max_tool_calls", "prompt", "context_management")
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh"})


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What the request wants from the store."""

    previous_response_id: str | None = None
    item_ids: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.previous_response_id is not None or bool(self.item_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What the store has of it. `history` is None where the response is unknown; unknown items are absent."""

    history: tuple[Item, ...] | None = ()
    items: Mapping[str, Item]


NOTHING_RECALLED = Recalled(items={})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What to send, and what the response must say of the request."""

    body: dict[str, Any]
    echo: dict[str, Any]
    input_items: tuple[Item, ...]  # this request's own, references resolved
    previous_response_id: str | None
    stream: bool
    store: bool
    seal_reasoning: bool
    warnings: tuple[str, ...]


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises RequestRefused."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise RequestRefused(400, "the request's body is not JSON") from None
    if not isinstance(body, dict):
        raise RequestRefused(400, "the request's body is not a JSON object")
    return body


def references(body: Mapping[str, Any]) -> References:
    """What to look up before `normalise`."""
    previous = body.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise RequestRefused(400, "previous_response_id must be a string", param="previous_response_id")
    ids = [item.get("id") for item in _input_items(body) if item_type(item) == "item_reference"]
    return References(
        previous_response_id=previous or None,
        item_ids=tuple(found if isinstance(found, str) else "" for found in ids),
    )


def normalise(body: Mapping[str, Any], recalled: Recalled = NOTHING_RECALLED) -> ChatRequest:
    """The chat completion that the request asks for. Raises RequestRefused; mutates nothing."""
    wanted = references(body)
    own_items = tuple(_resolved(item, recalled) for item in _input_items(body))
    history = recalled.history
    if wanted.previous_response_id is None:
        history = ()
    elif history is None:
        raise _not_found(f"Previous response with id {wanted.previous_response_id!r} not found.")
    if body.get("input") is None and not history:
        raise RequestRefused(400, "Missing required parameter: 'input'.", param="input")
    instructions, instruction_items = _instructions(body)
    tools, tool_warnings = _tools(body.get("tools"))
    choice = _tool_choice(body.get("tool_choice"), tools)
    text_format = _text_format(body.get("text"))
    conflict = _settle_conflict(choice, text_format)
    instructions = "\n\n".join(text for text in (instructions, conflict.instruction) if text)
    messages, warnings = chat_messages(instructions, (*instruction_items, *history, *own_items))
    if not messages:
        raise RequestRefused(400, "the input is empty", param="input")

    chat: dict[str, Any] = {key: value for key, value in body.items() if key not in _OWN_KEYS and value is not None}
    parallel = chat.pop("parallel_tool_calls", None)
    chat["messages"] = messages
    chat["stream"] = True
    chat["stream_options"] = {"include_usage": True}
    chat.setdefault("reasoning_format", "deepseek")
    if choice.offered and conflict.with_tools:
        chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in choice.offered]
        chat["tool_choice"] = choice.mode
        if isinstance(parallel, bool):
            chat["parallel_tool_calls"] = parallel
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if text_format is not None and conflict.with_format:
        chat["response_format"] = _response_format(text_format)
    _set_effort(chat, body.get("reasoning"))
    include = body.get("include")
    include = include if isinstance(include, list) else []
    return ChatRequest(
        body=chat,
        echo=_echo(body, tools, choice, text_format),
        input_items=own_items,
        previous_response_id=wanted.previous_response_id,
        stream=body.get("stream") is True,
        store=body.get("store") is not False,
        seal_reasoning=ENCRYPTED_REASONING in include,
        warnings=(
            *warnings,
            *tool_warnings,
            *choice.warnings,
            *conflict.warnings,
            *(f"{key} is ignored" for key in _IGNORED_WITH_A_WARNING if body.get(key)),
            *(("log probabilities are not available",) if body.get("top_logprobs") else ()),
        ),
    )


# --- input ----------------------------------------------------------------------------------------------


def _input_items(body: Mapping[str, Any]) -> tuple[Item, ...]:
    given = body.get("input")
    if given is None:
        return ()
    if isinstance(given, str):
        return ({"type": "message", "role": "user", "content": given},)
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, list):
        raise RequestRefused(400, "input must be a string or a list of items", param="input")
    items: list[Item] = []
    for item in given:
        if isinstance(item, str):
            item = {"type": "message", "role": "user", "content": item}
        if not isinstance(item, Mapping):
            raise RequestRefused(400, "every input item must be an object", param="input")
        items.append(item)
    return tuple(items)


def _resolved(item: Item, recalled: Recalled) -> Item:
    if item_type(item) != "item_reference":
        return item
    found = recalled.items.get(str(item.get("id")))
    if found is None:
        raise _not_found(f"Item with id {item.get('id')!r} not found.", param="input")
    return found


def _not_found(message: str, param: str = "previous_response_id") -> RequestRefused:
    return RequestRefused(
        400,
        f"{message} Responses are kept in memory, the least recently used go first, and `store: false` keeps none: "
        "send the whole conversation as `input`.",
        code="previous_response_not_found",
        param=param,
    )


def _instructions(body: Mapping[str, Any]) -> tuple[str, Sequence[Item]]:
    given = body.get("instructions")
    if given is None or isinstance(given, str):
        return given or "", ()
    if isinstance(given, list) and all(isinstance(item, Mapping) for item in given):
        if all(item_type(item) == "input_text" for item in given):
            return plain_text(given), ()
        return "", given
    raise RequestRefused(400, "instructions must be a string", param="instructions")


# --- tools ----------------------------------------------------------------------------------------------


def _tools(given: object) -> tuple[list[dict[str, Any]], list[str]]:
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


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["parameters"] or {"type": "object", "properties": {}}}
    if tool["description"] is not None:
        function["description"] = tool["description"]
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    mode: str
    offered: Sequence[Mapping[str, Any]]
    echo: Any
    warnings: tuple[str, ...] = ()


def _tool_choice(given: object, tools: Sequence[Mapping[str, Any]]) -> _Choice:
    """llama-server takes an object for "auto": a choice is forced by offering only what is chosen."""
    if given is None:
        return _Choice(mode="auto", offered=tools, echo="auto")
    if given in ("auto", "none", "required"):
        if given == "required" and not tools:
            warning = "tool_choice 'required' is ignored: there is no function tool"
            return _Choice(mode="auto", offered=(), echo="auto", warnings=(warning,))
        return _Choice(mode=str(given), offered=tools, echo=given)
    if not isinstance(given, Mapping):
        raise RequestRefused(400, f"unknown tool_choice {given!r}", param="tool_choice")
    kind = given.get("type")
    if kind == "function":
        function = given.get("function")
        name = given.get("name") or (function.get("name") if isinstance(function, Mapping) else None)
        return _Choice(mode="required", offered=_chosen([name], tools), echo={"type": "function", "name": name})
    if kind == "allowed_tools":
        allowed, mode = given.get("tools"), given.get("mode", "auto")
        allowed = [tool for tool in allowed if isinstance(tool, Mapping)] if isinstance(allowed, list) else []
        names = [tool.get("name") for tool in allowed if tool.get("type", "function") == "function"]
        if mode not in ("auto", "required"):
            raise RequestRefused(400, f"unknown mode {mode!r} of allowed_tools", param="tool_choice")
        echo = {"type": "allowed_tools", "mode": mode, "tools": [dict(tool) for tool in allowed]}
        offered = _chosen(names, tools)
        return _Choice(mode=mode if offered else "auto", offered=offered, echo=echo)
    return _Choice(mode="auto", offered=tools, echo="auto", warnings=(f"tool_choice of type {kind!r} is ignored",))


def _chosen(names: Sequence[object], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    known = {tool["name"]: tool for tool in tools}
    for name in names:
        if name not in known:
            raise RequestRefused(400, f"Tool choice {name!r} not found in 'tools' parameter.", param="tool_choice")
    return [known[name] for name in dict.fromkeys(names)]


# --- output ---------------------------------------------------------------------------------------------


def _text_format(text: object) -> dict[str, Any] | None:
    """The format, where it is JSON."""
    given = text.get("format") if isinstance(text, Mapping) else None
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise RequestRefused(400, f"unknown text.format {kind!r}", param="text.format")
    inner = given.get("json_schema")
    source = inner if isinstance(inner, Mapping) else given
    schema, strict, description = source.get("schema"), source.get("strict"), source.get("description")
    if not isinstance(schema, Mapping):
        raise RequestRefused(400, "text.format needs a schema", param="text.format.schema")
    name = source.get("name")
    return {
        "type": "json_schema",
        "name": name if isinstance(name, str) else "response",
        "schema": dict(schema),
        "strict": strict if isinstance(strict, bool) else None,
        "description": description if isinstance(description, str) else None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conflict:
    with_tools: bool = True
    with_format: bool = True
    instruction: str = ""
    warnings: tuple[str, ...] = ()


def _settle_conflict(choice: _Choice, text_format: Mapping[str, Any] | None) -> _Conflict:
    """llama-server drops the tools, silently, from a request that has a format as well (b11434)."""
    if text_format is None or not choice.offered:
        return _Conflict()
    if choice.mode == "none":
        return _Conflict(with_tools=False)
    if choice.mode == "required":
        return _Conflict(with_format=False)
    schema = text_format.get("schema")
    fits = f" that fits this schema: {json.dumps(schema, ensure_ascii=False)}" if schema else ""
    return _Conflict(
        with_format=False,
        instruction=f"When you do not call a tool, answer with nothing but one JSON object{fits}",
        warnings=("beside tools, text.format is only asked for in the prompt",),
    )


def _response_format(text_format: Mapping[str, Any]) -> dict[str, Any]:
    if text_format["type"] == "json_object":
        return dict(text_format)
    schema = {key: text_format[key] for key in ("name", "schema", "strict") if text_format[key] is not None}
    return {"type": "json_schema", "json_schema": schema}


def _set_effort(chat: dict[str, Any], reasoning: object) -> None:
    """What templates read: gpt-oss an effort, most others whether to think at all."""
    effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
    if not isinstance(effort, str):
        return
    given = chat.get("chat_template_kwargs")
    wanted: dict[str, Any] = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    chat["chat_template_kwargs"] = {**wanted, **(given if isinstance(given, Mapping) else {})}


def _echo(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], choice: _Choice, text_format: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The request as its response repeats it; what is not of the API's form is left out."""
    reasoning = body.get("reasoning")
    reasoning = reasoning if isinstance(reasoning, Mapping) else {}
    effort, summary = reasoning.get("effort"), reasoning.get("summary")
    text: dict[str, Any] = {"format": dict(text_format) if text_format else {"type": "text"}}
    if text["format"].get("description", "") is None:
        del text["format"]["description"]
    verbosity = body["text"].get("verbosity") if isinstance(body.get("text"), Mapping) else None
    if verbosity in ("low", "medium", "high"):
        text["verbosity"] = verbosity
    metadata = body.get("metadata")
    instructions = body.get("instructions")
    parallel = body.get("parallel_tool_calls")
    return {
        "instructions": instructions if isinstance(instructions, str) else None,
        "max_output_tokens": _typed(body.get("max_output_tokens"), int),
        "max_tool_calls": None,
        "metadata": (
            {key: value for key, value in metadata.items() if isinstance(value, str)}
            if isinstance(metadata, Mapping)
            else {}
        ),
        "model": body["model"] if isinstance(body.get("model"), str) else "default",
        "parallel_tool_calls": parallel if isinstance(parallel, bool) else True,
        "previous_response_id": body.get("previous_response_id") or None,
        "prompt_cache_key": _typed(body.get("prompt_cache_key"), str),
        "reasoning": {
            "effort": effort if effort in _EFFORTS else None,
            "summary": summary if summary in ("auto", "concise", "detailed") else None,
        },
        "safety_identifier": _typed(body.get("safety_identifier"), str),
        "service_tier": "default",
        "store": body.get("store") is not False,
        "temperature": _typed(body.get("temperature"), int, float),
        "text": text,
        "tool_choice": choice.echo,
        "tools": [dict(tool) for tool in tools],
        "top_logprobs": 0,
        "top_p": _typed(body.get("top_p"), int, float),
        "truncation": "disabled",
        "user": _typed(body.get("user"), str),
    }


def _typed(value: Any, *types: type) -> Any:
    return value if isinstance(value, types) and not isinstance(value, bool) else None
