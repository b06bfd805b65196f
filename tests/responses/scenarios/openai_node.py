"""`openai` for Node, its stream helper: 5 scenarios."""

import json
from collections.abc import Callable
from typing import Any

from tests.responses.relay import FAILS
from tests.responses.scenarios.node import Json, Scenario, run_scenarios
from tests.responses.scenarios.sayings import ADD_PARAMETERS, GREETING, STORY, calls, thinks

Check = Callable[[Json], None]
SCENARIOS: list[Scenario] = []
ADD: Json = {"type": "function", "name": "add", "parameters": ADD_PARAMETERS, "strict": False}


def scenario(said: str, *, model: str = "m", **settings: Any) -> Callable[[Check], Check]:
    """Adds a scenario of one request."""

    def add(check: Check) -> Check:
        def check_result(result: Json) -> None:
            assert (result["thrown"] is None) == (model != FAILS), result
            check(result)

        SCENARIOS.append(
            Scenario(check.__name__, {"model": model, "input": said, **settings}, check_result)
        )
        return check

    return add


def run_all(base_url: str) -> dict[str, Json]:
    """What every scenario gave, by its name."""
    return run_scenarios("openai_client.mjs", base_url, SCENARIOS)


@scenario(GREETING)
def text(result: Json) -> None:
    assert (result["text"], result["final"]["output_text"]) == (GREETING, GREETING)
    assert (result["kinds"][0], result["kinds"][-1]) == ("response.created", "response.completed")
    assert result["final"]["usage"]["output_tokens"] > 1


@scenario(thinks("Greet back.", GREETING))
def reasoning(result: Json) -> None:
    thought, said = result["final"]["output"]
    assert thought["content"][0]["text"].strip() == "Greet back."
    assert said["content"][0]["text"] == GREETING
    assert "response.reasoning_text.done" in result["kinds"]


@scenario(calls({"a": 2, "b": 3}), tools=[ADD])
def a_call(result: Json) -> None:
    (call,) = result["final"]["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 2, "b": 3})
    assert "response.function_call_arguments.done" in result["kinds"]


@scenario(GREETING, max_output_tokens=2)
def the_token_limit(result: Json) -> None:
    assert (result["final"]["status"], result["kinds"][-1]) == ("incomplete", "response.incomplete")
    assert result["final"]["incomplete_details"] == {"reason": "max_output_tokens"}


@scenario(STORY, model=FAILS)
def an_error_in_mid_stream(result: Json) -> None:
    assert result["text"] == "Once"
    assert "out of memory" in str(result["thrown"])
