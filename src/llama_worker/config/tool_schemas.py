"""Checks tool definitions, and finds mistakes that a model would be told unnoticed. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

from llama_worker.config.validation import checked_json_object, checked_str, did_you_mean, shown
from llama_worker.errors import ConfigError
from llama_worker.types.chat import ToolDef

_TOOL_KEYS = ("type", "function")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_KEYWORDS = (
    *("type", "properties", "required", "items", "enum", "const", "description", "title"),
    *("default", "format", "pattern", "additionalProperties", "patternProperties"),
    *("propertyNames", "prefixItems", "anyOf", "oneOf", "allOf", "not", "minimum", "maximum"),
    *("minItems", "maxItems", "uniqueItems", "minLength", "maxLength", "examples", "multipleOf"),
    *("exclusiveMinimum", "exclusiveMaximum", "minProperties", "maxProperties", "contains"),
    *("minContains", "maxContains", "dependentRequired", "dependentSchemas", "definitions"),
    *("if", "then", "else", "$ref", "$defs", "$schema", "$id", "$comment", "deprecated"),
    *("dependencies", "additionalItems", "unevaluatedProperties", "unevaluatedItems"),
    *("contentEncoding", "contentMediaType", "readOnly", "writeOnly"),
    *("example", "nullable", "discriminator", "externalDocs"),  # OpenAPI
)
_NEAR = 0.8
# If a string or an array has a minimum above its maximum, the server builds a grammar that takes
# all of the machine's memory (b11434).
_BOUNDS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minimum", "maximum"))
# Keywords that may define more properties: with one, `required` may name what `properties` lacks.
_COMPOSING = {"$ref", "allOf", "anyOf", "oneOf", "then", "else", "dependentSchemas"}
_COMPOSING |= {"patternProperties", "additionalProperties"}


def checked_tools(field: str, value: object) -> tuple[ToolDef, ...]:
    """Check OpenAI function definitions for distinct names and valid schemas; returns copies.

    Raises TypeError or ConfigError; the text names the tool, what is wrong and what would be right.
    """
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise TypeError(f"{field} must be a sequence of tool definitions, not {shown(value)}")
    tools: list[ToolDef] = []
    for index, given in enumerate(value):
        tool = _checked_tool(f"{field}[{index}]", given)
        name = tool["function"]["name"]
        if any(name == other["function"]["name"] for other in tools):
            raise ConfigError(f"{field} has two tools named {name!r}")
        tools.append(tool)
    return tuple(tools)


def _checked_tool(where: str, given: object) -> ToolDef:
    tool = checked_json_object(where, given)
    _check_keys(where, tool, _TOOL_KEYS)
    if tool.get("type") != "function":
        raise ConfigError(f"{where} needs 'type': 'function', not {shown(tool.get('type'))}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise TypeError(f"{where} needs 'function', a mapping with a name, not {shown(function)}")
    name = function.get("name")
    checked_str(f"{where} function name", name, empty=False)
    if not _TOOL_NAME.fullmatch(str(name)):
        raise ConfigError(
            f"{where} function name {shown(name)} must be up to 128 letters, digits and _ - . : /, "
            f"without spaces: the model has to write it"
        )
    where = f"{where} ({name})"
    _check_keys(where, function, _FUNCTION_KEYS)
    # The server answers each request with a 500 if it is anything but a str, even null (b11434).
    checked_str(f"{where} description", function.get("description", ""))
    if (parameters := function.get("parameters")) is not None:
        if not isinstance(parameters, dict):
            raise TypeError(
                f"{where} parameters must be a JSON schema object, not {shown(parameters)}"
            )
        _check_schema(f"{where} parameters", parameters)
    return cast("ToolDef", tool)


def _check_keys(where: str, given: Collection[str], known: Collection[str]) -> None:
    """Raises ConfigError for a key that is nearly a known one; others are left to the server."""
    for key in given:
        if key in known or not key.replace("_", "").isalpha() or key.startswith("x"):
            continue
        if meant := did_you_mean(key, known, cutoff=_NEAR):
            raise ConfigError(f"{where} has {key!r}; {meant}")


def _check_schema(where: str, schema: dict[str, Any]) -> None:
    # imported here: it takes longer than importing all of this package
    from jsonschema import Draft3Validator, Draft202012Validator
    from jsonschema.exceptions import SchemaError, best_match
    from jsonschema.validators import validator_for

    checked_str(f"{where} $schema", schema.get("$schema", ""))
    validator = validator_for(schema, default=Draft202012Validator)
    if validator is Draft3Validator:
        raise ConfigError(
            f"{where} $schema must name draft 4 or later, in which 'required' is a list of names"
        )
    errors = validator(validator.META_SCHEMA).iter_errors(schema)
    error: SchemaError | None = best_match(errors)
    if error is not None:
        raise ConfigError(f"{where}{error.json_path[1:]}: {_what_is_wrong(error)}")
    if schema.get("type", "object") != "object":
        raise ConfigError(
            f"{where} needs 'type': 'object', since a tool's arguments are an object; not "
            f"{shown(schema['type'])}"
        )
    for path, part in _object_schemas("", schema):
        _check_keys(f"{where}{path}", part, _KEYWORDS)
        _check_required(f"{where}{path}", part)
        _check_bounds(f"{where}{path}", part)


def _what_is_wrong(error: Any) -> str:
    path, value = list(error.absolute_path), error.instance
    if path and path[-1] == "type" and isinstance(value, str):
        hint = did_you_mean(value, _TYPES) or f"known: {', '.join(_TYPES)}"
        return f"unknown type {value!r}; {hint}"
    return f"not a JSON schema: {error.message[:200]}"


def _object_schemas(path: str, schema: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema, and the schemas of its properties and items at any depth, with their paths."""
    if not isinstance(schema, dict):
        return  # true and false are schemas, too
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from _object_schemas(f"{path}.properties.{name}", part)
    yield from _object_schemas(f"{path}.items", schema.get("items"))


def _check_required(where: str, schema: Mapping[str, Any]) -> None:
    if _COMPOSING & {key for key, value in schema.items() if value is not False}:
        return
    names = list(schema.get("properties", {}))
    for name in schema.get("required", ()):
        if name not in names:
            hint = did_you_mean(name, names) or f"known: {', '.join(names) or 'none'}"
            raise ConfigError(f"{where}: required lists {name!r}, which is not a property; {hint}")


def _check_bounds(where: str, schema: Mapping[str, Any]) -> None:
    for low, high in _BOUNDS:
        if low in schema and high in schema and schema[low] > schema[high]:
            raise ConfigError(
                f"{where}: {low} {schema[low]} is above {high} {schema[high]}; no value fits both"
            )
