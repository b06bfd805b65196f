"""A mistake in a tool's definition is found when the worker's config is made."""

from typing import Any

import pytest

from llama_worker import ConfigError
from llama_worker.config.tool_schemas import checked_tools
from llama_worker.exit_tools import ALL_EXIT_TOOLS
from tests.unit.config.cases import refuses, tool

NUMBER = {"type": "number"}
DRAFT_3 = {
    "$schema": "http://json-schema.org/draft-03/schema#",
    "properties": {"a": {"type": "number", "required": True}},
}


def taking(**schema: Any) -> Any:
    """A tool with these parameters."""
    return tool(parameters=schema)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            taking(type="object", properties={"a": {"type": "strnig"}}),
            "(add) parameters.properties.a.type: unknown type 'strnig'; did you mean 'string'?",
        ),
        (taking(type="object", properties={"a": {"type": "file"}}), "known: string, number"),
        (taking(type="object", properties=["a"]), "properties: not a JSON schema: ['a'] is not of"),
        (taking(type="object", properties={"a": {"required": True}}), "not a JSON schema"),
        (taking(type="array", items=NUMBER), "needs 'type': 'object', since a tool's arguments"),
        (taking(type="object", propertys={}), "has 'propertys'; did you mean 'properties'?"),
        (
            taking(properties={"a": {"type": "array", "items": {"descripton": "x"}}}),
            "parameters.properties.a.items has 'descripton'; did you mean 'description'?",
        ),
        (tool(paramters={"type": "object"}), "has 'paramters'; did you mean 'parameters'?"),
        ({**tool(), "functoin": {}}, "has 'functoin'; did you mean 'function'?"),
        (
            taking(type="object", properties={"city": NUMBER}, required=["ctiy"]),
            "required lists 'ctiy', which is not a property; did you mean 'city'?",
        ),
        (taking(type="object", required=["a"]), "which is not a property; known: none"),
        (
            taking(properties={"at": {"type": "object", "properties": {}, "required": ["x"]}}),
            "parameters.properties.at: required lists 'x'",
        ),
        (
            taking(properties={"at": {"type": "string", "minLength": 5, "maxLength": 2}}),
            "parameters.properties.at: minLength 5 is above maxLength 2; no value",
        ),
        (tool("get weather"), "'get weather' must be up to 128 letters, digits and _ - . : /"),
        (tool("a" * 129), "up to 128"),
    ],
)
def test_a_slip_is_named_with_place_and_hint(given: dict[str, Any], says: str) -> None:
    refuses(lambda: checked_tools("tools", [given]), "tools[0]", ConfigError, says)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (tool("a"), TypeError, ["sequence of tool definitions"]),
        ("a", TypeError, ["sequence", "'a'"]),
        ([None], TypeError, ["[0]", "mapping", "None"]),
        ([tool("a") | {"type": "tool"}], ConfigError, ["[0]", "'function'", "'tool'"]),
        ([{"type": "function", "name": "a"}], TypeError, ["[0]", "'function'", "None"]),
        ([tool("")], ConfigError, ["[0]", "name", "empty"]),
        ([tool(name=7)], TypeError, ["[0]", "name", "str", "7"]),
        ([tool(description=None)], TypeError, ["[0]", "(add) description", "str", "NoneType"]),
        ([tool(parameters=[])], TypeError, ["[0]", "parameters", "JSON schema object", "[]"]),
        ([taking(**{"$schema": 7})], TypeError, ["[0]", "$schema", "str", "7"]),
        ([taking(**DRAFT_3)], ConfigError, ["[0]", "$schema", "draft 4", "'required'"]),
        ([tool("a"), taking(x={1})], TypeError, ["[1]", "['x']", "JSON-serializable", "not set"]),
    ],
)
def test_what_defines_no_tools_is_refused(
    given: Any, error: type[Exception], says: list[str]
) -> None:
    refuses(lambda: checked_tools("tools", given), "tools", error, *says)


@pytest.mark.parametrize(
    "given",
    [
        tool(),
        tool("mcp/files.read-2:now", strict=True),
        {**tool(), "x-mine": 1, "cache_control": {"type": "ephemeral"}},
        taking(),
        taking(type="object", properties={"a": NUMBER}, required=["a"], **{"x-order": 1}),
        taking(properties={"a": {"type": ["string", "null"], "example": "x", "nullable": True}}),
        taking(type="object", required=["a"], additionalProperties=NUMBER),
        taking(properties={}, required=["a"], allOf=[{"properties": {"a": NUMBER}}]),
        taking(required=["b"], **{"if": {}, "then": {"properties": {"b": NUMBER}}}),
        taking(properties={"a": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}}),
        taking(required=["b"], dependentSchemas={"a": {"properties": {"b": NUMBER}}}),
        taking(**{"$ref": "#/$defs/all", "$defs": {"all": {"type": "object"}}}),
        taking(**{"$schema": "http://json-schema.org/draft-07/schema#"}, additionalItems=False),
        taking(properties={"required": NUMBER, "propertys": NUMBER, "anything": True}),
        *ALL_EXIT_TOOLS,
    ],
)
def test_a_sound_definition_is_taken_as_it_is(given: Any) -> None:
    assert checked_tools("exit_tools", [given]) == (given,)
