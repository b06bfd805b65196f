"""The ready-made exit tools."""

import json

import pytest

from llama_worker.exit_tools import ALL_EXIT_TOOLS, REQUEST_DECISION
from llama_worker.types import ToolDef


@pytest.mark.parametrize("tool", ALL_EXIT_TOOLS, ids=lambda tool: tool["function"]["name"])
def test_each_is_an_openai_function_with_a_closed_object_schema(tool: ToolDef) -> None:
    assert json.loads(json.dumps(tool)) == tool
    assert tool["type"] == "function"
    assert tool["function"]["description"]
    schema = tool["function"]["parameters"]
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) <= set(schema["properties"])
    assert all(item["description"] and item["type"] for item in schema["properties"].values())


def test_a_decision_has_two_to_six_options_and_a_default() -> None:
    schema = REQUEST_DECISION["function"]["parameters"]
    assert set(schema["required"]) == {"question", "options", "default"}
    assert (schema["properties"]["options"]["minItems"], schema["properties"]["options"]["maxItems"]) == (2, 6)
