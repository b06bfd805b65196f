"""Whatever the server says, the events are a stream that strict clients take."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_worker.responses.api.conversation import unseal
from llama_worker.responses.api.events import ResponseEvents, sse
from llama_worker.responses.api.request import normalise
from llama_worker.responses.upstream_facts import LLAMA_SERVER_SAMPLING, sampling_echo
from llama_worker.stream.events import (
    Done,
    EmptyRecord,
    Finish,
    PromptReport,
    ReasoningDelta,
    ServerError,
    StreamEvent,
    TextDelta,
    TimingsReport,
    ToolCallDelta,
    UsageReport,
)
from tests.responses.oracle import Event, check_events, read_sse
from tests.tables import cases

HEARTBEAT = object()
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
NAMESPACE = {"type": "namespace", "name": "n", "tools": [TOOL]}
GRAMMAR = {"type": "grammar", "grammar": {"definition": "start: /a/"}}
NESTED = {"type": "custom", "custom": {"name": "h", "format": GRAMMAR}}  # as in chat completions
BODIES: list[dict[str, Any]] = [
    {"input": "a", **body}
    for body in (
        {},
        {"tools": [TOOL, {"type": "custom", "name": "g"}, NESTED, NAMESPACE]},
        {"model": "m", "store": False, "metadata": {"a": "b", "c": 1}, "instructions": "i"},
        {
            "user": "u",
            "tools": [TOOL, {"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "f"},
        },
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]},
        },
        {
            "text": {
                "format": {"type": "json_schema", "name": "n", "schema": {}},
                "verbosity": "low",
            }
        },
        {"text": {"format": {"type": "json_object"}}, "temperature": 0, "top_p": 0.5},
        {"reasoning": {"effort": "extreme", "summary": "auto"}, "max_output_tokens": 5},
        {"truncation": "auto"},
    )
]


def new_events(body: dict[str, Any] | None = None, *, seal: bool = False) -> ResponseEvents:
    request = normalise(body or {"input": "a"})
    return ResponseEvents(
        unique="1",
        clock=lambda: 1700000000.5,
        echo={**request.echo, **sampling_echo(request.body, LLAMA_SERVER_SAMPLING)},
        tools=request.tools,
        seal=seal,
    )


def run(
    said: Iterable[StreamEvent | object], body: dict[str, Any] | None = None, *, seal: bool = False
) -> list[Event]:
    """All events, as a client reads them; the stream just ends after the last."""
    events = new_events(body, seal=seal)
    out = events.begin()
    for one in said:
        if one is HEARTBEAT:
            out += events.heartbeat()
        else:
            out += events.feed([one])  # type: ignore[list-item]
    out += events.closed()
    assert events.is_over
    for late in (events.closed(), events.fail("late"), events.heartbeat()):
        assert late == []
    assert events.feed([TextDelta("late")]) == []
    assert out[-1]["response"] == events.response
    return read_sse(sse(out))


def fed(*said: StreamEvent) -> ResponseEvents:
    events = new_events()
    events.begin()
    events.feed(said)
    return events


def response_of(*said: StreamEvent | object, **kwargs: Any) -> Event:
    return check_events(run(said, **kwargs))


def call(
    index: int, arguments: str | None, name: str | None = None, call_id: str | None = None
) -> ToolCallDelta:
    return ToolCallDelta(index=index, call_id=call_id, name=name, arguments=arguments)


def shown(response: Event) -> list[tuple[str, ...]]:
    """The items in short: kind and text, of a call name and arguments."""
    return [
        (item["name"], item["arguments"])
        if "name" in item
        else (item["type"], item["content"][0]["text"])
        for item in response["output"]
    ]


# ---------------------------------------------------------------- any stream

texts = st.sampled_from(
    ["a", "b ", "\n", "<think>", "</think>", "<th", "ink>", "{", "}", "é", "\u2028", "\ud800"]
)
calls = st.builds(
    call,
    st.integers(0, 3),
    st.sampled_from([None, "", "{", "}", '{"a":', "1", '"', "{}", " ", '"\ud800"']),
    st.sampled_from([None, "f", "g"]),
    st.sampled_from([None, "c1", "c2"]),
)
streams = st.lists(
    st.one_of(
        st.builds(TextDelta, texts),
        st.builds(ReasoningDelta, texts),
        calls,
        calls,
        st.builds(UsageReport, st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 9)),
        st.sampled_from([EmptyRecord(), PromptReport(1, 2, 0)]),
        st.sampled_from([Finish(reason) for reason in ("stop", "length", "tool_calls")]),
        st.sampled_from([TimingsReport(1, 2, 3, None), HEARTBEAT]),
    ),
    max_size=30,
)
ENDINGS: list[tuple[StreamEvent, ...]] = [(), (Done(),), (ServerError("broken", 500, None),)]
endings = st.sampled_from([*ENDINGS, (Finish("stop"), Done()), (Finish("length"),)])


@settings(max_examples=150)
@given(streams, endings, st.sampled_from(BODIES), st.booleans())
def test_any_stream_is_valid_with_heartbeats(
    said: list[StreamEvent | object],
    ending: tuple[StreamEvent, ...],
    body: dict[str, Any],
    seal: bool,
) -> None:
    response_of(*said, *ending, body=body, seal=seal)


@settings(max_examples=40)
@given(
    st.lists(
        st.one_of(st.builds(TextDelta, texts.filter(lambda text: "<" not in text)), calls),
        max_size=30,
    )
)
def test_no_text_is_lost_or_made_up(said: list[StreamEvent]) -> None:
    items = shown(response_of(*said, Finish("stop")))
    shown_text = [text for kind, text in items if kind == "message"]
    assert "".join(shown_text) == "".join(one.text for one in said if isinstance(one, TextDelta))


@settings(max_examples=40)
@given(
    st.data(),
    st.lists(st.sampled_from(['{"a": 1}', "{}", '{"text": "{}{}"}']), min_size=1, max_size=4),
)
def test_interleaved_calls_come_out_whole(data: st.DataObject, arguments: list[str]) -> None:
    order = data.draw(
        st.permutations([index for index, text in enumerate(arguments) for _ in text])
    )
    left = [iter(text) for text in arguments]
    heads = {
        index: call(index, next(left[index]), f"f{index}", f"id{index}")
        for index in dict.fromkeys(order)
    }
    said = [
        heads.pop(index) if index in heads else call(index, next(left[index])) for index in order
    ]
    response = response_of(*said, Finish("tool_calls"), Done())
    found = {item["name"]: (item["call_id"], item["arguments"]) for item in response["output"]}
    assert found == {f"f{index}": (f"id{index}", text) for index, text in enumerate(arguments)}


# ---------------------------------------------------------------- what comes out


THOUGHT = ReasoningDelta("hm")
CALLS = [call(0, '{"a"', "f"), call(0, ": 1}"), call(1, "{}", "g")]
LATE_NAME = [call(0, "{", None, "c"), call(0, "}", "f"), call(0, None, "f")]
# of two tools, one's name begins with the other's (b11434)
GROWING = [call(0, "{", "read", "c1"), call(0, None, "read_file", "c1")]
HM = ("reasoning", "hm")


@cases(
    "said, items",
    {
        "tagged reasoning": ([TextDelta("<think>hm</think>\n\nA")], [HM, ("message", "A")]),
        "all kinds, and text after a call": (
            [THOUGHT, TextDelta("I "), TextDelta("add."), *CALLS, TextDelta("Wait")],
            [HM, ("message", "I add."), ("f", '{"a": 1}'), ("g", "{}"), ("message", "Wait")],
        ),
        "no arguments": ([call(0, None, "f", "c1")], [("f", "{}")]),
        "a late name, twice": (LATE_NAME, [("f", "{}")]),
        "a name that grows": ([*GROWING, call(0, '"a": 1}')], [("read_file", '{"a": 1}')]),
        "a name that grows before another call": (
            [*GROWING, call(1, "{}", "f", "c2"), call(0, "}")],
            [("read_file", "{}"), ("f", "{}")],
        ),
        "a name that grows before a text": (
            [*GROWING, TextDelta("Wait"), call(0, "}")],
            [("read_file", "{}"), ("message", "Wait")],
        ),
        "equal ids": (
            [call(0, "{}", "f", "c"), call(1, "{}", "g", "c")],
            [("f", "{}"), ("g", "{}")],
        ),
        "one index for all calls": (
            [call(0, "{}", "f", "c1"), call(0, '{"a":', "f", "c2"), call(0, " 1}")],
            [("f", "{}"), ("f", '{"a": 1}')],
        ),
        "a late id": (
            [call(0, "{}", "f", "c1"), call(0, "", "f", "c2"), call(0, " ", "f", "c2")],
            [("f", "{} ")],
        ),
        "nothing": ([], [("message", "")]),
        "no answer": ([THOUGHT], [HM, ("message", "")]),
    },
)
def test_items_are_what_the_model_meant(
    said: list[StreamEvent], items: list[tuple[str, ...]]
) -> None:
    assert shown(response_of(*said, Finish("stop"), Done())) == items


def test_deltas_and_calls_come_at_once() -> None:
    events = fed()
    for text in ("a", "b"):
        assert [event["delta"] for event in events.feed([TextDelta(text)]) if "delta" in event] == [
            text
        ]
    assert events.feed([call(0, None, "f", "c1"), call(0, "{")]) == []  # the name may grow
    for text, shown_text in (('"a', '{"a'), ('": 1', '": 1'), ("}", "}")):
        new = events.feed([call(0, text)])
        assert [event["delta"] for event in new if "delta" in event] == [shown_text]
    assert [event["type"] for event in events.feed([call(1, "{}", "g", "c2")])] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
    ]


def test_reasoning_is_sealed_where_it_is_to_be() -> None:
    (item,) = response_of(ReasoningDelta("hm"), Finish("length"), seal=True)["output"]
    assert unseal(item["encrypted_content"]) == "hm"
    (item,) = response_of(ReasoningDelta("hm"), Finish("length"))["output"]
    assert "encrypted_content" not in item


@pytest.mark.parametrize(
    ("reason", "status", "detail"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
    ],
)
def test_the_finish_reason_decides_the_terminal_event(
    reason: str, status: str, detail: Any
) -> None:
    response = response_of(TextDelta("a"), Finish(reason), Done())
    assert (response["status"], response["incomplete_details"]) == (status, detail)
    assert response["output"][0]["status"] == status


FAILURE = ServerError("out of memory", 500, "server_error")


@pytest.mark.parametrize(
    ("said", "done", "kept"),
    [
        ([*CALLS[:2], call(1, '{"a": ', "g"), Finish("length")], "function_call", "function_call"),
        ([*CALLS, Finish("length")], "function_call", "function_call"),
        ([THOUGHT, TextDelta("Once"), FAILURE], "reasoning", "message"),
        ([THOUGHT, call(0, "{", "f"), FAILURE], "reasoning", "function_call"),
    ],
    ids=["half a call at the limit", "a call at the limit", "failure", "failure in a call"],
)
def test_a_cut_keeps_whole_items_done_others_incomplete(
    said: list[StreamEvent], done: str, kept: str
) -> None:
    events = fed(*said, Done())
    items = [(item["type"], item["status"]) for item in events.stored["output"]]
    assert items == [(done, "completed"), (kept, "incomplete")]
    assert events.response["output"] == events.stored["output"][:1]


@pytest.mark.parametrize(
    "said",
    [
        None,
        EmptyRecord(),
        TextDelta("a"),
        ReasoningDelta("a"),
        call(0, "{", "f"),
        call(0, '{"a', "f"),
        call(0, "{}", "f"),
        TextDelta("<thi"),
    ],
)
@pytest.mark.parametrize("ending", [None, FAILURE])
def test_what_a_failure_cut_is_never_reported_done(
    said: StreamEvent | None, ending: StreamEvent | None
) -> None:
    events = run([one for one in (said, ending) if one is not None])
    assert check_events(events)["output"] == []
    assert not [event for event in events if event["type"].endswith(".done")]


@pytest.mark.parametrize("before", [(), (Finish("stop"),), (Finish("stop"), UsageReport(1, 1, 0))])
@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("out of memory", "server_error"),
        ("Context size has been exceeded.", "context_length_exceeded"),
    ],
)
def test_an_error_after_a_finish_reason_still_counts(
    before: tuple[StreamEvent, ...], message: str, code: str
) -> None:
    events = run([TextDelta("a"), *before, ServerError(message, 500, "server_error"), Done()])
    assert check_events(events)["error"] == {"code": code, "message": message}
    assert events[-2]["error"]["message"] == events[-2]["message"] == message
    assert events[-2]["code"] == code


CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edit."}
MCP: dict[str, Any] = {"type": "namespace", "name": "mcp__dict", "description": "d"}
MCP["tools"] = [{**TOOL, "name": "lookup"}, CUSTOM]
SEARCH: dict[str, Any] = {"type": "tool_search", "execution": "client", "description": "d"}
SEARCH["parameters"] = TOOL["parameters"]
CALL = {"type": "function_call"}
PATCHED = {"name": "apply_patch", "input": "+a\n"}
SEARCH_CALL = {"type": "tool_search_call", "execution": "client"}
TEXT = '{"input": "+a\\n"}'


@pytest.mark.parametrize(
    ("name", "arguments", "shown_as"),
    [
        ("f", TEXT, {**CALL, "name": "f", "namespace": None, "arguments": TEXT}),
        ("mcp__dict__lookup", TEXT, {**CALL, "name": "lookup", "namespace": "mcp__dict"}),
        ("lookup", TEXT, {**CALL, "name": "lookup", "namespace": None}),
        ("apply_patch", TEXT, {"type": "custom_tool_call", "namespace": None, **PATCHED}),
        ("mcp__dict__apply_patch", TEXT, {"namespace": "mcp__dict", **PATCHED}),
        ("apply_patch", '{"input": ""}', {"input": ""}),
        ("apply_patch", "{}", {"input": "{}"}),
        ("apply_patch", '{"input": 3}', {"input": '{"input": 3}'}),
        ("apply_patch", "", {"input": ""}),
        # strict clients take no half of a pair
        ("apply_patch", '{"input": "\\ud800"}', {"input": "\ufffd"}),
        ("tool_search", '{"a": "b"}', {**SEARCH_CALL, "arguments": {"a": "b"}}),
        ("tool_search", "[", {**SEARCH_CALL, "arguments": {}}),
    ],
)
def test_calls_come_back_in_the_clients_form(
    name: str, arguments: str, shown_as: dict[str, Any]
) -> None:
    said = [
        call(0, arguments[:12], name, "c1"),
        call(0, arguments[12:]),
        Finish("tool_calls"),
        Done(),
    ]
    tools = [TOOL, CUSTOM, MCP, SEARCH]
    (item,) = response_of(*said, body={"input": "a", "tools": tools})["output"]
    assert {key: item.get(key) for key in shown_as} == shown_as


@pytest.mark.parametrize(
    "counts",
    [UsageReport(7, 5, 3), TimingsReport(3, 4, 5, None)],
    ids=["usage", "timings in its place"],
)
@pytest.mark.parametrize("ending", [Finish("stop"), FAILURE])
def test_usage_is_told_also_of_a_failure(counts: StreamEvent, ending: StreamEvent) -> None:
    assert response_of(TextDelta("a"), counts, ending)["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }
