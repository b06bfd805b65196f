"""What every stream of Responses events must keep, whatever came from the server."""

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from llama_worker.responses.errors import CONTEXT_EXCEEDED
from tests.responses.open_responses import check_event, check_reply

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
        assert _EVENTS.validate_python(_as_modelled(event)).type == event["type"]
        check_event(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    kinds = [event["type"] for event in events]
    assert sum(kind in TERMINAL for kind in kinds) == 1
    assert kinds[-1] in TERMINAL
    assert ("error" in kinds) == (kinds[-1] == "response.failed")
    if "error" in kinds:
        assert kinds.index("error") == len(kinds) - 2
        assert (
            events[-2].items()
            >= {name: events[-2]["error"][name] for name in ("message", "code")}.items()
        )
    beats = [event for event in events[2:-1] if event["type"] == "response.in_progress"]
    items = [
        event for event in events[2:-1] if event["type"] not in ("error", "response.in_progress")
    ]
    done = _check_items(items, ending=kinds[-1])
    assert all(
        beat["response"]["output"] == done[: len(beat["response"]["output"])] for beat in beats
    )
    response: Event = events[-1]["response"]
    check_response(response)
    assert response["output"] == done
    assert response["status"] == kinds[-1].removeprefix("response.")
    assert {event["response"]["id"] for event in (*events[:2], *beats, events[-1])} == {
        response["id"]
    }
    assert all(event["response"]["output"] == [] for event in events[:2])
    return response


def _as_modelled(event: Event) -> Event:
    """With a code that the models know in place of that of a full context, which OpenAI's API
    sends, and Codex looks for."""
    error = event.get("response", {}).get("error")
    if not error or error["code"] != CONTEXT_EXCEEDED:
        return event
    error = {**error, "code": "server_error"}
    return {**event, "response": {**event["response"], "error": error}}


def check_response(response: Event) -> None:
    """A response in itself."""
    _RESPONSE.validate_python(_as_modelled({"response": response})["response"])
    check_reply(200, response)
    assert (response["completed_at"] is not None) == (response["status"] == "completed")
    assert (response["error"] is not None) == (response["status"] == "failed")
    assert (response["incomplete_details"] is not None) == (response["status"] == "incomplete")
    ids = [item["id"] for item in response["output"]]
    calls = [item["call_id"] for item in response["output"] if item["type"] in _CALLS]
    assert len(set(ids)) == len(ids)
    assert len(set(calls)) == len(calls)
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


_CALLS = ("function_call", "custom_tool_call", "tool_search_call")
_PARTS = {
    "response.content_part": "content",
    "response.reasoning_summary_part": "summary",
}  # where an item has them
# by their events: where an item has the parts that they belong to, and which field or kind of part
# it is
_TEXTS = {
    "response.function_call_arguments": ("", "arguments"),
    "response.custom_tool_call_input": ("", "input"),
    "response.output_text": ("content", "output_text"),
    "response.reasoning_text": ("content", "reasoning_text"),
    "response.reasoning_summary_text": ("summary", "summary_text"),
}
_LATE = {
    "reasoning": ("status", "encrypted_content"),
    "tool_search_call": ("status", "arguments"),
}  # else the status


def _check_items(events: list[Event], *, ending: str) -> list[Event]:
    """Who builds the items of their events gets what `done` says; one is open at a time, its parts
    inside it.

    Where the stream failed, the last item stays open; so does a call that the token limit cut.
    """
    done: list[Event] = []
    item: Event | None = None
    open_texts: dict[str, str] = {}  # by their place: what is to be done next, the text or its part
    for event in events:
        assert event["output_index"] == len(done), event
        match event["type"]:
            case "response.output_item.added":
                assert item is None
                item = event["item"]
                assert item["status"] == "in_progress"
                open_texts = {
                    field: "text" for field in ("arguments", "input") if item.get(field) == ""
                }
            case "response.output_item.done":
                assert item is not None
                assert not open_texts, open_texts
                late = {
                    field: event["item"][field]
                    for field in _LATE.get(item["type"], ("status",))
                    if field in event["item"]
                }
                assert event["item"] == {**item, **late}
                assert event["item"]["status"] in ("completed", "incomplete")
                done.append(event["item"])
                item = None
            case _:
                assert item is not None
                assert event["item_id"] == item["id"]
                _build(item, event, open_texts)
    cut = item is not None and item["type"] in _CALLS and ending == "response.incomplete"
    assert item is None or ending == "response.failed" or cut
    return done


def _build(item: Event, event: Event, open_texts: dict[str, str]) -> None:
    head, _, phase = event["type"].rpartition(".")
    index = event.get("content_index", event.get("summary_index", 0))
    if place := _PARTS.get(head):
        if phase == "added":
            assert (index, event["part"]["text"]) == (len(item[place]), "")
            item[place].append(event["part"])
            open_texts[place] = "text"
        else:
            assert (open_texts.pop(place), event["part"]) == ("part", item[place][index])
        return
    place, kind = _TEXTS[head]
    owner, field = (item[place][index], "text") if place else (item, kind)
    assert open_texts[place or kind] == "text"
    assert not place or owner["type"] == kind
    if phase == "delta":
        assert event["delta"]
        owner[field] += event["delta"]
        return
    assert event[field] == owner[field]
    del open_texts[place or kind]
    if place:
        open_texts[place] = "part"
