"""The scripted server of `llama_worker.testing`, as a host's tests use it."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_worker import (
    Canary,
    LlamaWorker,
    RequestFailed,
    RequestRefused,
    TimeoutProfile,
    ToolDef,
    WorkerFuture,
    WorkerStartError,
)
from llama_worker.exit_tools import ALL_EXIT_TOOLS
from llama_worker.testing import (
    Answer,
    Exit,
    HttpError,
    KillSelf,
    Reasoning,
    Script,
    ScriptedReply,
    ScriptedServer,
    Text,
    ToolCall,
    failed,
    plain_reply,
    request_result,
    resolved,
)
from tests.actors.conftest import WAIT_S

pytest_plugins = ["llama_worker.pytest_plugin"]


def said(worker: LlamaWorker, prompt: str) -> str:
    return worker.ask(prompt).get(timeout=WAIT_S)["text"]


def test_replies_follow_prompt_order_and_the_last_repeats(
    scripted_server: ScriptedServer, scripted_worker: LlamaWorker
) -> None:
    assert said(scripted_worker, "before there is a reply") == "Hello"
    scripted_server.reply("one", times=2)
    scripted_server.reply(Text("t"), "wo")
    scripted_server.reply("to the worker's own words", to="Time: ")
    scripted_server.reply("rivers: 3", to="rivers")
    prompts = ["a", "b", "rivers?", "c", "d"]
    assert [said(scripted_worker, prompt) for prompt in prompts] == [
        *("one", "one", "rivers: 3", "two", "two")
    ]
    contents = [body["messages"][-1]["content"] for body in scripted_server.requests]
    assert len(contents) == 6
    assert contents[3].startswith("rivers?\n\n<worker_status>\nTime: ")
    assert scripted_server.wait_request(6) == scripted_server.requests[-1]


def test_a_reply_added_late_is_not_passed_over(
    scripted_server: ScriptedServer, scripted_worker: LlamaWorker
) -> None:
    scripted_server.reply("one")
    assert [said(scripted_worker, "x") for _ in range(3)] == ["one"] * 3
    scripted_server.reply("two")
    scripted_server.reply("three")
    assert [said(scripted_worker, "x") for _ in range(3)] == ["two", "three", "three"]


def test_a_restart_does_not_begin_the_replies_anew(
    scripted_server: ScriptedServer, scripted_worker: LlamaWorker
) -> None:
    scripted_server.reply("half", KillSelf())
    scripted_server.reply("whole")
    with pytest.raises(RequestFailed) as failure:
        said(scripted_worker, "x")
    assert failure.value.result["fail_reason"] == "server_died"
    scripted_worker.wait_slot().get(timeout=WAIT_S)
    assert said(scripted_worker, "x") == "whole"
    assert len(scripted_server.journal.facts("launched")) == 2


def test_each_launch_has_answers_of_its_own(tmp_path: Path) -> None:
    once = [Answer(times=1), Answer(status=500)]
    first = Script(models=once, replies=[ScriptedReply([Text("one"), KillSelf()])])
    replies = [ScriptedReply(plain_reply(Text(text))) for text in ("two", "three")]
    then = Script(models=once, replies=replies)
    server = ScriptedServer(tmp_path / "server", Script(launches=[first, then]))
    with LlamaWorker(server.config()) as worker:
        with pytest.raises(RequestFailed) as failure:
            said(worker, "x")
        assert failure.value.result["text"] == "one"
        worker.wait_slot().get(timeout=WAIT_S)
        assert [said(worker, "x") for _ in range(3)] == ["two", "three", "three"]


def test_a_refusal_takes_the_place_of_a_reply(
    scripted_server: ScriptedServer, scripted_worker: LlamaWorker
) -> None:
    scripted_server.reply(HttpError(503, "busy"))
    with pytest.raises(RequestFailed, match="busy"):
        said(scripted_worker, "x")


def test_signals_and_reasoning_are_scripted(scripted_server: ScriptedServer) -> None:
    outcome = {"outcome": "success", "summary": "s"}
    call = ToolCall("declare_outcome", outcome)
    scripted_server.reply(Reasoning("hm"), "4", call, reason="tool_calls")
    with LlamaWorker(scripted_server.config(exit_tools=ALL_EXIT_TOOLS)) as worker:
        result = worker.ask("x").get(timeout=WAIT_S)
    assert (result["reasoning"], result["text"]) == ("hm", "4")
    assert [signal["arguments"] for signal in result["signals"]] == [outcome]


@pytest.mark.parametrize("mode", ["native", "prompted"])
def test_a_prompt_has_its_replies_through_tool_turns(
    scripted_server: ScriptedServer, mode: str
) -> None:
    call = {
        "native": ToolCall("add", {"a": 1}),
        "prompted": Text('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'),
    }
    scripted_server.reply(call[mode], to="sum", reason="tool_calls")
    scripted_server.reply("3", to="sum")
    add: ToolDef = {"type": "function", "function": {"name": "add"}}
    runner = SimpleNamespace(run_tool=lambda *, name, arguments, request_id, job_name: 3)
    config = scripted_server.config(normal_tools=[add], tool_runner=runner, tool_call_mode=mode)
    with LlamaWorker(config) as worker:
        assert said(worker, "The sum?") == "3"
    assert ["tools" in body for body in scripted_server.requests] == [mode == "native"] * 2


def test_a_server_waits_until_the_test_lets_go(
    scripted_server: ScriptedServer, scripted_worker: LlamaWorker
) -> None:
    hold = scripted_server.hold()
    scripted_server.reply("a", hold.step, "b")
    asked = scripted_worker.ask("x")
    hold.wait_reached(WAIT_S)
    assert not asked.done()
    hold.release()
    assert asked.get(timeout=WAIT_S)["text"] == "ab"


def test_a_canary_gets_its_reply_in_one_piece(scripted_server: ScriptedServer) -> None:
    scripted_server.reply("It ", "is 4.", to="2 + 2")
    seen: list[str] = []

    def check(text: str) -> bool:
        seen.append(text)
        return True

    canary = Canary(prompt="What is 2 + 2?", check=check)
    with LlamaWorker(scripted_server.config(canary=canary)) as worker:
        assert said(worker, "x") == "Hello"
    assert seen == ["It is 4."]


def test_a_start_may_fail(tmp_path: Path, free_port: Callable[[], int]) -> None:
    script = Script(exits=[Exit(1, "before_bind", log=["no luck"])])
    config = ScriptedServer(tmp_path / "server", script).config(port=free_port())
    with closing(LlamaWorker(config)) as worker, pytest.raises(WorkerStartError, match="no luck"):
        worker.start().get(timeout=WAIT_S)


def test_a_key_that_the_worker_lacks_is_named_at_once(tmp_path: Path) -> None:
    """No limit ends this start."""
    config = ScriptedServer(tmp_path / "server").config(
        env={"LLAMA_API_KEY": "sesame"}, timeouts=TimeoutProfile.debug()
    )
    with closing(LlamaWorker(config)) as worker, pytest.raises(WorkerStartError) as failure:
        worker.start().get(timeout=WAIT_S)
    assert failure.value.reason == "unauthorized"
    assert "GET /v1/models: 401; give the worker the server's --api-key" in str(failure.value)


def test_a_double_of_a_worker_returns_futures() -> None:
    result = request_result("4", job_name="sum")
    assert resolved(result).get(timeout=0) is result
    assert (result["text"], result["job_name"], result["fail_reason"]) == ("4", "sum", None)
    with pytest.raises(RequestRefused):
        failed(RequestRefused("NO_SLOT_AVAILABLE")).get(timeout=0)
    later: WorkerFuture[int] = WorkerFuture()
    assert not later.done()
    later.answer(7)
    assert later.get(timeout=0) == 7


def test_any_thread_may_add_a_reply(tmp_path: Path) -> None:
    server = ScriptedServer(tmp_path)
    texts = [f"said {number}" for number in range(100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(server.reply, texts))
    written = json.loads((tmp_path / "script.json").read_text())
    assert all(json.dumps(written).count(f'"{text}"') == 1 for text in texts)
