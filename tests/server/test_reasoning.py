"""Reasoning and text come apart the same way, whichever form the real server gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from llama_worker import LlamaWorker
from tests.server.conftest import Serve, ended, forced, submitted

pytestmark = pytest.mark.server

FORMATS = ["deepseek", "none", "deepseek-legacy", "auto", None]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("thinking.jinja", id="template-with-think-tags"),
        pytest.param(None, id="template-that-the-server-does-not-recognise"),
    ],
)
def worker(serve: Serve, lasting_port: Callable[[], int], request: pytest.FixtureRequest) -> Iterator[LlamaWorker]:
    with LlamaWorker(serve(port=lasting_port(), template=request.param)) as worker:
        yield worker


@pytest.fixture(scope="module")
def opened_worker(serve: Serve, lasting_port: Callable[[], int]) -> Iterator[LlamaWorker]:
    with LlamaWorker(serve(port=lasting_port(), template="opened_thinking.jinja")) as worker:
        yield worker


def said(worker: LlamaWorker, text: str, reasoning_format: str | None) -> tuple[str, str]:
    """(reasoning, text) of a model that says `text`."""
    chosen = {} if reasoning_format is None else {"reasoning_format": reasoning_format}
    result = ended(worker, submitted(worker, "thought", "Hi", **forced(text), **chosen))
    return result["reasoning"], result["text"]


@pytest.mark.parametrize("reasoning_format", FORMATS)
def test_every_format_gives_the_same_reasoning_and_text(worker: LlamaWorker, reasoning_format: str | None) -> None:
    assert said(worker, "<think>abc</think>Ans", reasoning_format) == ("abc", "Ans")


@pytest.mark.parametrize("reasoning_format", FORMATS)
def test_tags_on_lines_of_their_own_leave_no_trace_in_the_text(
    worker: LlamaWorker, reasoning_format: str | None
) -> None:
    reasoning, text = said(worker, "<think>\nabc\n</think>\n\nAns", reasoning_format)
    assert (reasoning.strip(), text) == ("abc", "Ans")  # the server leaves the last newline in `reasoning_content`


@pytest.mark.parametrize("reasoning_format", FORMATS)
def test_a_tag_inside_the_answer_stays_there(worker: LlamaWorker, reasoning_format: str | None) -> None:
    assert said(worker, "Write <think>x</think> so.", reasoning_format) == ("", "Write <think>x</think> so.")


@pytest.mark.parametrize("reasoning_format", FORMATS)
def test_a_think_tag_opened_by_the_template_is_no_part_of_what_comes_out(
    opened_worker: LlamaWorker, reasoning_format: str | None
) -> None:
    reasoning, text = said(opened_worker, "abc\n</think>\n\nAns", reasoning_format)
    assert (reasoning.strip(), text) == ("abc", "Ans")
