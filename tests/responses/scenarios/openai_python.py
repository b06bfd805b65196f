"""`openai` for Python and `openai-agents`: 20 scenarios. Each raises where its user would
complain."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import openai
from openai.types.responses import Response
from pydantic import BaseModel

from tests.responses.oracle import check_events, read_sse
from tests.responses.relay import FAILS
from tests.responses.scenarios.sayings import (
    ADD_PARAMETERS,
    GREETING,
    STORY,
    TOO_LONG,
    calls,
    thinks,
)

E = TypeVar("E", bound=Exception)
Scenario = Callable[[openai.OpenAI], None]
SCENARIOS: list[Scenario] = []
WAIT_S = 300.0  # for a server that is slow; the proxy adds next to nothing
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "add",
    "strict": False,
    "parameters": ADD_PARAMETERS,
}
SUB: Any = {**ADD, "name": "sub"}
CALL = calls({"a": 2, "b": 3})
SUM = {"a": 2, "b": 3}


class Person(BaseModel):
    """What answers are parsed into."""

    name: Literal["John"]
    age: Literal[5, 7]


def make_client(base_url: str) -> openai.OpenAI:
    """Tries once; to be closed."""
    return openai.OpenAI(base_url=base_url, api_key="sk-test", max_retries=0, timeout=WAIT_S)


def scenario(run: Scenario) -> Scenario:
    SCENARIOS.append(run)
    return run


def ask(client: openai.OpenAI, said: Any, **settings: Any) -> Response:
    response: Response = client.responses.create(model="m", input=said, **settings)
    return response


def input_tokens(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens


def raised(kind: type[E], request: Callable[[], object]) -> E:
    """The error that it ends with."""
    try:
        request()
    except kind as error:
        return error
    raise AssertionError("it ended as if all were well")


# ---------------------------------------------------------------- text and reasoning


@scenario
def create(client: openai.OpenAI) -> None:
    response = ask(client, GREETING)
    assert (response.status, response.output_text, response.error) == ("completed", GREETING, None)
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


@scenario
def the_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m", input=GREETING) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    # A fast server's words may come in one piece.
    assert ("".join(deltas), final.output_text) == (GREETING, GREETING)
    assert [event.sequence_number for event in events] == list(range(len(events)))


@scenario
def every_event_is_of_the_apis_form(client: openai.OpenAI) -> None:
    body: Any = {"model": "m", "input": thinks("Greet.", GREETING), "stream": True}
    with client.responses.with_streaming_response.create(**body) as reply:
        response = check_events(read_sse(reply.read()))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


@scenario
def reasoning_goes_back_without_state(client: openai.OpenAI) -> None:
    include = ["reasoning.encrypted_content"]
    first = ask(client, thinks("Greet back.", GREETING), store=False, include=include)
    thought, message = first.output
    assert thought.type == "reasoning"
    assert thought.encrypted_content
    history: Any = [thought, message, {"role": "user", "content": "And?"}]
    second = ask(client, history, store=False)
    assert second.output_text == "And?"
    assert input_tokens(second) > input_tokens(ask(client, history[1:], store=False))


@scenario
def untyped_messages_and_null_fields(client: openai.OpenAI) -> None:
    history: Any = [
        {"role": "developer", "content": "Be terse."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": GREETING},
    ]
    unset = dict.fromkeys(
        ("tools", "tool_choice", "text", "reasoning", "metadata", "previous_response_id")
    )
    assert ask(client, history, extra_body=unset).output_text == GREETING


# ---------------------------------------------------------------- limits and forms


@scenario
def the_token_limit_is_incomplete(client: openai.OpenAI) -> None:
    response = ask(client, GREETING, max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@scenario
def a_prompt_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    refused = raised(openai.BadRequestError, lambda: ask(client, TOO_LONG))
    assert refused.code == "context_length_exceeded"


@scenario
def parse_gives_what_the_schema_says(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        model="m", input="John is five.", text_format=Person, max_output_tokens=100
    )
    assert isinstance(response.output_parsed, Person)


@scenario
def a_json_object_is_one(client: openai.OpenAI) -> None:
    response = ask(
        client, "Not JSON.", text={"format": {"type": "json_object"}}, max_output_tokens=100
    )
    assert response.output_text.lstrip().startswith("{")


# ---------------------------------------------------------------- tools


@scenario
def a_call_and_its_output(client: openai.OpenAI) -> None:
    first = ask(client, CALL, tools=[ADD])
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("add", SUM)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It is 5."}
    assert (
        ask(client, [output], previous_response_id=first.id, tools=[ADD]).output_text == "It is 5."
    )


@scenario
def two_calls_in_one_turn_and_outputs_in_parts(client: openai.OpenAI) -> None:
    first = ask(client, calls(SUM, {"a": 4, "b": 5}), tools=[ADD])
    history: Any = [{"role": "user", "content": "Add."}, *first.output]
    for call in first.output:
        assert call.type == "function_call"
        output = [
            {"type": "input_text", "text": f"It is {sum(json.loads(call.arguments).values())}."}
        ]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    assert len(first.output) == 2
    assert ask(client, history, tools=[ADD]).output_text == "It is 9."


@scenario
def a_chosen_tool_is_called(client: openai.OpenAI) -> None:
    response = ask(client, CALL, tools=[ADD, SUB], tool_choice={"type": "function", "name": "sub"})
    assert {getattr(item, "name", None) for item in response.output} == {"sub"}


@scenario
def built_in_tools_do_no_harm(client: openai.OpenAI) -> None:
    response = ask(client, CALL, tools=[{"type": "web_search"}, ADD])
    assert [item.type for item in response.output] == ["function_call"]


# ---------------------------------------------------------------- state


@scenario
def a_conversation_goes_on_by_id(client: openai.OpenAI) -> None:
    first = ask(client, GREETING)
    second = ask(client, "Go on.", previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("Go on.", first.id)
    assert input_tokens(second) > input_tokens(ask(client, "Go on."))


@scenario
def a_response_is_retrieved(client: openai.OpenAI) -> None:
    assert client.responses.retrieve(ask(client, GREETING).id).output_text == GREETING


@scenario
def an_unknown_response_is_refused(client: openai.OpenAI) -> None:
    refused = raised(
        openai.BadRequestError, lambda: ask(client, "Hi", previous_response_id="resp_unknown")
    )
    assert refused.code == "previous_response_not_found"


@scenario
def an_error_in_mid_stream_is_raised(client: openai.OpenAI) -> None:
    said: list[str] = []

    def read() -> None:
        for event in client.responses.create(model=FAILS, input=STORY, stream=True):
            if event.type == "response.output_text.delta":
                said.append(event.delta)

    assert "out of memory" in raised(openai.APIError, read).message
    assert said == ["Once"]


# ---------------------------------------------------------------- openai-agents


def run_agent(
    client: openai.OpenAI, said: str, *, stream: bool = False, output_type: type | None = None
) -> Any:
    """What the run of an agent ends with that has a tool, or gives that type."""
    import agents  # takes two seconds, in every process that collects the tests

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """add"""
        return f"It is {a + b}."

    async def run() -> Any:
        options: Any = {
            "base_url": client.base_url,
            "api_key": "k",
            "timeout": WAIT_S,
            "max_retries": 0,
        }
        async with openai.AsyncOpenAI(**options) as own_client:
            model = agents.OpenAIResponsesModel(model="m", openai_client=own_client)
            tools: list[agents.Tool] = [] if output_type else [add]
            agent = agents.Agent(
                name="a", instructions="Do it.", model=model, tools=tools, output_type=output_type
            )
            config = agents.RunConfig(tracing_disabled=True)
            if not stream:
                return (
                    await agents.Runner.run(agent, said, run_config=config, max_turns=3)
                ).final_output
            result = agents.Runner.run_streamed(agent, said, run_config=config, max_turns=3)
            async for _ in result.stream_events():
                pass
            return result.final_output

    return asyncio.run(run())


@scenario
def an_agent_uses_its_tool(client: openai.OpenAI) -> None:
    assert run_agent(client, thinks("Add them.", CALL)) == "It is 5."


@scenario
def an_agent_that_streams_uses_its_tool(client: openai.OpenAI) -> None:
    assert run_agent(client, thinks("Add them.", CALL), stream=True) == "It is 5."


@scenario
def an_agent_gives_structured_output(client: openai.OpenAI) -> None:
    assert isinstance(run_agent(client, "John is five.", output_type=Person), Person)
