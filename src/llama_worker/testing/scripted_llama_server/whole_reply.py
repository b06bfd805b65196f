"""The reply to a request that wants no stream, made of the records of the stream."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .wire import Json


def whole_reply(stream: bytearray) -> tuple[int, Json]:
    """Status and body as llama-server (b11434) sends them: a `chat.completion`, or the error that
    the stream ends with.

    Raises ValueError where the stream ends with neither a finish reason nor an error, or holds what
    is no record.
    """
    message: Json = {"role": "assistant", "content": ""}
    calls: dict[int, Json] = {}
    body: Json = {}
    finish_reason = None
    for record in _records(stream):
        if "error" in record:
            return record["error"]["code"], record
        body |= record
        for choice in record["choices"]:
            finish_reason = choice["finish_reason"] or finish_reason
            _add(choice["delta"], message, calls)
    if finish_reason is None:
        raise ValueError("a reply in one piece needs a Finish, or an error")
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    body["choices"] = [{"finish_reason": finish_reason, "index": 0, "message": message}]
    body["object"] = "chat.completion"
    body.pop("prompt_progress", None)
    return 200, body


def _records(stream: bytearray) -> Iterator[Json]:
    """Chunks and errors, without comments and `[DONE]`."""
    for block in stream.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n\n"):
        field, _, value = block.partition(":")
        if not field or value.strip() == "[DONE]":
            continue
        if field not in ("data", "error"):
            raise ValueError(f"no record of a reply in one piece: {block!r}")
        record = json.loads(value)
        yield {"error": record} if field == "error" else record


def _add(delta: Json, message: Json, calls: dict[int, Json]) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for piece in delta.get("tool_calls", ()):
        index, function = piece["index"], piece["function"]
        if index in calls:
            calls[index]["function"]["arguments"] += function["arguments"]
        else:
            call = {key: value for key, value in piece.items() if key != "index"}
            calls[index] = call | {"function": dict(function)}
