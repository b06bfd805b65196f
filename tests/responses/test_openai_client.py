"""The official Python clients, against the real llama-server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.responses.conftest import WAIT_S, Client
from tests.responses.scenarios.openai_python import SCENARIOS, Scenario
from tests.responses.scenarios.sayings import GREETING

pytestmark = pytest.mark.server


@pytest.fixture
def client(real: Client) -> Iterator[openai.OpenAI]:
    with real.openai() as client:
        yield client


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(client: openai.OpenAI, scenario: Scenario) -> None:
    scenario(client)


def test_what_is_ignored_is_told_in_a_header(client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(model="m", input=GREETING, tools=[{"type": "web_search"}])
    assert "web_search" in raw.headers["x-llama-worker-warning"]
    assert raw.parse().output_text == GREETING


def test_what_is_no_response_passes_through(client: openai.OpenAI) -> None:
    assert client.models.list().data
    chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": GREETING}])
    assert chat.choices[0].message.content == GREETING


def test_eighty_streams_one_after_another_never_fail(client: openai.OpenAI) -> None:
    for _ in range(80):
        with client.responses.stream(model="m", input="Yes.") as stream:
            assert stream.get_final_response().output_text == "Yes."


def test_raw_events_are_read_by_any_http_client(real: Client) -> None:
    body = {"input": GREETING, "stream": True}
    with httpx.stream("POST", f"{real.proxy.base_url}/responses", json=body, timeout=WAIT_S) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("event: ")]
    assert lines[-1] == "event: response.completed"
