"""Reasoning and text come apart the same way, whichever form the real server gives them."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from llama_worker import ChatMessage, LlamaWorker
from tests.server.conftest import Serve, ended, forced, prompt_of, submitted
from tests.server.pace import patience

pytestmark = pytest.mark.server

DISTINCT = ["deepseek", "none", "deepseek-legacy"]
FORMATS = [*DISTINCT, "auto", None]  # None: what the worker asks for


@pytest.fixture(scope="module")
def workers(serve: Serve, chat_worker: LlamaWorker) -> Iterator[dict[str, LlamaWorker]]:
    """By what their server makes of think tags."""
    with (
        LlamaWorker(serve(template="thinking.jinja")) as parsed,
        LlamaWorker(
            serve(template="opened_thinking.jinja")
        ) as opened,  # the same, and every prompt ends in one
    ):
        yield {
            "parsed": parsed,
            "opened": opened,
            "unknown": chat_worker,
        }  # tags stay in the content in every format


def said(
    worker: LlamaWorker, text: str, reasoning_format: str | None, **params: Any
) -> tuple[str, str]:
    """(reasoning, text) of a model that says `text`."""
    chosen = (
        params if reasoning_format is None else {"reasoning_format": reasoning_format, **params}
    )
    result = ended(worker, submitted(worker, "thought", "Hi", **forced(text), **chosen))
    return result["reasoning"], result["text"]


# What the server's own parser does (b11434), to be made up for: of what stands before the closing
# tag it leaves all whitespace in `reasoning_content`, but sends none of that where nothing else is
# in it; after the tag it drops at most the two newlines that the template writes there, and leaves
# all other whitespace in the content.
@pytest.mark.parametrize(
    ("tags", "saying", "reasoning", "text"),
    [
        ("unknown", "<think>\nabc\n</think>\n\nAns", "abc", "Ans"),
        ("parsed", "<think>abc</think>Ans", "abc", "Ans"),
        ("parsed", "<think>\nabc\n</think>\nAns\n", "abc", "Ans\n"),
        ("parsed", "<think> \n abc \n\n </think> \n \n  Ans ", "abc", "Ans "),
        ("parsed", "<think>abc</think>\n\n\n\nAns", "abc", "Ans"),
        (
            "parsed",
            "<think>\na\n\n\n  b   c\n \n</think>\n\nX\n\n\n  Y",
            "a\n\n\n  b   c",
            "X\n\n\n  Y",
        ),
        (
            "parsed",
            "<think>\ngrün 🙂 日本\u2028\n</think>\u2003日本 🙂\n",
            "grün 🙂 日本",
            "日本 🙂\n",
        ),
        ("parsed", "<think>a < b <</think>Ans", "a < b <", "Ans"),
        ("parsed", "<think>abc\n</think>\n\n", "abc", ""),
        ("parsed", "<think>\nabc\n\n", "abc", ""),
        ("parsed", "<think></think>Ans", "", "Ans"),
        ("parsed", "<think>\n\n</think>\n\nAns", "", "Ans"),
        ("parsed", "<think> \n\n \n</think>\n\nAns  b", "", "Ans  b"),
        ("parsed", "<think>abc</think> <think>x</think>Y", "abc", "<think>x</think>Y"),
        ("parsed", "Write <think>x</think> so.\n", "", "Write <think>x</think> so.\n"),
        ("parsed", "Ans\n</think> b ", "", "Ans\n</think> b "),
        ("opened", "\n abc</think>  Ans ", "abc", "Ans "),
        ("opened", "a\n\n  b 日本\n \n</think>\n\n\nAns", "a\n\n  b 日本", "Ans"),
        ("opened", "abc\n\n", "abc", ""),
        (
            "opened",
            "<think>\nabc\n</think>\n\nAns",
            "<think>\nabc",
            "Ans",
        ),  # the template's tag and the model's own
    ],
)
def test_the_formats_agree_to_the_letter(
    workers: dict[str, LlamaWorker], tags: str, saying: str, reasoning: str, text: str
) -> None:
    outcomes = {name: said(workers[tags], saying, name) for name in FORMATS}
    assert outcomes == dict.fromkeys(FORMATS, (reasoning, text))


@pytest.mark.parametrize(
    ("tags", "saying"),
    [
        ("unknown", "The answer is in the words: one, two, three."),
        ("parsed", "<think>\nOne comes first.\n</think>\n\nThe answer: one, two, three."),
        ("opened", "One comes first.\n</think>\n\nThe answer: one, two, three."),
    ],
)
def test_prompt_is_counted_and_repeated_with_its_answer(
    workers: dict[str, LlamaWorker], tags: str, saying: str
) -> None:
    worker, prompt = workers[tags], prompt_of(16, f"a follow-up {tags}")
    counted = worker.count_tokens("Be terse.", prompt).get(timeout=patience())
    first = worker.ask(prompt, system_prompt="Be terse.", params=forced(saying))
    before = first.get(timeout=patience())
    assert before["text"].endswith("one, two, three.")
    assert counted["n_prompt_tokens"] == before["usage"]["prompt_tokens"]
    follow_up = worker.ask(
        "And then?",
        system_prompt="Be terse.",
        messages=before["conversation"],
        params={"max_tokens": 1},
    )
    cached = follow_up.get(timeout=patience())["usage"]["cached_tokens"]
    assert cached >= 0.95 * counted["n_prompt_tokens"]
    # A model that is forced to say something takes other tokens for it than the tokenizer would, so
    # that its cache does not hold them: the text shows that a model of its own will would have it.
    asked, answer = before["conversation"]
    first_prompt, whole = rendered(worker, asked), rendered(worker, asked, answer)
    assert whole.startswith(first_prompt + saying)


def rendered(worker: LlamaWorker, *messages: ChatMessage) -> str:
    """The prompt that the server's template makes of them."""
    config = worker._backend.config
    body = {"messages": [{"role": "system", "content": "Be terse."}, *messages]}
    url = f"http://{config.host}:{config.port}/apply-template"
    prompt = requests.post(url, json=body, timeout=patience()).json()["prompt"]
    assert isinstance(prompt, str)
    return prompt


def test_answer_cut_off_without_a_thought_is_text(workers: dict[str, LlamaWorker]) -> None:
    answer = "one two three four five"
    reasoning, text = said(workers["opened"], f"</think>{answer}", None, max_tokens=8)
    assert reasoning == ""
    assert text
    assert answer.startswith(text)
    assert text != answer


HALF_A_TAG = re.compile(r"\s*</?(t|th|thi|thin|think)?$")


def test_formats_agree_at_every_cut_except_half_tags(workers: dict[str, LlamaWorker]) -> None:
    saying, whole = "a  b\n\n ü\n</think>\n\nAns", ("a  b\n\n ü", "Ans")
    seen: list[tuple[str, str]] = []
    while not seen or seen[-1] != whole:
        limit = len(seen) + 1
        assert limit < 40
        outcomes = [said(workers["opened"], saying, name, max_tokens=limit) for name in DISTINCT]
        (outcome,) = {(HALF_A_TAG.sub("", reasoning), text) for reasoning, text in outcomes}
        seen.append(outcome)
    assert {("a", ""), ("a  b", ""), (whole[0], ""), whole} <= set(seen)
    assert all(
        whole[0].startswith(reasoning) and whole[1].startswith(text) for reasoning, text in seen
    )


# Where the server's own parser (b11434) leaves no trace of what it saw, nothing can be made up for:
# it forgets half a tag when the rest never comes, and says nothing of an empty thought, so that the
# content is an answer without any.
@pytest.mark.parametrize(
    ("tags", "saying", "whole", "parsed"),
    [
        ("parsed", "<think>abc\n</thi", ("abc\n</thi", ""), ("abc", "")),
        ("parsed", "<thi", ("", "<thi"), ("", "")),
        ("parsed", "<think></think>  Ans", ("", "Ans"), ("", "  Ans")),
        ("opened", "</think>Ans", ("", "Ans"), ("", "Ans")),
        ("opened", "\n\n</think>\n\nAns", ("", "Ans"), ("", "Ans")),
    ],
)
def test_what_servers_parser_withholds_costs_no_answer(
    workers: dict[str, LlamaWorker],
    tags: str,
    saying: str,
    whole: tuple[str, str],
    parsed: tuple[str, str],
) -> None:
    assert said(workers[tags], saying, "none") == whole
    assert said(workers[tags], saying, "deepseek") in [whole, parsed]
