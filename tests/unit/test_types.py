"""The contract's values, which hosts depend on, and the ready-made exit tools. The keys of answers
are held to the tables of the reference (tests/docs)."""

import json
from enum import StrEnum

import pytest

from llama_worker.exit_tools import ALL_EXIT_TOOLS
from llama_worker.types import request
from llama_worker.types.chat import ToolDef
from llama_worker.types.worker import WorkerState


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (WorkerState, "stopped running ready failed"),
        (request.RequestState, "running tool_running completed failed canceled"),
        (request.RequestFinishReason, "stop max_tokens canceled failed"),
        (request.RequestPhase, "waiting prefill generating tool done"),
    ],
)
def test_the_values_of_an_enum(kind: type[StrEnum], values: str) -> None:
    assert {member.value for member in kind} == set(values.split())
    assert all(
        member == member.value == str(member) == json.loads(json.dumps(member)) for member in kind
    )


def test_three_states_are_terminal() -> None:
    terminal = [state.value for state in request.RequestState if state.is_terminal]
    assert terminal == ["completed", "failed", "canceled"]


@pytest.mark.parametrize("tool", ALL_EXIT_TOOLS, ids=lambda tool: tool["function"]["name"])
def test_exit_tools_are_functions_with_closed_schemas(tool: ToolDef) -> None:
    assert json.loads(json.dumps(tool)) == tool
    assert tool["type"] == "function"
    assert tool["function"]["description"]
    schema = tool["function"]["parameters"]
    assert (schema["type"], schema["additionalProperties"]) == ("object", False)
    assert set(schema["required"]) <= set(schema["properties"])
    assert all(item["description"] and item["type"] for item in schema["properties"].values())
