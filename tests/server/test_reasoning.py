"""Reasoning and text come apart the same way, whichever form the real server gives them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llama_worker import LlamaWorker
from tests.server.conftest import Serve, ended, forced, submitted

pytestmark = pytest.mark.server

DISTINCT = ["deepseek", "none", "deepseek-legacy"]
FORMATS = [*DISTINCT, "auto", None]


@pytest.fixture(scope="module")
def thinking_worker(serve: Serve, lasting_port: Callable[[], int]) -> Iterator[LlamaWorker]:
    """Its server knows the template's think tags, and parses them itself."""
    with LlamaWorker(serve(port=lasting_port(), template="thinking.jinja", thin=True)) as worker:
        yield worker


@pytest.fixture(scope="module")
def unparsed_worker(serve: Serve, lasting_port: Callable[[], int]) -> Iterator[LlamaWorker]:
    """Its server does not recognise the template: tags stay in the content in every format."""
    with LlamaWorker(serve(port=lasting_port(), thin=True)) as worker:
        yield worker


@pytest.fixture(params=["thinking", "unparsed"])
def worker(thinking_worker: LlamaWorker, unparsed_worker: LlamaWorker, request: pytest.FixtureRequest) -> LlamaWorker:
    return thinking_worker if request.param == "thinking" else unparsed_worker


@pytest.fixture(scope="module")
def opened_worker(serve: Serve, lasting_port: Callable[[], int]) -> Iterator[LlamaWorker]:
    with LlamaWorker(serve(port=lasting_port(), template="opened_thinking.jinja")) as worker:
        yield worker


def said(worker: LlamaWorker, text: str, reasoning_format: str | None, **params: Any) -> tuple[str, str]:
    """(reasoning, text) of a model that says `text`."""
    chosen = params if reasoning_format is None else {"reasoning_format": reasoning_format, **params}
    result = ended(worker, submitted(worker, "thought", "Hi", **forced(text), **chosen))
    return result["reasoning"], result["text"]


@pytest.mark.parametrize("reasoning_format", FORMATS)
def test_every_format_gives_the_same_reasoning_and_text(worker: LlamaWorker, reasoning_format: str | None) -> None:
    assert said(worker, "<think>\nabc\n</think>\n\nAns", reasoning_format) == ("abc", "Ans")


# What the server's own parser does (b11434), to be made up for: of what stands before the closing tag it leaves all
# whitespace in `reasoning_content`, but sends none of that where nothing else is in it; after the tag it drops at most
# the two newlines that the template writes there, and leaves all other whitespace in the content.
SAYINGS = [
    # (what the model says, reasoning, text)
    ("<think>abc</think>Ans", "abc", "Ans"),
    ("<think>\nabc\n</think>\nAns\n", "abc", "Ans\n"),
    ("<think> \n abc \n\n </think> \n \n  Ans ", "abc", "Ans "),
    ("<think>abc</think>\n\n\n\nAns", "abc", "Ans"),
    ("<think>\na\n\n\n  b   c\n \n</think>\n\nX\n\n\n  Y", "a\n\n\n  b   c", "X\n\n\n  Y"),
    ("<think>\ngrün 🙂 日本\u2028\n</think>\u2003日本 🙂\n", "grün 🙂 日本", "日本 🙂\n"),
    ("<think>a < b <</think>Ans", "a < b <", "Ans"),
    ("<think>abc\n</think>\n\n", "abc", ""),
    ("<think>\nabc\n\n", "abc", ""),
    ("<think></think>Ans", "", "Ans"),
    ("<think>\n\n</think>\n\nAns", "", "Ans"),
    ("<think> \n\n \n</think>\n\nAns  b", "", "Ans  b"),
    ("<think>abc</think> <think>x</think>Y", "abc", "<think>x</think>Y"),
    ("Write <think>x</think> so.\n", "", "Write <think>x</think> so.\n"),
    ("Ans\n</think> b ", "", "Ans\n</think> b "),
]


@pytest.mark.parametrize(("saying", "reasoning", "text"), SAYINGS)
def test_the_formats_agree_to_the_letter(thinking_worker: LlamaWorker, saying: str, reasoning: str, text: str) -> None:
    outcomes = {name: said(thinking_worker, saying, name) for name in DISTINCT}
    assert outcomes == dict.fromkeys(DISTINCT, (reasoning, text))


HALF_A_TAG = re.compile(r"\s*</?(t|th|thi|thin|think)?$")


def test_the_formats_agree_wherever_the_token_limit_cuts_the_model_off_but_for_half_a_tag(
    opened_worker: LlamaWorker,
) -> None:
    saying, whole = "a  b\n\n ü\n</think>\n\nAns", ("a  b\n\n ü", "Ans")
    seen: list[tuple[str, str]] = []
    while not seen or seen[-1] != whole:
        limit = len(seen) + 1
        assert limit < 40
        outcomes = [said(opened_worker, saying, name, max_tokens=limit) for name in DISTINCT]
        (outcome,) = {(HALF_A_TAG.sub("", reasoning), text) for reasoning, text in outcomes}
        seen.append(outcome)
    assert {("a", ""), ("a  b", ""), (whole[0], ""), whole} <= set(seen)
    assert all(whole[0].startswith(reasoning) and whole[1].startswith(text) for reasoning, text in seen)


def test_half_a_tag_is_kept_where_the_server_gives_it_and_lost_where_its_own_parser_drops_it(
    thinking_worker: LlamaWorker,
) -> None:
    """The server's parser (b11434) waits for the rest of a tag and forgets what it has when none comes."""
    assert said(thinking_worker, "<think>abc\n</thi", "none") == ("abc\n</thi", "")
    assert said(thinking_worker, "<think>abc\n</thi", "deepseek") in [("abc", ""), ("abc\n</thi", "")]
    assert said(thinking_worker, "<thi", "none") == ("", "<thi")
    assert said(thinking_worker, "<thi", "deepseek") in [("", ""), ("", "<thi")]


def test_after_an_empty_thought_the_text_begins_as_the_server_left_it(thinking_worker: LlamaWorker) -> None:
    """Its own parser (b11434) says nothing of an empty thought: to us the content is an answer without any."""
    assert said(thinking_worker, "<think></think>  Ans", "none") == ("", "Ans")
    assert said(thinking_worker, "<think></think>  Ans", "deepseek") in [("", "  Ans"), ("", "Ans")]


OPENED_SAYINGS = [
    ("abc\n</think>\n\nAns", "abc", "Ans"),
    ("\n abc</think>  Ans ", "abc", "Ans "),
    ("a\n\n  b 日本\n \n</think>\n\n\nAns", "a\n\n  b 日本", "Ans"),
    ("abc\n\n", "abc", ""),
    ("<think>\nabc\n</think>\n\nAns", "<think>\nabc", "Ans"),  # the template's tag and the model's own
]


@pytest.mark.parametrize("reasoning_format", FORMATS)
@pytest.mark.parametrize(("saying", "reasoning", "text"), OPENED_SAYINGS)
def test_a_think_tag_opened_by_the_template_is_no_part_of_what_comes_out(
    opened_worker: LlamaWorker, saying: str, reasoning: str, text: str, reasoning_format: str | None
) -> None:
    assert said(opened_worker, saying, reasoning_format) == (reasoning, text)


@pytest.mark.parametrize("saying", ["</think>Ans", "\n\n</think>\n\nAns"])
def test_an_empty_thought_that_the_template_opened_costs_no_answer(opened_worker: LlamaWorker, saying: str) -> None:
    """The server's own parser (b11434) sends the bare answer, which until its end looks like an unparsed thought."""
    assert said(opened_worker, saying, "none") == ("", "Ans")
    assert said(opened_worker, saying, "deepseek") in [("", "Ans"), ("Ans", "Ans")]
