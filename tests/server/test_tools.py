"""Tools on the real server: native calls with a template that has tools, prompted ones with one
that has none."""

import json
import queue
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from llama_worker import (
    BiosContext,
    ChatMessage,
    LlamaWorker,
    RequestFinishReason,
    RequestResult,
    RequestState,
    RequestStatus,
    ToolCall,
    ToolDef,
    default_bios,
)
from llama_worker.bios import STATUS_CLOSE, STATUS_OPEN
from tests.server.conftest import TEMPLATES, Serve
from tests.server.pace import SERVER_ARGS, patience

pytestmark = pytest.mark.server


def tool(name: str, **properties: Any) -> ToolDef:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": parameters},
    }


ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})
REPORT = tool("report", level={"type": "string", "enum": ["low", "high"]})


class Bench:
    """A worker and its tools; `seen`: how far the request was at each call."""

    def __init__(self, serve: Serve, **settings: Any) -> None:
        self.seen = queue.SimpleQueue[RequestStatus]()
        tools = {"normal_tools": [ADD], "exit_tools": [REPORT], "tool_runner": self}
        self.worker = LlamaWorker(serve(bios_provider=default_bios, **tools, **settings))

    def run_tool(
        self, *, name: str, arguments: dict[str, Any], request_id: int, job_name: str
    ) -> Any:
        self.seen.put(self._status(request_id))
        return arguments["a"] + arguments["b"]

    def run(
        self, prompt: str, messages: list[ChatMessage], **params: Any
    ) -> tuple[RequestResult, RequestStatus]:
        """The result, and the last status with what the server said of the last turn's prompt."""
        admitted = self.worker.submit("tools", "", prompt, messages=messages, params=params).get(
            timeout=patience()
        )
        assert admitted["ok"], admitted
        future, ends = self.worker.result(admitted["request_id"]), queue.SimpleQueue[None]()
        future.add_done_callback(lambda _: ends.put(None))
        # the value is not taken yet, so that the request is still known
        ends.get(timeout=patience())
        status, result = self._status(admitted["request_id"]), future.get(timeout=patience())
        assert result["ok"]
        return result, status

    def warnings(self) -> list[str]:
        return self.worker.get_worker_status().get(timeout=patience())["warnings"]

    def _status(self, request_id: int) -> RequestStatus:
        status = self.worker.get_status(request_id).get(timeout=patience())
        assert status["ok"], status
        return status


@pytest.fixture
def native(serve: Serve) -> Iterator[Bench]:
    bench = Bench(serve, template="tools.jinja", whole=True)
    with bench.worker:
        yield bench


@pytest.fixture(scope="module")
def prompted(serve: Serve) -> Iterator[Bench]:
    bench = Bench(serve)
    with bench.worker:
        yield bench


def assert_added_and_reported(result: RequestResult, *sums: dict[str, int]) -> None:
    assert result["finish_reason"] is RequestFinishReason.STOP
    calls = [
        (e["tool_name"], e["arguments"], e["iteration"], e["ok"]) for e in result["tool_trace"]
    ]
    assert calls == [("add", arguments, 1, True) for arguments in sums]
    assert [(s["tool_name"], s["arguments"]) for s in result["signals"]] == [
        ("report", {"level": "high"})
    ]


def assert_cached(first_turn: RequestStatus, last: RequestStatus, *, at_least: int) -> None:
    """What the first turn read was not read again in the last, for all that the worker put
    between."""
    first, second = first_turn["prompt_progress"], last["prompt_progress"]
    assert second["total"] > first["total"] > at_least
    assert second["cached"] >= 0.95 * first["total"]


# A model of 135M parameters calls no tool by itself, but at temperature 0 it copies what it was
# shown three times, status lines of the default BIOS and all. The clock in these is another each
# time, which may tip the first token of a turn: a bias for that of a call makes up for it, and is
# far too little to turn the answer after the results.


def call(name: str, **arguments: Any) -> ToolCall:
    return {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


TASK = "Add 2 and 3, and 4 and 5. Report high."
COPYING: dict[str, Any] = {"temperature": 0, "max_tokens": 256, "logit_bias": [["<", 2.5]]}


def shown() -> list[ChatMessage]:
    """A conversation as the worker would have it, a moment ago."""

    def status(left: int) -> str:
        context = BiosContext(
            now=datetime.now(UTC),
            timezone_name="UTC",
            worker_name="real",
            tool_iters_remaining=left,
            normal_tools=(ADD,),
            exit_tools=(REPORT,),
            tool_call_mode="native",
        )
        return f"{STATUS_OPEN}\n{default_bios(context).volatile}\n{STATUS_CLOSE}"

    calls = [call("add", a=2, b=3), call("add", a=4, b=5), call("report", level="high")]
    return [
        {"role": "user", "content": f"{TASK}\n\n{status(8)}"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "5"},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": f"9\n\n{status(7)}"},
        {"role": "assistant", "content": "The sums are 5 and 9."},
    ]


def test_native_turn_is_answered_and_prompt_cache_survives(native: Bench) -> None:
    examples = shown() * 3
    result, status = native.run(TASK, examples, **COPYING)
    assert_added_and_reported(result, {"a": 2, "b": 3}, {"a": 4, "b": 5})
    assert result["text"] == "The sums are 5 and 9."
    assert (status["tool_calls_count"], status["tool_iters_remaining"]) == (2, 7)
    assert native.warnings() == []
    first_turn, second_call = (native.seen.get(timeout=patience()) for _ in range(2))
    assert first_turn["state"] is second_call["state"] is RequestState.TOOL_RUNNING
    assert_cached(first_turn, status, at_least=1000)
    earlier = [*examples, *result["conversation"]]
    counted = native.worker.count_tokens("", "Thank you.", messages=earlier).get(timeout=patience())
    _, follow_up = native.run("Thank you.", earlier, max_tokens=1)
    answer_tokens = 8
    known = status["prompt_progress"]["total"] + answer_tokens
    assert follow_up["prompt_progress"]["cached"] >= 0.95 * known
    total = follow_up["prompt_progress"]["total"]
    assert counted == {"ok": True, "n_prompt_tokens": total, "n_ctx": 2048, "n_left": 2048 - total}


# In prompted mode the server knows of no tools, so a grammar may rule. It leaves two sayings; a
# bias makes the first one likelier, until it stands in the prompt: then a penalty that is as high
# outdoes the bias.

CALLS = (
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    '<tool_call>{"name": "report", "arguments": {"level": "high"}}</tool_call>'
)
FIRST_CALL_THEN_ANSWER: dict[str, Any] = {
    "grammar": f"root ::= {json.dumps('Sum: ' + CALLS)} | {json.dumps('Result: five')}",
    "logit_bias": [["Sum", 100], ["Result", 50]],
    "presence_penalty": 100,
    "repeat_last_n": 256,
    "temperature": 0,
}


def test_template_without_tools_prompts_them_and_keeps_cache(prompted: Bench) -> None:
    (warning,) = prompted.warnings()
    assert "prompted mode" in warning
    result, status = prompted.run("What is 2 + 3?", [], **FIRST_CALL_THEN_ANSWER)
    assert_added_and_reported(result, {"a": 2, "b": 3})
    assert result["text"] == "Sum: Result: five"  # the calls are no part of it
    assert_cached(prompted.seen.get(timeout=patience()), status, at_least=400)


def test_consecutive_prompted_requests_share_bios_in_prompt_cache(prompted: Bench) -> None:
    for prompt in ("Say one.", "Say two."):
        _, status = prompted.run(prompt, [], max_tokens=1)
    assert status["prompt_progress"]["cached"] >= 0.8 * status["prompt_progress"]["total"]


def test_server_refusing_tools_gets_request_again_as_prompted(serve: Serve) -> None:
    """With --no-jinja, b11434 says in /props that this template has tools, and refuses them with a
    500."""
    template = ("--no-jinja", "--chat-template-file", str(TEMPLATES / "tools.jinja"))
    bench = Bench(serve, args=(*SERVER_ARGS, *template))
    with bench.worker:
        result, _ = bench.run("Say ok.", [], max_tokens=4)
        assert result["state"] is RequestState.COMPLETED, result
        (warning,) = bench.warnings()
        assert "tools param requires --jinja flag" in warning
