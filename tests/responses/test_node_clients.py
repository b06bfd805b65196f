"""Clients of Node: four lines of @ai-sdk/openai, and the stream helper of `openai`.

`make test-responses` installs them; without them these tests are skipped.
"""

import json
from collections.abc import Iterator
from itertools import product

import pytest

from llama_worker.responses.proxy import ResponsesProxy, ResponsesProxyConfig
from llama_worker.testing.scripts import (
    Reasoning,
    Script,
    ScriptedReply,
    Text,
    ToolCall,
    plain_reply,
)
from tests.responses.conftest import MakeClient
from tests.responses.scenarios import ai_sdk, openai_node
from tests.responses.scenarios.node import Json, Scenario, is_installed, run_node

pytestmark = pytest.mark.skipif(not is_installed(), reason="run `make test-responses`")
CALL = plain_reply(Reasoning("hm"), ToolCall("add", '{"a": 1}', pieces=3), reason="tool_calls")
ANSWER = plain_reply(Text("It is 5."))


@pytest.fixture(scope="module")
def base_url(real_url: str) -> Iterator[str]:
    """A proxy in front of the real llama-server."""
    with ResponsesProxy(ResponsesProxyConfig(upstream=real_url, port=0)) as proxy:
        yield proxy.base_url


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every line with `make test-responses`, else the oldest and the newest: each takes 20 s of a
    core."""
    if "done" in metafunc.fixturenames:
        oldest, *_, newest = ai_sdk.LINES
        lines = ai_sdk.LINES if metafunc.config.getoption("--every-line") else (oldest, newest)
        metafunc.parametrize("done", lines, indirect=True, scope="module")


@pytest.fixture(scope="module")
def done(request: pytest.FixtureRequest, base_url: str) -> dict[str, ai_sdk.Turns]:
    """What every scenario gave with one line of the SDK."""
    return ai_sdk.run_line(request.param, base_url)


@pytest.mark.server
@pytest.mark.parametrize("scenario", ai_sdk.SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_ai_sdk(done: dict[str, ai_sdk.Turns], scenario: Scenario) -> None:
    scenario.check(done[scenario.name])


@pytest.fixture(scope="module")
def helped(base_url: str) -> dict[str, Json]:
    """What every scenario gave with the stream helper."""
    return openai_node.run_all(base_url)


@pytest.mark.server
@pytest.mark.parametrize("scenario", openai_node.SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_stream_helper_of_openai(helped: dict[str, Json], scenario: Scenario) -> None:
    scenario.check(helped[scenario.name])


def test_a_tool_result_follows_its_call_and_reasoning(make_client: MakeClient) -> None:
    """With every line, stored and stateless."""
    jobs = []
    for line, options in product(ai_sdk.LINES, ({}, ai_sdk.STATELESS)):
        given: Json = {"tools": [ai_sdk.ADD], "providerOptions": options}
        turns = [
            ai_sdk.turn("Hi", system="Be terse.", **given),
            ai_sdk.turn(results=["5"], **given),
        ]
        jobs.append({"line": line, "turns": turns})
    client = make_client(Script(replies=[ScriptedReply(CALL), ScriptedReply(ANSWER)] * len(jobs)))
    for turns in run_node("ai_sdk.mjs", client.proxy.base_url, jobs):
        ai_sdk.went_well(*turns)
    second_chats = client.journal.facts("request", path="/v1/chat/completions")[1::2]
    for job, chat in zip(jobs, second_chats, strict=True):
        system, user, assistant, tool = chat["body"]["messages"]
        (call,) = assistant["tool_calls"]
        assert (system["content"], user["content"], assistant["reasoning_content"]) == (
            "Be terse.",
            "Hi",
            "hm",
        ), job
        assert json.loads(call["function"]["arguments"]) == {"a": 1}, job
        assert (tool["content"], tool["tool_call_id"]) == ("5", call["id"]), job
