"""The official Python clients, against the real llama-server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import agents
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.responses.conftest import WAIT_S, Client
from tests.responses.oracle import check_response
from tests.server.conftest import ENDLESS, forced

pytestmark = pytest.mark.server

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "add",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


# A model of 135M parameters calls no tool by itself, but at temperature 0 it copies what it was shown three times.
SHOWN: list[Any] = [
    item
    for number, (a, b) in enumerate([(4, 5), (6, 1), (7, 2)])
    for item in (
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"type": "function_call", "call_id": f"call_{number}", "name": "add", "arguments": f'{{"a": {a}, "b": {b}}}'},
        {"type": "function_call_output", "call_id": f"call_{number}", "output": str(a + b)},
        {"type": "message", "role": "assistant", "content": f"It is {a + b}."},
    )
]
QUESTION: Any = {"role": "user", "content": "What is 2 + 3?"}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def client(real: Client) -> Iterator[openai.OpenAI]:
    with real.openai() as client:
        yield client


def test_create(client: openai.OpenAI) -> None:
    response = client.responses.create(model="m", input="Hi", extra_body=forced("Hello there."))
    assert (response.status, response.output_text) == ("completed", "Hello there.")
    assert response.usage is not None
    assert response.usage.output_tokens > 0
    check_response(json.loads(response.to_json()))


def test_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m", input="Hi", extra_body=forced("Hello there.")) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Hello there."


def test_create_with_stream(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="m", input="Hi", stream=True, extra_body=forced("Hello there."))
    assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "Hello there."


def test_reasoning(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="m",
        input="Hi",
        include=["reasoning.encrypted_content"],
        extra_body=forced("<think>Greet back.</think>Hello there."),
    )
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.summary[0].text == "Greet back."
    assert message.type == "message"
    history: Any = [*response.output, {"role": "user", "content": "And?"}]
    again = client.responses.create(model="m", input=history, extra_body=forced("Yes."))
    assert again.output_text == "Yes."


def test_the_token_limit_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="m", input="Hi", max_output_tokens=5, extra_body=ENDLESS)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].type == "message"
    assert response.output[0].status == "incomplete"


def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input="Hi " * 5000)
    assert refused.value.code == "context_length_exceeded"


def test_parse_gives_what_the_schema_says(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        model="m", input="John is 5 years old.", text_format=Person, temperature=0, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Person)


def test_a_json_object_is_one(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="m",
        input="Give me a JSON object with one short key.",
        text={"format": {"type": "json_object"}},
        temperature=0,
        max_output_tokens=300,
    )
    if response.status == "completed":  # a small model may not come to an end
        assert isinstance(json.loads(response.output_text), dict)
    assert response.output_text.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_forced_call_and_its_output(client: openai.OpenAI, choice: Any) -> None:
    first = client.responses.create(
        model="m",
        input=[*SHOWN, QUESTION],
        tools=[ADD],
        tool_choice=choice,
        temperature=0,
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    call = first.output[-1]
    assert call.type == "function_call"
    assert call.name == "add"
    assert json.loads(call.arguments).keys() == {"a", "b"}
    second = client.responses.create(
        model="m",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "5"}],
        extra_body=forced("It is 5."),
    )
    assert second.output_text == "It is 5."


def test_a_conversation_by_id_and_retrieval(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="Hi", extra_body=forced("Hello."))
    second = client.responses.create(model="m", input="Go on", previous_response_id=first.id, extra_body=forced("Yes."))
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == "Yes."


def test_an_unknown_response_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input="Hi", previous_response_id="resp_unknown")
    assert refused.value.code == "previous_response_not_found"


def test_built_in_tools_are_ignored_with_a_warning_header(client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        model="m", input="Hi", tools=[{"type": "web_search"}], extra_body=forced("Hello.")
    )
    assert "web_search" in raw.headers["x-llama-worker-warning"]
    assert raw.parse().output_text == "Hello."


def test_what_is_no_response_passes_through(client: openai.OpenAI) -> None:
    assert client.models.list().data
    chat = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hi"}], extra_body=forced("Hello.")
    )
    assert chat.choices[0].message.content == "Hello."


def test_eighty_streams_one_after_another_never_fail(client: openai.OpenAI) -> None:
    for _ in range(80):
        with client.responses.stream(model="m", input="Hi", extra_body=forced("Yes.")) as stream:
            assert stream.get_final_response().output_text == "Yes."


@agents.function_tool
def add(a: int, b: int) -> int:
    """add"""
    return a + b


def run_agent(real: Client, agent: agents.Agent[Any], prompt: Any, *, stream: bool = False) -> Any:
    """What the agent's run ends with."""

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=real.proxy.base_url, api_key="k", timeout=WAIT_S) as client:
            model = agents.OpenAIResponsesModel(model="m", openai_client=client)
            agent.model = model
            config = agents.RunConfig(tracing_disabled=True)
            if not stream:
                return (await agents.Runner.run(agent, prompt, run_config=config, max_turns=3)).final_output
            result = agents.Runner.run_streamed(agent, prompt, run_config=config, max_turns=3)
            async for _ in result.stream_events():
                pass
            return result.final_output

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_answers(real: Client, stream: bool) -> None:
    settings = agents.ModelSettings(extra_body=forced("Hello there."))
    agent = agents.Agent(name="a", instructions="Be terse.", model_settings=settings)
    assert run_agent(real, agent, "Hi", stream=stream) == "Hello there."


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_its_tool(real: Client, stream: bool) -> None:
    settings = agents.ModelSettings(tool_choice="required", temperature=0, max_tokens=300, parallel_tool_calls=False)
    agent = agents.Agent(
        name="a", tools=[add], model_settings=settings, tool_use_behavior="stop_on_first_tool", instructions="Add."
    )
    assert run_agent(real, agent, [*SHOWN, QUESTION], stream=stream) == "5"


def test_an_agent_gives_structured_output(real: Client) -> None:
    settings = agents.ModelSettings(temperature=0, max_tokens=200)
    agent = agents.Agent(name="a", output_type=Person, model_settings=settings, instructions="Extract.")
    assert isinstance(run_agent(real, agent, "John is 5 years old."), Person)


def test_raw_events_are_read_by_any_http_client(real: Client) -> None:
    body = {"input": "Hi", "stream": True, **forced("Hello.")}
    with httpx.stream("POST", f"{real.proxy.base_url}/responses", json=body, timeout=WAIT_S) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("event: ")]
    assert lines[-1] == "event: response.completed"
