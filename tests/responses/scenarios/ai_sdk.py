"""@ai-sdk/openai: 18 scenarios for each of its lines."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from tests.responses.relay import DIES, FAILS
from tests.responses.scenarios.node import Json, Scenario, run_scenarios
from tests.responses.scenarios.sayings import (
    ADD_PARAMETERS,
    GREETING,
    STORY,
    TALE,
    TOO_LONG,
    calls,
    thinks,
)

LINES = (
    "ai-sdk-openai-2.0",
    "ai-sdk-openai-3.0",
    "ai-sdk-openai-3.1",
    "ai-sdk-openai-4.0",
)  # of node/package.json
ADD: Json = {"type": "function", "name": "add", "description": "add", "inputSchema": ADD_PARAMETERS}
SUB: Json = {**ADD, "name": "sub"}
STATELESS: Json = {"openai": {"store": False, "include": ["reasoning.encrypted_content"]}}
PERSON_SCHEMA: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["John"]},
        "age": {"type": "integer", "enum": [5, 7]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SUM = {"a": 2, "b": 3}
CALL = calls(SUM)
LOOP = thinks("Add them.", CALL)

Turns = list[Json]
Check = Callable[..., None]
SCENARIOS: list[Scenario] = []


def scenario(*turns: Json, goes_well: bool = True) -> Callable[[Check], Check]:
    """Adds a scenario of these turns; its check gets what each turn gave."""

    def add(check_turns: Check) -> Check:
        def check(done: Turns) -> None:
            if goes_well:
                went_well(*done)
            check_turns(*done)

        SCENARIOS.append(Scenario(check_turns.__name__, {"turns": turns}, check))
        return check_turns

    return add


def turn(
    *said: str,
    system: str = "",
    results: Sequence[str] = (),
    stream: bool = True,
    model: str = "m",
    by_id: bool = False,
    abort_after: int = 0,
    **settings: Any,
) -> Json:
    """A request: what the user says, in parts; `results` answer the calls of the turn before."""
    prompt: list[Json] = [{"role": "system", "content": system}] if system else []
    if said:
        prompt.append(
            {"role": "user", "content": [{"type": "text", "text": part} for part in said]}
        )
    given = {
        "prompt": prompt,
        "results": results,
        "stream": stream,
        "model": model,
        "settings": settings,
    }
    return {**given, "byId": by_id, "abortAfter": abort_after}


def run_line(line: str, base_url: str) -> dict[str, Turns]:
    """What every scenario gave with one line of the SDK, by the scenario's name."""
    return run_scenarios("ai_sdk.mjs", base_url, SCENARIOS, line=line)


def went_well(*turns: Json) -> None:
    for result in turns:
        assert (result["thrown"], result["errors"]) == (None, [])
        assert (result["unbegun"], result["unclosed"]) == (0, 0)


def arguments(result: Json) -> list[Any]:
    return [json.loads(call["input"]) for call in result["calls"]]


# ---------------------------------------------------------------- text and reasoning


@scenario(turn(GREETING))
def text_is_streamed(result: Json) -> None:
    assert (result["text"], result["finish"]) == (GREETING, "stop")
    assert result["deltas"] >= 1  # words that come together may go in one piece
    assert result["usage"]["input"] > 0
    assert result["usage"]["output"] > 1


@scenario(turn(GREETING, stream=False))
def text_comes_in_one_piece(result: Json) -> None:
    assert (result["text"], result["finish"]) == (GREETING, "stop")


@scenario(turn(thinks("Greet back.", GREETING)))
def reasoning_is_shown(result: Json) -> None:
    assert (result["reasoning"].strip(), result["text"]) == ("Greet back.", GREETING)


@scenario(
    turn(thinks("Greet.", GREETING), system="Be terse."), turn("Go on, and", "on and on and on.")
)
def a_conversation_goes_on(*turns: Json) -> None:
    assert [result["text"] for result in turns] == [GREETING, "Go on, and\non and on and on."]


@scenario(turn(GREETING), turn(GREETING, by_id=True))
def a_conversation_goes_on_by_id(first: Json, second: Json) -> None:
    assert second["text"] == GREETING
    # the same was said: the rest is what came before
    assert second["usage"]["input"] > first["usage"]["input"]


# ---------------------------------------------------------------- tools


@scenario(turn(CALL, tools=[ADD]))
def a_call_is_streamed(result: Json) -> None:
    assert (arguments(result), result["finish"]) == ([SUM], "tool-calls")


@scenario(turn(CALL, tools=[ADD], stream=False))
def a_call_comes_in_one_piece(result: Json) -> None:
    assert (arguments(result), result["finish"]) == ([SUM], "tool-calls")


@scenario(
    turn(calls(SUM, {"a": 4, "b": 5}), tools=[ADD]),
    turn(results=["It is 5.", "It is 9."], tools=[ADD]),
)
def two_calls_in_one_turn_are_answered(first: Json, second: Json) -> None:
    assert arguments(first) == [SUM, {"a": 4, "b": 5}]
    assert len({call["toolCallId"] for call in first["calls"]}) == 2
    assert (second["text"], second["finish"]) == ("It is 9.", "stop")


def a_tool_loop(**settings: Json) -> list[Json]:
    second = thinks("And one.", calls({"a": 5, "b": 1}))
    given: Json = {"tools": [ADD], **settings}
    return [
        turn(LOOP, **given),
        turn(results=[second], **given),
        turn(results=["It is 6."], **given),
    ]


@scenario(*a_tool_loop())
def a_tool_loop_refers_to_stored_items(*turns: Json) -> None:
    assert [arguments(result) for result in turns] == [[SUM], [{"a": 5, "b": 1}], []]
    assert [result["finish"] for result in turns] == ["tool-calls", "tool-calls", "stop"]
    assert [result["reasoning"].strip() for result in turns] == ["Add them.", "And one.", ""]
    assert turns[-1]["text"] == "It is 6."


@scenario(*a_tool_loop(providerOptions=STATELESS))
def a_tool_loop_needs_no_state(*turns: Json) -> None:
    a_tool_loop_refers_to_stored_items(*turns)


@scenario(turn(CALL, tools=[ADD, SUB], toolChoice={"type": "tool", "toolName": "sub"}))
def a_chosen_tool_is_called(result: Json) -> None:
    assert {call["toolName"] for call in result["calls"]} == {"sub"}


# ---------------------------------------------------------------- limits and forms


@scenario(turn(GREETING, maxOutputTokens=2))
def the_token_limit_is_told(result: Json) -> None:
    assert (result["finish"], result["usage"]["output"]) == ("length", 2)
    assert GREETING.startswith(result["text"])


@scenario(turn(CALL, tools=[ADD], maxOutputTokens=20), goes_well=False)
def a_call_that_the_limit_cut_is_not_finished(result: Json) -> None:
    assert (result["thrown"], result["errors"], result["finish"]) == (None, [], "length")


@scenario(
    turn(
        "John is five.", responseFormat={"type": "json", "schema": PERSON_SCHEMA, "name": "person"}
    )
)
def a_schema_is_kept(result: Json) -> None:
    said = json.loads(result["text"])
    assert (said["name"], said["age"] in (5, 7)) == ("John", True)


# ---------------------------------------------------------------- what goes wrong


@scenario(turn(TOO_LONG), goes_well=False)
def a_prompt_that_is_too_long_is_refused(result: Json) -> None:
    assert result["status"] == 400
    assert "context size" in result["thrown"]


def check_broken(result: Json) -> None:
    """What was said until then is there, and the user sees that it is not all."""
    assert (result["text"], result["unbegun"]) == ("Once", 0)
    assert result["errors"] or result["thrown"]
    assert result["finish"] != "stop"


@scenario(turn(STORY, model=FAILS), goes_well=False)
def an_error_in_mid_stream_is_seen(result: Json) -> None:
    check_broken(result)
    assert "out of memory" in str(result["errors"] or result["thrown"])


@scenario(turn(STORY, model=DIES), goes_well=False)
def a_server_that_dies_is_seen_to(result: Json) -> None:
    check_broken(result)


@scenario(turn(TALE, abort_after=2), turn(GREETING), goes_well=False)
def a_user_who_aborts_can_go_on(first: Json, second: Json) -> None:
    assert TALE.startswith(first["text"])
    assert (0 < len(first["text"]) < len(TALE), first["unbegun"]) == (True, 0)
    assert "Abort" in first["thrown"]
    went_well(second)
    assert second["text"] == GREETING
