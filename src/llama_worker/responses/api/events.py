"""Makes the events of one response from the stream events of one chat completion. Pure; not
thread-safe.

Events of the response as a whole are made here; `items` makes those of one item. At most one item
is open at a time. A tool call is closed once its arguments are a complete JSON object and something
else comes; what comes before its arguments are complete waits, in order.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, assert_never

import msgspec

from llama_worker.responses.api import items
from llama_worker.responses.api.store import item_id_of, response_id_of
from llama_worker.responses.api.tools import NO_TOOLS, Tool, ToolSet
from llama_worker.responses.errors import CONTEXT_EXCEEDED, error_code
from llama_worker.stream import events as chat
from llama_worker.stream.calls import ToolCallAssembler
from llama_worker.stream.failure import StreamFailure
from llama_worker.stream.reasoning import ReasoningSplitter
from llama_worker.stream.turn_end import NO_FINISH_REASON, Finished, TurnEnd, TurnOutcome

Event = dict[str, Any]

_CALL_PREFIXES = {"function": "fc", "custom": "ctc", "tool_search": "tsc"}  # of ids
_INCOMPLETE_REASONS = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}  # by finish reason
_encode = msgspec.json.Encoder().encode


def sse(events: list[Event]) -> bytes:
    """The events as server-sent events; a Responses stream has no end mark of its own."""
    records: list[bytes] = []
    for event in events:
        records.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event)))
    return b"".join(records)


def to_json(event: Event) -> bytes:
    try:
        return _encode(event)  # much faster than json
    except UnicodeEncodeError:  # a lone surrogate, which a client's own text may hold
        return json.dumps(event, separators=(",", ":")).encode()


class ResponseEvents:
    """Makes one response's events. Call `begin` once, `feed` with what is read of the stream,
    `closed` at its end; each returns the events to send.

    `unique`: from which the ids are made. `clock` returns seconds since 1970. After the terminal
    event all methods return [], and `response` is final.

    An item that is open when the stream fails, or a call that is open at the token limit, is never
    reported done: clients act on what is done, and make it part of their history.
    """

    def __init__(
        self,
        *,
        unique: str,
        clock: Callable[[], float],
        echo: Mapping[str, Any],
        tools: ToolSet = NO_TOOLS,
        seal: bool = False,
    ) -> None:
        self.is_over = False
        self.failure: str | None = None  # why, after `response.failed`
        self.response: dict[str, Any] = {
            "id": response_id_of(unique),
            "object": "response",
            "created_at": int(clock()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            **echo,
            "output": [],
            "usage": None,
        }
        self._clock = clock
        self._unique = unique
        self._ids_count = 0
        self._tools = tools
        self._seal = seal
        self._turn_end = TurnEnd()
        self._out: list[Event] = []
        self._sequence_number = 0
        self._splitter: ReasoningSplitter | None = ReasoningSplitter()  # None once a call has begun
        self._call_start = items.CallStart()
        self._open: items.OutputItem | None = None
        self._waiting: deque[items.Delta] = deque()
        self._call_ids: set[str] = set()
        self._closed_calls: set[int] = set()
        self._usage: chat.UsageReport | None = None
        self._timings = chat.TimingsReport(None, None, None, None)

    @property
    def stored(self) -> dict[str, Any]:
        """The response to store: it also has the item that was open when the stream failed, as
        incomplete."""
        half = [] if self._open is None else [self._open.done("incomplete")]
        return {**self.response, "output": [*self.response["output"], *half]}

    def begin(self) -> list[Event]:
        """`response.created` and `response.in_progress`."""
        self._emit_response("created")
        return self.heartbeat()

    def heartbeat(self) -> list[Event]:
        """`response.in_progress` again: clients that give up on a silent stream count events, not
        comments."""
        if not self.is_over:
            self._emit_response("in_progress")
        return self._take()

    def feed(self, stream_events: Iterable[chat.StreamEvent]) -> list[Event]:
        for event in stream_events:
            if self.is_over:
                break
            match event:
                case chat.TextDelta(text=text):
                    splitter = self._splitter
                    self._piece(splitter.feed_text(text) if splitter else ("", text))
                case chat.ReasoningDelta(text=text):
                    splitter = self._splitter
                    self._piece(splitter.feed_reasoning(text) if splitter else (text, ""))
                case chat.ToolCallDelta():
                    self._finish_splitter()  # text that was held back must not follow the call
                    for delta in self._call_start.feed(event):
                        self._take_delta(delta)
                case chat.Finish() | chat.ServerError() | chat.Done():
                    self._conclude(self._turn_end.feed(event))
                case chat.UsageReport():
                    self._usage = event
                case chat.TimingsReport():
                    self._timings = event
                case chat.EmptyRecord() | chat.UnknownContent() | chat.PromptReport():
                    pass
                case _:
                    assert_never(event)
        return self._take()

    def closed(self, failure: StreamFailure | None = None) -> list[Event]:
        """The connection is over; `failure`: how it broke, None for a regular end."""
        self._conclude(self._turn_end.closed(failure))
        return self._take()

    def finish_empty(self) -> list[Event]:
        """Complete the response without output: nothing was to be generated."""
        self._emit_terminal("completed")
        return self._take()

    def fail(self, message: str, *, code: str | None = None) -> list[Event]:
        if not self.is_over:
            self._fail(message, code)
        return self._take()

    def _fail(self, message: str, code: str | None = None) -> None:
        self._finish_splitter()
        self._release_call()
        self.failure = message
        error = {
            "type": "server_error",
            "code": code or "server_error",
            "message": message,
            "param": None,
        }
        flat = {key: value for key, value in error.items() if key != "type"}
        self._emit("error", **flat, error=error)  # old clients read the fields, new ones `error`
        # OpenAI's API has this code here, too, although its models lack it: Codex reads no other
        known = code if code == CONTEXT_EXCEEDED else "server_error"
        self.response["error"] = {"code": known, "message": message}
        self._emit_terminal("failed")

    def _conclude(self, outcome: TurnOutcome | None) -> None:
        if self.is_over:
            return
        match outcome:
            case chat.ServerError(message=message, type=kind):
                self._fail(message, error_code(f"{kind} {message}"))
            case StreamFailure(detail=detail):
                self._fail(detail)
            case Finished(reason=str(reason)):
                self._finish(_INCOMPLETE_REASONS.get(reason))
            case Finished():
                self._fail(NO_FINISH_REASON)

    def _finish(self, incomplete: str | None) -> None:
        status: items.ItemStatus = "incomplete" if incomplete else "completed"
        self._close_all(status)
        if incomplete:
            self.response["incomplete_details"] = {"reason": incomplete}
        elif all(item["type"] == "reasoning" for item in self.response["output"]):
            # clients expect a message, even an empty one
            self._begin_item(items.MessageItem(self._new_id("msg")))
            self._close("completed")
        self._emit_terminal(status)

    # ------------------------------------------------------------ items

    def _piece(self, piece: tuple[str, str]) -> None:
        reasoning, text = piece
        if self._call_start.held is not None:
            self._release_call()
        if reasoning:
            self._take_delta(chat.ReasoningDelta(reasoning))
        if text:
            self._take_delta(chat.TextDelta(text))

    def _finish_splitter(self) -> None:
        splitter, self._splitter = self._splitter, None
        if splitter is not None:
            self._piece(splitter.finish())

    def _release_call(self) -> None:
        if (held := self._call_start.release()) is not None:
            self._take_delta(held)

    def _take_delta(self, delta: items.Delta) -> None:
        if isinstance(delta, chat.ToolCallDelta) and delta.index in self._closed_calls:
            if not (delta.name and delta.call_id):
                return  # nothing can follow complete arguments
            self._closed_calls.remove(delta.index)  # a server that gives all calls the same index
        if self._append(delta):  # nearly always; the deltas that wait are of other items
            if self._waiting:
                self._pass_on_waiting()
            return
        self._waiting.append(delta)
        if len(self._waiting) == 1:
            self._pass_on_waiting()

    def _pass_on_waiting(self) -> None:
        """Pass on the deltas that wait, until one must still wait for the open call."""
        while self._waiting:
            if self._append(self._waiting[0]):
                self._waiting.popleft()
                continue
            if isinstance(self._open, items.CallItem) and not self._open.is_complete():
                return
            self._close("completed")
            if not self._begin_item_for(self._waiting[0]):
                return
            if isinstance(self._open, items.CallItem):  # others' deltas may wait between its own
                self._waiting = deque(delta for delta in self._waiting if not self._append(delta))

    def _append(self, delta: items.Delta) -> bool:
        """Add the delta to the open item. False: it does not belong to that."""
        item = self._open
        if item is None or (piece := item.piece_of(delta)) is None:
            return False
        self._emit_of(item, item.append(piece))
        return True

    def _begin_item_for(self, delta: items.Delta) -> bool:
        """Open the item that the delta begins. False: a call whose name has not come yet."""
        if isinstance(delta, chat.ReasoningDelta):
            self._begin_item(items.ReasoningItem(self._new_id("rs"), seal=self._seal))
        elif isinstance(delta, chat.TextDelta):
            self._begin_item(items.MessageItem(self._new_id("msg")))
        else:
            name, call_id = self._name_and_id(delta.index)
            if not name:
                return False
            if not call_id or call_id in self._call_ids:
                call_id = self._new_id("call")
            self._call_ids.add(call_id)
            self._closed_calls.discard(delta.index)  # of the call before, if it had the same
            unknown = Tool(kind="function", name=name, model_name=name)
            tool = self._tools.called(name) or unknown
            self._begin_item(
                items.CallItem(self._new_id(_CALL_PREFIXES[tool.kind]), delta.index, call_id, tool)
            )
        return True

    def _name_and_id(self, index: int) -> tuple[str, str | None]:
        assembler = ToolCallAssembler()
        for delta in self._waiting:
            if isinstance(delta, chat.ToolCallDelta) and delta.index == index:
                assembler.feed(delta)
        (call,) = assembler.calls()
        return call.name, call.call_id

    def _begin_item(self, item: items.OutputItem) -> None:
        self._open = item
        self._emit("response.output_item.added", output_index=self._index, item=item.in_progress())
        self._emit_of(item, item.opening())

    def _close(self, status: items.ItemStatus) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, items.CallItem):
            self._closed_calls.add(item.index)
        self._emit_of(item, item.closing(status))
        done = item.done(status)
        self._emit("response.output_item.done", output_index=self._index, item=done)
        self.response["output"].append(done)

    def _close_all(self, status: items.ItemStatus) -> None:
        """The turn is over: pass on what was held back and what waits, and close the last item.

        A call that the token limit cut stays open: clients run what is done.
        """
        self._finish_splitter()
        self._release_call()
        self._pass_on_waiting()
        while self._open is not None or self._waiting:
            if status == "incomplete" and isinstance(self._open, items.CallItem):
                return
            if self._open is not None:
                self._close(status)
            else:  # a call without a name is dropped
                nameless = _call_index(self._waiting[0])
                self._waiting = deque(
                    delta for delta in self._waiting if _call_index(delta) != nameless
                )
            self._pass_on_waiting()

    def _new_id(self, prefix: str) -> str:
        self._ids_count += 1
        return item_id_of(self._unique, prefix, self._ids_count)

    @property
    def _index(self) -> int:
        return len(self.response["output"])

    # ------------------------------------------------------------ events

    def _emit_terminal(self, status: Literal["completed", "incomplete", "failed"]) -> None:
        self.is_over = True
        self.response["status"] = status
        if status == "completed":
            self.response["completed_at"] = int(self._clock())
        self.response["usage"] = self._usage_object()
        self._emit_response(status)

    def _usage_object(self) -> dict[str, Any]:
        """The server's token counts; from its timings if it sent no usage, as when it failed."""
        usage, timings = self._usage, self._timings
        if usage is None:
            cached = timings.cache_n or 0
            read = cached + (timings.prompt_n or 0)
            usage = chat.UsageReport(read, timings.predicted_n or 0, cached)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens or 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _emit_response(self, kind: str) -> None:
        """Emit an event with a snapshot of the response, whose list of items goes on growing."""
        snapshot = {**self.response, "output": [*self.response["output"]]}
        self._emit(f"response.{kind}", response=snapshot)

    def _emit(self, kind: str, **fields: Any) -> None:
        self._out.append({"type": kind, "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1

    def _emit_of(self, item: items.OutputItem, emitted: items.Emitted) -> None:
        for kind, fields in emitted:  # inlines `_emit`: this runs for every token
            self._out.append(
                {
                    "type": kind,
                    "sequence_number": self._sequence_number,
                    "output_index": len(self.response["output"]),
                    "item_id": item.id,
                    **fields,
                }
            )
            self._sequence_number += 1

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        return out


def _call_index(delta: items.Delta) -> int | None:
    return delta.index if isinstance(delta, chat.ToolCallDelta) else None
