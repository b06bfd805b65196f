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
    tool_call_id,
)
from llama_worker.stream.events import ToolCallDelta

NORMAL = {"add", "find"}
EXITS = {"signal_issue", "escalate"}


def split(calls: list[RawCall | MalformedCall]) -> Partition:
    return partition(calls, NORMAL, EXITS, emitted_at=7.5, first_number=1)


def raw(name: str, arguments: str) -> RawCall:
    return RawCall(None, name, arguments)


def delta(
    index: int, call_id: str | None = None, name: str | None = None, arguments: str | None = None
) -> ToolCallDelta:
    return ToolCallDelta(index=index, call_id=call_id, name=name, arguments=arguments)


def assembled(*deltas: ToolCallDelta) -> tuple[RawCall, ...]:
    assembler = ToolCallAssembler()
    for item in deltas:
        assembler.feed(item)
    return assembler.calls()


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


# --- ids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 17, 99_999_999])
def test_ids_sent_back_are_nine_alphanumerics(number: int) -> None:
    assert re.fullmatch(r"[A-Za-z0-9]{9}", tool_call_id(number))


def test_ids_are_distinct_and_the_same_each_time() -> None:
    assert [tool_call_id(n) for n in range(1, 4)] == ["c00000001", "c00000002", "c00000003"]


@pytest.mark.parametrize("number", [-1, 10**8])
def test_a_number_that_has_no_id_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="number must be from 0"):
        tool_call_id(number)


# --- fragments ------------------------------------------------------------------------------------------


def test_arguments_are_appended() -> None:
    calls = assembled(delta(0, "id1", "add", "{"), delta(0, arguments='"a": 1'), delta(0, arguments="}"))
    assert calls == (RawCall("id1", "add", '{"a": 1}'),)


def test_a_name_or_id_sent_again_whole_is_assigned_not_appended() -> None:
    calls = assembled(delta(0, "id1", "add", "{"), delta(0, "id1", "add", "}"))
    assert calls == (RawCall("id1", "add", "{}"),)


def test_an_empty_name_or_id_does_not_overwrite() -> None:
    assert assembled(delta(0, "id1", "add", "{}"), delta(0, "", "")) == (RawCall("id1", "add", "{}"),)


def test_gaps_between_indices_do_not_matter() -> None:
    calls = assembled(delta(7, name="find"), delta(2, name="add"), delta(7, arguments="{}"))
    assert calls == (RawCall(None, "add", ""), RawCall(None, "find", "{}"))


def test_seventeen_calls_keep_their_order() -> None:
    assert [c.name for c in assembled(*(delta(n, name=f"t{n}") for n in range(17)))] == [f"t{n}" for n in range(17)]


def test_a_whole_call_in_one_piece_is_a_call() -> None:
    assert assembled(delta(0, "id1", "add", '{"a": 1}')) == (RawCall("id1", "add", '{"a": 1}'),)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(NORMAL)), st.text()), max_size=4),
    st.lists(st.integers(0, 50), max_size=6),
    st.randoms(use_true_random=False),
)
def test_any_split_of_the_arguments_gives_the_same_calls(
    calls: list[tuple[str, str]], places: list[int], random: object
) -> None:
    streams = [
        [delta(n, f"id{n}", name), *(delta(n, arguments=part) for part in cut(arguments, places))]
        for n, (name, arguments) in enumerate(calls)
    ]
    deltas = []
    while any(streams):  # interleaved, each call's own order kept
        stream = random.choice([s for s in streams if s])  # type: ignore[attr-defined]
        deltas.append(stream.pop(0))
    assert assembled(*deltas) == tuple(RawCall(f"id{n}", name, arguments) for n, (name, arguments) in enumerate(calls))


# --- arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        (' {"a": [1.5, null, "x"]}\n', {"a": [1.5, None, "x"]}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ("{}", {}),
        ("", {}),
        (" \n", {}),
    ],
)
def test_arguments_are_a_json_object_or_nothing(text: str, value: dict[str, object]) -> None:
    assert parse_arguments(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "[]", "1", "null", '"{}"', "{", '{"a": 1', '{"a": 1}}', "{'a': 1}", '{"a": NaN}', '{"a": -Infinity}',
        '{"a": 1e999}', '{"a": 1' + "0" * 400 + "}", '{"a": 1' + "0" * 5000 + "}", '{"a": "\\ud800"}',
        '{"a": "\ud800"}', '{"a": "\n"}', '{"a": ' * 100_000, '{"a": ' + "[" * 5000 + "]" * 5000 + "}", "x",
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_anything_else_is_refused_with_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_arguments(text)


def test_arguments_are_nested_as_deep_as_can_be_copied_and_no_deeper() -> None:
    def nested(containers: int) -> str:
        return '{"a": ' + "[" * (containers - 1) + "1" + "]" * (containers - 1) + "}"

    deepest = parse_arguments(nested(MAX_JSON_DEPTH))
    assert copy.deepcopy(deepest) == deepest
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_arguments(nested(MAX_JSON_DEPTH + 1))


# --- telling apart --------------------------------------------------------------------------------------


def test_a_normal_call_gets_the_workers_own_id_and_keeps_its_text() -> None:
    parts = partition(
        [RawCall("call_abc", "add", '{"b":2, "a":1}'), raw("find", "")],
        NORMAL,
        EXITS,
        emitted_at=1.0,
        first_number=5,
    )
    assert parts.normal == (
        ParsedCall("c00000005", "add", {"b": 2, "a": 1}, '{"b":2, "a":1}'),
        ParsedCall("c00000006", "find", {}, "{}"),
    )
    assert parts.problem is None
    assert parts.exits == ()


@pytest.mark.parametrize("name", ["mul", "", "Add", "add "])
def test_an_unknown_name_is_a_problem(name: str) -> None:
    problem = split([raw(name, "{}")]).problem
    assert problem is not None
    assert repr(name) in problem
    assert "add, escalate, find, signal_issue" in problem


@pytest.mark.parametrize("arguments", ["[]", "null", '{"a": ', "a=1", '{"a": NaN}'])
def test_arguments_that_are_not_a_json_object_are_a_problem(arguments: str) -> None:
    parts = split([raw("add", arguments)])
    assert parts.normal == ()
    assert parts.problem is not None
    assert "'add'" in parts.problem
    assert repr(arguments) in parts.problem


def test_the_first_problem_is_the_one_told() -> None:
    problem = split([raw("first", "{}"), raw("add", "[]")]).problem
    assert problem is not None
    assert "'first'" in problem


def test_a_problem_shows_a_bounded_part_of_the_arguments() -> None:
    problem = split([raw("add", "x" * 10_000)]).problem
    assert problem is not None
    assert len(problem) < 500


def test_exit_calls_are_recorded() -> None:
    parts = split([raw("signal_issue", '{"code": "x"}')])
    assert parts.exits == ({"tool_name": "signal_issue", "arguments": {"code": "x"}, "emitted_at": 7.5},)
    assert parts.problem is None


@pytest.mark.parametrize("arguments", ["[]", '{"code": "x', "nope", '{"code": "\\ud800"}'])
def test_malformed_exit_calls_are_recorded_with_their_text_and_are_no_problem(arguments: str) -> None:
    parts = split([raw("signal_issue", arguments)])
    assert parts.exits == ({"tool_name": "signal_issue", "arguments": {}, "emitted_at": 7.5, "malformed": arguments},)
    assert parts.problem is None


@pytest.mark.parametrize("beside", [raw("add", "{}"), raw("mul", "{}"), raw("add", "["), MalformedCall("<tool_call>")])
def test_exit_calls_are_recorded_beside_normal_unknown_and_malformed_ones(
    beside: RawCall | MalformedCall,
) -> None:
    for calls in ([beside, raw("escalate", "{}")], [raw("escalate", "{}"), beside]):
        assert [signal["tool_name"] for signal in split(calls).exits] == ["escalate"]


def test_exit_calls_are_never_counted_and_take_no_id() -> None:
    parts = split([raw("escalate", "{}"), raw("add", "{}"), raw("escalate", "{}"), raw("find", "{}")])
    assert [call.id for call in parts.normal] == ["c00000001", "c00000002"]
    assert len(parts.exits) == 2


def test_only_exit_calls_leave_no_normal_call_and_no_problem() -> None:
    parts = split([raw("escalate", "{}"), raw("signal_issue", "")])
    assert (parts.normal, parts.problem) == ((), None)


def test_no_calls_are_nothing() -> None:
    assert split([]) == Partition((), (), None, ())


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "signal_issue", "arguments": "oops"}</tool_call>',
        '<tool_call>{"name": "signal_issue", "argum',
        "<tool_call>{name: signal_issue}</tool_call>",
        "<tool_call>signal_issue(code=1)</tool_call>",
    ],
)
def test_a_malformed_tagged_call_aimed_at_an_exit_tool_is_a_malformed_signal(text: str) -> None:
    parts = split([MalformedCall(text)])
    assert parts.exits == ({"tool_name": "signal_issue", "arguments": {}, "emitted_at": 7.5, "malformed": text},)
    assert parts.problem is None


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": "signal_issue"}</tool_call>',
        '<tool_call>{"name": "mul", "arguments": "signal_issue"}</tool_call>',
        "<tool_call>add(signal_issue)</tool_call>",
        "<tool_call>my_signal_issue()</tool_call>",
        "<tool_call>",
    ],
)
def test_any_other_malformed_tagged_call_is_a_problem(text: str) -> None:
    parts = split([MalformedCall(text)])
    assert parts.exits == ()
    assert parts.problem is not None
    assert text in parts.problem
