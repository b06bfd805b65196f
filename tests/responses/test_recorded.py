"""What Codex and OpenCode sent (`make test-clients` keeps it) becomes what the model and its prompt
cache need."""

import json
from itertools import pairwise
from typing import Any

import pytest

from llama_worker import LlamaWorker
from llama_worker.responses.api.chat_template import ADAPTERS
from llama_worker.responses.api.request import normalise
from tests.responses.clients.recorded import recorded
from tests.responses.conftest import Json, MakeClient
from tests.responses.scenarios import TEMPLATE_ARGS
from tests.server.conftest import NO_PROBES, Serve
from tests.server.pace import SERVER_ARGS

RECORDED = recorded()
OTHERS = (
    "runs_a_sub_agent",
    "asks_for_a_title",
    "compacts_a_long_conversation",
    "finds_a_tool_that_it_kept_back",
)
GROWING = [
    name for name, bodies in RECORDED.items() if len(bodies) > 1 and not name.endswith(OTHERS)
]
assert len(GROWING) >= 20, "a conversation of several turns is no longer among those recorded"
CACHE_SHARE = 0.95
ALTERNATING = ("user", "assistant")
# of answers_in_a_given_form
KNOWN_WARNINGS = {"with tools, text.format is only requested in the prompt"}


@pytest.mark.parametrize("bodies", RECORDED.values(), ids=RECORDED.keys())
def test_what_clients_send_is_taken_whole(bodies: list[Json]) -> None:
    for body in bodies:
        request = normalise(body)
        assert set(request.warnings) <= KNOWN_WARNINGS
        assert request.body["messages"]
        offered = [tool["function"]["name"] for tool in request.body.get("tools", [])]
        assert len(set(offered)) == len(offered) == len(request.tools.tools)
        given = [
            *(body.get("tools") or []),
            *(tool for item in body["input"] for tool in item.get("tools") or []),
        ]
        assert len(offered) == sum(len(tool.get("tools", [tool])) for tool in given)


@pytest.mark.parametrize("name", GROWING)
def test_each_turns_prompt_begins_with_the_one_before(name: str) -> None:
    sent = [normalise(body).body for body in RECORDED[name]]
    for before, after in pairwise(sent):
        assert json.dumps(after.get("tools")) == json.dumps(before.get("tools"))
        count = len(before["messages"])
        assert json.dumps(after["messages"][:count]) == json.dumps(before["messages"])


@pytest.mark.parametrize("bodies", RECORDED.values(), ids=RECORDED.keys())
def test_strict_templates_take_what_clients_send(bodies: list[Json]) -> None:
    """By the rule in the templates of Devstral Small 2, Ministral 3 and Mistral Small."""
    for body in bodies:
        messages: Any = normalise(body).body["messages"]
        for _, adapt in ADAPTERS:
            messages = adapt(messages)
        later = messages[messages[0]["role"] == "system" :]
        assert {message["role"] for message in later} <= {*ALTERNATING, "tool"}
        counted = [one for one in later if one["role"] != "tool" and not one.get("tool_calls")]
        assert [one["role"] for one in counted] == [
            ALTERNATING[number % 2] for number in range(len(counted))
        ]


@pytest.mark.server
@pytest.mark.timeout(
    1800
)  # as long as it takes to read some thousand tokens on whatever machine this is
@pytest.mark.parametrize("client", ["codex", "opencode"])
def test_the_prompt_cache_covers_what_was_sent_before(
    make_client: MakeClient, serve: Serve, client: str
) -> None:
    """Ten turns: of each prompt, at least 95 % of the one before is not read again."""
    bodies = RECORDED[f"{client}-works_in_several_turns"]
    assert len(bodies) == 10
    config, usages = (
        serve(slot_tokens=8192, timeouts=NO_PROBES, args=(*SERVER_ARGS, *TEMPLATE_ARGS)),
        [],
    )
    with LlamaWorker(config):
        proxied = make_client(upstream=f"http://{config.host}:{config.port}")
        for body in bodies:
            usages.append(
                proxied.create(**{**body, "stream": False, "max_output_tokens": 1}).json["usage"]
            )
    for before, after in pairwise(usages):
        assert (
            after["input_tokens_details"]["cached_tokens"] >= CACHE_SHARE * before["input_tokens"]
        )
