"""Clients of Node: four lines of @ai-sdk/openai, 18 scenarios each, and the stream helper of `openai`.

`make test-responses` installs them; without them these tests are skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fake_script import (
    ErrorData,
    Fin,
    Headers,
    HttpError,
    KillSelf,
    Reasoning,
    Reset,
    Role,
    Step,
    Text,
    ToolCall,
    plain_reply,
    steps_json,
)
from tests.responses.conftest import WAIT_S, Client

NODE = Path(__file__).parent / "node"
LINES = ("ai-sdk-openai-2.0", "ai-sdk-openai-3.0", "ai-sdk-openai-3.1", "ai-sdk-openai-4.0")
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules").is_dir(), reason="run `make test-responses`"
)

Json = dict[str, Any]
USER: Json = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
ADD: Json = {
    "type": "function",
    "name": "add",
    "description": "add",
    "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
TEXT = plain_reply(Text("Hel"), Text("lo"))
THOUGHT = plain_reply(Reasoning("h"), Reasoning("m"), Text("Hello"))
CALL = plain_reply(Reasoning("hm"), ToolCall("add", '{"a": 1}', pieces=3), reason="tool_calls")
CALLS = plain_reply(
    ToolCall("add", '{"a": 1}', call_id="c1", pieces=3),
    ToolCall("add", '{"a": 2}', call_id="c2", index=1, pieces=3),
    reason="tool_calls",
)
HALF: list[Step] = [Headers(), Role(), Text("Hel")]


def run(script: str, client: Client, jobs: list[Json]) -> list[Json]:
    done = subprocess.run(
        ["node", str(NODE / script)],
        input=json.dumps({"baseURL": client.proxy.base_url, "jobs": jobs}),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: list[Json] = json.loads(done.stdout)
    return results


@pytest.fixture(params=LINES)
def line(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Sdk:
    """One line of the SDK."""

    def __init__(self, client: Client, line: str) -> None:
        self.client = client
        self.line = line

    def turns(self, *turns: Json) -> list[Json]:
        """What each turn gave."""
        (result,) = run("ai_sdk.mjs", self.client, [{"line": self.line, "turns": list(turns)}])
        done: list[Json] = result["turns"]
        return done

    def one(self, *steps: Step, stream: bool = True, **settings: Any) -> Json:
        """One turn's."""
        (done,) = self.turns(turn(*steps, stream=stream, **settings))
        return done


def turn(*steps: Step, stream: bool = True, prompt: list[Json] | None = None, **settings: Any) -> Json:
    return {
        "steps": steps_json(*steps),
        "stream": stream,
        "prompt": [USER] if prompt is None else prompt,
        "settings": settings,
    }


@pytest.fixture
def sdk(fake: Client, line: str) -> Sdk:
    return Sdk(fake, line)


def arguments(result: Json) -> list[Any]:
    return [json.loads(call["input"]) for call in result["calls"]]


@pytest.mark.parametrize("stream", [True, False])
def test_text(sdk: Sdk, stream: bool) -> None:
    result = sdk.one(*TEXT, stream=stream)
    assert (result["thrown"], result["errors"]) == (None, [])
    assert (result["text"], result["finish"], result["usage"]) == ("Hello", "stop", 2)


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning(sdk: Sdk, stream: bool) -> None:
    result = sdk.one(*THOUGHT, stream=stream)
    assert (result["thrown"], result["errors"]) == (None, [])
    assert (result["reasoning"], result["text"]) == ("hm", "Hello")


@pytest.mark.parametrize("stream", [True, False])
def test_a_tool_call(sdk: Sdk, stream: bool) -> None:
    result = sdk.one(*CALL, stream=stream, tools=[ADD])
    assert (result["thrown"], result["errors"]) == (None, [])
    assert (arguments(result), result["finish"], result["reasoning"]) == ([{"a": 1}], "tool-calls", "hm")


def test_parallel_tool_calls(sdk: Sdk) -> None:
    result = sdk.one(*CALLS, tools=[ADD])
    assert (arguments(result), result["errors"]) == ([{"a": 1}, {"a": 2}], [])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="stored"),
        pytest.param({"store": False, "include": ["reasoning.encrypted_content"]}, id="stateless"),
    ],
)
def test_a_tools_result_goes_back_with_the_reasoning(sdk: Sdk, options: Json) -> None:
    given: Json = {"tools": [ADD], "providerOptions": {"openai": options}}
    first, second = sdk.turns(turn(*CALL, **given), turn(*TEXT, prompt=[], **given))
    assert (first["thrown"], second["thrown"], second["errors"]) == (None, None, [])
    assert second["text"] == "Hello"
    user, assistant, tool = sdk.client.last_chat()["messages"]
    assert user["content"] == "Hi"
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert (tool["content"], tool["tool_call_id"]) == ("5", assistant["tool_calls"][0]["id"])
    assert options or assistant["reasoning_content"] == "hm"


def test_a_conversation(sdk: Sdk) -> None:
    first, second = sdk.turns(turn(*THOUGHT), turn(*TEXT))
    assert (first["thrown"], second["thrown"], second["text"]) == (None, None, "Hello")
    assert [message["role"] for message in sdk.client.last_chat()["messages"]] == ["user", "assistant", "user"]
    assert sdk.client.last_chat()["messages"][1]["content"] == "Hello"


def test_a_system_prompt(sdk: Sdk) -> None:
    (result,) = sdk.turns(turn(*TEXT, prompt=[{"role": "system", "content": "Be terse."}, USER]))
    assert result["text"] == "Hello"
    assert sdk.client.last_chat()["messages"][0] == {"role": "system", "content": "Be terse."}


def test_the_token_limit(sdk: Sdk) -> None:
    result = sdk.one(*plain_reply(Text("Hel"), reason="length"), maxOutputTokens=1)
    assert (result["finish"], result["text"], result["errors"]) == ("length", "Hel", [])
    assert sdk.client.last_chat()["max_tokens"] == 1


def test_a_call_that_the_limit_cut(sdk: Sdk) -> None:
    result = sdk.one(*plain_reply(ToolCall("add", '{"a": '), reason="length"), tools=[ADD])
    assert (result["finish"], result["errors"]) == ("length", [])


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param([ErrorData(500, "out of memory")], id="error record"),
        pytest.param([KillSelf()], id="killed server"),
        pytest.param([Fin()], id="silent end"),
        pytest.param([Reset()], id="reset"),
    ],
)
def test_a_broken_stream_is_seen_to_be_one(sdk: Sdk, fault: list[Step]) -> None:
    result = sdk.one(*HALF, *fault)
    assert result["text"] == "Hel"
    assert result["errors"]
    assert result["finish"] in ("error", "other", "unknown")


def test_a_refused_request_is_an_error(sdk: Sdk) -> None:
    result = sdk.one(HttpError(400, "too long", "exceed_context_size_error"))
    assert result["status"] == 400
    assert "too long" in result["thrown"]


def test_structured_output(sdk: Sdk) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    result = sdk.one(*plain_reply(Text('{"a": 1}')), responseFormat={"type": "json", "schema": schema, "name": "x"})
    assert (result["text"], result["errors"]) == ('{"a": 1}', [])
    assert sdk.client.last_chat()["response_format"]["json_schema"]["schema"] == schema


def test_a_chosen_tool(sdk: Sdk) -> None:
    other = {**ADD, "name": "sub"}
    result = sdk.one(*CALL, tools=[other, ADD], toolChoice={"type": "tool", "toolName": "add"})
    assert (arguments(result), result["errors"]) == ([{"a": 1}], [])
    sent = sdk.client.last_chat()
    assert (sent["tool_choice"], [tool["function"]["name"] for tool in sent["tools"]]) == ("required", ["add"])


def test_the_stream_helper_of_openai(fake: Client) -> None:
    """Text, reasoning, a call, the limit, an error."""
    tool = {"type": "function", "name": "add", "parameters": ADD["inputSchema"], "strict": False}
    bodies: list[Json] = [
        {"fake_script": steps_json(*TEXT)},
        {"fake_script": steps_json(*THOUGHT)},
        {"fake_script": steps_json(*CALL), "tools": [tool]},
        {"fake_script": steps_json(*plain_reply(Text("Hel"), reason="length"))},
        {"fake_script": steps_json(*HALF, ErrorData(500, "out of memory"))},
    ]
    jobs = [{"body": {"model": "m", "input": "Hi", **body}} for body in bodies]
    text, thought, call, limit, error = run("openai_client.mjs", fake, jobs)
    assert (text["thrown"], text["status"], text["text"]) == (None, "completed", "Hello")
    assert (thought["thrown"], thought["text"], thought["output"][0]["type"]) == (None, "Hello", "reasoning")
    assert (call["thrown"], call["output"][-1]["arguments"]) == (None, '{"a": 1}')
    assert (limit["thrown"], limit["status"], limit["text"]) == (None, "incomplete", "Hel")
    assert "out of memory" in error["thrown"]
