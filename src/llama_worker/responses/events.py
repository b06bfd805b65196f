"""The events of one response, made from the stream events of one chat completion. Pure; not thread-safe.

At most one item is open at a time. A tool call is closed when its arguments are a whole JSON object and something
else comes; what comes earlier than that waits, in order.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, assert_never

from llama_worker.responses.items import Call, Delta, ItemStatus, Message, Reasoning
from llama_worker.responses.refusal import error_code
from llama_worker.stream.calls import ToolCallAssembler
from llama_worker.stream.events import (
    Done,
    Finish,
    PromptProgress,
    ReasoningDelta,
    RoleOnly,
    ServerError,
    StreamEvent,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from llama_worker.stream.reasoning import Piece, ReasoningSplitter

Event = dict[str, Any]

_INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}  # by finish reason


def sse(events: list[Event]) -> bytes:
    """The events as a Responses stream has them; it has no end mark of its own."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event, separators=(",", ":")).encode())
        for event in events
    )


class ResponseEvents:
    """`begin` once, `feed` for every stream event, `end` or `fail` once; each returns the events to send.

    `new_id` makes an id of a prefix. After the terminal event everything returns [], and `response` is final.
    """

    def __init__(
        self,
        *,
        response_id: str,
        created_at: int,
        echo: Mapping[str, Any],
        new_id: Callable[[str], str],
        seal: bool = False,
    ) -> None:
        self.over = False
        self.failure: str | None = None  # why, after `response.failed`
        self.response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": created_at,
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            **echo,
            "output": [],
            "usage": None,
        }
        self._new_id = new_id
        self._seal = seal
        self._out: list[Event] = []
        self._sequence_number = 0
        self._splitter: ReasoningSplitter | None = ReasoningSplitter()  # None once a call has begun
        self._open: Reasoning | Message | Call | None = None
        self._waiting: deque[Delta] = deque()
        self._call_ids: set[str] = set()
        self._closed_calls: set[int] = set()
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._timings: Timings | None = None

    @property
    def settling(self) -> bool:
        """The model is done; usage, the end mark or an error may still follow."""
        return self._finish_reason is not None and not self.over

    def begin(self) -> list[Event]:
        """`response.created` and `response.in_progress`."""
        self._emit("response.created", response=dict(self.response))
        self._emit("response.in_progress", response=dict(self.response))
        return self._take()

    def feed(self, event: StreamEvent) -> list[Event]:
        """What the server said."""
        if self.over:
            return []
        match event:
            case TextDelta(text=text):
                self._piece(self._splitter.feed_text(text) if self._splitter else Piece("", text))
            case ReasoningDelta(text=text):
                self._piece(self._splitter.feed_reasoning(text) if self._splitter else Piece(text, ""))
            case ToolCallDelta():
                self._finish_splitter()  # no text that came before may come after the call
                self._take_delta(Delta("call", call=event))
            case Finish(reason=reason):
                self._finish_reason = reason
            case Usage():
                self._usage = event
            case Timings():
                self._timings = event
            case ServerError():
                return self.fail(event.message, code=error_code(f"{event.type} {event.message}"))
            case Done():
                return self.end()
            case RoleOnly() | PromptProgress():
                pass
            case _:
                assert_never(event)
        return self._take()

    def end(self) -> list[Event]:
        """The stream is over without an error; one that never gave a finish reason has failed."""
        if self.over:
            return []
        if self._finish_reason is None:
            return self.fail("the stream ended without a finish reason")
        incomplete = _INCOMPLETE_REASONS.get(self._finish_reason)
        self._close_all("incomplete" if incomplete else "completed")
        if incomplete:
            self.response["incomplete_details"] = {"reason": incomplete}
            return self._conclude("incomplete")
        if all(item["type"] == "reasoning" for item in self.response["output"]):
            self._begin_item(Message(self._new_id("msg")))  # clients expect an answer, be it empty
            self._close("completed")
        return self._conclude("completed")

    def fail(self, message: str, *, code: str | None = None) -> list[Event]:
        """The stream is over, and this is why."""
        if self.over:
            return []
        self._close_all("incomplete")
        self.failure = message
        error = {"type": "server_error", "code": code or "server_error", "message": message, "param": None}
        flat = {key: value for key, value in error.items() if key != "type"}
        self._emit("error", **flat, error=error)  # old clients look outside, new ones inside
        self.response["error"] = {"code": "server_error", "message": message}
        return self._conclude("failed")

    # ------------------------------------------------------------ items

    def _piece(self, piece: Piece) -> None:
        if piece.reasoning:
            self._take_delta(Delta("reasoning", text=piece.reasoning))
        if piece.text:
            self._take_delta(Delta("text", text=piece.text))

    def _finish_splitter(self) -> None:
        splitter, self._splitter = self._splitter, None
        if splitter is not None:
            self._piece(splitter.finish())

    def _take_delta(self, delta: Delta) -> None:
        if delta.call is not None and delta.index in self._closed_calls:
            if not (delta.call.name and delta.call.call_id):
                return  # nothing can follow a whole object of arguments
            self._closed_calls.remove(delta.index)  # a server that numbers every call alike
        self._waiting.append(delta)
        if len(self._waiting) == 1 or self._for_open_item(delta):
            self._work_off()

    def _work_off(self) -> None:
        """Pass on what waits, as far as it may be."""
        while self._waiting:
            mine = [delta for delta in self._waiting if self._for_open_item(delta)]
            if isinstance(self._open, Call) and mine:
                self._waiting = deque(delta for delta in self._waiting if not self._for_open_item(delta))
                for delta in mine:
                    self._append(delta)
                continue
            delta = self._waiting[0]
            if not self._for_open_item(delta):
                if isinstance(self._open, Call) and not self._open.is_whole():
                    return
                self._close("completed")
                if not self._begin_item_for(delta):
                    return
            self._append(self._waiting.popleft())

    def _for_open_item(self, delta: Delta) -> bool:
        item = self._open
        if isinstance(item, Call):
            return delta.kind == "call" and delta.index == item.index
        return item is not None and delta.kind == item.kind

    def _begin_item_for(self, delta: Delta) -> bool:
        """Open the item that the delta begins; False where it cannot be opened yet."""
        if delta.kind == "reasoning":
            self._begin_item(Reasoning(self._new_id("rs"), seal=self._seal))
        elif delta.kind == "text":
            self._begin_item(Message(self._new_id("msg")))
        else:
            name, call_id = self._name_and_id(delta.index)
            if not name:
                return False
            if not call_id or call_id in self._call_ids:
                call_id = self._new_id("call")
            self._call_ids.add(call_id)
            self._begin_item(Call(self._new_id("fc"), index=delta.index, call_id=call_id, name=name))
        return True

    def _name_and_id(self, index: int) -> tuple[str, str | None]:
        assembler = ToolCallAssembler()
        for delta in self._waiting:
            if delta.call is not None and delta.index == index:
                assembler.feed(delta.call)
        (call,) = assembler.calls()
        return call.name, call.call_id

    def _begin_item(self, item: Reasoning | Message | Call) -> None:
        self._open = item
        self._emit("response.output_item.added", output_index=self._index, item=item.begun())
        for kind, fields in item.opening():
            self._emit(kind, output_index=self._index, item_id=item.id, **fields)

    def _append(self, delta: Delta) -> None:
        item = self._open
        assert item is not None
        for kind, fields in item.append(delta):
            self._emit(kind, output_index=self._index, item_id=item.id, **fields)

    def _close(self, status: ItemStatus) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, Call):
            self._closed_calls.add(item.index)
        for kind, fields in item.closing(status):
            self._emit(kind, output_index=self._index, item_id=item.id, **fields)
        done = item.done(status)
        self._emit("response.output_item.done", output_index=self._index, item=done)
        self.response["output"].append(done)

    def _close_all(self, status: ItemStatus) -> None:
        """The turn is over: pass on what was held back and what waits, and close the last item."""
        self._finish_splitter()
        while self._waiting:
            self._work_off()
            if not self._waiting:
                break
            if self._open is None:  # a call that never got a name is none
                nameless = self._waiting[0].index
                self._waiting = deque(delta for delta in self._waiting if delta.index != nameless)
            else:
                self._close(status)
        self._close(status)

    @property
    def _index(self) -> int:
        return len(self.response["output"])

    # ------------------------------------------------------------ events

    def _conclude(self, status: Literal["completed", "incomplete", "failed"]) -> list[Event]:
        self.over = True
        self.response["status"] = status
        self.response["usage"] = self._usage_object()
        self._emit(f"response.{status}", response=dict(self.response))
        return self._take()

    def _usage_object(self) -> dict[str, Any]:
        """As the server counts; from its timings where it sent no usage, as when it failed."""
        usage, timings = self._usage, self._timings
        if usage is None:
            cached = (timings.cache_n if timings else None) or 0
            read = (timings.prompt_n if timings else None) or 0
            usage = Usage(cached + read, (timings.predicted_n if timings else None) or 0, cached)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _emit(self, kind: str, **fields: Any) -> None:
        if "response" in fields:  # a snapshot: the list goes on growing
            fields["response"]["output"] = list(fields["response"]["output"])
        self._out.append({"type": kind, "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        return out
