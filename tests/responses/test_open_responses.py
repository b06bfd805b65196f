"""The proxy conforms to Open Responses."""

import copy
import json
import re
from typing import Any

import jsonschema
import pytest

from llama_worker.responses import upstream_facts
from llama_worker.testing.scripts import Reasoning, Text, plain_reply
from tests.responses.conformance import CAPABLE, TESTS, Api
from tests.responses.conftest import Client, MakeClient, Through, answer
from tests.responses.open_responses import check_event, check_reply
from tests.responses.oracle import read_sse
from tools.pages import DOCS

SMALL_MODELS_DO = [name for name in TESTS if name not in ("tool-calling", "image-input")]


@pytest.mark.parametrize("name", TESTS)
def test_the_suites_test_holds(make_client: MakeClient, name: str) -> None:
    TESTS[name](Api(make_client(CAPABLE).proxy.base_url))


@pytest.mark.server
@pytest.mark.parametrize("name", SMALL_MODELS_DO)
def test_it_holds_on_the_real_server(real: Client, name: str) -> None:
    TESTS[name](Api(real.proxy.base_url))


def test_the_table_in_the_docs_says_so() -> None:
    _, _, part = (DOCS / "responses.md").read_text().partition("<!-- open responses -->")
    rows = dict(re.findall(r"\| `([\w-]+)` \| (.+) \|", part))
    assert rows == dict.fromkeys(TESTS, "holds")


def test_a_missing_member_does_not_conform(fake: Client) -> None:
    response = fake.create().json
    required = ("presence_penalty", "frequency_penalty", "temperature", "top_p", "usage", "text")
    for name in required:
        lacking = {key: value for key, value in response.items() if key != name}
        with pytest.raises(jsonschema.ValidationError, match=name):
            check_reply(200, lacking)
    for name in required[:4]:
        with pytest.raises(jsonschema.ValidationError):
            check_reply(200, {**response, name: None})


def test_an_event_without_a_member_does_not_conform(fake: Client) -> None:
    events = read_sse(fake.create(*plain_reply(Reasoning("hm"), Text("a")), stream=True).data)
    for event in events:
        lacking: dict[str, Any] = copy.deepcopy(event)
        del lacking["sequence_number"]
        if "reasoning_text" not in event["type"]:
            with pytest.raises(jsonschema.ValidationError):
                check_event(lacking)
    with pytest.raises(AssertionError):
        check_event({**events[0], "type": "response.made_up"})


@pytest.mark.server
def test_a_response_says_what_the_server_samples_with(real: Client) -> None:
    """Its command has `--temp 0`."""
    said = real.create(input="Hi", top_p=0.5).json
    numbers = [said[name] for name in ("temperature", "top_p", "presence_penalty")]
    assert numbers == [0, 0.5, 0]


@pytest.mark.parametrize("asked_each_s", [60.0, 0.0], ids=["asked again soon", "not forgotten"])
def test_the_server_samples_as_it_last_said(
    through: Through, monkeypatch: pytest.MonkeyPatch, asked_each_s: float
) -> None:
    monkeypatch.setattr(upstream_facts, "_PROPS_RETRY_S", 0.0)
    monkeypatch.setattr(upstream_facts, "_PROPS_S", asked_each_s)
    client, upstream = through(answer(b"{}", b"503 Loading"))
    assert client.create().status == 503
    upstream.reply = answer(b'{"default_generation_settings": {"params": {"temperature": 0}}}')
    client.create()
    said = {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}
    upstream.reply = answer(f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n".encode())
    assert client.create().json["temperature"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("caps", "warns"),
    [
        ({"supports_tools": False}, True),
        ({"supports_tools": True, "supports_tool_calls": False}, True),
        ({"supports_tools": True}, False),
        ({}, False),
    ],
)
def test_tools_that_the_template_ignores_are_told(
    through: Through, caps: dict[str, bool], warns: bool, stream: bool
) -> None:
    props = {
        "default_generation_settings": {"params": {"temperature": 0}},
        "chat_template_caps": caps,
    }
    client, upstream = through(answer(json.dumps(props).encode()))
    client.create()
    said = {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}
    upstream.reply = answer(f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n".encode())
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    for tools in ([tool], []):
        headers = client.create(tools=tools, stream=stream).headers
        assert ("x-llama-worker-warning" in headers) is (warns and bool(tools))
        assert "tools" in headers.get("x-llama-worker-warning", "tools")


def test_a_conversation_goes_on_from_its_summary(fake: Client) -> None:
    first = fake.create(*plain_reply(Text("Yes?")))
    summing_up = fake.create(
        *plain_reply(Reasoning("hm"), Text("They said hi.")),
        target="/v1/responses/compact",
        input="And then?",
        previous_response_id=first.json["id"],
        instructions="Be terse.",
    )
    sent = fake.last_chat()["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "user", "user"]
    assert "summary" in sent[-1]["content"]
    fake.create(input=[*summing_up.json["output"], {"role": "user", "content": "Go on."}])
    summary, question = fake.last_chat()["messages"]
    assert summary["content"].endswith("They said hi.")
    assert question == {"role": "user", "content": "Go on."}
    assert fake.send("GET", f"/v1/responses/{summing_up.json['id']}").status == 404


@pytest.mark.parametrize(
    "ahead", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}]
)
def test_a_summary_is_always_generated(fake: Client, ahead: dict[str, Any]) -> None:
    assert fake.create(target="/v1/responses/compact", **ahead).status == 200


def test_without_a_summary_a_compaction_fails(fake: Client) -> None:
    reply = fake.create(*plain_reply(Reasoning("hm")), target="/v1/responses/compact")
    assert (reply.status, reply.json["error"]["message"]) == (502, "the model wrote no summary")


def test_a_compaction_of_nothing_is_refused(fake: Client) -> None:
    reply = fake.create(target="/v1/responses/compact", input=None)
    assert (reply.status, reply.json["error"]["param"]) == (400, "input")


def test_a_compaction_of_an_unknown_response_is_refused(fake: Client) -> None:
    unknown = {"input": None, "previous_response_id": "resp_1"}
    reply = fake.create(target="/v1/responses/compact", **unknown)
    assert reply.status == 400
    assert reply.json["error"]["code"] == "previous_response_not_found"
