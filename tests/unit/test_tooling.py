"""Calls: put together, parsed out of text, told apart; results encoded."""

import copy
import itertools
import json
import re
import time
from enum import Enum, IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.stream_events import ToolCallDelta
from llama_worker.tooling import (
    MAX_TAGGED_CALL_CHARS,
    MalformedCall,
    ParsedCall,
    Partition,
    PromptedToolFilter,
    RawCall,
    ToolCallAssembler,
    ToolResultError,
    encode_result,
    parse_arguments,
    partition,
    tagged_call,
    tool_call_id,
)
from llama_worker.types import RequestFailReason

NORMAL = {"add", "find"}
EXITS = {"signal_issue", "escalate"}
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ISSUE = '<tool_call>{"name": "signal_issue", "arguments": {"code": "x"}}</tool_call>'


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


def filtered(
    pieces: list[str], *, strict: bool = True, structured: bool = False
) -> tuple[str, list[RawCall | MalformedCall]]:
    tool_filter = PromptedToolFilter(strict=strict)
    shown = [tool_filter.feed(piece) for piece in pieces]
    shown.append(tool_filter.finish(structured_calls=structured))
    return "".join(shown), tool_filter.calls


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
def test_unknown_name_is_tool_parse_error(name: str) -> None:
    problem = split([raw(name, "{}")]).problem
    assert problem is not None
    assert problem.fail_reason is RequestFailReason.TOOL_PARSE_ERROR
    assert repr(name) in problem.fail_detail
    assert "add, escalate, find, signal_issue" in problem.fail_detail


@pytest.mark.parametrize("arguments", ["[]", "null", '{"a": ', "a=1", '{"a": NaN}'])
def test_arguments_that_are_not_a_json_object_are_tool_parse_error(arguments: str) -> None:
    parts = split([raw("add", arguments)])
    assert parts.normal == ()
    assert parts.problem is not None
    assert parts.problem.fail_reason is RequestFailReason.TOOL_PARSE_ERROR
    assert "'add'" in parts.problem.fail_detail
    assert repr(arguments) in parts.problem.fail_detail


def test_the_first_problem_is_the_one_told() -> None:
    problem = split([raw("first", "{}"), raw("add", "[]")]).problem
    assert problem is not None
    assert "'first'" in problem.fail_detail


def test_a_problem_shows_a_bounded_part_of_the_arguments() -> None:
    problem = split([raw("add", "x" * 10_000)]).problem
    assert problem is not None
    assert len(problem.fail_detail) < 500


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
    assert split([]) == Partition((), (), None)


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
def test_any_other_malformed_tagged_call_is_tool_parse_error(text: str) -> None:
    parts = split([MalformedCall(text)])
    assert parts.exits == ()
    assert parts.problem is not None
    assert parts.problem.fail_reason is RequestFailReason.TOOL_PARSE_ERROR
    assert text in parts.problem.fail_detail


# --- results --------------------------------------------------------------------------------------------


class Colour(str, Enum):  # noqa: UP042 - this kind's str() is not its value
    RED = "red"


class Number(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ([], "[]"),
        ({}, "{}"),
        ("", ""),
        (False, "false"),
        (0, "0"),
        ("nothing found", "nothing found"),
        ('{"a": 1}', '{"a": 1}'),
        ({"a": [1, 2.5, None, "é"]}, '{"a": [1, 2.5, null, "é"]}'),
        ((1, 2), "[1, 2]"),
        (Colour.RED, "red"),
        (Number.ONE, "1"),
    ],
)
def test_any_json_value_is_passed_back_also_nothing_found(value: object, text: str) -> None:
    encoded = encode_result(value)
    assert encoded == text
    assert type(encoded) is str


def endless() -> list[object]:
    value: list[object] = []
    value.append(value)
    return value


def deep() -> list[object]:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    return value


class Broken(dict[str, int]):
    def items(self) -> object:  # type: ignore[override]
        raise KeyError("broken")


@pytest.mark.parametrize(
    "value",
    [
        float("nan"), float("inf"), {1, 2}, b"x", object(), {1: "a"}, {None: 1}, [{"a": {2.5: 1}}], "\ud800",
        {"a": ["\udfff"]}, {"\ud800": 1}, endless(), deep(), 10**5000, Broken(a=1),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(ToolResultError, match=f"a {type(value).__name__} that JSON cannot hold: ."):
        encode_result(value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES.filter(lambda value: not isinstance(value, str)))
def test_an_encoded_result_reads_back_as_it_was_and_is_not_mutated(value: object) -> None:
    before = copy.deepcopy(value)
    assert json.loads(encode_result(value)) == before
    assert value == before


# --- calls in the text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "visible", "names"),
    [
        (ADD, "", ["add"]),
        (f"Let me see.\n{ADD}", "Let me see.\n", ["add"]),
        (f"a{ADD}b{ISSUE}c", "abc", ["add", "signal_issue"]),
        (f"{ADD}\n{ADD}\n", "\n\n", ["add", "add"]),
        ('<tool_call>\n{"name": "add",\n "arguments": {}}\n</tool_call>', "", ["add"]),
        ('<tool_call>{"arguments": {}, "name": "mul"}</tool_call>', "", ["mul"]),
        ("no call", "no call", []),
        ("", "", []),
    ],
)
def test_well_formed_calls_never_appear_in_the_text(text: str, visible: str, names: list[str]) -> None:
    shown, calls = filtered([text])
    assert shown == visible
    assert [call.name for call in calls if isinstance(call, RawCall)] == names
    assert len(calls) == len(names)


@pytest.mark.parametrize(
    "arguments",
    [
        {"a": "</tool_call>"},
        {"a": "<tool_call>{}</tool_call>"},
        {"a": '"}}</tool_call>\\'},
        {"</tool_call>": {"b": [{"c": "}"}, [], '\\"']}},
        {"a": 'line\nline\t"é"\u2028'},
        {"a": [True, False, None, -1.5e-7, 12]},
    ],
)
def test_arguments_may_hold_tags_braces_and_quotes(arguments: dict[str, object]) -> None:
    written = tagged_call("add", json.dumps(arguments))
    shown, calls = filtered([f"x{written}y"])
    assert shown == "xy"
    (call,) = calls
    assert isinstance(call, RawCall)
    assert parse_arguments(call.arguments) == arguments
    assert call.tagged == written


MALFORMED = [
    "<tool_call>{}</tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>add</tool_call>",
    '<tool_call>{"name": "add"}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "add", "arguments": []}</tool_call>',
    '<tool_call>{"name": "add", "arguments": null}</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {}, "id": 1}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>",
    '<tool_call>{"name": "add", "arguments": {"a": "it said "hi""}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "two\nlines"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {}}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {}} and</tool_call>',
    '<tool_call>[{"name": "add", "arguments": {}}]</tool_call>',
    '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * 500 + "{}" + "}" * 501 + "</tool_call>",
    '<tool_call>{"name": "add", "arguments": {}}</tool_cal>',
]


@pytest.mark.parametrize("text", MALFORMED, ids=itertools.count())
def test_a_malformed_call_is_told_and_the_text_left_as_it_was(text: str) -> None:
    assert filtered([text]) == (text, [MalformedCall(text)])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{"name": "add", "arguments": {"a": "<tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call',
        "<tool_call>and then I stopped",
    ],
)
def test_an_unclosed_call_at_the_end_is_malformed(text: str) -> None:
    shown, calls = filtered([f"before {text}"])
    assert shown == f"before {text}"
    assert calls
    assert all(isinstance(call, MalformedCall) for call in calls)


def test_a_malformed_call_ends_at_its_closing_tag_or_where_the_next_begins() -> None:
    first, second = "<tool_call>one</tool_call>", "<tool_call>two"
    assert filtered([f"a{first}b{second}{ADD}c"]) == (
        f"a{first}b{second}c",
        [MalformedCall(first), MalformedCall(second), *filtered([ADD])[1]],
    )


@pytest.mark.parametrize(
    "text",
    [
        "a < b",
        "<tool_cal",
        "<tool_calls>",
        "<Tool_call>",
        "</tool_call>",
        "<",
        "x<tool_<tool_",
        "< tool_call>",
    ],
)
def test_what_only_looks_like_a_tag_is_text(text: str) -> None:
    assert filtered([text]) == (text, [])
    assert filtered(list(text)) == (text, [])


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        ("Hello", "Hello"),
        ("a < b", "a < b"),
        ("a <", "a "),
        ("a <tool", "a "),
        ("a <tool_call>", "a "),
        ('a <tool_call>{"na', "a "),
        ("a <tool_call>x", "a <tool_call>x"),
        ('a <tool_call>{"name": <', 'a <tool_call>{"name": '),
    ],
)
def test_only_what_may_be_a_call_is_held_back(piece: str, shown: str) -> None:
    assert PromptedToolFilter(strict=True).feed(piece) == shown


def test_a_call_of_the_longest_length_is_taken_and_a_longer_one_is_text() -> None:
    frame = len(tagged_call("add", '{"a": ""}'))
    for extra in (0, 1):
        text = tagged_call("add", json.dumps({"a": "x" * (MAX_TAGGED_CALL_CHARS - frame + extra)}))
        for pieces in ([text], cut(text, list(range(0, len(text), 100_003)))):
            shown, calls = filtered(pieces)
            assert shown == (text if extra else "")
            assert isinstance(calls[0], MalformedCall if extra else RawCall)


def test_hold_back_is_bounded() -> None:
    tool_filter = PromptedToolFilter(strict=True)
    text = '<tool_call>{"name": "' + "x" * MAX_TAGGED_CALL_CHARS
    assert tool_filter.feed(text) == text


@pytest.mark.parametrize(
    "unit",
    ["<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"a":', '<tool_call>{"":"', "<", '"{', ADD],
)
@pytest.mark.parametrize("piece_chars", [3, 10**9])
def test_time_is_linear_in_the_text(unit: str, piece_chars: int) -> None:
    text = '<tool_call>{"a": "' + unit * (200_000 // len(unit))
    pieces = [text[at : at + piece_chars] for at in range(0, len(text), piece_chars)]
    began = time.process_time()
    filtered(pieces)
    assert time.process_time() - began < 5.0  # quadratic: minutes


FRAGMENTS = st.sampled_from(
    [ADD, ISSUE, *MALFORMED[:8], "<tool_call>", "</tool_call>", "<", "{", "}", '"', "\\", "text ", "\n",
     '{"a": ', '<tool_call>{"name": "add", "arguments": {"x": "', "<tool_"]
)  # fmt: skip


@given(st.lists(FRAGMENTS, max_size=8).map("".join), st.lists(st.integers(0, 400)), st.booleans(), st.booleans())
def test_any_split_of_the_text_gives_the_same(text: str, places: list[int], strict: bool, structured: bool) -> None:
    whole = filtered([text], strict=strict, structured=structured)
    assert filtered(cut(text, places), strict=strict, structured=structured) == whole
    assert filtered(list(text), strict=strict, structured=structured) == whole


@given(st.lists(FRAGMENTS, max_size=8).map("".join))
def test_nothing_but_the_calls_is_lost(text: str) -> None:
    shown, calls = filtered([text])
    rest = text
    for call in calls:
        if isinstance(call, RawCall):
            assert call.tagged is not None
            before, found, rest_after = rest.partition(call.tagged)
            assert found
            rest = before + rest_after
    assert len(shown) == len(text) - sum(len(c.tagged or "") for c in calls if isinstance(c, RawCall))
    assert sorted(shown) == sorted(rest)


@given(st.text(), st.text(), st.dictionaries(st.text(), JSON_VALUES, max_size=3))
def test_every_call_written_in_the_convention_is_found(before: str, after: str, arguments: dict[str, object]) -> None:
    shown, calls = filtered([before, tagged_call("add", json.dumps(arguments)), after])
    assert shown == before + after
    assert [parse_arguments(c.arguments) for c in calls if isinstance(c, RawCall)] == [arguments]


# --- tagged calls in native mode ------------------------------------------------------------------------


def test_in_native_mode_a_well_formed_tagged_call_is_taken_the_same_way() -> None:
    shown, calls = filtered([f"a {ADD} b"], strict=False)
    assert shown == "a  b"
    assert calls == [RawCall(None, "add", '{"a": 1}', ADD)]


@pytest.mark.parametrize("text", MALFORMED, ids=itertools.count())
def test_in_native_mode_a_malformed_one_is_just_text(text: str) -> None:
    assert filtered([text], strict=False) == (text, [])


def test_in_native_mode_a_malformed_one_stays_text_behind_a_call_that_is_taken() -> None:
    assert filtered([f"a{ADD}b<tool_call>c"], strict=False) == (
        "ab<tool_call>c",
        [RawCall(None, "add", '{"a": 1}', ADD)],
    )


def test_beside_structured_calls_tagged_ones_stay_text_in_their_place() -> None:
    text = f"a {ADD} b {ISSUE} c <tool_call>"
    assert filtered([text], strict=False, structured=True) == (text, [])
    assert filtered(list(text), strict=False, structured=True) == (text, [])


def test_in_native_mode_text_up_to_the_first_call_is_shown_at_once() -> None:
    tool_filter = PromptedToolFilter(strict=False)
    assert tool_filter.feed(f"a <tool_call>x</tool_call> b {ADD} c") == "a <tool_call>x</tool_call> b "
    assert tool_filter.feed("d") == ""
    assert tool_filter.finish() == " cd"
