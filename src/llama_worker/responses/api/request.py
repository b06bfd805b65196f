"""Translates a request of the Responses API into one for a chat completion, also that for a
compaction: the model sums a conversation up, to go on in a smaller context. Pure.

Parameters that neither API knows (llama.cpp's sampling parameters above all) pass through
unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from llama_worker.config.validation import as_count
from llama_worker.responses.api.chat_template import Message
from llama_worker.responses.api.conversation import ChatMessages, Item, continues, item_type, seal
from llama_worker.responses.api.store import References, not_found
from llama_worker.responses.api.tools import (
    Choice,
    Tool,
    ToolSet,
    as_object,
    as_text,
    inner,
    tool_choice,
    tool_set,
)
from llama_worker.responses.errors import ApiError
from llama_worker.stream.calls import finite_float, is_deeper, refuse_constant

# parts of the body are stored and repeated: they are serialised with less stack left than here
_MAX_DEPTH = 200
ENCRYPTED_REASONING = "reasoning.encrypted_content"
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_COMPACTION_ORDER = (
    "The conversation so far is about to be replaced by a summary that you write now, so that it "
    "can go on in a smaller context. Write that summary and nothing else. Keep what is needed to "
    "go on: what the user wants, word for word where the words matter; facts, names, numbers, "
    "file paths and code that were settled; what was done, and what came of it; what is still to "
    "be done. Call no tool, and answer no earlier question."
)

# Parameters of the Responses API that a chat completion does not have, or not in this form; `null`
# means that one was not given.
_OWN_KEYS = frozenset({
    "background", "client_metadata", "context_management", "conversation", "generate",
    "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "messages",
    "metadata", "previous_response_id", "prompt", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "store",
    "stream", "stream_options", "text", "tool_choice", "tools", "top_logprobs", "truncation",
    "user",
})  # fmt: skip


class ChatRequest(Struct, frozen=True, kw_only=True):
    """The chat completion to send, and what the response must repeat of the request."""

    body: dict[str, Any]
    tools: ToolSet
    echo: dict[str, Any]
    input_items: tuple[Item, ...]  # this request's own, references resolved
    previous_response_id: str | None
    stream: bool
    store: bool
    seal_reasoning: bool
    generates: bool  # False: it only brings input from which a later request continues
    warnings: tuple[str, ...]


def references(body: Mapping[str, Any]) -> References:
    """What to look up in the store before `normalise`. Raises ApiError."""
    previous = body.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise ApiError(400, "previous_response_id must be a string", param="previous_response_id")
    found = [item.get("id") for item in input_items(body) if item_type(item) == "item_reference"]
    ids = [item_id if isinstance(item_id, str) else "" for item_id in found]
    # OpenAI refuses it, too; by repeated references a short request could grow without bound
    if len(set(ids)) < len(ids):
        raise ApiError(400, "an input item is referenced twice", param="input")
    return References(previous_response_id=previous or None, item_ids=tuple(ids))


def normalise(
    body: Mapping[str, Any], history: tuple[Item, ...] = (), found: Mapping[str, Item] = {}
) -> ChatRequest:
    """The chat completion that the request asks for. `history`, `found`: as RecalledItems. Raises
    ApiError; mutates nothing."""
    wanted = references(body)
    own_items = tuple(_resolved(item, found) for item in input_items(body))
    if body.get("input") is None and not history:
        raise ApiError(400, "Missing required parameter: 'input'.", param="input")
    items = (*history, *own_items)
    if wanted.previous_response_id is not None:
        _check_calls_of(own_items, items)
    tools = tool_set(
        body.get("tools"), *(item.get("tools") for item in items if _brings_tools(item))
    )
    choice = tool_choice(body.get("tool_choice"), tools)
    text_format = _text_format(body.get("text"))
    offered, sent_format, wish = _tools_and_format(choice, text_format)
    instructions = "\n\n".join(text for text in (_instructions(body), wish) if text)
    chat_input = ChatMessages(instructions, items, tools)
    prewarm = as_object(body.get("prompt_cache_options")).get("prewarm")
    generates = body.get("generate") is not False and prewarm is not True
    if generates and not chat_input.messages:
        raise ApiError(400, "the input is empty", param="input")
    store = body.get("store") is not False
    include = body.get("include")
    include = include if isinstance(include, list) else []
    warnings = [*chat_input.warnings, *tools.warnings, *choice.warnings]
    if wish:
        warnings.append("with tools, text.format is only requested in the prompt")
    return ChatRequest(
        body=_chat_body(body, chat_input.messages, offered, choice.mode, sent_format),
        tools=tools,
        echo=echo_of(body, tools, choice, text_format),
        input_items=own_items,
        previous_response_id=wanted.previous_response_id,
        stream=body.get("stream") is True,
        store=store,
        # if nothing is stored, only the sealed form brings the reasoning back
        seal_reasoning=not store or ENCRYPTED_REASONING in include,
        generates=generates,
        warnings=tuple(dict.fromkeys([*warnings, *_ignored(body, include)])),
    )


def _ignored(body: Mapping[str, Any], include: Sequence[Any]) -> Iterator[str]:
    """Warnings about parameters that llama-server has no use for."""
    for key in ("background", "conversation", "max_tool_calls", "prompt", "context_management"):
        if body.get(key):
            yield f"{key} is ignored"
    if body.get("top_logprobs") or "message.output_text.logprobs" in include:
        yield "log probabilities are not available"
    if body.get("truncation") == "auto":
        yield "truncation is ignored"


def _chat_body(
    body: Mapping[str, Any],
    messages: list[Message],
    offered: Sequence[Tool],
    mode: str,
    text_format: Mapping[str, Any] | None,
) -> dict[str, Any]:
    chat = {key: value for key, value in body.items() if key not in _OWN_KEYS and value is not None}
    parallel = chat.pop("parallel_tool_calls", None)
    chat |= {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    chat.setdefault("reasoning_format", "deepseek")
    # Without these two, the reply begins with the old text (b11434), as JSON has to.
    continuing = {"continue_final_message": True, "add_generation_prompt": False}
    if continues(messages) and text_format is None and not chat.keys() & continuing.keys():
        chat |= continuing
    if offered:
        chat["tools"] = [tool.offer() for tool in offered]
        chat["tool_choice"] = mode
        if isinstance(parallel, bool):
            chat["parallel_tool_calls"] = parallel
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if text_format is not None:
        chat["response_format"] = _response_format(text_format)
    _set_effort(chat, body.get("reasoning"))
    return chat


# --- the body as it came --------------------------------------------------------------------------


def parse_body(data: bytes) -> dict[str, Any]:
    """The body's JSON object, which can be serialised again. Raises ApiError."""
    try:
        body = json.loads(data, parse_constant=refuse_constant, parse_float=finite_float)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ApiError(400, "the request's body is not JSON") from None
    except ValueError:
        raise ApiError(400, "a number in the request is outside the range of a double") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the request's body is not a JSON object")
    if is_deeper(body, _MAX_DEPTH):
        raise ApiError(400, f"the request's body is nested deeper than {_MAX_DEPTH} levels")
    return body


def parse_create(message: bytes) -> dict[str, Any]:
    """A WebSocket message as the body of the same request over HTTP. Raises ApiError."""
    body = parse_body(message)
    if body.pop("type", None) != "response.create":
        raise ApiError(400, "messages must be of type 'response.create'", param="type")
    return {**body, "stream": True}


# --- input ----------------------------------------------------------------------------------------


def input_items(body: Mapping[str, Any]) -> tuple[Item, ...]:
    given = body.get("input")
    if given is None:
        return ()
    items: list[Item] = []
    for item in given if isinstance(given, list) else [given]:
        if isinstance(item, str):
            item = {"type": "message", "role": "user", "content": item}
        if not isinstance(item, Mapping):
            raise ApiError(400, "input must be a string or a list of objects", param="input")
        items.append(item)
    return tuple(items)


def _check_calls_of(outputs: Iterable[Item], items: Iterable[Item]) -> None:
    """Raises ApiError for the output of a call that is not among the items."""
    called = {_call_id(item) for item in items if item_type(item).endswith("_call")}
    for item in outputs:
        if item_type(item).endswith("_call_output") and _call_id(item) not in called:
            message = f"No tool call found for the output with call_id {_call_id(item)!r}."
            raise ApiError(400, message, param="input")


def _call_id(item: Item) -> str:
    return str(item.get("call_id"))


def _brings_tools(item: Item) -> bool:
    return item_type(item) in ("additional_tools", "tool_search_output")


def _resolved(item: Item, found: Mapping[str, Item]) -> Item:
    if item_type(item) != "item_reference":
        return item
    item_id = str(item.get("id"))
    if item_id not in found:
        raise not_found(f"Item with id {item.get('id')!r} not found.", param="input")
    return found[item_id]


def _instructions(body: Mapping[str, Any]) -> str:
    given = body.get("instructions")
    if given is None or isinstance(given, str):
        return given or ""
    raise ApiError(400, "instructions must be a string", param="instructions")


# --- output ---------------------------------------------------------------------------------------


def _text_format(text: object) -> dict[str, Any] | None:
    """The requested format, if it is JSON; None: plain text."""
    given = as_object(text).get("format")
    kind = as_object(given).get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise ApiError(400, f"unknown text.format {kind!r}", param="text.format")
    source = inner(given, "json_schema")
    name, schema, description = (source.get(key) for key in ("name", "schema", "description"))
    if not isinstance(schema, Mapping):
        raise ApiError(400, "text.format needs a schema", param="text.format.schema")
    return {
        "type": "json_schema",
        "name": name if isinstance(name, str) else "response",
        "schema": dict(schema),
        "strict": source.get("strict") is True,
        "description": as_text(description),
    }


def _tools_and_format(
    choice: Choice, text_format: Mapping[str, Any] | None
) -> tuple[Sequence[Tool], Mapping[str, Any] | None, str]:
    """The tools or the format to send, not both: llama-server silently drops the tools of a request
    that has a format as well (b11434). If the model may call a tool or answer, the third value is a
    text that asks for the format in the prompt."""
    if text_format is None or not choice.offered:
        return choice.offered, text_format, ""
    if choice.mode == "none":
        return (), text_format, ""
    return choice.offered, None, _format_wish(text_format) if choice.mode == "auto" else ""


def _format_wish(text_format: Mapping[str, Any]) -> str:
    schema = text_format.get("schema")
    fits = f" that fits this schema: {json.dumps(schema, ensure_ascii=False)}" if schema else ""
    return f"When you do not call a tool, answer with nothing but one JSON object{fits}"


def _response_format(text_format: Mapping[str, Any]) -> dict[str, Any]:
    if text_format["type"] == "json_object":
        return dict(text_format)
    schema = {key: text_format[key] for key in ("name", "schema", "strict")}
    return {"type": "json_schema", "json_schema": schema}


def _set_effort(chat: dict[str, Any], reasoning: object) -> None:
    """Set what templates read: gpt-oss an effort, most others whether to think at all."""
    effort = as_object(reasoning).get("effort")
    if not isinstance(effort, str):
        return
    wanted: dict[str, Any] = (
        {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    )
    chat["chat_template_kwargs"] = {**wanted, **as_object(chat.get("chat_template_kwargs"))}


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


# --- compaction -----------------------------------------------------------------------------------


def compaction_request(
    body: Mapping[str, Any], history: tuple[Item, ...], found: Mapping[str, Item]
) -> ChatRequest:
    """The chat completion that sums the conversation up. Raises ApiError for a bad request."""
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise ApiError(400, "Missing required parameter: 'model'.", param="model")
    items = input_items(body)
    if not items and not history:
        raise ApiError(400, "Missing required parameter: 'input'.", param="input")
    order = {"type": "message", "role": "user", "content": _COMPACTION_ORDER}
    asked = {**body, "input": [*items, order], "store": False, "stream": False}
    asked |= {"tool_choice": "none", "text": None}
    asked |= dict.fromkeys(("generate", "prompt_cache_options"))  # a summary is always generated
    return normalise(asked, history, found)


def compacted(response: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    """The reply with the conversation's new beginning, from the response to `compaction_request`.

    Raises ApiError if the model wrote no summary.
    """
    messages = [item for item in response["output"] if item["type"] == "message"]
    summary = "\n\n".join(message["content"][0]["text"] for message in messages).strip()
    if not summary:
        raise ApiError(502, "the model wrote no summary", code="upstream_failed")
    item = {"id": item_id, "type": "compaction", "encrypted_content": seal(summary)}
    return {
        "id": response["id"],
        "object": "response.compaction",
        "created_at": response["created_at"],
        "output": [item],
        "usage": response["usage"],
    }
