"""Chunks of a chat completion, of new and old builds and odd ones, to events."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llama_worker.stream.decoder import ProtocolError, StreamDecoder, decode_record
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
    UnknownContent,
    UsageReport,
)
from llama_worker.stream.sse import ErrorField
from llama_worker.types.request import ContextUse


def decode(value: Any, *, is_error: bool = False) -> list[StreamEvent]:
    text = json.dumps(value)
    return list(decode_record(ErrorField(text) if is_error else text))


def chunk(delta: Any, finish: Any = None, **beside: Any) -> dict[str, Any]:
    """As b11434 sends it."""
    return {
        "choices": [{"finish_reason": finish, "index": 0, "delta": delta}],
        "created": 1790000000,
        "id": "chatcmpl-1",
        "model": "m",
        "system_fingerprint": "b11434",
        "object": "chat.completion.chunk",
        **beside,
    }


def call(**fields: Any) -> dict[str, Any]:
    return chunk({"tool_calls": [fields]})


def usage(**fields: Any) -> dict[str, Any]:
    return {"usage": fields}


TIMINGS = {"cache_n": 3, "prompt_n": 1, "prompt_ms": 4.5}
TIMINGS |= {"predicted_n": 8, "predicted_per_second": 40}
PROGRESS = {"total": 9, "cache": 2, "processed": 5, "time_ms": 7}
CONTEXT: ContextUse = {"n_prompt_tokens": 5000, "n_ctx": 4096}
NO_TIMINGS = TimingsReport(cache_n=None, prompt_n=None, predicted_n=None, predicted_per_second=None)
TOOL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": "{"}}
MESSAGE = {"content": None, "tool_calls": [TOOL]}
EMPTY, DECODED = {"name": "", "arguments": ""}, {"name": "f", "arguments": {"é": [1]}}
CACHED = {"cached_tokens": 2}
SAYS_NOTHING = [
    *(
        chunk(delta)
        for delta in ({"content": ""}, {"content": 3}, {"reasoning": "", "refusal": None})
    ),
    chunk({}, ""),
    chunk({}, 7),
    chunk({}, error=False),
    chunk({}, message="hello"),
    {"id": 1},
    {"id": "7", "created": 9, "model": "m", "choices": []},
]


@pytest.mark.parametrize(
    ("value", "events"),
    [
        (chunk({"content": " word"}), [TextDelta(" word")]),
        *((nothing, [EmptyRecord()]) for nothing in SAYS_NOTHING),
        (
            chunk({"content": [{"type": "text", "text": "a"}, {"text": "b"}, {"image": 1}, 5]}),
            [TextDelta("ab")],
        ),
        (chunk({"reasoning_content": "hm"}), [ReasoningDelta("hm")]),
        (chunk({"role": "assistant", "content": None}), [EmptyRecord()]),
        (chunk({"role": "assistant", "content": "x"}), [TextDelta("x")]),
        (chunk(None, "stop"), [Finish("stop")]),
        (chunk({"content": "x"}, "length"), [TextDelta("x"), Finish("length")]),
        ({"choices": [{"finish_reason": "stop"}]}, [Finish("stop")]),
        ({"choices": ["x", None, 5, [], [1]]}, [EmptyRecord()]),
        (
            {"choices": [{"index": 1, "delta": {"content": "x"}}, {"delta": {"content": "y"}}]},
            [TextDelta("y")],
        ),
        (chunk({"content": "x", "reasoning": "word 7"}), [TextDelta("x")]),
        # tool calls
        (chunk({"tool_calls": [TOOL]}), [ToolCallDelta(0, "c1", "add", "{")]),
        (call(index=2, function={"arguments": "1}"}), [ToolCallDelta(2, None, None, "1}")]),
        (
            call(index=0, function={"id": "c1", "name": "add"}),
            [ToolCallDelta(0, "c1", "add", None)],
        ),
        (call(index=0, id="", function=EMPTY), [ToolCallDelta(0, None, None, "")]),
        (call(function=DECODED), [ToolCallDelta(0, None, "f", '{"é": [1]}')]),
        (call(index="0", id=5, function=None), [ToolCallDelta(0, None, None, None)]),
        (
            chunk({"tool_calls": [{"function": {"name": "f"}}, "x", {"function": {"name": "g"}}]}),
            [ToolCallDelta(0, None, "f", None), ToolCallDelta(2, None, "g", None)],
        ),
        (
            {"choices": [{"message": MESSAGE, "finish_reason": "tool_calls"}]},
            [ToolCallDelta(0, "c1", "add", "{"), Finish("tool_calls")],
        ),
        ({"choices": [{"delta": {}, "message": MESSAGE}]}, [ToolCallDelta(0, "c1", "add", "{")]),
        # progress, usage and timings
        (
            chunk({"role": "assistant"}, prompt_progress=PROGRESS),
            [PromptReport(processed=5, total=9, cached=2)],
        ),
        ({"prompt_progress": {"total": 9, "processed": 5}}, [PromptReport(5, 9, 0)]),
        ({"prompt_progress": {"total": None, "processed": 5}}, [EmptyRecord()]),
        ({"prompt_progress": {"total": 9, "processed": None}}, [EmptyRecord()]),
        ({"choices": [], **usage(prompt_tokens=4, completion_tokens=2)}, [UsageReport(4, 2, None)]),
        (
            {**usage(prompt_tokens=4, prompt_tokens_details=CACHED), "timings": {"cache_n": 3}},
            [UsageReport(4, 0, 2), TimingsReport(3, None, None, None)],
        ),
        (
            {**usage(prompt_tokens=4), "timings": TIMINGS},
            [UsageReport(4, 0, 3), TimingsReport(3, 1, 8, 40.0, 4.5)],
        ),
        (usage(prompt_tokens_details=None, completion_tokens=True), [UsageReport(0, 0, None)]),
        (
            {"usage": {"prompt_tokens": 1 << 63, "completion_tokens": (1 << 63) - 1}},
            [UsageReport(0, (1 << 63) - 1, None)],
        ),
        ({"timings": {}}, [NO_TIMINGS]),
        ({"timings": TIMINGS}, [TimingsReport(3, 1, 8, 40.0, 4.5)]),
        ({"timings": {"predicted_n": float("inf"), "cache_n": 1.5}}, [NO_TIMINGS]),
        ({"timings": {"predicted_per_second": 10**400, "prompt_n": -1}}, [NO_TIMINGS]),
        ({"timings": {"predicted_per_second": float("nan"), "prompt_ms": True}}, [NO_TIMINGS]),
        ({"timings": {"predicted_per_second": "40", "prompt_ms": float("inf")}}, [NO_TIMINGS]),
    ],
)
def test_a_chunk_becomes_events(value: Any, events: list[StreamEvent]) -> None:
    assert decode(value) == events


def test_events_of_one_chunk_come_in_order() -> None:
    delta = {"tool_calls": [TOOL], "content": "x", "reasoning_content": "hm"}
    beside = {"timings": TIMINGS, "usage": {"prompt_tokens": 1}, "prompt_progress": PROGRESS}
    full = chunk(delta, "stop", error="bad", **beside)
    kinds = (
        *(PromptReport, ReasoningDelta, TextDelta, ToolCallDelta),
        *(Finish, UsageReport, TimingsReport, ServerError),
    )
    assert tuple(type(event) for event in decode(full)) == kinds


@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize(
    ("value", "event"),
    [
        (
            {"error": {"code": 500, "message": "bad", "type": "server"}},
            ServerError("bad", 500, "server"),
        ),
        ({"code": 400, "message": "bad", "type": "invalid"}, ServerError("bad", 400, "invalid")),
        ({"object": "error", "message": "bad"}, ServerError("bad", None, None)),
        ({"error": "bad"}, ServerError("bad", None, None)),
        ({"error": {"message": "bad", "code": "503", "type": 3}}, ServerError("bad", 503, None)),
        ({"error": {"code": 500}}, ServerError('{"code": 500}', 500, None)),
        ({"error": {"é": 1, "code": "x"}}, ServerError('{"é": 1, "code": "x"}', None, None)),
        ({"error": {"message": "bad", "code": "9" * 5000}}, ServerError("bad", None, None)),
        ({"error": ["bad"]}, ServerError('["bad"]', None, None)),
        ({"error": {"message": "bad", **CONTEXT}}, ServerError("bad", None, None, CONTEXT)),
    ],
)
def test_an_error_is_recognised_wrapped_or_not(
    value: Any, event: ServerError, is_error: bool
) -> None:
    assert decode(value, is_error=is_error) == [event]


@pytest.mark.parametrize(
    "text", ["x", "{half", '{"a": 1}}', "null", "[]", "[DONE", "[" * 100_000, "9" * 5000, " "]
)
def test_what_is_no_json_object_is_an_error(text: str) -> None:
    assert decode_record(ErrorField(text)) == (ServerError(text, None, None),)
    with pytest.raises(ProtocolError) as raised:
        decode_record(text)
    assert repr(text[:50])[:-1] in str(raised.value)
    assert len(str(raised.value)) < 140


def test_unknown_content_is_told_apart() -> None:
    def fingerprint(value: Any) -> int:
        told = [event for event in decode(value) if isinstance(event, UnknownContent)]
        return told[0].fingerprint

    seven = fingerprint(chunk({"reasoning": "word 7"}))
    clocks = {"id": "b", "created": 9, "timings": TIMINGS, "usage": {"completion_tokens": 8}}
    assert fingerprint(chunk({"reasoning": "word 7"}, **clocks)) == seven
    assert fingerprint(chunk({"reasoning": "word 8"})) != seven
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert fingerprint(chunk({}, thought=one)) == fingerprint(chunk({}, thought=other))
    assert fingerprint(chunk({}, thought="word 7")) != fingerprint(chunk({}, thought="word 8"))


NAMES = (
    "choices delta message content reasoning_content role tool_calls function arguments id index "
    "name text finish_reason usage prompt_tokens_details timings prompt_progress total processed "
    "error"
)
JSON = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -3, 2.5, float("inf"), "", "x", "7"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES.split()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(["choices", "usage", "timings", "prompt_progress", "error"]), JSON
    ),
    JSON,
    JSON,
)
def test_nothing_is_too_odd_to_decode(value: dict[str, Any], delta: Any, finish: Any) -> None:
    decode(value)
    decode(chunk(delta, finish))
    decode({"choices": [{"message": delta, "finish_reason": finish}]})


def records(*values: Any) -> bytes:
    return "".join(f"data: {json.dumps(value)}\n\n" for value in values).encode()


def final(**message: Any) -> bytes:
    return records({"choices": [{"message": message, "finish_reason": "stop"}]})


def test_a_final_message_repeats_nothing() -> None:
    call, other_call = ToolCallDelta(0, "c1", "add", "{"), ToolCallDelta(1, "c1", "add", "{")
    decoder = StreamDecoder()
    assert decoder.feed(records(chunk({"content": "x"}), chunk({"content": "y"}))) == [
        TextDelta("xy", 2)
    ]
    said = decoder.feed(
        final(reasoning_content="hm", content="xy", tool_calls=[TOOL, TOOL | {"index": 1}])
    )
    assert said == [ReasoningDelta("hm"), call, other_call, Finish("stop")]
    decoder = StreamDecoder()
    assert decoder.feed(records(chunk({"tool_calls": [TOOL]}))) == [call]
    assert decoder.feed(final(tool_calls=[TOOL])) == [Finish("stop")]


def test_records_with_data_are_counted_comments_are_not() -> None:
    decoder = StreamDecoder()
    assert (decoder.feed(b": ping\n\n\n"), decoder.data_records) == ([], 0)
    assert decoder.feed(b'data: {"choices": []}\n\n: ping\n\nerror: e\n\ndata: [DO') == [
        EmptyRecord(),
        ServerError("e", None, None),
    ]
    assert (decoder.data_records, decoder.partial) == (2, True)
    assert decoder.feed(b"NE] \n\n") == [Done()]
    assert (decoder.data_records, decoder.partial) == (3, False)


@pytest.mark.parametrize(
    "bad", [b"data: {half\n\n", b"data: \xff\n\n", b"data: {half\n\ndata: \xff\n\n"]
)
def test_what_came_before_protocol_error_is_not_lost(bad: bytes) -> None:
    good = records(chunk({"content": "x"}))
    decoder = StreamDecoder()
    assert decoder.feed(good + bad + good) == [TextDelta("x")]
    assert decoder.error is not None
    assert not decoder.lacks_memory
    assert decoder.feed(good) == []


@pytest.mark.parametrize(
    "form",
    [
        '{"error":[%s]}',
        '{"error":{"x":%s}}',
        '{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":%s}}]}}]}',
    ],
    ids=["an error", "an error object", "a call"],
)
def test_nesting_of_any_depth_raises_nothing(form: str) -> None:
    good = records(chunk({"content": "x"}))
    for depth in range(700, 1100):  # of Python's limit, 1000, the test's own frames are a part
        record = f"data: {form % ('[' * depth + ']' * depth)}\n\n".encode()
        decoder = StreamDecoder()
        first, *later = decoder.feed(good + record)
        assert first == TextDelta("x")
        assert later or decoder.error


@pytest.mark.parametrize("every_choice", [False, True])
@pytest.mark.parametrize("index", [{"index": 1}, {}])
def test_first_of_several_answers_taken_unless_all_requested(
    every_choice: bool, index: dict[str, int]
) -> None:
    first, second = chunk({"content": "a"}), {"delta": {"content": "b"}, **index}
    if index:
        said = records(first, {"choices": [second]})
    else:  # they are told apart in one record only
        said = records({"choices": [*first["choices"], second]})
    decoder = StreamDecoder(every_choice=True) if every_choice else StreamDecoder()
    texts = [event.text for event in decoder.feed(said) if isinstance(event, TextDelta)]
    assert "".join(texts) == ("ab" if every_choice else "a")


def test_deltas_in_a_row_are_one_event() -> None:
    text = [{"content": "a"}, {"content": "b"}]
    thoughts = [{"reasoning_content": "c"}, {"reasoning_content": "d"}]
    said = records(*map(chunk, [*text, *thoughts, {"content": "e"}]))
    assert StreamDecoder().feed(said) == [
        TextDelta("ab", 2),
        ReasoningDelta("cd", 2),
        TextDelta("e"),
    ]


DELTAS = st.dictionaries(
    st.sampled_from(["content", "reasoning_content", "role", "tool_calls"]),
    st.sampled_from([None, "", "x", "🦙", 7, [TOOL], ["x"]]),
    max_size=3,
)
CHUNKS = st.builds(
    lambda delta, index, finish, beside: {
        "choices": [{"delta": delta, **index, **finish}],
        "x": "\u2028",
        **beside,
    },
    DELTAS,
    st.sampled_from([{"index": 0}, {"index": 0.0}, {"index": 1}, {"index": None}, {}]),
    st.sampled_from([{"finish_reason": None}, {"finish_reason": "stop"}, {}]),
    st.dictionaries(
        st.sampled_from(["usage", "timings", "prompt_progress", "error", "id"]), JSON, max_size=2
    ),
)


@given(CHUNKS, st.booleans(), st.booleans())
@example(chunk({"content": "x"}, error="bad"), True, True)
@example(chunk({"content": "x", "reasoning_content": "y"}), True, True)
@example(chunk({"content": "x"}, usage={}), True, True)
@example(chunk({"content": "x"}, timings=TIMINGS), True, True)
@example(chunk({"content": "x"}, prompt_progress=PROGRESS), True, True)
@example({"choices": [{"index": 1, "finish_reason": None, "delta": {"content": "x"}}]}, True, True)
def test_the_short_way_gives_the_same_events(value: Any, ascii_only: bool, spaced: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, separators=None if spaced else (",", ":"))
    decoder = StreamDecoder()
    events = decoder.feed(f"data: {text}\n\n".encode())
    assert (events, decoder.error) == (list(decode_record(text)), None)
