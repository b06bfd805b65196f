"""Reasoning and text told apart: the table of what must come out, at every split."""

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_worker.stream.reasoning import ReasoningSplitter
from tests.timing import is_linear

TAGS = [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")]
ALL_TAGS = [tag for pair in TAGS for tag in pair]

Delta = tuple[str, str]  # "r" for reasoning_content or "c" for content, and what it says


def split(deltas: Sequence[Delta], *, opened: bool = False) -> tuple[str, str]:
    """(reasoning, text) of a turn; checks that no reasoning comes after text, where content has the
    tags."""
    splitter = ReasoningSplitter(opened_by_template=opened)
    pieces = [
        splitter.feed_reasoning(said) if field == "r" else splitter.feed_text(said)
        for field, said in deltas
    ]
    pieces.append(splitter.finish())
    assert splitter.finish() == ("", "")
    after_text = itertools.dropwhile(lambda piece: not piece[1], pieces)
    assert not any(reasoning for reasoning, _ in itertools.islice(after_text, 1, None))
    return "".join(reasoning for reasoning, _ in pieces), "".join(text for _, text in pieces)


CONTENT_ONLY = [
    # (content, the prompt ended in a tag, reasoning, text)
    ("<think>x</think>Y", False, "x", "Y"),
    ("  Here: <think>x</think>", False, "", "  Here: <think>x</think>"),
    ("\nabc\n</think>\n\nAns", True, "abc", "Ans"),
    ("abc\n</think>\n\nAns", False, "", "abc\n</think>\n\nAns"),
    ("\n</think>\n", True, "", ""),
    ("\n\n</think>\n\nAns", True, "", "Ans"),
    ("\n<think>\nabc\n</think>\nAns", True, "abc", "Ans"),
    ("abc < d </thing> e</think>Ans", True, "abc < d </thing> e", "Ans"),
    ("abc", True, "abc", ""),
    ("<thi", True, "<thi", ""),
    ("a</think>b[/THINK]c</seed:think>", True, "a", "b[/THINK]c</seed:think>"),
    (" \n", True, "", ""),
    ("<think>a <think>b</think> c</think>Z", False, "a <think>b", "c</think>Z"),
    ("<think>a</think> <think>b</think>Y", False, "a", "<think>b</think>Y"),
    ("<think>abc \n", False, "abc", ""),
    ("<think>abc\n</thin", False, "abc\n</thin", ""),
    ("<think>a</think >b</think>Y", False, "a</think >b", "Y"),
    ("<think>a</thi</think>Y", False, "a</thi", "Y"),
    ("<think> \n", False, "", ""),
    ("<think> \t\nx  y\n\n\n z\r\n</think> \n\n\n Y", False, "x  y\n\n\n z", "Y"),
    ("<thinking>x</thinking>Y", False, "", "<thinking>x</thinking>Y"),
    ("<Think>x</Think>", False, "", "<Think>x</Think>"),
    ("  <thi", False, "", "  <thi"),
    ("<thi <think>", False, "", "<thi <think>"),
    ("[1, 2]", False, "", "[1, 2]"),
    (" \n", False, "", " \n"),
]


def with_tags(content: str, pair: tuple[str, str]) -> str:
    return content.replace("<think>", pair[0]).replace("</think>", pair[1])


@pytest.mark.parametrize("tags", TAGS, ids=[opening for opening, _ in TAGS])
@pytest.mark.parametrize(("content", "opened", "reasoning", "text"), CONTENT_ONLY)
def test_content_alone(
    content: str, opened: bool, reasoning: str, text: str, tags: tuple[str, str]
) -> None:
    content = with_tags(content, tags)
    expected = with_tags(reasoning, tags), with_tags(text, tags)
    assert split([("c", content)], opened=opened) == expected
    assert (
        split([("c", piece) for char in content for piece in (char, "")], opened=opened) == expected
    )


@pytest.mark.parametrize(
    ("content", "opened", "assumed"),
    [
        ("abc", True, True),
        ("abc", False, False),
        ("<thi", True, True),
        ("abc</think>", True, False),
        ("<think>abc", True, False),
    ],
)
def test_reasoning_without_a_tag_is_only_assumed(content: str, opened: bool, assumed: bool) -> None:
    splitter = ReasoningSplitter(opened_by_template=opened)
    splitter.feed_text(content)
    splitter.finish()
    assert splitter.only_assumed is assumed


AFTER_REASONING = [
    # (reasoning_content, content, text)
    ("abc", "\n\nAns", "Ans"),
    (" \n a  b\n\n\n c \n\n ", "  X\n\n\n  Y ", "X\n\n\n  Y "),
    ("\n ", "", ""),
    ("\n ", " Ans", "Ans"),
    ("abc", "<think>x</think>Y", "<think>x</think>Y"),
    ("abc", "abc</think>Ans", "abc</think>Ans"),
    ("abc", "\n<think>\nabc\n</think>\n\nAns", "Ans"),
    ("a \n<b", "<think>a \n<b</think>Ans", "Ans"),
    ("abc", "<think>abc</think>Ans <think>x</think>", "Ans <think>x</think>"),
    ("abc", "<think>abcd</think>Ans", "<think>abcd</think>Ans"),
    ("abc", "<think>ab</think>Ans", "<think>ab</think>Ans"),
    ("abc", "<think></think>Ans", "<think></think>Ans"),
    ("abc", "<think>abc</thi", ""),
    ("abc", "<think>ab", ""),
    ("abc", "<think> ", "<think> "),
    ("abc", " <thi", "<thi"),
    ("abc", " <think>abX ", "<think>abX "),
    ("\n", "<think>\n</think>Ans", "Ans"),
    ("abc", "[THINK]abc[/THINK]Ans", "Ans"),
    ("abc", "<seed:think>abc</seed:think>Ans", "Ans"),
]


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(("reasoning", "content", "text"), AFTER_REASONING)
def test_content_after_reasoning_content(
    reasoning: str, content: str, text: str, opened: bool
) -> None:
    expected = reasoning.strip(), text
    assert split([("r", reasoning), ("c", content)], opened=opened) == expected
    assert (
        split([*(("r", c) for c in reasoning), *(("c", c) for c in content)], opened=opened)
        == expected
    )


# What each delta ("r" for reasoning_content, "c" for content) makes come out at once, as
# (reasoning, text).
CONVERSATIONS = {
    "a thought ends with the closing tag of its own kind, and comes before text in one piece too": [
        ("c", "<think>x[/THINK]y</seed:think>z</think>Y", ("x[/THINK]y</seed:think>z", "Y"))
    ],
    "reasoning content of nothing does not count": [
        ("r", "", ("", "")),
        ("c", "<think>x</think>Y", ("x", "Y")),
    ],
    "after text, reasoning is passed on and a tag is text": [
        ("c", "Ans", ("", "Ans")),
        ("r", "abc", ("abc", "")),
        ("c", "<think>", ("", "<think>")),
    ],
    "after a tagged thought began, reasoning content is passed on in order": [
        ("c", "<think>abc ", ("abc", "")),
        ("r", "xyz\n", (" xyz", "")),
        ("c", "def</think>Ans", ("\ndef", "Ans")),
    ],
    "whitespace that ends the reasoning waits for what follows it, and is no part of the text": [
        ("r", " \n", ("", "")),
        ("r", " a b\n", ("a b", "")),
        ("r", " \n", ("", "")),
        ("r", "c\n", ("\n \nc", "")),
        ("c", "\n\n", ("", "")),
        ("c", " Ans", ("", "Ans")),
        ("c", "\n", ("", "\n")),
    ],
    "content that repeats the reasoning may run ahead by whitespace and the start of a tag": [
        ("c", "<think>", ("", "")),
        ("r", "a", ("a", "")),
        ("c", "a", ("", "")),
        ("c", " \n<", ("", "")),
        ("r", " \n</b", (" \n</b", "")),
        ("c", "/b</think>Ans", ("", "Ans")),
    ],
    "content that came before the reasoning and does not repeat it is let go with its tag": [
        ("c", "<think>", ("", "")),
        ("c", "\n", ("", "")),
        ("r", "abc", ("abc", "")),
        ("c", "X", ("", "<think>\nX")),
    ],
    "content that stops repeating the reasoning is let go at once": [
        ("r", "abc", ("abc", "")),
        ("c", "<think>ab", ("", "")),
        ("c", "X", ("", "<think>abX")),
        ("c", "<think>", ("", "<think>")),
    ],
}


@pytest.mark.parametrize("deltas", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_each_delta_lets_out_what_is_decided(
    deltas: list[tuple[str, str, tuple[str, str]]],
) -> None:
    splitter = ReasoningSplitter()
    for field, said, let_out in deltas:
        assert (
            splitter.feed_reasoning(said) if field == "r" else splitter.feed_text(said)
        ) == let_out
    assert splitter.finish() == ("", "")


FRAGMENTS = [*ALL_TAGS, "<", "</", "[", " ", "\n", "a", "think>", "<thinking>", "bc"]
CONTENT = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)


def cut(field: str, said: str, data: st.DataObject) -> list[Delta]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(said)))))
    return [(field, said[a:b]) for a, b in itertools.pairwise([0, *cuts, len(said)])]


@given(
    reasoning=st.one_of(st.just(""), CONTENT), content=CONTENT, opened=st.booleans(), data=st.data()
)
def test_splits_do_not_matter(
    reasoning: str, content: str, opened: bool, data: st.DataObject
) -> None:
    whole = split([("r", reasoning), ("c", content)], opened=opened)
    assert split([*cut("r", reasoning, data), *cut("c", content, data)], opened=opened) == whole


@given(content=CONTENT, opened=st.booleans())
def test_no_character_is_lost(content: str, opened: bool) -> None:
    reasoning, text = split([("c", content)], opened=opened)
    assert content.endswith(text)
    head = content.removesuffix(text)
    left_out = [("", ""), *(("", closing) for _, closing in TAGS if opened)]
    left_out += [(opening, end) for opening, closing in TAGS for end in ("", closing)]
    saying = rf"\s*{re.escape(reasoning)}\s*"
    assert any(
        re.fullmatch(rf"\s*{re.escape(begin)}{saying}{re.escape(end)}\s*", head)
        for begin, end in left_out
    )


@given(reasoning=CONTENT.filter(str.strip), content=CONTENT, opened=st.booleans())
def test_only_repetition_is_omitted_after_reasoning_content(
    reasoning: str, content: str, opened: bool
) -> None:
    said, text = split([("r", reasoning), ("c", content)], opened=opened)
    assert said == reasoning.strip()
    assert content.endswith(text)
    left_out = content.removesuffix(text).strip()
    for opening, closing in TAGS:
        if left_out.startswith(opening):
            repeated = left_out.removeprefix(opening).strip()
            whole = reasoning.strip()
            assert repeated.removesuffix(closing).strip() == whole or (not text and repeated != "")
            return
    assert left_out == ""


SPACE = st.text(" \t\n\u2028", max_size=3)
WORDS = st.lists(st.sampled_from(["a", " ", "\n", "b<", "🙂"]), max_size=6).map("".join)


@given(gaps=st.tuples(SPACE, SPACE, SPACE, SPACE), thought=WORDS, answer=WORDS, data=st.data())
def test_three_forms_of_one_saying_come_out_alike(
    gaps: tuple[str, str, str, str], thought: str, answer: str, data: st.DataObject
) -> None:
    """As a server sends them: its own parser drops the tags, and of the whitespace about them what
    it likes."""
    thought = f"{gaps[1]}{thought}{gaps[2]}" or "\n"
    tagged = f"{gaps[0]}<think>{thought}</think>{gaps[3]}{answer}"
    expected = thought.strip(), (gaps[3] + answer).lstrip()
    parsed = [*cut("r", thought, data), *cut("c", gaps[3] + answer, data)]
    both = [delta for _, piece in cut("r", thought, data) for delta in (("r", piece), ("c", piece))]
    legacy = [("c", gaps[0] + "<think>"), *both, *cut("c", f"</think>{gaps[3]}{answer}", data)]
    assert split(parsed) == split(cut("c", tagged, data)) == split(legacy) == expected


@given(content=CONTENT, opened=st.booleans())
def test_little_is_held_back(content: str, opened: bool) -> None:
    splitter = ReasoningSplitter(opened_by_template=opened)
    splitter.feed_text(content)
    held = splitter.finish()
    rest = "".join(held).strip()
    assert any(tag.startswith(rest) and tag != rest for tag in ALL_TAGS)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("unit", ["\n\n", "ab ", "<", "</thi"])
def test_time_is_in_proportion_to_the_length(unit: str, legacy: bool) -> None:
    def think(count: int) -> None:
        splitter = ReasoningSplitter()
        splitter.feed_text("<think>")
        for _ in range(count):
            if legacy:
                splitter.feed_reasoning(unit)
            splitter.feed_text(unit)
        splitter.finish()

    assert is_linear(think, 10_000)
