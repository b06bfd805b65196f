"""Messages are adapted to a chat template only as far as it needs."""

from typing import Any

import pytest

from llama_worker.responses.api.chat_template import ADAPTERS, alternating, is_rendered
from tests.tables import cases

Json = dict[str, Any]
(LATE, _), (IN_A_ROW, _) = ADAPTERS


@pytest.mark.parametrize(
    ("probe", "shown", "is_whole"),
    [
        (LATE, [0, 1, 2, 3, 4], True),
        (LATE, [0, 3, 1, 2, 4], False),  # moved to the head
        (LATE, [0, 1, 2, 4], False),  # dropped
        (LATE, [1, 2, 3, 4], False),  # the first one dropped
        (IN_A_ROW, [0, 1], True),
        (IN_A_ROW, [1], False),
    ],
)
def test_the_prompt_shows_what_the_template_takes(
    probe: Json, shown: list[int], is_whole: bool
) -> None:
    texts = [message["content"] for message in probe["messages"]]
    assert is_rendered(probe, " ".join(texts[number] for number in shown)) is is_whole
    assert is_rendered(probe, None) is is_rendered(probe, 3) is False


def said(role: str, content: Any = "a", **fields: Any) -> Json:
    return {"role": role, "content": content, **fields}


CALL = said("assistant", "", tool_calls=[{"id": "c"}])
RESULT = said("tool", tool_call_id="c")
DONE = said("assistant", "Done.")
IMAGE: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BLANK_LINE: Json = {"type": "text", "text": "\n\n"}


def text(value: str) -> Json:
    return {"type": "text", "text": value}


@cases(
    "given, adapted",
    {
        "texts": (
            [said("system"), said("user"), said("user", "b"), said("user", "c")],
            [said("system"), said("user", "a\n\nb\n\nc")],
        ),
        "images": (
            [said("user"), said("user", [IMAGE, text("b")]), said("user", [IMAGE])],
            [said("user", [text("a"), BLANK_LINE, IMAGE, text("b"), BLANK_LINE, IMAGE])],
        ),
        "answers": (
            [said("user"), said("assistant", reasoning_content="hm"), said("assistant", "b")],
            [said("user"), said("assistant", "a\n\nb", reasoning_content="hm")],
        ),
        "all that was thought": (
            [
                said("user"),
                said("assistant", reasoning_content="hm"),
                said("assistant", "b", reasoning_content="well"),
            ],
            [said("user"), said("assistant", "a\n\nb", reasoning_content="hm\n\nwell")],
        ),
        "an answer before calls": (
            [said("user"), said("assistant"), CALL, RESULT, said("assistant", "b"), said("user")],
            [said("user"), {**CALL, "content": "a"}, RESULT, said("assistant", "b"), said("user")],
        ),
        "after a result": (
            [said("user"), CALL, RESULT, said("user", "b"), said("user", "c")],
            [said("user"), CALL, RESULT, DONE, said("user", "b\n\nc")],
        ),
        "after a call without a result": (
            [said("user"), CALL, said("user")],
            [said("user"), CALL, DONE, said("user")],
        ),
    },
)
def test_users_and_answers_take_turns(given: list[Json], adapted: list[Json]) -> None:
    assert alternating(given) == adapted


@cases(
    "given",
    {
        "taking turns": [said("system"), said("user"), said("assistant"), said("user")],
        "calls": [said("user"), CALL, RESULT, CALL, RESULT, RESULT, said("assistant")],
        "parts": [said("user", [text("a"), IMAGE])],
    },
)
def test_what_takes_turns_already_stays(given: list[Json]) -> None:
    assert alternating(given) == given
