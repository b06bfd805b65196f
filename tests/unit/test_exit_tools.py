"""The ready-made exit tools."""

import json
from typing import Any

import pytest

from llama_worker.exit_tools import (
    ALL_EXIT_TOOLS,
    DECLARE_OUTCOME,
    REQUEST_DECISION,
    REQUEST_ESCALATION,
    SIGNAL_ISSUE,
)
from llama_worker.types import ToolDef


def properties(tool: ToolDef) -> dict[str, Any]:
    return dict(tool["function"]["parameters"]["properties"])


def test_all_of_them_are_in_the_tuple_under_distinct_names() -> None:
    assert ALL_EXIT_TOOLS == (SIGNAL_ISSUE, REQUEST_ESCALATION, REQUEST_DECISION, DECLARE_OUTCOME)
    assert [tool["function"]["name"] for tool in ALL_EXIT_TOOLS] == [
        "signal_issue",
        "request_escalation",
        "request_decision",
        "declare_outcome",
    ]


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


def test_an_issue_has_code_severity_and_summary() -> None:
    assert set(SIGNAL_ISSUE["function"]["parameters"]["required"]) == {"code", "severity", "summary"}
    assert properties(SIGNAL_ISSUE)["severity"]["enum"] == ["info", "warning", "error", "critical"]


def test_a_decision_has_two_to_six_options_and_a_default() -> None:
    assert set(REQUEST_DECISION["function"]["parameters"]["required"]) == {"question", "options", "default"}
    options = properties(REQUEST_DECISION)["options"]
    assert (options["minItems"], options["maxItems"]) == (2, 6)
