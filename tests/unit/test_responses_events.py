"""Whatever the server says, the events are a stream that strict clients take."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_worker.responses.conversation import unseal_reasoning
from llama_worker.responses.events import ResponseEvents, sse
from llama_worker.responses.request import normalise
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
from tests.responses.oracle import Event, check_events, read_sse

END = object()
NOW = 100.0
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
BODIES: list[dict[str, Any]] = [
    {
        "input": "a",
        "tools": [TOOL, {"type": "custom", "name": "g"}, {"type": "namespace", "name": "n", "tools": [TOOL]}],
    },
    {"input": "a"},
    {"input": "a", "model": "m", "store": False, "metadata": {"a": "b", "c": 1}, "instructions": "i", "user": "u"},
    {"input": "a", "tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "function", "name": "f"}},
    {"input": "a", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}},
    {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"}},
    {"input": "a", "text": {"format": {"type": "json_object"}}, "temperature": 0, "top_p": 0.5},
    {"input": "a", "reasoning": {"effort": "extreme", "summary": "auto"}, "max_output_tokens": 5, "truncation": "auto"},
]


def new_events(body: dict[str, Any] | None = None, *, seal: bool = False) -> ResponseEvents:
    numbers = itertools.count()
    request = normalise(body or {"input": "a"})
    return ResponseEvents(
        response_id="resp_1",
        created_at=1700000000,
        echo=request.echo,
        tools=request.tools,
        new_id=lambda prefix: f"{prefix}_{next(numbers)}",
        seal=seal,
    )


def run(said: Iterable[StreamEvent | object], body: dict[str, Any] | None = None, *, seal: bool = False) -> list[Event]:
    """All events, as a client reads them; the stream just ends after the last, or at END."""
    events = new_events(body, seal=seal)
    out = events.begin()
    for one in said:
        out += events.closed() if one is END else events.feed(one, NOW)  # type: ignore[arg-type]
    out += events.closed()
    assert events.over
    assert events.closed() == events.fail("late") == events.feed(TextDelta("late"), NOW) == events.heartbeat() == []
    assert out[-1]["response"] == events.response
    return read_sse(sse(out))


def response_of(*said: StreamEvent | object, **kwargs: Any) -> Event:
    return check_events(run(said, **kwargs))


def call(index: int, arguments: str | None, name: str | None = None, call_id: str | None = None) -> ToolCallDelta:
    return ToolCallDelta(index=index, call_id=call_id, name=name, arguments=arguments)


def shown(response: Event) -> list[tuple[str, ...]]:
    """The items in short."""
    found: list[tuple[str, ...]] = []
    for item in response["output"]:
        match item["type"]:
            case "message":
                found.append(("text", item["content"][0]["text"]))
            case "reasoning":
                found.append(("reasoning", item["content"][0]["text"]))
            case _:
                found.append(("call", item["name"], item["arguments"]))
    return found


# ---------------------------------------------------------------- any stream

texts = st.sampled_from(["a", "b ", "\n", "<think>", "</think>", "<th", "ink>", "{", "}", "é", "\u2028", "\ud800"])
calls = st.builds(
    call,
    st.integers(0, 3),
    st.sampled_from([None, "", "{", "}", '{"a":', "1", '"', "{}", " "]),
    st.sampled_from([None, "f", "g"]),
    st.sampled_from([None, "c1", "c2"]),
)
streams = st.lists(
    st.one_of(
        st.builds(TextDelta, texts),
        st.builds(ReasoningDelta, texts),
        calls,
        calls,
        st.builds(Usage, st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 9)),
        st.just(Timings(1, 2, 3, None)),
        st.sampled_from([RoleOnly(), PromptProgress(1, 2, 0), Finish("stop"), Finish("length"), Finish("tool_calls")]),
    ),
    max_size=30,
)
endings = st.sampled_from(
    [(), (Done(),), (ServerError("broken", 500, None),), (Finish("stop"), Done()), (Finish("length"),)]
)


@settings(max_examples=150)
@given(streams, endings, st.sampled_from(BODIES), st.booleans())
def test_any_stream_of_events_is_valid(
    said: list[StreamEvent], ending: tuple[StreamEvent, ...], body: dict[str, Any], seal: bool
) -> None:
    response_of(*said, *ending, body=body, seal=seal)


@settings(max_examples=80)
@given(st.lists(st.one_of(st.builds(TextDelta, texts), calls), max_size=30))
def test_no_text_is_lost_or_made_up(said: list[StreamEvent]) -> None:
    plain = [TextDelta(one.text.replace("<", "(")) if isinstance(one, TextDelta) else one for one in said]
    response = response_of(*plain, Finish("stop"))
    texts = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
    assert "".join(texts) == "".join(one.text for one in plain if isinstance(one, TextDelta))


@settings(max_examples=80)
@given(st.data(), st.lists(st.sampled_from(['{"a": 1}', "{}", '{"text": "{}{}"}']), min_size=1, max_size=4))
def test_interleaved_calls_come_out_whole(data: st.DataObject, arguments: list[str]) -> None:
    left = {index: [text[:1], *text[1:]] for index, text in enumerate(arguments)}
    said: list[StreamEvent] = []
    while left:
        index = data.draw(st.sampled_from(sorted(left)))
        piece = left[index].pop(0)
        begins = len(left[index]) == len(arguments[index]) - 1
        said.append(call(index, piece, f"f{index}" if begins else None, f"id{index}" if begins else None))
        if not left[index]:
            del left[index]
    response = response_of(*said, Finish("tool_calls"), Done())
    found = {item["name"]: (item["call_id"], item["arguments"]) for item in response["output"]}
    assert found == {f"f{index}": (f"id{index}", text) for index, text in enumerate(arguments)}


# ---------------------------------------------------------------- what comes out


def test_reasoning_text_and_calls_are_items_in_order() -> None:
    response = response_of(
        RoleOnly(),
        ReasoningDelta("hm"),
        TextDelta("I "),
        TextDelta("add."),
        call(0, '{"a"', "add", "c1"),
        call(0, ": 1}"),
        call(1, "{}", "sub", "c2"),
        Finish("tool_calls"),
        Usage(7, 5, 3),
        Done(),
    )
    assert shown(response) == [
        ("reasoning", "hm"),
        ("text", "I add."),
        ("call", "add", '{"a": 1}'),
        ("call", "sub", "{}"),
    ]
    assert response["status"] == "completed"
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }


def test_deltas_are_passed_on_as_they_come() -> None:
    events = new_events()
    events.begin()
    for text in ("a", "b"):
        assert [event["delta"] for event in events.feed(TextDelta(text), NOW) if "delta" in event] == [text]
    events.feed(call(0, None, "f", "c"), NOW)
    for text in ("{", '"a": 1'):
        assert [event["delta"] for event in events.feed(call(0, text), NOW)] == [text]


def test_the_second_call_begins_when_it_comes() -> None:
    events = new_events()
    events.begin()
    events.feed(call(0, "{}", "f", "c1"), NOW)
    kinds = [event["type"] for event in events.feed(call(1, "{", "g", "c2"), NOW)]
    assert kinds == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
    ]


def test_tagged_reasoning_is_reasoning() -> None:
    assert shown(response_of(TextDelta("<think>hm</think>\n\nYes"), Finish("stop"))) == [
        ("reasoning", "hm"),
        ("text", "Yes"),
    ]


def test_reasoning_is_sealed_where_it_is_to_be() -> None:
    (item,) = response_of(ReasoningDelta("hm"), Finish("length"), seal=True)["output"]
    assert unseal_reasoning(item["encrypted_content"]) == "hm"
    (item,) = response_of(ReasoningDelta("hm"), Finish("length"))["output"]
    assert item["encrypted_content"] is None


@pytest.mark.parametrize(
    ("reason", "status", "detail"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
    ],
)
def test_the_finish_reason_decides_the_terminal_event(reason: str, status: str, detail: Any) -> None:
    response = response_of(TextDelta("a"), Finish(reason), Done())
    assert (response["status"], response["incomplete_details"]) == (status, detail)
    assert response["output"][0]["status"] == status


@pytest.mark.parametrize("arguments", ['{"a": ', "{}"])
def test_a_call_that_the_limit_cut_is_never_reported_done(arguments: str) -> None:
    events = new_events()
    events.begin()
    for one in (call(0, "{}", "f", "c1"), call(1, arguments, "g", "c2"), Finish("length"), Done()):
        events.feed(one, NOW)
    assert [(item["name"], item["status"]) for item in events.response["output"]] == [("f", "completed")]
    assert [(item["name"], item["status"]) for item in events.stored["output"]] == [
        ("f", "completed"),
        ("g", "incomplete"),
    ]


HALVES = [(), (RoleOnly(),), (TextDelta("a"),), (ReasoningDelta("a"),), (call(0, '{"a', "f"),), (TextDelta("<thi"),)]


@pytest.mark.parametrize("said", [*HALVES, (call(0, "{}", "f", "c"),)])
@pytest.mark.parametrize("ending", [END, ServerError("out of memory", 500, "server_error")])
def test_what_a_failure_cut_is_never_reported_done(said: tuple[StreamEvent, ...], ending: Any) -> None:
    events = run([*said, ending])
    assert check_events(events)["output"] == []
    assert not [event for event in events if event["type"].endswith(".done")]


def test_what_was_whole_before_a_failure_is_done_and_the_half_is_kept_for_reference() -> None:
    events = new_events()
    events.begin()
    for one in (ReasoningDelta("hm"), TextDelta("Once"), ServerError("out of memory", 500, None)):
        events.feed(one, NOW)
    assert [(item["type"], item["status"]) for item in events.response["output"]] == [("reasoning", "completed")]
    assert [(item["type"], item["status"]) for item in events.stored["output"]] == [
        ("reasoning", "completed"),
        ("message", "incomplete"),
    ]


@pytest.mark.parametrize("before", [(), (Finish("stop"),), (Finish("stop"), Usage(1, 1, 0))])
def test_an_error_record_is_a_failure_also_after_a_finish_reason(before: tuple[StreamEvent, ...]) -> None:
    events = run([TextDelta("a"), *before, ServerError("out of memory", 500, "server_error"), Done()])
    response = check_events(events)
    assert response["error"] == {"code": "server_error", "message": "out of memory"}
    assert events[-2]["error"]["message"] == events[-2]["message"] == "out of memory"


@pytest.mark.parametrize(("now", "over"), [(NOW + 1.99, False), (NOW + 2.0, True)])
def test_what_may_follow_a_finish_reason_is_waited_for_two_seconds(now: float, over: bool) -> None:
    events = new_events()
    events.begin()
    assert events.deadline is None
    events.feed(TextDelta("a"), NOW)
    events.feed(Finish("stop"), NOW)
    assert events.deadline == NOW + 2.0
    kinds = [event["type"] for event in events.tick(now)]
    assert kinds[-1:] == (["response.completed"] if over else [])
    assert events.over is over


@given(st.data(), streams, endings)
def test_a_heartbeat_may_come_at_any_time(
    data: st.DataObject, said: list[StreamEvent], ending: tuple[StreamEvent, ...]
) -> None:
    events = new_events()
    out = events.begin()
    for one in (*said, *ending):
        out += events.feed(one, NOW)
        if data.draw(st.booleans()):
            out += events.heartbeat()
    out += events.closed()
    check_events(read_sse(sse(out)))


CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edit."}
MCP = {"type": "namespace", "name": "mcp__dict", "description": "d", "tools": [{**TOOL, "name": "lookup"}, CUSTOM]}


@pytest.mark.parametrize(
    ("name", "shown_as"),
    [
        ("f", ("function_call", "f", None)),
        ("mcp__dict__lookup", ("function_call", "lookup", "mcp__dict")),
        ("lookup", ("function_call", "lookup", None)),
        ("apply_patch", ("custom_tool_call", "apply_patch", None)),
        ("mcp__dict__apply_patch", ("custom_tool_call", "apply_patch", "mcp__dict")),
    ],
)
def test_calls_come_back_as_the_client_knows_the_tool(name: str, shown_as: tuple[str, str, str | None]) -> None:
    said = [call(0, '{"input": "+', name, "c1"), call(0, 'a\\n"}'), Finish("tool_calls"), Done()]
    (item,) = response_of(*said, body={"input": "a", "tools": [TOOL, CUSTOM, MCP]})["output"]
    assert (item["type"], item["name"], item.get("namespace")) == shown_as
    if item["type"] == "custom_tool_call":
        assert item["input"] == "+a\n"
    else:
        assert json.loads(item["arguments"]) == {"input": "+a\n"}


SEARCH = {"type": "tool_search", "execution": "client", "description": "d", "parameters": TOOL["parameters"]}


@pytest.mark.parametrize(("arguments", "given"), [('{"query": "words"}', {"query": "words"}), ("[", {})])
def test_a_search_for_tools_comes_back_as_one(arguments: str, given: Any) -> None:
    said = [call(0, arguments, "tool_search", "c1"), Finish("tool_calls"), Done()]
    (item,) = response_of(*said, body={"input": "a", "tools": [SEARCH]})["output"]
    assert (item["type"], item["execution"], item["arguments"]) == ("tool_search_call", "client", given)


@pytest.mark.parametrize(
    ("arguments", "text"), [('{"input": ""}', ""), ("{}", "{}"), ('{"input": 3}', '{"input": 3}'), ("", "{}")]
)
def test_arguments_that_are_no_free_text_reach_the_custom_tool_as_they_are(arguments: str, text: str) -> None:
    said = [call(0, arguments, "apply_patch", "c1"), Finish("tool_calls")]
    (item,) = response_of(*said, body={"input": "a", "tools": [CUSTOM]})["output"]
    assert item["input"] in (text, arguments)


def test_a_full_context_in_mid_stream_has_its_code() -> None:
    events = run([TextDelta("a"), ServerError("Context size has been exceeded.", 500, "server_error")])
    assert events[-2]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("said", [(), (ReasoningDelta("hm"),)])
def test_a_completed_response_always_has_an_answer(said: tuple[StreamEvent, ...]) -> None:
    response = response_of(*said, Finish("stop"), Done())
    assert shown(response)[-1] == ("text", "")


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert shown(response_of(call(0, None, "f", "c1"), Finish("tool_calls"))) == [("call", "f", "{}")]


def test_equal_call_ids_are_told_apart() -> None:
    response = response_of(call(0, "{}", "f", "c"), call(1, "{}", "f", "c"), Finish("tool_calls"))
    assert response["output"][0]["call_id"] == "c"  # the oracle sees that the other differs


def test_a_name_that_comes_late_or_again_is_one_call() -> None:
    response = response_of(call(0, "{", None, "c"), call(0, "}", "f"), call(0, None, "f"), Finish("tool_calls"))
    assert shown(response) == [("call", "f", "{}")]


def test_text_after_a_call_is_a_message_of_its_own() -> None:
    response = response_of(TextDelta("a"), call(0, "{}", "f", "c"), TextDelta("b"), Finish("stop"))
    assert shown(response) == [("text", "a"), ("call", "f", "{}"), ("text", "b")]


def test_usage_is_taken_from_the_timings_where_there_is_none() -> None:
    usage = response_of(TextDelta("a"), Timings(3, 4, 5, None), ServerError("x", None, None))["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (7, 5)
    assert usage["input_tokens_details"]["cached_tokens"] == 3


def test_a_stream_of_events_has_no_end_mark() -> None:
    data = sse(new_events().begin())
    assert b"[DONE]" not in data
    assert [event["type"] for event in read_sse(data)] == ["response.created", "response.in_progress"]
