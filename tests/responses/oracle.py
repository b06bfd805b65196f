"""What every stream of Responses events must keep, whatever came from the server."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

Event = dict[str, Any]

TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_RESPONSE = TypeAdapter(Response)


def read_sse(data: bytes) -> list[Event]:
    """The events of a whole stream; comments aside. Each names its type twice, the same."""
    events = []
    for record in data.decode().split("\n\n"):
        lines = [line for line in record.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        (name, text) = lines
        event = json.loads(text.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def check_events(events: list[Event]) -> Event:
    """AssertionError where a stream is not as it must be; the final response."""
    for event in events:
        assert _EVENTS.validate_python(event).type == event["type"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    kinds = [event["type"] for event in events]
    assert sum(kind in TERMINAL for kind in kinds) == 1
    assert kinds[-1] in TERMINAL
    assert ("error" in kinds) == (kinds[-1] == "response.failed")
    if "error" in kinds:
        assert kinds.index("error") == len(kinds) - 2
        _check_error(events[-2])
    beats = [event for event in events[2:-1] if event["type"] == "response.in_progress"]
    items = [event for event in events[2:-1] if event["type"] not in ("error", "response.in_progress")]
    done = _check_items(items, ending=kinds[-1])
    assert all(beat["response"]["output"] == done[: len(beat["response"]["output"])] for beat in beats)
    response: Event = events[-1]["response"]
    check_response(response)
    assert response["output"] == done
    assert response["status"] == kinds[-1].removeprefix("response.")
    assert {event["response"]["id"] for event in (*events[:2], *beats, events[-1])} == {response["id"]}
    assert all(event["response"]["output"] == [] for event in events[:2])
    return response


def check_response(response: Event) -> None:
    """A response in itself."""
    _RESPONSE.validate_python(response)
    assert (response["error"] is not None) == (response["status"] == "failed")
    assert (response["incomplete_details"] is not None) == (response["status"] == "incomplete")
    ids = [item["id"] for item in response["output"]]
    calls = [item["call_id"] for item in response["output"] if item["type"] in _CALLS]
    assert len(set(ids)) == len(ids)
    assert len(set(calls)) == len(calls)
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def _check_error(event: Event) -> None:
    assert event["message"] == event["error"]["message"]
    assert event["code"] == event["error"]["code"]


Parts = dict[tuple[str, int, str], str]  # by kind, index and "open" or "text done": what the deltas add up to


def _check_items(events: list[Event], *, ending: str) -> list[Event]:
    """One item is open at a time, its parts are opened and closed inside it, deltas add up.

    Where the stream failed, the last item stays open; so does a call that the token limit cut.
    """
    done: list[Event] = []
    item: Event | None = None
    parts: Parts = {}
    for event in events:
        kind = event["type"]
        assert event["output_index"] == len(done), event
        if kind == "response.output_item.added":
            assert item is None
            item = event["item"]
            assert item["status"] == "in_progress"
            if item["type"] in _GIVEN:
                assert item[_GIVEN[item["type"]]] == ""
                parts[_GIVEN[item["type"]], 0, "open"] = ""
            continue
        assert item is not None
        if kind == "response.output_item.done":
            assert not parts, parts
            _check_done(item, event["item"])
            done.append(event["item"])
            item = None
            continue
        assert event["item_id"] == item["id"]
        _check_part(event, parts)
    cut = item is not None and item["type"] in _CALLS and ending == "response.incomplete"
    assert item is None or ending == "response.failed" or cut
    return done


_CALLS = ("function_call", "custom_tool_call", "tool_search_call")
_GIVEN = {"function_call": "arguments", "custom_tool_call": "input"}
_PARTS = {
    "response.custom_tool_call_input": ("input", "input"),
    "response.output_text": ("output_text", "text"),
    "response.reasoning_text": ("reasoning_text", "text"),
    "response.reasoning_summary_text": ("summary_text", "text"),
    "response.function_call_arguments": ("arguments", "arguments"),
}


def _check_part(event: Event, parts: Parts) -> None:
    head, _, phase = event["type"].rpartition(".")
    index: int = event["content_index"] if "content_index" in event else event.get("summary_index") or 0
    if phase == "added":
        key = (event["part"]["type"], index, "open")
        assert key not in parts
        assert event["part"]["text"] == ""
        parts[key] = ""
    elif head in ("response.content_part", "response.reasoning_summary_part"):
        assert parts.pop((event["part"]["type"], index, "text done")) == event["part"]["text"]
    else:
        name, field = _PARTS[head]
        if phase == "delta":
            assert event["delta"]
            parts[name, index, "open"] += event["delta"]
        else:
            assert phase == "done"
            text = parts.pop((name, index, "open"))
            assert event[field] == text
            if name not in _GIVEN.values():
                parts[name, index, "text done"] = text


def _check_done(added: Event, done: Event) -> None:
    assert (done["id"], done["type"]) == (added["id"], added["type"])
    assert done["status"] in ("completed", "incomplete")
    if done["type"] == "reasoning":
        assert done["summary"][0]["text"] == done["content"][0]["text"]
