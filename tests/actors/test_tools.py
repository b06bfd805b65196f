"""Tools and exit tools on real threads, and what the server is sent; which calls run and what fails
how is sans-IO."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from llama_worker import RestartPolicy, RunningCall
from llama_worker.exit_tools import ALL_EXIT_TOOLS
from llama_worker.request import messages
from llama_worker.request.messages import StuckToolThreads
from llama_worker.testing import scripts as fs
from llama_worker.types.chat import ToolDef
from llama_worker.types.request import ExitSignal
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, eventually
from tests.actors.test_on_event import halted


def tool(name: str) -> ToolDef:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }


class Tools:
    """A runner: each tool is a function of its arguments. `release` ends every tool that waits in
    `hold`."""

    def __init__(self, **functions: Callable[[Mapping[str, Any]], Any]) -> None:
        self.functions = functions
        self.callers: list[tuple[int, str, str]] = []
        self.released = threading.Event()

    @property
    def definitions(self) -> list[ToolDef]:
        return [tool(name) for name in self.functions]

    def run_tool(
        self, *, name: str, arguments: Mapping[str, Any], request_id: int, job_name: str
    ) -> Any:
        self.callers.append((request_id, job_name, threading.current_thread().name))
        return self.functions[name](arguments)

    def hold(self, arguments: Mapping[str, Any]) -> Any:
        """A tool that does not return until it is released."""
        assert self.released.wait(120)
        return "released"


def add(arguments: Mapping[str, Any]) -> int:
    return int(arguments["a"]) + int(arguments["b"])


@pytest.fixture
def tools() -> Iterator[Tools]:
    made = Tools(add=add, echo=lambda arguments: arguments.get("value"))
    made.functions["hold"] = made.hold
    yield made
    made.released.set()


@pytest.fixture
def make_rig(make_worker: MakeWorker, tools: Tools) -> Callable[..., Rig]:
    def make(**config: Any) -> Rig:
        return make_worker(normal_tools=tools.definitions, tool_runner=tools, **config)

    return make


def calling(*steps: fs.Step) -> list[fs.Step]:
    """A turn that calls tools."""
    return fs.plain_reply(*steps, reason="tool_calls")


def call(name: str, index: int = 0, **arguments: Any) -> fs.Step:
    return fs.ToolCall(name, arguments, call_id=f"from-the-server-{index}", index=index, pieces=2)


def bodies(rig: Rig) -> list[dict[str, Any]]:
    return [fact["body"] for fact in rig.journal.facts("request", path="/v1/chat/completions")]


def stuck(rig: Rig) -> int:
    return rig.debug()["stuck_tool_threads_count"]


def test_parallel_tools_of_different_requests_keep_own_arguments(make_worker: MakeWorker) -> None:
    both = threading.Barrier(2)

    def meet(arguments: Any) -> bool:
        arguments["list"].append("spoilt")
        return both.wait(WAIT_S) >= 0

    meeting = Tools(meet=meet)
    rig = make_worker(slots=2, normal_tools=meeting.definitions, tool_runner=meeting)
    turns = fs.Turns([calling(call("meet", list=[1])), fs.plain_reply(fs.Text("met"))])
    ids = {rig.submit(turns, job_name=name): name for name in ("one", "two")}
    for result in map(rig.ended, ids):
        assert (result["text"], result["tool_trace"][0]["arguments"]) == ("met", {"list": [1]})
    assert {request_id: job_name for request_id, job_name, _ in meeting.callers} == ids
    assert all("tool" in thread_name for *_, thread_name in meeting.callers)
    (sent,) = bodies(rig)[-1]["messages"][-2]["tool_calls"]
    assert json.loads(sent["function"]["arguments"]) == {"list": [1]}


def test_tools_refused_by_server_are_not_offered_again(
    make_worker: MakeWorker, tools: Tools
) -> None:
    refusal = fs.HttpError(500, "tools param requires --jinja flag")  # b11434 with --no-jinja
    script = fs.Script(
        replies=[fs.ScriptedReply([refusal]), fs.ScriptedReply(fs.plain_reply(), times=None)]
    )
    restart = RestartPolicy(server_errors_before_restart=1)
    rig = make_worker(script, normal_tools=tools.definitions, tool_runner=tools, restart=restart)
    assert [rig.run()["state"] for _ in range(2)] == ["completed"] * 2
    assert ["tools" in body for body in bodies(rig)] == [True, False, False]
    assert rig.status()["restart_count"] == 0


# --- tools that take their time -------------------------------------------------------------------


def test_tool_that_never_returns_fails_only_its_request(
    make_rig: Callable[..., Rig], tools: Tools
) -> None:
    rig = make_rig(tool_timeout_s=0.2)
    assert stuck(rig) == 0
    result = rig.run(*calling(call("hold")))
    assert result["fail_reason"] == "tool_execution_error"
    assert "tool_timeout_s 0.2" in result["fail_detail"]
    assert result["tool_trace"][0]["duration_s"] >= 0.2
    eventually(lambda: stuck(rig) == 1, "one stuck thread")
    assert (
        rig.run(fs.Turns([calling(call("add", a=1, b=2)), fs.plain_reply(fs.Text("3"))]))["text"]
        == "3"
    )
    rig.stop()
    rig.start()
    assert stuck(rig) == 1
    tools.released.set()
    eventually(lambda: stuck(rig) == 0, "no stuck thread")


def test_batch_ending_in_time_leaves_no_stuck_thread(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Mock(wraps=StuckToolThreads)
    monkeypatch.setattr(messages, "StuckToolThreads", told)
    rig = make_rig(tool_timeout_s=60.0)
    for last in (call("add", 1, a=1, b=2), call("add", 1)):  # well, and with a failure
        rig.run(fs.Turns([calling(call("echo"), last), fs.plain_reply(fs.Text("done"))]))
    assert (told.called, stuck(rig)) == (False, 0)


# --- runners that know how long somebody waits, and async ones ------------------------------------


class Patient:
    """A tool that waits until nobody does any more."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[RunningCall] = SimpleQueue()
        self.gave_up: SimpleQueue[bool] = SimpleQueue()

    def run_tool(self, *, call: RunningCall, **about: Any) -> str:
        self.calls.put(call)
        self.gave_up.put(call.cancelled.wait(WAIT_S))
        return "too late"


@pytest.mark.parametrize("ending", ["cancel", "stop", "timeout"])
def test_a_runner_is_told_once_nobody_waits(make_worker: MakeWorker, ending: str) -> None:
    patient, limit_s = Patient(), 0.2 if ending == "timeout" else 60.0
    rig = make_worker(normal_tools=[tool("wait")], tool_runner=patient, tool_timeout_s=limit_s)
    request_id = rig.submit(*calling(call("wait")))
    running = patient.calls.get(timeout=WAIT_S)
    assert running.deadline <= time.monotonic() + limit_s
    if ending != "timeout":
        assert rig.request(request_id)["running_tool"] == "wait"
        assert not running.cancelled.is_set()
    if ending == "cancel":
        rig.worker.cancel(request_id)
    elif ending == "stop":
        rig.worker.stop()
    assert patient.gave_up.get(timeout=WAIT_S) is True
    reason = {"cancel": "canceled", "stop": "worker_stopped", "timeout": "tool_execution_error"}
    assert rig.ended(request_id)["fail_reason"] == reason[ending]
    eventually(lambda: stuck(rig) == 0, "the end of the thread")


class Async:
    """Coroutines for tools."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    async def run_tool(self, *, name: str, arguments: dict[str, Any], **about: Any) -> Any:
        if name == "bad":
            await asyncio.to_thread(self.fail)
        if name == "wait":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return await asyncio.to_thread(dict, arguments)

    def fail(self) -> None:
        raise ValueError("wrong lever")


def test_an_async_runner_has_its_own_event_loop(make_worker: MakeWorker) -> None:
    rig = make_worker(normal_tools=[tool("echo"), tool("bad")], tool_runner=Async())
    turns = fs.Turns([calling(call("echo", a=1)), fs.plain_reply(fs.Text("done"))])
    with halted("asyncio"):  # each loop says which selector it uses
        (entry,) = rig.run(turns)["tool_trace"]
        failed = rig.run(*calling(call("bad")))
    assert (entry["ok"], entry["result"]) == (True, '{"a": 1}')
    assert failed["fail_detail"] == "tool 'bad' raised ValueError: wrong lever"


def test_an_async_tool_is_cancelled_once_nobody_waits(make_worker: MakeWorker) -> None:
    runner = Async()
    rig = make_worker(normal_tools=[tool("wait")], tool_runner=runner, tool_timeout_s=0.2)
    assert "tool_timeout_s 0.2" in rig.run(*calling(call("wait")))["fail_detail"]
    assert runner.cancelled.wait(WAIT_S)
    eventually(lambda: stuck(rig) == 0, "the end of the thread")


def test_async_tool_need_not_wait_for_its_threads(make_worker: MakeWorker) -> None:
    held = threading.Event()

    class Impatient:
        async def run_tool(self, **call: Any) -> str:
            try:
                await asyncio.wait_for(asyncio.to_thread(held.wait, WAIT_S), 0.01)
            except TimeoutError:
                return "nothing yet"
            return "it came"

    rig = make_worker(normal_tools=[tool("look")], tool_runner=Impatient())
    try:
        result = rig.run(fs.Turns([calling(call("look")), fs.plain_reply(fs.Text("Later."))]))
    finally:
        held.set()
    assert (result["fail_reason"], result["text"]) == (None, "Later.")
    assert [entry.get("result") for entry in result["tool_trace"]] == ["nothing yet"]


# --- exit tools -----------------------------------------------------------------------------------


ISSUE = {"code": "missing_input", "severity": "error", "summary": "No file."}


def test_signal_is_reported_immediately_outside_the_conversation(
    make_rig: Callable[..., Rig], gate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: SimpleQueue[tuple[Any, int, str]] = SimpleQueue()

    def on_signal(signal: ExitSignal, *, request_id: int, job_name: str) -> None:
        heard.put((signal, request_id, job_name))
        raise RuntimeError("and nobody minds")

    rig = make_rig(exit_tools=ALL_EXIT_TOOLS, on_signal=on_signal)
    issue = fs.ToolCall("signal_issue", ISSUE, index=0, call_id="exit", pieces=3)
    first = [
        fs.Headers(),
        fs.Role(),
        issue,
        fs.Gate(gate),
        call("add", 1, a=1, b=2),
        fs.Finish("tool_calls"),
        fs.DoneMarker(),
    ]
    second = calling(
        fs.Text("done"), fs.ToolCall("declare_outcome", {"outcome": "success", "summary": "s"})
    )
    request_id = rig.submit(fs.Turns([first, second]))
    signal, *whose = heard.get(timeout=WAIT_S)
    assert (signal["tool_name"], signal["arguments"]) == ("signal_issue", ISSUE)
    assert whose == [request_id, "job"]
    status = rig.request(request_id)
    assert (status["state"], status["signals"]) == ("running", [signal])
    assert rig.debug()["totals"]["signals"] == {"signal_issue": 1}
    gate.touch()
    result = rig.ended(request_id)
    assert [told["tool_name"] for told in result["signals"]] == ["signal_issue", "declare_outcome"]
    assert heard.get(timeout=WAIT_S)[0]["tool_name"] == "declare_outcome"
    assert heard.empty()
    assert (result["state"], result["text"], len(result["tool_trace"])) == ("completed", "done", 1)
    assert ISSUE["code"] not in json.dumps(bodies(rig)[1]["messages"])
    record = caplog.records[0]
    assert record.exc_info is not None
    assert (
        record.getMessage()
        == f"on_signal of worker {rig.config.name!r}, request {request_id} ('job'), failed"
    )
