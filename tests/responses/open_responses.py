"""Open Responses 2026-04-24: what a response, a compaction, an event and an error must be.

The specification's members, types and values as JSON schemas of our own. OpenAI's API has kinds of
items, events, tools and choices that it lacks; clients of OpenAI's need them, so they are named
here and held to nothing but `openai`'s models.
"""

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

# What only OpenAI's API has.
OPENAI_EVENTS = frozenset(
    f"response.{kind}.{phase}"
    for kind in ("reasoning_text", "custom_tool_call_input")
    for phase in ("delta", "done")
)
OPENAI_ITEMS = ("custom_tool_call", "tool_search_call")
OPENAI_TOOLS = ("custom", "namespace", "tool_search")

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def record(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    """An object; members that the specification does not know are allowed, as it says."""
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def by_type(kinds: Mapping[str, Schema], *unchecked: str) -> Schema:
    """An object whose `type` says which of them it is."""
    return {
        "type": "object",
        "required": ["type"],
        "properties": {"type": one_of(*kinds, *unchecked)},
        "allOf": [
            {"if": {"properties": {"type": {"const": kind}}}, "then": schema}
            for kind, schema in kinds.items()
        ],
    }


# --- content, items, tools ------------------------------------------------------------------------

_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": array(INTEGER)}
LOG_PROBABILITIES = array(record({**_TOKEN, "top_logprobs": array(record(_TOKEN))}))
_CITATION = {"url": STRING, "start_index": INTEGER, "end_index": INTEGER, "title": STRING}
ANNOTATION = by_type({"url_citation": record(_CITATION)})
_PARTS = {
    **{
        kind: record({"text": STRING})
        for kind in ("input_text", "text", "summary_text", "reasoning_text")
    },
    "output_text": record(
        {"text": STRING, "annotations": array(ANNOTATION)}, logprobs=LOG_PROBABILITIES
    ),
    "refusal": record({"refusal": STRING}),
    "input_image": record({"image_url": nullable(STRING), "detail": one_of("low", "high", "auto")}),
    "input_file": record({}, filename=STRING, file_url=STRING),
}
PART = by_type(_PARTS)
_VIDEO = {"input_video": record({"video_url": STRING})}
STATUS = one_of("in_progress", "completed", "incomplete")
_GIVEN = by_type({kind: _PARTS[kind] for kind in ("input_text", "input_image", "input_file")})
ITEM = by_type(
    {
        "message": record(
            {
                "id": STRING,
                "status": STATUS,
                "role": one_of("user", "assistant", "system", "developer"),
                "content": array(by_type({**_PARTS, **_VIDEO})),
            },
            phase=one_of("commentary", "final_answer"),
        ),
        "function_call": record(
            {"id": STRING, "call_id": STRING, "name": STRING, "arguments": STRING, "status": STATUS}
        ),
        "function_call_output": record(
            {
                "id": STRING,
                "call_id": STRING,
                "output": {"anyOf": [STRING, array(_GIVEN)]},
                "status": STATUS,
            }
        ),
        "reasoning": record(
            {"id": STRING, "summary": array(PART)}, content=array(PART), encrypted_content=STRING
        ),
        "compaction": record({"id": STRING, "encrypted_content": STRING}, created_by=STRING),
    },
    *OPENAI_ITEMS,
)
TOOL = by_type(
    {
        "function": record(
            {
                "name": STRING,
                "description": nullable(STRING),
                "parameters": nullable(OBJECT),
                "strict": nullable(BOOLEAN),
            }
        )
    },
    *OPENAI_TOOLS,
)
_MODE = one_of("none", "auto", "required")
_CHOSEN = by_type({"function": record({}, name=STRING)}, "custom")
TOOL_CHOICE: Schema = {
    "anyOf": [
        _MODE,
        _CHOSEN,
        by_type({"allowed_tools": record({"tools": array(_CHOSEN), "mode": _MODE})}),
    ]
}

# --- a response -----------------------------------------------------------------------------------

TEXT = record(
    {
        "format": by_type(
            {
                "text": record({}),
                "json_object": record({}),
                "json_schema": record(
                    {
                        "name": STRING,
                        "description": nullable(STRING),
                        "schema": nullable(OBJECT),
                        "strict": BOOLEAN,
                    }
                ),
            }
        )
    },
    verbosity=one_of("low", "medium", "high"),
)
USAGE = record(
    {
        "input_tokens": INTEGER,
        "output_tokens": INTEGER,
        "total_tokens": INTEGER,
        "input_tokens_details": record({"cached_tokens": INTEGER}),
        "output_tokens_details": record({"reasoning_tokens": INTEGER}),
    }
)
REASONING = record(
    {
        "effort": nullable(one_of("none", "low", "medium", "high", "xhigh")),
        "summary": nullable(one_of("concise", "detailed", "auto")),
    }
)
RESPONSE = record(
    {
        "id": STRING,
        "object": one_of("response"),
        "created_at": INTEGER,
        "completed_at": nullable(INTEGER),
        "status": STRING,
        "incomplete_details": nullable(record({"reason": STRING})),
        "model": STRING,
        "previous_response_id": nullable(STRING),
        "instructions": nullable(STRING),
        "output": array(ITEM),
        "error": nullable(record({"code": STRING, "message": STRING})),
        "tools": array(TOOL),
        "tool_choice": TOOL_CHOICE,
        "truncation": one_of("auto", "disabled"),
        "parallel_tool_calls": BOOLEAN,
        "text": TEXT,
        "top_p": NUMBER,
        "presence_penalty": NUMBER,
        "frequency_penalty": NUMBER,
        "top_logprobs": INTEGER,
        "temperature": NUMBER,
        "reasoning": nullable(REASONING),
        "usage": nullable(USAGE),
        "max_output_tokens": nullable(INTEGER),
        "max_tool_calls": nullable(INTEGER),
        "store": BOOLEAN,
        "background": BOOLEAN,
        "service_tier": STRING,
        "metadata": {},
        "safety_identifier": nullable(STRING),
        "prompt_cache_key": nullable(STRING),
    }
)
COMPACTION = record(
    {
        "id": STRING,
        "object": one_of("response.compaction"),
        "output": array(ITEM),
        "created_at": INTEGER,
        "usage": USAGE,
    }
)

# --- events and errors ----------------------------------------------------------------------------

ERROR = record(
    {"type": STRING, "code": nullable(STRING), "message": STRING, "param": nullable(STRING)},
    headers={"type": "object", "additionalProperties": STRING},
)
_ITEM_EVENT = {"output_index": INTEGER, "item": nullable(ITEM)}
_IN_ITEM = {"item_id": STRING, "output_index": INTEGER}
_IN_CONTENT = {**_IN_ITEM, "content_index": INTEGER}
_IN_SUMMARY = {**_IN_ITEM, "summary_index": INTEGER}
_MEMBERS: dict[str, Schema] = {
    **{
        f"response.{state}": {"response": RESPONSE}
        for state in ("created", "queued", "in_progress", "completed", "failed", "incomplete")
    },
    **{f"response.output_item.{phase}": _ITEM_EVENT for phase in ("added", "done")},
    **{
        f"response.{kind}_part.{phase}": {**place, "part": PART}
        for kind, place in (("content", _IN_CONTENT), ("reasoning_summary", _IN_SUMMARY))
        for phase in ("added", "done")
    },
    **{
        f"response.{kind}.delta": {**place, "delta": STRING}
        for kind, place in (
            ("output_text", _IN_CONTENT),
            ("refusal", _IN_CONTENT),
            ("reasoning", _IN_CONTENT),
            ("reasoning_summary_text", _IN_SUMMARY),
            ("function_call_arguments", _IN_ITEM),
        )
    },
    **{
        f"response.{kind}.done": {**place, field: STRING}
        for kind, place, field in (
            ("output_text", _IN_CONTENT, "text"),
            ("refusal", _IN_CONTENT, "refusal"),
            ("reasoning", _IN_CONTENT, "text"),
            ("reasoning_summary_text", _IN_SUMMARY, "text"),
            ("function_call_arguments", _IN_ITEM, "arguments"),
        )
    },
    "response.output_text.annotation.added": {
        **_IN_CONTENT,
        "annotation_index": INTEGER,
        "annotation": nullable(ANNOTATION),
    },
    "error": {"error": ERROR},
}
_OPTIONAL = {"logprobs": LOG_PROBABILITIES, "obfuscation": STRING}
EVENTS = {
    kind: Draft202012Validator(record({"sequence_number": INTEGER, **members}, **_OPTIONAL))
    for kind, members in _MEMBERS.items()
}
SOCKET_ERROR = Draft202012Validator(
    by_type(
        {
            "error": record(
                {
                    "status": INTEGER,
                    "error": record(
                        {"code": STRING, "message": STRING}, type=STRING, param=nullable(STRING)
                    ),
                }
            )
        }
    )
)
_OBJECTS = {
    "response": Draft202012Validator(RESPONSE),
    "response.compaction": Draft202012Validator(COMPACTION),
}
_REFUSAL = Draft202012Validator(record({"error": ERROR}))


def check_event(event: Mapping[str, Any]) -> None:
    """Raises jsonschema.ValidationError; AssertionError for an event that neither API has."""
    kind = event["type"]
    if kind not in OPENAI_EVENTS:
        assert kind in EVENTS, kind
        EVENTS[kind].validate(event)


def check_reply(status: int, reply: Mapping[str, Any]) -> None:
    """A reply in one piece, where it is a response, a compaction or a refusal: else raises
    jsonschema.ValidationError."""
    if status >= 400:
        _REFUSAL.validate(reply)
    elif reply.get("object") in _OBJECTS and "deleted" not in reply:
        _OBJECTS[reply["object"]].validate(reply)
