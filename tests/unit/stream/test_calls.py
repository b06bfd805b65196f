"""Calls: put together, parsed, told apart."""

import copy
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.stream.calls import (
    MAX_JSON_DEPTH,
    MalformedCall,
    ParsedCall,
    Partition,
    RawCall,
    ToolCallAssembler,
    parse_arguments,
    partition,
)
from llama_worker.stream.events import ToolCallDelta
from tests.timing import is_linear

NORMAL = {"add", "find"}
EXITS = {"signal_issue", "escalate"}


def split(calls: list[RawCall | MalformedCall]) -> Partition:
    return partition(calls, NORMAL, EXITS, emitted_at=7.5, first_number=1)


def raw(name: str, arguments: str) -> RawCall:
    return RawCall(None, name, arguments)


def more(index: int, arguments: str) -> ToolCallDelta:
    return ToolCallDelta(index, None, None, arguments)


def assembled(*deltas: ToolCallDelta) -> tuple[RawCall, ...]:
    assembler = ToolCallAssembler()
    for item in deltas:
        assembler.feed(item)
    return assembler.calls()


def test_arguments_are_appended_name_and_id_replaced() -> None:
    pieces = [("id1", "add", "{"), ("", "", '"a"'), ("id1", "add", ": 1}"), (None, None, None)]
    assert assembled(*(ToolCallDelta(0, *piece) for piece in pieces)) == (
        RawCall("id1", "add", '{"a": 1}'),
    )


def test_half_a_character_of_a_call_is_replaced() -> None:
    whole = RawCall("\ufffd", "\ufffd", "\ufffd")
    assert assembled(ToolCallDelta(0, *["\ud800"] * 3)) == (whole,)


def test_calls_come_in_the_order_of_indices() -> None:
    indices = [7, 2, *range(20, 37)]
    heads = [ToolCallDelta(index, None, f"t{index}", None) for index in indices]
    calls = [RawCall(None, f"t{index}", "{}" if index == 7 else "") for index in sorted(indices)]
    assert assembled(*heads, more(7, "{}")) == tuple(calls)


@given(st.lists(st.tuples(st.sampled_from(sorted(NORMAL)), st.lists(st.text())), max_size=4))
def test_fragments_of_calls_may_come_in_turns(calls: list[tuple[str, list[str]]]) -> None:
    streams = [
        [ToolCallDelta(n, f"id{n}", name, None), *(more(n, part) for part in parts)]
        for n, (name, parts) in enumerate(calls)
    ]
    in_turns = [
        fragment for turn in itertools.zip_longest(*streams) for fragment in turn if fragment
    ]
    whole = tuple(RawCall(f"id{n}", name, "".join(parts)) for n, (name, parts) in enumerate(calls))
    assert assembled(*in_turns) == assembled(*itertools.chain(*streams)) == whole


def test_long_arguments_take_linear_time() -> None:
    def assemble(count: int) -> None:
        assembler = ToolCallAssembler()
        assembler.feed(ToolCallDelta(0, None, "escalate", '{"code": "' + count * "x"))
        assembler.feed(ToolCallDelta(1, None, "escalate", None))  # it ends the first, which goes on
        for _ in range(count):
            assembler.feed(more(0, "}"))
            assert assembler.take_complete(EXITS) == []

    assert is_linear(assemble, 5_000)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (' {"a": [1.5, null, "x"]}\n', {"a": [1.5, None, "x"]}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ("", {}),
        (" \n", {}),
    ],
)
def test_arguments_are_a_json_object_or_nothing(text: str, value: dict[str, object]) -> None:
    assert parse_arguments(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "1", "null", '"{}"', "{", '{"a": 1', '{"a": 1}}', "{'a': 1}", "x"),
        *('{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": "\ud800"}'),
        *('{"a": "\n"}', '{"a": 1' + "0" * 400 + "}", '{"a": 1' + "0" * 5000 + "}"),
        *('{"a": ' * 100_000, '{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
    ],
    ids=itertools.count(),
)
def test_anything_else_is_refused_with_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_arguments(text)


def test_arguments_have_a_deepest_nesting() -> None:
    def nested(containers: int) -> str:
        return '{"a": ' + "[" * (containers - 1) + "1" + "]" * (containers - 1) + "}"

    deepest = parse_arguments(nested(MAX_JSON_DEPTH))
    assert copy.deepcopy(deepest) == deepest
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_arguments(nested(MAX_JSON_DEPTH + 1))


def test_a_normal_call_gets_an_own_id() -> None:
    calls = [RawCall("call_abc", "add", '{"b":2, "a":1}'), raw("find", "")]
    parts = partition(calls, NORMAL, EXITS, emitted_at=1.0, first_number=5)
    assert parts.normal == (
        ParsedCall("c00000005", "add", {"b": 2, "a": 1}, '{"b":2, "a":1}'),
        ParsedCall("c00000006", "find", {}, "{}"),
    )
    assert (parts.problem, parts.exits) == (None, ())


def test_kimis_ids_are_kept_but_not_twice() -> None:
    kimi, other = RawCall("functions.add:0", "add", "{}"), RawCall("functions.add", "add", "{}")
    second = RawCall("functions.add:1", "add", "{}")
    parts = split([kimi, other, kimi, second])
    ids = ["functions.add:0", "c00000002", "c00000003", "functions.add:1"]
    assert [call.id for call in parts.normal] == ids


def test_only_the_last_call_is_cut_off() -> None:
    calls = [raw("find", ""), raw("add", "")]
    parts = partition(calls, NORMAL, EXITS, emitted_at=1.0, first_number=1, cut_off=True)
    assert parts.normal == (ParsedCall("c00000001", "find", {}, "{}"),)
    assert "'add'" in (parts.problem or "")


def test_a_call_without_any_tools_is_a_problem() -> None:
    parts = partition([raw("mul", "{}")], (), (), emitted_at=1.0, first_number=1)
    assert parts.problem == "the model called an unknown tool, 'mul'; known tools: none"


UNCLOSED = '<tool_call>{"arguments": {"a": "signal_issue"}, "name": "add"</tool_call>'
PYTHONIC = "<tool_call>add(signal_issue)</tool_call>"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (raw("mul", "{}"), "'mul'.*add, escalate, find, signal_issue"),
        (raw("", "{}"), "''"),
        (raw("add ", "{}"), "'add '"),
        (raw("add", "[]"), r"'add'.*'\[\]'"),
        (raw("add", '{"a": '), """'add'.*'{"a": '"""),
        (raw("add", "x" * 200), "'add'.*'x{200}'$"),
        (raw("add", "x" * 201), r"'add'.*'x{200}\.\.\.'$"),
        (MalformedCall(UNCLOSED), '"name": "add"'),
        (MalformedCall(PYTHONIC), r"add\(signal_issue\)</tool_call>"),
        (MalformedCall("<tool_call>my_signal_issue()</tool_call>"), "my_signal_issue"),
        (MalformedCall("<tool_call>"), "<tool_call>"),
    ],
)
def test_a_call_that_cannot_run_is_a_problem(call: RawCall | MalformedCall, told: str) -> None:
    parts = split([call, raw("later", "{}")])
    assert (parts.normal, parts.exits) == ((), ())
    assert re.search(told, parts.problem or "")
    assert len(parts.problem or "") < 500


@pytest.mark.parametrize(
    "malformed",
    [
        *("[]", '{"code": "x', "nope", '{"code": "\\ud800"}'),
        '<tool_call>{"name": "signal_issue", "arguments": "oops"}</tool_call>',
        '<tool_call>{"name": "signal_issue", "argum',
        "<tool_call>{name: signal_issue}</tool_call>",
        "<tool_call>signal_issue(code=1)</tool_call>",
    ],
)
def test_a_malformed_exit_call_is_recorded(malformed: str) -> None:
    parts = split(
        [MalformedCall(malformed) if "<" in malformed else raw("signal_issue", malformed)]
    )
    assert parts.exits == (
        {"tool_name": "signal_issue", "arguments": {}, "emitted_at": 7.5, "malformed": malformed},
    )
    assert (parts.normal, parts.problem) == ((), None)


@pytest.mark.parametrize(
    "beside", [raw("mul", "{}"), raw("add", "["), MalformedCall("<tool_call>")]
)
def test_exit_calls_recorded_beside_unknown_and_malformed_ones(
    beside: RawCall | MalformedCall,
) -> None:
    signals = split([raw("escalate", "{}"), beside, raw("signal_issue", "{}")]).exits
    assert [signal["tool_name"] for signal in signals] == ["escalate", "signal_issue"]


def test_exit_calls_take_no_id() -> None:
    parts = split(
        [
            raw("escalate", '{"code": "x"}'),
            raw("add", "{}"),
            raw("escalate", "{}"),
            raw("find", "{}"),
        ]
    )
    assert [call.id for call in parts.normal] == ["c00000001", "c00000002"]
    assert [signal["arguments"] for signal in parts.exits] == [{"code": "x"}, {}]
    assert parts.problem is None
