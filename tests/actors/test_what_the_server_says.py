"""What a server says of its template and of tools, and how a worker then talks to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from llama_worker.profiles import RestartPolicy
from llama_worker.stream.tagged_calls import tagged_call
from llama_worker.types import ToolDef
from tests.actors.conftest import MakeWorker, Rig
from tests.fake_script import (
    Answer,
    HttpError,
    Reply,
    Script,
    Text,
    Turns,
    plain_reply,
    props_answer,
)

CHAT = "/v1/chat/completions"
CALL = tagged_call("add", '{"a": 1, "b": 2}')
B11434_REFUSAL = "tools param requires --jinja flag"  # with --no-jinja, as a 500
ADD: ToolDef = {
    "type": "function",
    "function": {"name": "add", "description": "Adds two.", "parameters": {"type": "object", "properties": {}}},
}


class Adding:
    def __init__(self) -> None:
        self.calls: list[Mapping[str, Any]] = []

    def run_tool(self, *, name: str, arguments: Mapping[str, Any], request_id: int, job_name: str) -> Any:
        self.calls.append(arguments)
        return {"sum": arguments["a"] + arguments["b"]}


@pytest.fixture
def adding() -> Adding:
    return Adding()


@pytest.fixture
def make_rig(make_worker: MakeWorker, adding: Adding) -> Callable[..., Rig]:
    def make(script: Script = Script(), **config: Any) -> Rig:  # noqa: B008 (frozen)
        return make_worker(script, normal_tools=[ADD], tool_runner=adding, tool_call_mode="auto", **config)

    return make


def bodies(rig: Rig) -> list[dict[str, Any]]:
    return [fact["body"] for fact in rig.journal.facts("request", path=CHAT)]


def test_auto_uses_native_mode_where_the_template_has_tools(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Script(props=[props_answer(tools=True)]))
    rig.run()
    assert "tools" in bodies(rig)[0]
    assert rig.status()["warnings"] == []


def test_auto_uses_prompted_mode_where_the_template_has_no_tools_and_warns(
    make_rig: Callable[..., Rig], adding: Adding
) -> None:
    rig = make_rig(Script(props=[props_answer(tools=False)]))
    result = rig.run(Turns([plain_reply(Text(CALL)), plain_reply(Text("3"))]))
    assert (result["text"], adding.calls) == ("3", [{"a": 1, "b": 2}])
    assert "tools" not in bodies(rig)[0]
    assert any("prompted mode" in line for line in rig.status()["warnings"])


def test_auto_sends_the_very_request_again_prompted_where_the_server_refuses_tools(
    make_rig: Callable[..., Rig], adding: Adding
) -> None:
    answers = [
        Reply([HttpError(500, B11434_REFUSAL)]),
        Reply([Turns([plain_reply(Text(CALL)), plain_reply(Text("3"))])], times=None),
    ]
    restart = RestartPolicy(server_errors_before_restart=1)
    rig = make_rig(Script(replies=answers), restart=restart)
    result = rig.run(prompt="What is 1 + 2?", temperature=0)
    assert (result["state"], result["text"], adding.calls) == ("completed", "3", [{"a": 1, "b": 2}])
    rig.run()
    refused, again, *later = bodies(rig)
    assert not any("tools" in body for body in later), "once refused, they are not offered again"
    assert "tools" in refused
    assert "tools" not in again
    assert "<tool_call>" in again["messages"][0]["content"]
    assert {**refused, "messages": 0, "tools": 0} == {**again, "messages": 0, "tools": 0}
    assert refused["messages"][-1] == again["messages"][-1]
    status = rig.status()
    assert status["restart_count"] == 0
    assert any(B11434_REFUSAL in line for line in status["warnings"])


def test_where_the_template_opens_a_think_content_up_to_its_end_is_reasoning(make_worker: MakeWorker) -> None:
    rig = make_worker(Script(apply_template=[Answer(body={"prompt": "<|im_start|>assistant\n<think>\n"})]))
    result = rig.run(*plain_reply(*(Text(char) for char in "abc\n</think>\n\nAns")))
    assert (result["reasoning"], result["text"]) == ("abc", "Ans")
