"""What the proxy remembers, what it forgets, and how conversations go on."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseItemList

from llama_worker.responses import exchange
from llama_worker.testing import scripts as fs
from tests.responses.conftest import Client, MakeClient
from tests.responses.oracle import check_events, read_sse
from tests.responses.scenarios.openai_python import make_client as openai_client

ANSWER = fs.plain_reply(fs.Reasoning("hm"), fs.Text("Yes?"))


def test_a_conversation_goes_on_by_id(fake: Client) -> None:
    first = fake.create(*ANSWER, instructions="Only now.").json
    second = fake.create(
        *fs.plain_reply(fs.Text("I see.")), input="More", previous_response_id=first["id"]
    ).json
    assert second["previous_response_id"] == first["id"]
    fake.create(input="And?", previous_response_id=second["id"], instructions="Be terse.")
    assert fake.last_chat()["messages"] == [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?", "reasoning_content": "hm"},
        {"role": "user", "content": "More"},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "And?"},
    ]


def test_a_response_can_be_fetched_and_deleted(fake: Client) -> None:
    made = fake.create(*ANSWER).json
    with openai_client(fake.proxy.base_url) as client:
        found = client.responses.retrieve(made["id"])
        assert (
            found.to_dict(exclude_unset=True)
            == openai.types.responses.Response.construct(**made).to_dict()
        )
        assert [item.type for item in client.responses.input_items.list(made["id"]).data] == [
            "message"
        ]
        client.responses.delete(made["id"])
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made["id"])


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("Hi", {"type": "message", "content": [{"type": "input_text", "text": "Hi"}]}),
        ([{"role": "user", "content": "Hi"}], {"id": "item_0", "status": "completed"}),
        ([{"role": "user", "content": ["Hi"], "id": None}], {"id": "item_0"}),
        (
            [{"role": "assistant", "content": "Hi"}],
            {"content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
        ),
        (
            [{"role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}],
            {"content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
        ),
        (
            [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
            {"status": "completed"},
        ),
        (
            [{"type": "function_call_output", "call_id": "c", "output": "4", "id": "fco_1"}],
            {"id": "fco_1"},
        ),
    ],
)
def test_input_items_are_listed_whole(fake: Client, given: Any, listed: dict[str, Any]) -> None:
    made = fake.create(input=given).json
    reply = fake.send("GET", f"/v1/responses/{made['id']}/input_items").json
    ResponseItemList.model_validate(reply)
    (item,) = reply["data"]
    assert item | listed == item


def test_only_a_response_can_be_deleted(fake: Client) -> None:
    made = fake.create().json
    assert fake.send("DELETE", f"/v1/responses/{made['id']}/input_items").status == 404
    assert fake.send("GET", f"/v1/responses/{made['id']}").json == made


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_to_be_stored_is_not(fake: Client, stream: bool) -> None:
    made = fake.stream(store=False)[-1]["response"] if stream else fake.create(store=False).json
    assert made["store"] is False
    assert fake.send("GET", f"/v1/responses/{made['id']}").status == 404
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    for refused in (fake.create(previous_response_id=made["id"]), fake.create(input=[reference])):
        assert refused.status == 400
        assert refused.json["error"]["code"] == "previous_response_not_found"


def test_a_client_resumes_what_it_broke_off(fake: Client) -> None:
    """However soon: the proxy may not have noticed yet."""
    said = [fs.Headers(), fs.Role(), fs.Text("Once "), fs.Text("upon "), fs.WaitClose()]
    for _ in range(20):
        with fake.begun(*said, until=b"upon") as (data, _response):
            found = re.search(rb'"id":"(msg_[^"]+)"', data)
        assert found is not None
        reference = {"type": "item_reference", "id": found[1].decode()}
        reply = fake.create(input=[reference, {"role": "user", "content": "Go on."}])
        assert reply.status == 200, reply.data
        assert fake.last_chat()["messages"][0] == {"role": "assistant", "content": "Once upon "}


def test_a_cut_answer_is_continued_to_its_end(real: Client) -> None:
    said = "one two three four five six seven eight nine ten"
    reply = real.create(input=said, max_output_tokens=3).json
    texts = [reply["output"][0]["content"][0]["text"]]
    for stream in (False, True, False):
        body = {"input": [], "previous_response_id": reply["id"], "max_output_tokens": 3}
        reply = real.stream(**body)[-1]["response"] if stream else real.create(**body).json
        texts.append(reply["output"][0]["content"][0]["text"])
    assert "".join(texts) == said
    assert all(texts)


def test_client_fetches_and_deletes_what_it_broke_off(fake: Client) -> None:
    """However soon."""
    said = [fs.Headers(), fs.Role(), fs.Text("Once"), fs.WaitClose()]
    for _ in range(20):
        with fake.begun(*said, until=b"Once") as (data, _response):
            found = re.search(rb'"id":"(resp_[^"]+)"', data)
        assert found is not None
        target = f"/v1/responses/{found[1].decode()}"
        statuses = [fake.send(method, target).status for method in ("GET", "DELETE", "GET")]
        assert statuses == [200, 200, 404]


def test_a_response_that_still_runs_is_waited_for(fake: Client, gate: Path) -> None:
    with (
        fake.begun(*fs.plain_reply(fs.Text("Once"), fs.Gate(gate)), until=b"Once") as (
            data,
            response,
        ),
        ThreadPoolExecutor() as pool,
    ):
        found = re.search(rb'"id":"(resp_[^"]+)"', data)
        assert found is not None
        waiting = pool.submit(fake.create, previous_response_id=found[1].decode())
        gate.touch()
        assert waiting.result().status == 200
        final = check_events(read_sse(data + response.read()))
        # as soon as it has ended
        assert fake.send("GET", f"/v1/responses/{found[1].decode()}").json == final


def test_refused_deletion_is_not_made_later(
    fake: Client, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_ANSWER_S", 0.05)
    said = fs.plain_reply(fs.Text("Once"), fs.Gate(gate))
    with fake.begun(*said, until=b"Once") as (data, response):
        found = re.search(rb'"id":"(resp_[^"]+)"', data)
        assert found is not None
        target = f"/v1/responses/{found[1].decode()}"
        assert fake.send("DELETE", target).status == 503
        gate.touch()
        response.read()
    monkeypatch.undo()
    assert fake.send("GET", target).status == 200


def test_the_store_is_bounded(make_fake: MakeClient) -> None:
    fake = make_fake(max_responses=2)
    ids = [fake.create().json["id"] for _ in range(3)]
    assert [fake.send("GET", f"/v1/responses/{one}").status for one in ids] == [404, 200, 200]
