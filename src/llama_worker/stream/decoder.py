"""Decodes chat-completion chunks to stream events. Pure; one StreamDecoder per response body, one
thread at a time.

A record must be a JSON object, but everything in it is optional: llama-server's chunks differ
between builds, and a field that is absent, null or of an unexpected type gives no event.
"""

import json
import math
from collections.abc import Container, Iterator
from typing import Any, Literal

import msgspec

from llama_worker.config.validation import as_count, json_of, shown
from llama_worker.stream import events
from llama_worker.stream.failure import context_use
from llama_worker.stream.sse import ErrorField, SseDecoder, SseRecord

# The fields that are read here, and those that are the same in every record, or a clock.
_READ_IN_CHUNK = ("choices", "prompt_progress", "usage", "timings", "error", "message")
_IN_CHUNK = frozenset((*_READ_IN_CHUNK, "id", "object", "created", "model", "system_fingerprint"))
_IN_CHOICE = frozenset(["index", "delta", "message", "finish_reason"])
_IN_DELTA = frozenset(["role", "content", "reasoning_content", "tool_calls"])
_CONTENT = (
    events.TextDelta,
    events.ReasoningDelta,
    events.ToolCallDelta,
    events.Finish,
    events.ServerError,
)


class StreamDecoder:
    """Decodes a response body's bytes, split anywhere, to its events. `every_choice`: also those of
    the answers after the first, if several were asked for."""

    def __init__(self, *, every_choice: bool = False) -> None:
        self._every_choice = every_choice
        # records with data so far, including those that gave no event and those after an error
        self.data_records = 0
        self.error: str | None = None  # why the stream cannot be read; nothing is decoded any more
        self.lacks_memory = False  # the cause of `error`: no fault of the stream
        self._sse = SseDecoder()
        self._events: list[events.StreamEvent] = []  # of the bytes fed just now
        self._run_kind: type[events.TextDelta] | type[events.ReasoningDelta] = events.TextDelta
        self._run: list[str] = []  # consecutive deltas of that kind, to become one event
        self._delta_kinds: set[type[events.StreamEvent]] = set()

    def feed(self, data: bytes) -> list[events.StreamEvent]:
        """The events that these bytes complete, in order; consecutive text is one event.

        Bytes that are not SSE, or a record that is not a JSON object, end the stream: `error` says
        so, and the events before are returned.
        """
        if self.error is not None:
            return []
        try:
            records = self._sse.feed(data)
            self.data_records += len(records)
            for record in records:
                delta = _plain_delta(record)
                if delta is not None:
                    kind, text = delta
                    if kind is not self._run_kind:
                        self._end_run()
                        self._run_kind = kind
                    self._run.append(text)
                else:
                    self._end_run()
                    decoded = decode_record(record, self._delta_kinds, self._every_choice)
                    self._delta_kinds.update(map(type, decoded))
                    self._events += decoded
        except ProtocolError as error:
            self.error = str(error)
        except RecursionError:  # it parsed at the depth limit, but could not be dumped
            self.error = "a record of the stream is nested too deeply"
        except MemoryError:  # for a large record; the events before it are not lost
            self.error, self.lacks_memory = "out of memory while reading the stream", True
        self._end_run()
        self.error = self.error or self._sse.error
        complete, self._events = self._events, []
        return complete

    def _end_run(self) -> None:
        if self._run:
            self._events.append(self._run_kind("".join(self._run), len(self._run)))
            self._run.clear()
            self._delta_kinds.add(self._run_kind)

    @property
    def partial(self) -> bool:
        """Whether a record has begun and not ended; if the body ends here, it is truncated."""
        return self._sse.has_partial()


class ProtocolError(Exception):
    """A record cannot be read as part of a chat completion; the text is for a person."""


# ------------------------------------------- fast path: nearly all records are just a delta


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: None
    index: Literal[0]


class _Chunk(msgspec.Struct):
    """A chunk that is just one delta; decoding any other fails."""

    choices: tuple[_Choice]
    prompt_progress: None = None
    usage: None = None
    timings: None = None
    error: None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def _plain_delta(
    record: SseRecord,
) -> tuple[type[events.TextDelta] | type[events.ReasoningDelta], str] | None:
    """The kind and the text, if the record is just one delta of either; else None."""
    if isinstance(record, ErrorField):
        return None
    try:
        delta = _decode_chunk(record).choices[0].delta
    except (msgspec.MsgspecError, RecursionError):
        return None
    if delta.content and not delta.reasoning_content:
        return events.TextDelta, delta.content
    if delta.reasoning_content and not delta.content:
        return events.ReasoningDelta, delta.reasoning_content
    return None


# ---------------------------------------------------------------- any record


def decode_record(
    record: SseRecord, delta_kinds: Container[type] = (), every_choice: bool = False
) -> tuple[events.StreamEvent, ...]:
    """The events of one record: progress, reasoning, text, tool calls, finish, usage, timings,
    error, in this order.

    `delta_kinds`: the kinds of event that the stream gave so far. A final whole message repeats
    those, so only its other kinds count. Raises ProtocolError if a `data:` record is not a JSON
    object.
    """
    if isinstance(record, ErrorField):
        return (_error_of_field(record.text),)
    if record.strip() == "[DONE]":
        return (events.Done(),)
    try:
        chunk = json.loads(record)
    except (ValueError, RecursionError):
        raise ProtocolError(f"a record of the stream is not JSON: {shown(record)}") from None
    if not isinstance(chunk, dict):
        raise ProtocolError(f"a record of the stream is not a JSON object: {shown(record)}")
    decoded = tuple(_events(chunk, delta_kinds, every_choice=every_choice))
    if not any(isinstance(event, _CONTENT) for event in decoded):
        decoded += tuple(_unknown_content(chunk))
    return decoded or (events.EmptyRecord(),)


def _events(
    chunk: dict[str, Any], delta_kinds: Container[type], *, every_choice: bool
) -> Iterator[events.StreamEvent]:
    progress = chunk.get("prompt_progress")
    if isinstance(progress, dict):
        processed, total = as_count(progress.get("processed")), as_count(progress.get("total"))
        if processed is not None and total is not None:
            yield events.PromptReport(processed, total, as_count(progress.get("cache")) or 0)
    for choice in _choices(chunk, every_choice=every_choice):
        yield from _choice_events(choice, delta_kinds)
    usage, timings = chunk.get("usage"), _timings(chunk.get("timings"))
    if isinstance(usage, dict):
        yield _usage(usage, timings)
    if timings is not None:
        yield timings
    error = chunk.get("error")
    if error is not None and error is not False:
        yield _error(error)
    elif "choices" not in chunk and isinstance(chunk.get("message"), str):
        yield _error(chunk)  # an error object that is not wrapped


def _unknown_content(chunk: dict[str, Any]) -> Iterator[events.UnknownContent]:
    """An event for fields that are neither read here nor the same, or a clock, in every record."""
    choice = next(iter(_choices(chunk)), {})
    delta = choice.get("delta")
    unknown = [
        {key: value for key, value in part.items() if key not in known and value}
        for part, known in ((chunk, _IN_CHUNK), (choice, _IN_CHOICE), (delta, _IN_DELTA))
        if isinstance(part, dict)
    ]
    if any(unknown):
        yield events.UnknownContent(hash(json.dumps(unknown, sort_keys=True)))


def _choices(chunk: dict[str, Any], *, every_choice: bool = False) -> list[dict[str, Any]]:
    """The choice of the first answer, or those of all."""
    choices = chunk.get("choices")
    if not isinstance(choices, list):
        return []
    found = [choice for choice in choices if isinstance(choice, dict)]
    return found if every_choice else [c for c in found if c.get("index") in (0, None)][:1]


def _choice_events(
    choice: dict[str, Any], delta_kinds: Container[type]
) -> Iterator[events.StreamEvent]:
    delta, message = choice.get("delta"), choice.get("message")
    if isinstance(delta, dict) and delta:
        yield from _delta_events(delta)
    elif isinstance(message, dict):
        yield from (event for event in _delta_events(message) if type(event) not in delta_kinds)
    reason = choice.get("finish_reason")
    if isinstance(reason, str) and reason:
        yield events.Finish(reason)


def _delta_events(delta: dict[str, Any]) -> Iterator[events.StreamEvent]:
    reasoning = _text(delta.get("reasoning_content"))
    if reasoning:
        yield events.ReasoningDelta(reasoning)
    text = _text(delta.get("content"))
    if text:  # if it has both, they are of the same token (the legacy form)
        yield events.TextDelta(text, 0 if reasoning else 1)
    calls = delta.get("tool_calls")
    for position, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            yield _tool_call(call, position)


def _tool_call(call: dict[str, Any], position: int) -> events.ToolCallDelta:
    function = call.get("function")
    if not isinstance(function, dict):
        function = {}
    index = as_count(call.get("index"))
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        # old builds give a final call's arguments as an object
        arguments = json.dumps(arguments, ensure_ascii=False)
    return events.ToolCallDelta(
        index=position if index is None else index,
        call_id=_text(call.get("id")) or _text(function.get("id")),  # in `function`: old builds
        name=_text(function.get("name")),
        arguments=arguments,
    )


def _usage(usage: dict[str, Any], timings: events.TimingsReport | None) -> events.UsageReport:
    details = usage.get("prompt_tokens_details")
    cached = as_count(details.get("cached_tokens")) if isinstance(details, dict) else None
    if cached is None and timings is not None:  # builds before February 2026 report it only there
        cached = timings.cache_n
    return events.UsageReport(
        prompt_tokens=as_count(usage.get("prompt_tokens")) or 0,
        completion_tokens=as_count(usage.get("completion_tokens")) or 0,
        cached_tokens=cached,
    )


def _timings(timings: object) -> events.TimingsReport | None:
    if not isinstance(timings, dict):
        return None
    return events.TimingsReport(
        cache_n=as_count(timings.get("cache_n")),
        prompt_n=as_count(timings.get("prompt_n")),
        predicted_n=as_count(timings.get("predicted_n")),
        predicted_per_second=_rate(timings.get("predicted_per_second")),
        prompt_ms=_rate(timings.get("prompt_ms")),
    )


def _error_of_field(data: str) -> events.ServerError:
    """The error in an `error:` field: an error object, wrapped or not, or just a text."""
    value = json_of(data)
    if value is None:
        value = data
    if isinstance(value, dict) and value.get("error"):
        value = value["error"]
    return _error(value)


def _error(error: Any) -> events.ServerError:
    fields = error if isinstance(error, dict) else {"message": error}
    code = fields.get("code")
    return events.ServerError(
        message=_text(fields.get("message")) or json.dumps(error, ensure_ascii=False),
        code=as_count(json_of(code) if isinstance(code, str) else code),
        type=_text(fields.get("type")),
        context=context_use(fields),
    )


def _text(value: Any) -> str | None:
    """A string, or the joined strings of content parts; None if empty or of another type."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict)]
        value = "".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) and value else None


def _rate(value: Any) -> float | None:
    if type(value) not in (int, float):
        return None
    try:
        rate = float(value)
    except OverflowError:  # JSON as read here may hold integers of any size, NaN and Infinity
        return None
    return rate if math.isfinite(rate) else None
