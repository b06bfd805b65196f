"""What a tool returned, encoded for the model."""

import copy
import functools
import itertools
import json
import re
import sys
from enum import Enum, IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.request.turn import call_result, encode_result


class Colour(str, Enum):  # noqa: UP042 - this kind's str() is not its value
    RED = "red"


class Number(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ([], "[]"),
        ("", ""),
        ("nothing found", "nothing found"),
        ('{"a": 1}', '{"a": 1}'),
        ({"a": [1, 2.5, None, "é"]}, '{"a": [1, 2.5, null, "é"]}'),
        ((1, 2), "[1, 2]"),
        (Colour.RED, "red"),
        (Number.ONE, "1"),
    ],
)
def test_any_json_value_is_returned_even_nothing_found(value: object, text: str) -> None:
    encoded = encode_result(value)
    assert encoded == text
    assert type(encoded) is str
    assert call_result("t", lambda: value) == (True, text)


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)
DEEP = functools.reduce(lambda inner, _: [inner], range(100_000), list[object]())


class Broken(dict[str, int]):
    error: Exception = KeyError("broken")

    def items(self) -> object:  # type: ignore[override]
        raise self.error


class Wordless(Broken):
    error = KeyError()


@pytest.mark.parametrize(
    "value",
    [
        float("nan"), float("inf"), {1, 2}, b"x", object(), {1: "a"}, {None: 1},
        [{"a": {2.5: 1}}], "\ud800", {"a": ["\udfff"]}, {"\ud800": 1},
        ENDLESS, DEEP, 10**5000, Broken(a=1),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    ok, text = call_result("t", lambda: value)
    refused = (
        rf"tool 't' returned a value that JSON cannot represent: a {type(value).__name__} \(.+"
    )
    assert not ok
    assert re.match(refused, text)


def test_an_error_without_a_text_is_named() -> None:
    assert call_result("t", lambda: Wordless(a=1))[1].endswith(": a Wordless (KeyError)")


def test_whatever_a_tool_raises_only_fails_its_call() -> None:
    said = call_result("t", lambda: sys.exit("enough"))
    assert said == (False, "tool 't' raised SystemExit: enough")


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES.filter(lambda value: not isinstance(value, str)))
def test_an_encoded_result_reads_back_as_it_was(value: object) -> None:
    before = copy.deepcopy(value)
    assert json.loads(encode_result(value)) == before
    assert value == before
