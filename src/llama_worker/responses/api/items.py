"""The output items of a response, and the events of each when it begins, grows and ends. Pure."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from llama_worker.responses.api.conversation import seal
from llama_worker.responses.api.tools import Tool, custom_input
from llama_worker.stream.calls import parse_arguments
from llama_worker.stream.events import ReasoningDelta, TextDelta, ToolCallDelta, encodable

Delta = TextDelta | ReasoningDelta | ToolCallDelta
ItemStatus = Literal["completed", "incomplete"]
Emitted = list[tuple[str, dict[str, Any]]]  # types of events, and the item's own fields of each


class MessageItem(Struct):
    id: str
    _pieces: list[str] = field(default_factory=list)

    def piece_of(self, delta: Delta) -> str | None:
        """What the delta adds to this item; None: it belongs to another."""
        return delta.text if isinstance(delta, TextDelta) else None

    def in_progress(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }

    def opening(self) -> Emitted:
        return [("response.content_part.added", {"content_index": 0, "part": self._part("")})]

    def append(self, piece: str) -> Emitted:
        self._pieces.append(piece)
        fields = {"content_index": 0, "delta": piece, "logprobs": []}
        return [("response.output_text.delta", fields)]

    def closing(self, status: ItemStatus) -> Emitted:
        text = "".join(self._pieces)
        return [
            ("response.output_text.done", {"content_index": 0, "text": text, "logprobs": []}),
            ("response.content_part.done", {"content_index": 0, "part": self._part(text)}),
        ]

    def done(self, status: ItemStatus) -> dict[str, Any]:
        return {
            **self.in_progress(),
            "status": status,
            "content": [self._part("".join(self._pieces))],
        }

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ReasoningItem(Struct):
    """A reasoning item. Its text comes twice, as content and as summary: clients show either."""

    id: str
    seal: bool
    _pieces: list[str] = field(default_factory=list)

    def piece_of(self, delta: Delta) -> str | None:
        return delta.text if isinstance(delta, ReasoningDelta) else None

    def in_progress(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [],
        }

    def opening(self) -> Emitted:
        summary = {"summary_index": 0, "part": self._summary("")}
        content = {"content_index": 0, "part": self._content("")}
        return [
            ("response.reasoning_summary_part.added", summary),
            ("response.content_part.added", content),
        ]

    def append(self, piece: str) -> Emitted:
        self._pieces.append(piece)
        return [
            ("response.reasoning_summary_text.delta", {"summary_index": 0, "delta": piece}),
            ("response.reasoning_text.delta", {"content_index": 0, "delta": piece}),
        ]

    def closing(self, status: ItemStatus) -> Emitted:
        text = "".join(self._pieces)
        summary = {"summary_index": 0, "part": self._summary(text)}
        content = {"content_index": 0, "part": self._content(text)}
        return [
            ("response.reasoning_summary_text.done", {"summary_index": 0, "text": text}),
            ("response.reasoning_summary_part.done", summary),
            ("response.reasoning_text.done", {"content_index": 0, "text": text}),
            ("response.content_part.done", content),
        ]

    def done(self, status: ItemStatus) -> dict[str, Any]:
        text = "".join(self._pieces)
        sealed = {"encrypted_content": seal(text)} if self.seal else {}
        return {
            **self.in_progress(),
            "status": status,
            "summary": [self._summary(text)],
            "content": [self._content(text)],
            **sealed,
        }

    def _summary(self, text: str) -> dict[str, Any]:
        return {"type": "summary_text", "text": text}

    def _content(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class CallItem(Struct):
    """A tool call item; `index`: the server's number for the call."""

    id: str
    index: int
    call_id: str
    tool: Tool
    _pieces: list[str] = field(default_factory=list)  # of its arguments
    _may_be_complete: bool = False  # seen from the end of the last piece, without parsing all

    def piece_of(self, delta: Delta) -> str | None:
        if not isinstance(delta, ToolCallDelta) or delta.index != self.index:
            return None
        # A server that gives all calls the same index, or none: what has a name and follows
        # complete arguments is the next call. A name or an id alone may just come late, or again.
        if delta.name and (delta.arguments or "").strip() and self.is_complete():
            return None
        return delta.arguments or ""

    def in_progress(self) -> dict[str, Any]:
        return self._item("in_progress", "")

    def opening(self) -> Emitted:
        return []

    def append(self, piece: str) -> Emitted:
        piece = encodable(piece)
        self._pieces.append(piece)
        if stripped := piece.rstrip():
            self._may_be_complete = stripped.endswith("}")
        # free text is known once its JSON string is complete
        if self.tool.kind != "function" or not piece:
            return []
        return [("response.function_call_arguments.delta", {"delta": piece})]

    def is_complete(self) -> bool:
        """Whether the arguments are complete, so that nothing can follow."""
        return self._may_be_complete and _object(self._arguments()) is not None

    def closing(self, status: ItemStatus) -> Emitted:
        if self.tool.kind == "tool_search":
            return []
        if self.tool.kind == "custom":
            text = custom_input(self._arguments())
            delta = ("response.custom_tool_call_input.delta", {"delta": text})
            done = ("response.custom_tool_call_input.done", {"input": text})
            return [delta, done] if text else [done]
        emitted: Emitted = []
        # some servers send no text for a call without arguments
        if status == "completed" and not self._arguments().strip():
            emitted = self.append("{}")
        arguments = {"name": self.tool.name, "arguments": self._arguments()}
        return [*emitted, ("response.function_call_arguments.done", arguments)]

    def done(self, status: ItemStatus) -> dict[str, Any]:
        return self._item(status, self._arguments())

    def _item(self, status: str, arguments: str) -> dict[str, Any]:
        tool = self.tool
        item = {"id": self.id, "status": status, "call_id": self.call_id}
        if tool.kind == "tool_search":
            found = _object(arguments) or {}
            return {**item, "type": "tool_search_call", "execution": "client", "arguments": found}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        item["name"] = tool.name
        if tool.kind == "custom":
            return {**item, "type": "custom_tool_call", "input": custom_input(arguments)}
        return {**item, "type": "function_call", "arguments": arguments}

    def _arguments(self) -> str:
        return "".join(self._pieces)


OutputItem = MessageItem | ReasoningItem | CallItem


class CallStart(Struct):
    """Joins the first pieces of a call until its name is final: before more than `{` of its
    arguments, the server may send a longer one (b11434: `read`, then `read_file`)."""

    held: ToolCallDelta | None = None

    def feed(self, delta: ToolCallDelta) -> list[ToolCallDelta]:
        """The pieces whose call's name is final now."""
        held = self.release()
        settled: list[ToolCallDelta] = []
        if held is not None and held.index == delta.index:
            arguments = f"{held.arguments or ''}{delta.arguments or ''}"
            call_id, name = delta.call_id or held.call_id, delta.name or held.name
            delta = ToolCallDelta(delta.index, call_id, name, arguments)
        elif held is not None:
            settled.append(held)
        if delta.name and (delta.arguments or "") in ("", "{"):
            self.held = delta
        else:
            settled.append(delta)
        return settled

    def release(self) -> ToolCallDelta | None:
        """What is held back: something else has come, or the end."""
        held, self.held = self.held, None
        return held


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        return parse_arguments(arguments)
    except ValueError:
        return None
