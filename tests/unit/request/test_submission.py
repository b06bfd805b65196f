"""What may be submitted, and what is said of anything else."""

import copy
import math
from enum import IntEnum
from typing import Any

import pytest
from msgspec.structs import asdict

from llama_worker import ConfigError
from llama_worker.request.submission import Submission, valid_id, validate_submit
from tests.conftest import OwnText
from tests.unit.config.cases import SURROGATE, bad, refuses

GOOD: dict[str, Any] = dict.fromkeys(("job_name", "system_prompt", "user_prompt"), "")
GOOD |= {"params": None, "messages": None}
PARTS: list[dict[str, Any]] = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
    {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    {"type": "of_tomorrow", "of_tomorrow": 1},
]
BAD_PARTS = [
    ("u", TypeError, "[0] must be a mapping", "'u'"),
    ({"text": "u"}, ConfigError, "[0] needs a 'type', such as 'text', 'image_url', 'in", "None"),
    ({"type": ""}, ConfigError, "[0] needs a 'type'", "''"),
    ({"type": 7}, ConfigError, "[0] needs a 'type'", "7"),
    ({"type": "text"}, ConfigError, "[0] of type 'text' needs 'text', a str", "None"),
    ({"type": "image_url", "image_url": "u.png"}, ConfigError, "{'url': a str}", "'u.png'"),
    ({"type": "input_audio", "input_audio": {"data": "AA=="}}, ConfigError, "{'format': a str}"),
    ({"type": "text", "text": SURROGATE}, ConfigError, "[0]['text']", "surrogate"),
]


def submit(**changed: Any) -> Submission:
    return validate_submit(**(GOOD | changed))


def test_content_parts_are_copied_as_they_are() -> None:
    given = copy.deepcopy(PARTS)
    params = {"stop": ["x"]}
    messages = ({"role": "user", "content": given, "extra": {"a": 1}} for _ in range(2))
    got = submit(user_prompt=tuple(given), messages=messages, params=params)
    given[1]["image_url"]["url"] = "changed"
    params["stop"].append("y")
    assert (got.user_prompt, got.params) == (PARTS, {"stop": ["x"]})
    assert got.messages == ({"role": "user", "content": PARTS, "extra": {"a": 1}},) * 2


class Level(IntEnum):
    HIGH = 3


class Share(float):
    pass


def types_in(value: object) -> set[type]:
    """Those of a submission's parts, and of theirs."""
    if isinstance(value, Submission):
        value = list(asdict(value).values())
    if isinstance(value, dict):
        return {dict}.union(*map(types_in, value.keys()), *map(types_in, value.values()))
    if isinstance(value, (list, tuple)):
        return {type(value)}.union(*map(types_in, value))
    return {type(value)}


@pytest.mark.parametrize(
    ("part", "is_fetched"),
    [
        ({"type": "text", "text": "http://a/b.png"}, False),
        ({"type": "image_url", "image_url": {"url": "http://a/b.png"}}, True),
        ({"type": "image_url", "image_url": {"url": "https://a/b.png"}}, True),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aHR0cA=="}}, False),
        ({"type": "input_audio", "input_audio": {"data": "http://a/b", "format": "wav"}}, True),
        ({"type": "input_audio", "input_audio": {"data": "aHR0cA==", "format": "wav"}}, False),
        ({"type": "video_url", "video_url": {"url": "http://a/b.mp4"}}, True),
        ({"type": "input_file", "input_file": 7}, False),
    ],
)
def test_media_by_link_is_fetched_by_the_server(part: dict[str, Any], is_fetched: bool) -> None:
    in_prompt = validate_submit("job", "", [PARTS[0], part], None, None)
    in_messages = validate_submit("job", "", "", None, [{"role": "user", "content": [part]}])
    assert in_prompt.links_media is in_messages.links_media is is_fetched


def test_nothing_of_the_hosts_own_types_is_kept() -> None:
    text = OwnText("text")
    odd = {text: [text, Level.HIGH, Share(0.5), True, None]}
    messages = [{"role": text, "content": [{"type": text, "text": text}], "extra": odd}]
    got = submit(job_name=text, system_prompt=text, user_prompt=text, params=odd, messages=messages)
    assert got.params == {"text": ["text", 3, 0.5, True, None]}
    assert types_in(got) <= {bool, dict, float, frozenset, int, list, str, tuple, type(None)}
    assert copy.deepcopy(got) == got


@pytest.mark.parametrize("case", BAD_PARTS)
def test_a_part_of_no_use_is_refused(case: tuple[Any, ...]) -> None:
    part, error, *says = case
    refuses(lambda: submit(user_prompt=[part]), "user_prompt", error, *says)
    message = {"role": "user", "content": [part]}
    refuses(lambda: submit(messages=[message]), "messages[0]['content']", error, *says)


@pytest.mark.parametrize(
    ("field", "value", "error", "says"),
    [
        bad("job_name", None, TypeError, "str", "None"),
        bad("system_prompt", b"s", TypeError, "str", "b's'"),
        bad("user_prompt", None, TypeError, "str or a list of content parts", "None"),
        bad("user_prompt", PARTS[0], TypeError, "a list of content parts", "dict"),
        bad("user_prompt", b"x", TypeError, "str or a list of content parts", "bytes"),
        bad("user_prompt", [], ConfigError, "at least one content part"),
        bad("user_prompt", "x" * 100_000 + SURROGATE, ConfigError, "surrogate"),
        bad("params", [1], TypeError, "mapping", "[1]"),
        bad("params", {"temperature": math.inf}, ConfigError, "['temperature']", "finite", "inf"),
        *(bad("messages", value, TypeError, "sequence", repr(value)) for value in ("hello", 0)),
        bad("messages", {"role": "user"}, TypeError, "sequence", "dict"),
        bad("messages", ["hello"], TypeError, "messages[0]", "mapping", "'hello'"),
        bad("messages", [{"content": "x"}], ConfigError, "messages[0]", "role", "None"),
        bad("messages", [{"role": "user"}, {"role": ""}], ConfigError, "messages[1]", "role", "''"),
        bad("messages", [{"role": "user", "content": {1}}], TypeError, "[0]['content']", "JSON"),
    ],
)
def test_a_submission_is_refused(
    field: str, value: Any, error: type[Exception], says: tuple[str, ...]
) -> None:
    refuses(lambda: submit(**{field: value}), field, error, *says)


def test_an_id_is_a_number_that_is_not_negative() -> None:
    assert valid_id(0) == 0
    refuses(lambda: valid_id(-1), "request_id", ConfigError, "-1")
