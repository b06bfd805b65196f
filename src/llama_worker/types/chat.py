"""Messages and tools in OpenAI's format; a server may accept more keys. Pure."""

# No `from __future__ import annotations` here: with it Python 3.11 does not see `NotRequired`, and
# the classes' `__required_keys__` are wrong.

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, Required, TypeAlias, TypedDict


class ToolFunctionDef(TypedDict):
    """A function as described to a model; `parameters` is a JSON schema."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[Mapping[str, Any]]
    strict: NotRequired[bool]


class ToolDef(TypedDict):
    """A tool that a model may call."""

    type: Literal["function"]
    function: ToolFunctionDef


class ToolCallFunction(TypedDict):
    """The function that a model calls; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call in an assistant message."""

    id: NotRequired[str]
    type: Literal["function"]
    function: ToolCallFunction


ContentPart: TypeAlias = Mapping[str, Any]
"""A part of a message, in OpenAI's format: `{"type": "text", "text": ...}`,
`{"type": "image_url", "image_url": {"url": ...}}` or
`{"type": "input_audio", "input_audio": {"data": ..., "format": ...}}`."""


class ChatMessage(TypedDict, total=False):
    """One message of a conversation; a server may accept more keys."""

    role: Required[str]
    content: str | Sequence[ContentPart] | None
    name: str
    reasoning_content: str
    tool_calls: list[ToolCall]
    tool_call_id: str
