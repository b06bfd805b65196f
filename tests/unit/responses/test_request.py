"""Requests of the Responses API become chat completions."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_worker.responses.api import conversation
from llama_worker.responses.api.chat_template import late_instructions_as_user
from llama_worker.responses.api.conversation import seal, unseal
from llama_worker.responses.api.request import (
    ENCRYPTED_REASONING,
    ChatRequest,
    normalise,
    parse_body,
    references,
)
from llama_worker.responses.api.tools import NO_TOOLS
from llama_worker.responses.errors import ApiError

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Yes?"}
POLICY = {"role": "developer", "content": "policy"}
PNG = "data:image/png;base64,AAAA"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
SUB = {
    "type": "function",
    "name": "sub",
    "description": "minus",
    "parameters": None,
    "strict": None,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ALLOWED = {"type": "allowed_tools"}
FILE = {"type": "input_file", "file_id": "f"}
ANSWER = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}


def messages(*items: dict[str, Any], instructions: str = "") -> list[dict[str, Any]]:
    return conversation.ChatMessages(instructions, items, NO_TOOLS).messages


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": arguments}


def output(call_id: str, value: Any = "3") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def reasoning(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


def text_parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "input_text", "text": text} for text in texts]


# ---------------------------------------------------------------- input

IMAGE = {"type": "input_image", "image_url": PNG, "detail": "low"}
SENT_IMAGE = {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}


@pytest.mark.parametrize(
    ("content", "sent"),
    [
        ("a", "a"),
        (None, ""),
        (text_parts("a", "b"), "a\nb"),
        (["a"], "a"),
        ([{"type": "text", "text": "a"}, None], "a"),
        ([IMAGE], [SENT_IMAGE]),
        ([{"type": "input_text", "text": "a"}, IMAGE], [{"type": "text", "text": "a"}, SENT_IMAGE]),
    ],
)
def test_text_alone_is_a_string(content: Any, sent: Any) -> None:
    for item in (
        {"role": "user", "content": content},
        {"type": "message", "role": "user", "content": content},
    ):
        assert messages(item) == [{"role": "user", "content": sent}]


def test_leading_system_and_developer_messages_become_one() -> None:
    late = [{"role": "developer", "content": "B"}, {"role": "system", "content": "C"}]
    found = messages(*late, USER, instructions="A")
    assert found == [{"role": "system", "content": "A\n\nB\n\nC"}, USER]


@pytest.mark.parametrize("instructions", ["A", ""])
def test_a_late_developer_message_stays_in_its_place(instructions: str) -> None:
    head = messages(USER, SAID, instructions=instructions)
    assert late_instructions_as_user(head) == head
    found = messages(USER, SAID, POLICY, USER, instructions=instructions)
    assert found == [*head, {**POLICY, "role": "system"}, USER]
    assert late_instructions_as_user(found) == [*head, {**POLICY, "role": "user"}, USER]


def test_instructions_never_split_a_call_and_its_result() -> None:
    found = messages(USER, call("x"), call("y"), POLICY, output("x"), output("y"), SAID)
    roles = "user assistant tool tool system assistant"
    assert [message["role"] for message in found] == roles.split()


def test_call_never_answered_holds_nothing_back() -> None:
    before = messages(USER, call("x"), USER, POLICY)
    assert messages(USER, call("x"), USER, POLICY, SAID, USER) == [*before, SAID, USER]


THOUGHT = reasoning(content=[{"type": "reasoning_text", "text": "hm"}])
TURNS: list[list[dict[str, Any]]] = [  # what the model says, then what is new for it
    [SAID, USER],
    [SAID, POLICY, USER],
    [THOUGHT, USER],
    [THOUGHT, SAID, USER],
    [SAID, call("x"), output("x")],
    [THOUGHT, call("x"), output("x"), USER],
    [call("x"), call("y"), POLICY, output("x"), output("y")],
    [call("x"), output("x"), POLICY],
    [call("x"), output("x"), POLICY, USER],
]


@settings(max_examples=50)
@given(st.lists(st.sampled_from(TURNS), min_size=1, max_size=5))
def test_each_turn_extends_the_one_before(turns: list[list[dict[str, Any]]]) -> None:
    items = [USER]
    for turn in turns:
        before = messages(*items, instructions="A")
        items += turn
        assert messages(*items, instructions="A")[: len(before)] == before


def test_an_assistant_turn_becomes_one_message() -> None:
    words = [{"type": "output_text", "text": "I add."}]
    said = {"type": "message", "role": "assistant", "content": words}
    both = [
        call("call_a", '{"a": 1}'),
        call("call_b"),
        output("call_a"),
        output("call_b", text_parts("4", "5")),
    ]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        for call_id, arguments in (("c00000001", '{"a": 1}'), ("c00000002", "{}"))
    ]
    assert messages(USER, THOUGHT, said, *both, SAID, SAID, USER) == [
        USER,
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c00000001", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "c00000002", "name": "add", "content": "4\n5"},
        SAID,
        SAID,
        USER,
    ]


@pytest.mark.parametrize(
    ("items", "texts", "continues"),
    [
        ([SAID], ["Yes?"], True),
        ([SAID, SAID, SAID], ["Yes?Yes?Yes?"], True),
        ([THOUGHT, SAID, SAID], ["Yes?Yes?"], True),
        ([SAID, THOUGHT, SAID, SAID], ["Yes?", "Yes?Yes?"], True),
        ([SAID, THOUGHT], ["Yes?"], True),
        ([SAID, call("x")], ["Yes?"], False),
        ([SAID, SAID, USER], ["Yes?", "Yes?"], False),
        ([SAID, POLICY], ["Yes?"], False),
    ],
)
def test_the_models_text_at_the_end_is_continued(
    items: list[Any], texts: list[str], continues: bool
) -> None:
    sent = normalise({"input": [USER, *items]}).body
    said = [one for one in sent["messages"] if one["role"] == "assistant"]
    assert [one["content"] for one in said] == texts
    assert ("reasoning_content" in said[-1]) is (items[-1] == SAID and THOUGHT in items)
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    assert (sent.items() >= asked.items(), bool(sent.keys() & asked)) == (continues, continues)


@pytest.mark.parametrize(
    "also",
    [
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
        {"add_generation_prompt": True},
    ],
)
def test_an_answer_in_json_or_by_the_clients_own_flags_comes_whole(also: dict[str, Any]) -> None:
    sent = normalise({"input": [USER, SAID], **also}).body
    assert "continue_final_message" not in sent


def test_a_repeated_call_id_means_the_latest_call() -> None:
    found = messages(call("x"), output("x", "1"), call("x"), output("x", "2"))
    assert [m["tool_call_id"] for m in found if m["role"] == "tool"] == ["c00000001", "c00000002"]


@pytest.mark.parametrize(
    ("call_id", "shown"),
    [
        ("functions.add:0", "functions.add:0"),
        ("functions.mcp__dict__lookup:12", "functions.mcp__dict__lookup:12"),
        ("functions.add:", "c00000001"),
        ("call_1", "c00000001"),
    ],
)
def test_only_kimis_call_ids_are_kept(call_id: str, shown: str) -> None:
    turn, result = messages(call(call_id), output(call_id))
    assert [turn["tool_calls"][0]["id"], result["tool_call_id"]] == [shown, shown]


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ("", "{}"),
        ("  ", "{}"),
        ('{"a":  1}', '{"a":  1}'),
        ('{"a": ', '{"malformed_arguments": "{\\"a\\": "}'),
        ("[1]", '{"malformed_arguments": "[1]"}'),
        ("NaN", '{"malformed_arguments": "NaN"}'),
    ],
)
def test_arguments_in_history_are_json_objects(arguments: str, sent: str) -> None:
    (turn,) = messages(call("x", arguments))
    assert turn["tool_calls"][0]["function"]["arguments"] == sent
    (turn,) = messages({"type": "tool_search_call", "call_id": "x", "arguments": arguments})
    assert turn["tool_calls"][0]["function"]["arguments"] == sent


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("", ""),
        (None, ""),
        ([], ""),
        ({"n": 1}, '{"n": 1}'),
        ([1, 2], "[1, 2]"),
        (4, "4"),
        ([{"type": "text", "n": 1}], '[{"type": "text", "n": 1}]'),
        ([{"type": "file"}], '[{"type": "file"}]'),
        (
            [{"type": "input_image", "image_url": PNG}],
            [{"type": "image_url", "image_url": {"url": PNG}}],
        ),
    ],
)
def test_any_value_is_a_function_output(value: Any, sent: Any) -> None:
    assert messages(output("x", value)) == [{"role": "tool", "tool_call_id": "x", "content": sent}]


BOTH = {"content": [{"text": "c"}], "summary": [{"text": "s"}]}


@pytest.mark.parametrize(
    ("fields", "restored"),
    [
        ({"encrypted_content": seal("sealed"), "content": [{"text": "c"}]}, "sealed"),
        ({"encrypted_content": "of somebody else", **BOTH}, "c"),
        ({"content": [], "summary": [{"text": "s"}, {"text": "t"}]}, "s\n\nt"),
        ({"content": None, "summary": [{"text": "s"}]}, "s"),
        ({}, None),
        ({"summary": None, "encrypted_content": None}, None),
    ],
)
def test_reasoning_is_restored_from_its_best_form(
    fields: dict[str, Any], restored: str | None
) -> None:
    (turn,) = messages(reasoning(**fields), {"role": "assistant", "content": "a"})
    assert turn.get("reasoning_content") == restored


def test_reasoning_alone_is_dropped_at_the_end() -> None:
    kept = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert messages(USER, THOUGHT, USER) == [USER, kept, USER]
    assert messages(USER, THOUGHT) == [USER]


@pytest.mark.parametrize("text", ["", "a", "ä\n\ud83d\ude00", "\ud800"])
def test_sealed_reasoning_comes_back(text: str) -> None:
    assert unseal(seal(text)) == text


@pytest.mark.parametrize(
    "sealed", [None, "", 3, "gAAAA", "llama-worker-1:!", "llama-worker-1:/w=="]
)
def test_what_is_not_ours_is_not_unsealed(sealed: object) -> None:
    assert unseal(sealed) is None


HOSTED = {"call_id": None, "execution": "server"}


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1"},
        {"type": "tool_search_call", "arguments": {"paths": ["crm"]}, **HOSTED},
        {"type": "tool_search_output", "tools": [ADD], **HOSTED},
    ],
)
def test_unknown_items_are_ignored_with_a_warning(item: dict[str, Any]) -> None:
    request = normalise({"input": [USER, item]})
    assert request.body["messages"] == [USER]
    assert request.warnings == (f"input items of type {item['type']!r} are ignored",)


@pytest.mark.parametrize("role", ["assistant", "developer", "system"])
def test_images_beside_a_users_are_ignored_with_warning(role: str) -> None:
    content = [IMAGE, {"type": "input_text", "text": "a"}]
    request = normalise({"input": [{"role": role, "content": content}, USER]})
    assert request.body["messages"][0]["content"] == "a"
    assert request.warnings == ("images and audio are ignored except in user messages",)
    assert normalise({"input": [{"role": "user", "content": content}]}).warnings == ()


NO_IMAGE = {"type": "input_image", "file_id": "f"}
NO_SCHEMA = {"type": "json_schema", "name": "x"}
ODD_CHOICES: list[Any] = [
    "maybe",
    {"type": "function", "name": "sub"},
    {"type": "function", "name": {"a": 1}},
    {**ALLOWED, "tools": [{"name": []}]},
]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        *(({"input": given}, "input") for given in (None, [], 3, [3])),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input"),
        *(
            ({"input": [{"role": "user", "content": odd}]}, "input")
            for odd in (3, [FILE], [NO_IMAGE])
        ),
        ({"input": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        *(({"input": [output("x", [*text_parts("a"), odd])]}, "input") for odd in (FILE, NO_IMAGE)),
        *(({"input": "a", "instructions": odd}, "instructions") for odd in (3, [USER])),
        ({"input": "a", "previous_response_id": 3}, "previous_response_id"),
        ({"input": "a", "tools": 3}, "tools"),
        *(({"input": "a", "tools": [{"type": kind}]}, "tools") for kind in ("function", "custom")),
        ({"input": "a", "tools": [{"type": "namespace", "name": "n"}]}, "tools"),
        ({"input": "a", "tools": [{"type": "namespace", "tools": []}]}, "tools"),
        ({"input": [{"type": "additional_tools", "tools": 3}]}, "tools"),
        ({"input": [{"type": "custom_tool_call", "call_id": "x", "name": "p"}]}, "input"),
        ({"input": [{"type": "custom_tool_call_output", "output": "x"}]}, "input"),
        *(
            ({"input": "a", "tools": [ADD], "tool_choice": odd}, "tool_choice")
            for odd in ODD_CHOICES
        ),
        ({"input": "a", "text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": "a", "text": {"format": NO_SCHEMA}}, "text.format.schema"),
    ],
)
def test_malformed_requests_are_refused_and_say_where(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        normalise(body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000])
def test_a_body_must_be_a_json_object(data: bytes) -> None:
    with pytest.raises(ApiError):
        parse_body(data)


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999", b"1" * 5000])
def test_a_number_beyond_a_double_is_refused(number: bytes) -> None:
    with pytest.raises(ApiError, match="outside the range of a double"):
        parse_body(b'{"input": [%b]}' % number)


def test_a_body_may_nest_200_containers() -> None:
    def nested(containers: int) -> bytes:
        return b'{"input": %b0%b}' % (b"[" * (containers - 1), b"]" * (containers - 1))

    assert parse_body(nested(200))
    with pytest.raises(ApiError, match="deeper than 200 levels"):
        parse_body(nested(201))


def test_references_are_found_and_resolved_once() -> None:
    body = {"input": [{"type": "item_reference", "id": "msg_1"}, {"id": "rs_1"}, USER]}
    assert references(body).item_ids == ("msg_1", "rs_1")
    said = {"id": "msg_1", "type": "message", **SAID}
    found = {"msg_1": said, "rs_1": reasoning()}
    assert normalise(body, found=found).body["messages"] == [SAID, USER]
    with pytest.raises(ApiError, match="twice"):
        references({"input": [{"type": "item_reference", "id": "msg_1"}] * 2})


# ---------------------------------------------------------------- parameters


def test_what_neither_api_knows_passes_through() -> None:
    known_to_nobody = {"min_p": 0.1, "samplers": ["top_k"], "seed": 2**70}
    sent = normalise({"input": "a", **known_to_nobody}).body
    assert sent.items() >= known_to_nobody.items()
    assert "input" not in sent


def test_every_null_field_is_as_if_absent() -> None:
    names = (
        "instructions tools tool_choice text reasoning metadata include store stream "
        "previous_response_id max_output_tokens parallel_tool_calls temperature user top_k grammar"
    )
    assert normalise({"input": "a", **dict.fromkeys(names.split())}) == normalise({"input": "a"})


def test_differing_names_are_translated() -> None:
    options = {"stream": False, "stream_options": {"include_obfuscation": False}}
    body = {"input": "a", "max_output_tokens": 7, **options}
    sent = normalise(body).body
    assert (sent["stream"], sent["stream_options"]) == (True, {"include_usage": True})
    assert sent["max_tokens"] == 7


@pytest.mark.parametrize(
    ("effort", "sent"),
    [("low", {"reasoning_effort": "low"}), ("none", {"enable_thinking": False}), ([], None)],
)
def test_the_template_gets_the_reasoning_effort(
    effort: object, sent: dict[str, Any] | None
) -> None:
    request = normalise({"input": "a", "reasoning": {"effort": effort}})
    assert request.body.get("chat_template_kwargs") == sent
    assert request.echo["reasoning"]["effort"] == (effort or None)


@pytest.mark.parametrize(
    ("form", "sent"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            ANSWER,
            {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
            },
        ),
    ],
)
def test_text_format(form: dict[str, Any], sent: Any) -> None:
    assert normalise({"input": "a", "text": {"format": form}}).body.get("response_format") == sent


def test_a_tool_has_the_chat_completions_form() -> None:
    sent = {"name": "sub", "description": "minus", "parameters": ADD["parameters"]}
    found = normalise({"input": "a", "tools": [SUB]}).body["tools"]
    assert found == [{"type": "function", "function": sent}]


LOOKUP_TOOLS = [{**ADD, "name": "lookup"}]
MCP = {"type": "namespace", "name": "mcp__dict", "description": "Words.", "tools": LOOKUP_TOOLS}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR}


def offered(request: ChatRequest) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"] for tool in request.body["tools"]}


LOOKUP = {"name": "lookup", "namespace": "mcp__dict"}
EVERY = ["add", "sub", "mcp__dict__lookup", "apply_patch"]
NESTED_CHOICES = [
    {"type": "function", "function": {"name": "sub"}},
    {"type": "custom", "custom": {"name": "apply_patch"}},
]
NESTED_ALLOWED = {**ALLOWED, "allowed_tools": {"mode": "required", "tools": NESTED_CHOICES}}


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", EVERY),
        ("auto", "auto", EVERY),
        ("none", "none", EVERY),
        ("required", "required", EVERY),
        ({"type": "function", "name": "sub"}, "required", ["sub"]),
        ({"type": "function", "function": {"name": "sub"}}, "required", ["sub"]),
        ({"type": "function", **LOOKUP}, "required", ["mcp__dict__lookup"]),
        ({"type": "function", "name": "mcp__dict__lookup"}, "required", ["mcp__dict__lookup"]),
        ({"type": "custom", "name": "apply_patch"}, "required", ["apply_patch"]),
        (
            {**ALLOWED, "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
            "auto",
            ["add"],
        ),
        ({**ALLOWED, "mode": "required", "tools": [LOOKUP]}, "required", ["mcp__dict__lookup"]),
        (NESTED_ALLOWED, "required", ["sub", "apply_patch"]),
        ({"type": "web_search_preview"}, "auto", EVERY),
    ],
)
def test_tool_choice(choice: Any, mode: str, names: list[str]) -> None:
    tools = [ADD, SUB, MCP, PATCH]
    request = normalise(
        {"input": "a", "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    )
    assert (request.body["tool_choice"], request.body["parallel_tool_calls"]) == (mode, False)
    assert list(offered(request)) == names


def test_only_tools_that_count_are_echoed_as_allowed() -> None:
    choice = {**ALLOWED, "mode": None, "tools": [{"name": "add"}, {"type": "web_search"}]}
    echo = normalise({"input": "a", "tools": [ADD], "tool_choice": choice}).echo["tool_choice"]
    assert echo == {**ALLOWED, "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    nested: dict[str, Any] = {
        **ALLOWED,
        "allowed_tools": {"tools": [{"function": {"name": "add"}}]},
    }
    request = normalise({"input": "a", "tools": [ADD], "tool_choice": nested})
    assert request.echo["tool_choice"] == echo


def test_tools_are_echoed_as_they_were_given() -> None:
    request = normalise({"input": "a", "tools": [ADD, MCP]})
    assert request.echo["tools"][1]["tools"][0]["name"] == "lookup"
    assert request.warnings == ()


def test_a_custom_tool_becomes_a_one_string_function() -> None:
    (function,) = offered(normalise({"input": "a", "tools": [PATCH]})).values()
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].startswith("Edits.")
    assert "start: /a/" in function["description"]


def test_tools_among_the_input_count_too() -> None:
    again = {**ADD, "description": "newer"}
    more = {"type": "additional_tools", "role": "developer", "tools": [MCP, again, PATCH]}
    request = normalise({"input": [more, USER], "tools": [ADD, SUB]})
    assert list(offered(request)) == EVERY
    assert offered(request)["add"]["description"] == "newer"
    assert request.body["messages"] == [USER]


def test_names_that_would_be_one_are_told_apart() -> None:
    request = normalise({"input": "a", "tools": [{**ADD, "name": "mcp__dict__lookup"}, MCP]})
    found = [request.tools.called(name) for name in offered(request)]
    names = [(None, "mcp__dict__lookup"), ("mcp__dict", "lookup")]
    assert [tool and (tool.namespace, tool.name) for tool in found] == names


@pytest.mark.parametrize("tools", [[MCP, PATCH], []], ids=["offered", "no longer offered"])
def test_calls_in_history_keep_the_models_names(tools: list[Any]) -> None:
    items = [
        USER,
        {**call("x"), **LOOKUP},
        {"type": "custom_tool_call", "call_id": "y", "name": "apply_patch", "input": 'é"\n'},
        output("x"),
        {"type": "custom_tool_call_output", "call_id": "y", "output": "Done!"},
    ]
    sent = normalise({"input": items, "tools": tools}).body["messages"]
    calls = [tool_call["function"] for tool_call in sent[1]["tool_calls"]]
    assert [one["name"] for one in calls] == ["mcp__dict__lookup", "apply_patch"]
    assert calls[1]["arguments"] == '{"input": "é\\"\\n"}'
    assert [message["content"] for message in sent[2:]] == ["3", "Done!"]
    assert [message["name"] for message in sent[2:]] == ["mcp__dict__lookup", "apply_patch"]


def test_found_tools_are_offered_to_the_model() -> None:
    client: Any = {"execution": "client"}
    about: Any = {"call_id": "x", **client}
    items = [
        USER,
        {"type": "tool_search_call", "arguments": {"query": "words"}, **about},
        {"type": "tool_search_output", "tools": [MCP], **about},
    ]
    request = normalise({"input": items, "tools": [ADD, {"type": "tool_search", **client}]})
    assert list(offered(request)) == ["add", "tool_search", "mcp__dict__lookup"]
    _, asked, found = request.body["messages"]
    sent = {"name": "tool_search", "arguments": '{"query": "words"}'}
    assert asked["tool_calls"][0]["function"] == sent
    assert found["content"] == "These tools can be called now: mcp__dict__lookup"


@pytest.mark.parametrize(
    ("fields", "sealed"),
    [
        ({}, False),
        ({"store": True}, False),
        ({"store": False}, True),
        ({"include": [ENCRYPTED_REASONING]}, True),
    ],
)
def test_reasoning_without_state_is_sealed(fields: dict[str, Any], sealed: bool) -> None:
    assert normalise({"input": "a", **fields}).seal_reasoning is sealed


def test_built_in_tools_are_ignored_with_a_warning() -> None:
    tools = [{"type": "web_search"}, {"type": "mcp"}]
    request = normalise({"input": "a", "tools": tools, "tool_choice": "required"})
    assert not {"tools", "tool_choice"} & request.body.keys()
    assert request.echo["tools"] == []
    assert len(request.warnings) == 3


@pytest.mark.parametrize(
    ("choice", "mode", "warnings"),
    [
        ({"mode": "required", "tools": [ADD, {"type": "mcp"}]}, "required", 1),
        ({"mode": "required", "tools": [{"type": "mcp"}, {"type": []}]}, None, 3),
        ({"mode": "auto", "tools": [{"type": "mcp"}]}, None, 1),
        ({"mode": "auto", "tools": [ADD]}, "auto", 0),
    ],
)
def test_allowed_tools_that_nobody_runs_are_told(
    choice: dict[str, Any], mode: str | None, warnings: int
) -> None:
    request = normalise({"input": "a", "tools": [ADD], "tool_choice": {**ALLOWED, **choice}})
    assert request.body.get("tool_choice") == mode
    assert len(request.warnings) == warnings


@pytest.mark.parametrize(
    ("fields", "warnings"),
    [
        ({"truncation": "auto"}, 1),
        ({"truncation": "disabled"}, 0),
        ({"truncation": None}, 0),
        ({"top_logprobs": 2, "include": ["message.output_text.logprobs"]}, 1),
        ({"include": ["message.output_text.logprobs"]}, 1),
        ({"include": [ENCRYPTED_REASONING]}, 0),
    ],
)
def test_ignored_parameters_are_told(fields: dict[str, Any], warnings: int) -> None:
    request = normalise({"input": "a", **fields})
    assert len(request.warnings) == warnings
    assert request.echo["truncation"] == "disabled"


@pytest.mark.parametrize(
    ("choice", "tools", "constrained"),
    [("auto", True, False), ("required", True, False), ("none", False, True)],
)
def test_tools_and_a_format_never_go_together(choice: str, tools: bool, constrained: bool) -> None:
    request = normalise(
        {"input": "a", "tools": [ADD], "tool_choice": choice, "text": {"format": ANSWER}}
    )
    assert ("tools" in request.body, "response_format" in request.body) == (tools, constrained)
    told = json.dumps(SCHEMA) in str(request.body["messages"][0]["content"])
    assert told is (choice == "auto")


def test_nothing_given_is_changed() -> None:
    body = {
        "input": [USER, call("x"), output("x")],
        "tools": [ADD],
        "text": {"format": ANSWER},
        "metadata": {"a": "b"},
    }
    before = copy.deepcopy(body)
    normalise(body)
    assert body == before
