"""Translates input items of the Responses API into the messages of a chat completion. Pure.

An assistant's turn is several items (reasoning, message, calls), but one chat message. Leading
system and developer messages become one system message: many chat templates fail on a second one or
lose it silently. Later ones stay in their place, since the messages of one turn must begin with
those of the turn before: llama-server's prompt cache needs that. Call ids are replaced with our
own (`shown_call_id`).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_worker.responses.api.chat_template import Message
from llama_worker.responses.api.tools import TOOL_SEARCH, ToolSet, custom_arguments, tool_set
from llama_worker.responses.errors import ApiError
from llama_worker.stream.calls import parse_arguments, shown_call_id

Item = Mapping[str, Any]

_SEALED_PREFIX = "llama-worker-1:"
_SUMMARY_HEAD = "Summary of the conversation so far, which it stands for:"


def seal(text: str) -> str:
    """The `encrypted_content` of our items: not secret, only opaque, so that clients return it
    unchanged."""
    return _SEALED_PREFIX + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")


def unseal(sealed: object) -> str | None:
    """The text in what `seal` made; None for anything else."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEALED_PREFIX):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_SEALED_PREFIX), validate=True).decode(
            "utf-8", "surrogatepass"
        )
    except (binascii.Error, ValueError):
        return None


def item_type(item: Item) -> str:
    """The item's type. If it is left out, a message is known by its role, a reference by having
    only an id."""
    kind = item.get("type")
    if isinstance(kind, str):
        return kind
    if "role" in item:
        return "message"
    return "item_reference" if "id" in item else ""


class _Turn:
    """Collects the items of an assistant's turn into one message."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []  # the first one is not empty
        self.calls: list[Message] = []

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": "\n".join(self.texts)}
        if self.reasoning:
            message["reasoning_content"] = "\n\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ChatMessages:
    """Builds `messages` from input items. `warnings`: about items that were left out."""

    def __init__(self, instructions: str, items: Iterable[Item], tools: ToolSet) -> None:
        """Raises ApiError for a malformed item."""
        self.warnings: list[str] = []
        self._tools = tools
        self._unanswered: set[str] = set()  # call ids
        # late system messages: none may come between a call and its result
        self._held: list[Message] = []
        self._system = [instructions] if instructions else []
        self._messages: list[Message] = []
        self._turn: _Turn | None = None
        # by the client's call id: the id and the tool's name that the model is shown
        self._shown: dict[str, tuple[str, str]] = {}
        self._calls = 0
        for item in items:
            self._add(item)
        self.messages = self._all()

    def _add(self, item: Item) -> None:
        match item_type(item):
            case "message":
                self._message(item)
            case "reasoning":
                self._reasoning(item)
            case "function_call":
                arguments = item.get("arguments")
                if not isinstance(arguments, (str, type(None))):
                    raise ApiError(
                        400, "the arguments of a function_call must be a string", param="input"
                    )
                self._call(item, _valid_arguments(arguments or ""))
            case "custom_tool_call":
                text = item.get("input")
                if not isinstance(text, str):
                    raise ApiError(
                        400, "a custom_tool_call needs its input as a string", param="input"
                    )
                self._call(item, custom_arguments(text))
            # a search that the server made has no call id, and is ignored
            case "tool_search_call" if isinstance(item.get("call_id"), str):
                given = item.get("arguments") or {}  # mostly an object
                arguments = given if isinstance(given, str) else _as_json(given)
                self._call({**item, "name": TOOL_SEARCH}, _valid_arguments(arguments))
            case "function_call_output" | "custom_tool_call_output":
                self._output(item)
            case "tool_search_output" if isinstance(item.get("call_id"), str):
                self._output({**item, "output": self._names(item.get("tools"))})
            case "compaction" | "compaction_summary":
                self._summary(item)
            case "additional_tools":
                pass  # `normalise` adds their tools to the request's
            case kind:
                self.warnings.append(f"input items of type {kind or 'unknown'!r} are ignored")

    def _all(self) -> list[Message]:
        if self._turn is not None and not self._turn.texts and not self._turn.calls:
            # The model would continue a last message that is reasoning alone.
            self._turn = None
        self._end_turn()
        self._join_last_texts()
        self._release_held()
        system = [{"role": "system", "content": "\n\n".join(self._system)}] if self._system else []
        return system + self._messages

    def _join_last_texts(self) -> None:
        """Each text at the end continues the one before: they are one message to continue."""
        run: list[Message] = []
        while continues(self._messages) and not (run and "reasoning_content" in run[-1]):
            run.append(self._messages.pop())
        if run:
            content = "".join(message["content"] for message in reversed(run))
            self._messages.append({**run[-1], "content": content})

    def _message(self, item: Item) -> None:
        role, content = item.get("role"), item.get("content")
        match role:
            case "system" | "developer":
                text = self._text_of(content)
                if text:
                    self._instruct(text)
            case "assistant":
                self._assistant(self._text_of(content, separator=""))
            case "user" | "tool":
                self._user(_content(content))
            case _:
                raise ApiError(400, f"unknown role {role!r} of an input message", param="input")

    def _text_of(self, content: object, *, separator: str = "\n") -> str:
        """The text of a message whose role templates take as text only."""
        parts = _parts(content)
        if not _is_text(parts):
            self.warnings.append("images and audio are ignored except in user messages")
        return _joined(parts, separator)

    def _summary(self, item: Item) -> None:
        text = unseal(item.get("encrypted_content"))
        if text is None:
            self.warnings.append("a compaction that this proxy did not make is ignored")
        else:
            self._user(f"{_SUMMARY_HEAD}\n\n{text}")

    def _user(self, content: str | list[Message]) -> None:
        self._end_turn()
        self._release_held()
        self._messages.append({"role": "user", "content": content})

    def _instruct(self, text: str) -> None:
        if not self._messages and self._turn is None:
            self._system.append(text)
            return
        self._held.append({"role": "system", "content": text})
        if not self._unanswered:
            self._end_turn()
            self._release_held()

    def _release_held(self) -> None:
        """Calls without a result by now get none in their place, and hold nothing back any more."""
        self._messages += self._held
        self._held.clear()
        self._unanswered.clear()

    def _assistant(self, text: str) -> None:
        if self._turn is not None and self._turn.texts and not self._turn.calls:
            self._end_turn()
        turn = self._current_turn()
        if text or turn.texts:
            turn.texts.append(text)

    def _reasoning(self, item: Item) -> None:
        text = _reasoning_text(item)
        if not text:
            return
        if self._turn is not None and (self._turn.texts or self._turn.calls):
            self._end_turn()
        self._current_turn().reasoning.append(text)

    def _call(self, item: Item, arguments: str) -> None:
        name, namespace, call_id = item.get("name"), item.get("namespace"), item.get("call_id")
        if not isinstance(name, str):
            raise ApiError(400, f"a {item_type(item)} needs a name", param="input")
        self._calls += 1
        model_name = self._tools.model_name(namespace, name)
        shown_id = shown_call_id(call_id if isinstance(call_id, str) else None, self._calls)
        if isinstance(call_id, str):
            self._shown[call_id] = shown_id, model_name
            self._unanswered.add(call_id)
        function = {"name": model_name, "arguments": arguments}
        self._current_turn().calls.append(
            {"id": shown_id, "type": "function", "function": function}
        )

    def _output(self, item: Item) -> None:
        call_id, output = item.get("call_id"), item.get("output")
        if not isinstance(call_id, str):
            raise ApiError(400, f"a {item_type(item)} needs the call_id of its call", param="input")
        self._end_turn()
        shown_id, name = self._shown.get(call_id, (call_id, ""))
        result = {"role": "tool", "tool_call_id": shown_id, "content": _result(output)}
        self._messages.append({**result, "name": name} if name else result)
        self._unanswered.discard(call_id)
        if not self._unanswered:
            self._release_held()

    def _names(self, tools: object) -> str:
        """The result of a search: the model's names of the tools found, which are offered, too."""
        found = tool_set(tools).tools
        names = [self._tools.model_name(tool.namespace, tool.name) for tool in found]
        return (
            f"These tools can be called now: {', '.join(names)}" if names else "No tool was found."
        )

    def _current_turn(self) -> _Turn:
        if self._turn is None:
            self._turn = _Turn()
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn.message())
        self._turn = None


def continues(messages: Sequence[Message]) -> bool:
    """Whether the model goes on in the last message: a text of its own."""
    return any(one["role"] == "assistant" and "tool_calls" not in one for one in messages[-1:])


def _content(content: object) -> str | list[Message]:
    """A message's content: one string if all of it is text, since not every template takes
    parts."""
    parts = _parts(content)
    return _joined(parts) if _is_text(parts) else parts


def _result(output: object) -> str | list[Message]:
    """A call's result as content: it may be any JSON value, not only a text or a list of parts.
    Raises ApiError for a part that llama-server cannot take."""
    if isinstance(output, (str, list, type(None))):
        try:
            return _content(output)
        except ApiError:
            if any(_is_input(part) for part in output or ()):
                raise
    return _as_json(output)


def _is_input(part: object) -> bool:
    """Whether it is meant as a part of a message, and is no data that only looks like one."""
    return isinstance(part, Mapping) and str(part.get("type")).startswith("input_")


def _is_text(parts: list[Message]) -> bool:
    return all(part["type"] == "text" for part in parts)


def _joined(parts: list[Message], separator: str = "\n") -> str:
    return separator.join(part["text"] for part in parts if part["type"] == "text")


def _parts(content: object) -> list[Message]:
    if content is None:
        return []
    if isinstance(content, (str, Mapping)):
        content = [content]
    if not isinstance(content, list):
        raise ApiError(400, "content must be a string or a list of parts", param="input")
    return [_part(part) for part in content if part is not None]


def _part(part: object) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise ApiError(400, "a content part must be an object", param="input")
    kind = part.get("type")
    match kind:
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text" | "refusal":
            text = part.get("refusal" if kind == "refusal" else "text")
            if not isinstance(text, str):
                raise ApiError(400, f"a part of type {kind!r} needs a text", param="input")
            return {"type": "text", "text": text}
        case "input_image" | "image_url":
            return {"type": "image_url", "image_url": _image(part)}
        case "input_audio" if isinstance(part.get("input_audio"), Mapping):
            return {"type": "input_audio", "input_audio": dict(part["input_audio"])}
        case _:
            raise ApiError(
                400, f"content of type {kind!r} is not supported by llama-server", param="input"
            )


def _image(part: Item) -> Message:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str):
        raise ApiError(
            400, "an input_image needs an image_url (files cannot be looked up)", param="input"
        )
    detail = part.get("detail")
    return {"url": url, "detail": detail} if isinstance(detail, str) else {"url": url}


def _reasoning_text(item: Item) -> str:
    sealed = unseal(item.get("encrypted_content"))
    return sealed or _texts(item.get("content")) or _texts(item.get("summary"))


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _texts(parts: object) -> str:
    if isinstance(parts, str):
        return parts
    found = (
        [part.get("text") for part in parts if isinstance(part, Mapping)]
        if isinstance(parts, list)
        else []
    )
    return "\n\n".join(text for text in found if isinstance(text, str) and text)


def _valid_arguments(text: str) -> str:
    """The arguments as the model wrote them, if they are a JSON object; else wrapped in one, since
    with many templates llama-server answers 500 to anything else."""
    try:
        parse_arguments(text)
    except ValueError:
        return _as_json({"malformed_arguments": text})
    return text if text.strip() else "{}"
