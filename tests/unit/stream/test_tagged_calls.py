"""Calls in the text: taken out of it whatever its split, or left as they were."""

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llama_worker.bios import tagged_call
from llama_worker.stream.calls import MalformedCall, RawCall, parse_arguments
from llama_worker.stream.tagged_calls import MAX_TAGGED_CALL_CHARS, TaggedCallFilter
from tests.timing import is_linear
from tests.unit.request.test_tools import JSON_VALUES

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ISSUE = '<tool_call>{"name": "signal_issue", "arguments": {"code": "x"}}</tool_call>'
FOREIGN = '<tool_call>{"name": "zap", "arguments": {}}</tool_call>'
NAMES = ("add", "mul", "signal_issue")


def filtered(
    pieces: list[str], *, strict: bool = True
) -> tuple[str, list[RawCall | MalformedCall]]:
    tool_filter = TaggedCallFilter(NAMES, strict=strict)
    shown = [tool_filter.feed(piece) for piece in pieces]
    return "".join(shown) + tool_filter.finish(), tool_filter.calls


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    ("text", "visible", "names"),
    [
        (f"a\n{ADD}b{ISSUE}c", "a\nbc", ["add", "signal_issue"]),
        (f"{ADD}\n{ADD}\n", "\n\n", ["add", "add"]),
        (f"{ADD}\n{FOREIGN}\n", "\n\n", ["add", "zap"]),
        ('<tool_call>\n{"name": "add",\n "arguments": {}}\n</tool_call>', "", ["add"]),
        ('<tool_call>{"arguments": {}, "name": "mul"}</tool_call>', "", ["mul"]),
    ],
)
def test_well_formed_calls_never_appear_in_the_text(
    text: str, visible: str, names: list[str]
) -> None:
    shown, calls = filtered([text])
    assert shown == visible
    assert [call.name if isinstance(call, RawCall) else call for call in calls] == names


MALFORMED = [
    "<tool_call></tool_call>",
    "<tool_call>add</tool_call>",
    '<tool_call>{"name": "add"}</tool_call>',
    '<tool_call>{"name": "add", "arguments": null}</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {}, "id": 1}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>",
    '<tool_call>{"name": "add", "arguments": {"a": "it said "hi""}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "two\nlines"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {}}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {}} and</tool_call>',
    '<tool_call>[{"name": "add", "arguments": {}}]</tool_call>',
    '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * 500 + "{}" + "}" * 501 + "</tool_call>",
    '<tool_call>{"name": "add", "arguments": {}}</tool_call',
    '<tool_call>{"name": "add", "arguments": {}}',
    "<tool_call>and then I stopped",
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("text", MALFORMED, ids=itertools.count())
def test_a_malformed_call_stays_text(text: str, strict: bool) -> None:
    assert filtered([text], strict=strict) == (text, [MalformedCall(text)] if strict else [])


def test_where_a_malformed_call_ends() -> None:
    first, second = "<tool_call>one</tool_call>", '<tool_call>{"name": "'
    text = f"a{first}b{second}{ADD}c"
    for pieces in ([text], list(text)):
        assert filtered(pieces) == (
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
    assert filtered(list(text)) == filtered([text]) == (text, [])


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        ("a < b", "a < b"),
        *(
            (f"a {held_back}", "a ")
            for held_back in ("<", "<tool", "<tool_call>", '<tool_call>{"na')
        ),
        ("a <tool_call>x", "a <tool_call>x"),
        ('a <tool_call>{"name": <t', 'a <tool_call>{"name": '),
    ],
)
def test_only_possible_calls_are_held_back(piece: str, shown: str) -> None:
    assert TaggedCallFilter(NAMES, strict=True).feed(piece) == shown


def test_native_mode_shows_text_up_to_a_call() -> None:
    tool_filter = TaggedCallFilter(NAMES, strict=False)
    assert (
        tool_filter.feed(f"a <tool_call>x</tool_call> b {FOREIGN}{ADD} c")
        == f"a <tool_call>x</tool_call> b {FOREIGN}"
    )
    assert tool_filter.feed("<tool_call>d") == ""
    assert tool_filter.finish() == " c<tool_call>d"
    assert tool_filter.calls == [RawCall(None, "add", '{"a": 1}', ADD)]


def test_calls_of_some_tools_are_taken_once_complete() -> None:
    tool_filter = TaggedCallFilter(NAMES, strict=True)
    taken = []
    for piece in (f"{ISSUE}{ADD}<tool_call>x", f"{ISSUE[:30]}", ISSUE[30:]):
        tool_filter.feed(piece)
        taken.append([call.name for call in tool_filter.take(["signal_issue"])])
    assert taken == [["signal_issue"], [], ["signal_issue"]]
    assert tool_filter.calls == [*filtered([ADD])[1], MalformedCall("<tool_call>x")]


def test_a_call_has_a_longest_length() -> None:
    frame = len(tagged_call("add", '{"a": ""}'))
    for extra in (0, 1):
        text = tagged_call("add", json.dumps({"a": "x" * (MAX_TAGGED_CALL_CHARS - frame + extra)}))
        for pieces in ([text], cut(text, list(range(0, len(text), 100_003)))):
            shown, calls = filtered(pieces)
            assert shown == (text if extra else "")
            assert isinstance(calls[0], MalformedCall if extra else RawCall)
    unclosed = '<tool_call>{"name": "' + "x" * MAX_TAGGED_CALL_CHARS
    assert TaggedCallFilter(NAMES, strict=True).feed(unclosed) == unclosed  # held back no longer


@pytest.mark.parametrize(
    "unit", ["<tool_call>", '<tool_call>{"', '<tool_call>{"":"', "<", '"{', ADD]
)
@pytest.mark.parametrize("piece_chars", [3, 10**9])
def test_time_is_linear_in_the_text(unit: str, piece_chars: int) -> None:
    def take(chars: int) -> None:
        text = '<tool_call>{"a": "' + unit * (chars // len(unit))
        filtered([text[at : at + piece_chars] for at in range(0, len(text), piece_chars)])

    assert is_linear(take, 25_000)


FRAGMENTS = st.sampled_from(
    [ADD, ISSUE, FOREIGN, *MALFORMED[:8], "<tool_call>", "</tool_call>",
     "<", "{", "}", '"', "\\", "text ", "\n",
     '{"a": ', '<tool_call>{"name": "add", "arguments": {"x": "', "<tool_"]
)  # fmt: skip


TEXTS = st.lists(FRAGMENTS, max_size=8).map("".join)
PLACES = st.lists(st.integers(0, 400))


@given(TEXTS, PLACES, st.booleans())
def test_any_split_of_the_text_gives_the_same(text: str, places: list[int], strict: bool) -> None:
    shown, calls = filtered([text], strict=strict)
    assert (
        filtered(cut(text, places), strict=strict)
        == filtered(list(text), strict=strict)
        == (shown, calls)
    )
    rest = text
    for call in calls:
        if isinstance(call, RawCall):
            assert call.tagged
            assert call.tagged in rest
            rest = rest.replace(call.tagged, "", 1)
    assert sorted(shown) == sorted(rest)


@given(st.text(), st.text(), st.dictionaries(st.text(), JSON_VALUES, max_size=3))
@example("", "", {"a": "</tool_call>"})
@example("", "", {"a": "<tool_call>{}</tool_call>"})
@example("", "", {"</tool_call>": {"b": [{"c": "}"}, [], '\\"']}})
@example("", "", {"a": 'line\nline\t"é"\u2028'})
@example("", "", {"a": [True, False, None, -1.5e-7, 12]})
def test_every_call_written_in_the_convention_is_found(
    before: str, after: str, arguments: dict[str, object]
) -> None:
    written = tagged_call("add", json.dumps(arguments))
    shown, (call,) = filtered([before, written, after])
    assert shown == before + after
    assert isinstance(call, RawCall)
    assert parse_arguments(call.arguments) == arguments
    assert (call.arguments, call.tagged) == (json.dumps(arguments, ensure_ascii=False), written)


@given(TEXTS, PLACES)
def test_a_structured_call_puts_back_what_was_held(text: str, places: list[int]) -> None:
    tool_filter = TaggedCallFilter(NAMES, strict=False)
    shown = [tool_filter.feed(piece) for piece in cut(text, places)]
    assert ("".join(shown) + tool_filter.put_back(), tool_filter.calls) == (text, [])
