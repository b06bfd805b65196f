"""The items of a response as they grow: what is said of each when it begins, goes on and ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from llama_worker.responses.conversation import seal_reasoning
from llama_worker.responses.tools import Tool, custom_input
from llama_worker.stream.calls import ToolCallAssembler, parse_arguments
from llama_worker.stream.events import ToolCallDelta

ItemStatus = Literal["completed", "incomplete"]
Emitted = list[tuple[str, dict[str, Any]]]  # kinds of events, and the fields that are the item's


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an item."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: ToolCallDelta | None = None

    @property
    def index(self) -> int:
        """Of the call; -1 for what is none."""
        return self.call.index if self.call is not None else -1


@dataclass(slots=True)
class Message:
    """Text."""

    id: str
    kind: Literal["text"] = "text"
    _pieces: list[str] = field(default_factory=list)

    def begun(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}

    def opening(self) -> Emitted:
        return [("response.content_part.added", {"content_index": 0, "part": self._part("")})]

    def append(self, delta: Delta) -> Emitted:
        self._pieces.append(delta.text)
        return [("response.output_text.delta", {"content_index": 0, "delta": delta.text, "logprobs": []})]

    def closing(self, status: ItemStatus) -> Emitted:
        text = "".join(self._pieces)
        return [
            ("response.output_text.done", {"content_index": 0, "text": text, "logprobs": []}),
            ("response.content_part.done", {"content_index": 0, "part": self._part(text)}),
        ]

    def done(self, status: ItemStatus) -> dict[str, Any]:
        return {**self.begun(), "status": status, "content": [self._part("".join(self._pieces))]}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


@dataclass(slots=True)
class Reasoning:
    """The same text twice, as content and as summary: some clients show the one, some the other."""

    id: str
    seal: bool
    kind: Literal["reasoning"] = "reasoning"
    _pieces: list[str] = field(default_factory=list)

    def begun(self) -> dict[str, Any]:
        item = {"id": self.id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        return {**item, "encrypted_content": None}

    def opening(self) -> Emitted:
        return [
            ("response.reasoning_summary_part.added", {"summary_index": 0, "part": self._summary("")}),
            ("response.content_part.added", {"content_index": 0, "part": self._content("")}),
        ]

    def append(self, delta: Delta) -> Emitted:
        self._pieces.append(delta.text)
        return [
            ("response.reasoning_summary_text.delta", {"summary_index": 0, "delta": delta.text}),
            ("response.reasoning_text.delta", {"content_index": 0, "delta": delta.text}),
        ]

    def closing(self, status: ItemStatus) -> Emitted:
        text = "".join(self._pieces)
        return [
            ("response.reasoning_summary_text.done", {"summary_index": 0, "text": text}),
            ("response.reasoning_summary_part.done", {"summary_index": 0, "part": self._summary(text)}),
            ("response.reasoning_text.done", {"content_index": 0, "text": text}),
            ("response.content_part.done", {"content_index": 0, "part": self._content(text)}),
        ]

    def done(self, status: ItemStatus) -> dict[str, Any]:
        text = "".join(self._pieces)
        return {
            **self.begun(),
            "status": status,
            "summary": [self._summary(text)],
            "content": [self._content(text)],
            "encrypted_content": seal_reasoning(text) if self.seal else None,
        }

    def _summary(self, text: str) -> dict[str, Any]:
        return {"type": "summary_text", "text": text}

    def _content(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


@dataclass(slots=True)
class Call:
    """A call of a tool; `index`: the server's number for it. `tool`: None for one that was not offered."""

    id: str
    index: int
    call_id: str
    model_name: str
    tool: Tool | None = None
    kind: Literal["call"] = "call"
    _assembler: ToolCallAssembler = field(default_factory=ToolCallAssembler)

    def begun(self) -> dict[str, Any]:
        return self._item("in_progress", "")

    def opening(self) -> Emitted:
        return []

    def append(self, delta: Delta) -> Emitted:
        assert delta.call is not None
        self._assembler.feed(delta.call)
        if self._is_custom or not delta.call.arguments:  # free text is known once its JSON string is whole
            return []
        return [("response.function_call_arguments.delta", {"delta": delta.call.arguments})]

    def is_whole(self) -> bool:
        """Whether nothing can follow."""
        try:
            return bool(self._arguments().strip()) and parse_arguments(self._arguments()) is not None
        except ValueError:
            return False

    def closing(self, status: ItemStatus) -> Emitted:
        if self._is_custom:
            text = custom_input(self._arguments())
            delta: Emitted = [("response.custom_tool_call_input.delta", {"delta": text})] if text else []
            return [*delta, ("response.custom_tool_call_input.done", {"input": text})]
        emitted: Emitted = []
        if status == "completed" and not self._arguments().strip():  # so do some servers write a call without any
            emitted = self.append(Delta("call", call=ToolCallDelta(self.index, None, None, "{}")))
        arguments = {"name": self._name, "arguments": self._arguments()}
        return [*emitted, ("response.function_call_arguments.done", arguments)]

    def done(self, status: ItemStatus) -> dict[str, Any]:
        arguments = self._arguments()
        return self._item(status, custom_input(arguments) if self._is_custom else arguments)

    @property
    def _is_custom(self) -> bool:
        return self.tool is not None and self.tool.kind == "custom"

    @property
    def _name(self) -> str:
        return self.tool.name if self.tool is not None else self.model_name

    def _item(self, status: str, given: str) -> dict[str, Any]:
        kind, field_name = ("custom_tool_call", "input") if self._is_custom else ("function_call", "arguments")
        item = {"id": self.id, "type": kind, "status": status, "call_id": self.call_id, "name": self._name}
        if self.tool is not None and self.tool.namespace is not None:
            item["namespace"] = self.tool.namespace
        return {**item, field_name: given}

    def _arguments(self) -> str:
        calls = self._assembler.calls()
        return calls[0].arguments if calls else ""
