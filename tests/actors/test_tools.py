"""Normal tools, end to end: which calls run, in what order, what the server is told, and what fails how."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from llama_worker.actors import tool_loop
from llama_worker.messages import ToolThreadStuck
from llama_worker.profiles import RestartPolicy
from llama_worker.types import BiosContext, BiosText, RequestResult, ToolDef
from tests.actors.conftest import WAIT_S, GatePath, MakeWorker, Rig, eventually, fast_timeouts
from tests.fake_script import (
    Delta,
    DoneMarker,
    ErrorData,
    Fin,
    FinalMessage,
    Finish,
    Gate,
    Headers,
    HttpError,
    KillSelf,
    Note,
    Reasoning,
    Role,
    Step,
    Text,
    ToolCall,
    Turns,
    WaitClose,
    plain_reply,
)

CHAT = "/v1/chat/completions"
B11434_MALFORMED = "The model produced output that does not match the expected peg-native format"
OLDER_MALFORMED = "Failed to parse input at pos 184: <tool_call>"


def tool(name: str) -> ToolDef:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


class Tools:
    """A runner: each tool is a function of its arguments. `release` ends every tool that waits in `hold`."""

    def __init__(self, **functions: Callable[[Mapping[str, Any]], Any]) -> None:
        self.functions = functions
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.callers: list[tuple[int, str, str]] = []
        self.entered = threading.Semaphore(0)
        self.released = threading.Event()

    @property
    def definitions(self) -> list[ToolDef]:
        return [tool(name) for name in self.functions]

    def run_tool(self, *, name: str, arguments: Mapping[str, Any], request_id: int, job_name: str) -> Any:
        self.calls.append((name, arguments))
        self.callers.append((request_id, job_name, threading.current_thread().name))
        return self.functions[name](arguments)

    def hold(self, arguments: Mapping[str, Any]) -> Any:
        """A tool that does not return until it is released."""
        self.entered.release()
        assert self.released.wait(120)
        return "released"

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=WAIT_S)


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


def calling(*calls: Step, before: tuple[Step, ...] = ()) -> list[Step]:
    """A turn that calls tools."""
    return plain_reply(*before, *calls, reason="tool_calls")


def call(name: str, index: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, call_id=f"from-the-server-{index}", index=index, pieces=2)


def bodies(rig: Rig) -> list[dict[str, Any]]:
    return [fact["body"] for fact in rig.journal.facts("request", path=CHAT)]


def outcome(result: RequestResult) -> tuple[str, str | None]:
    return str(result["state"]), result.get("fail_reason")


def stuck(rig: Rig) -> int:
    return rig.worker.get_debug_info().get(timeout=WAIT_S)["stuck_tool_threads_count"]


# --- turns and what they cost ---------------------------------------------------------------------------


def test_the_tools_are_offered_to_the_model(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig()
    rig.run()
    assert bodies(rig)[0]["tools"] == tools.definitions


def test_a_turn_with_any_number_of_calls_is_one_iteration(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_tool_iterations=2)
    three = [call("add", index, a=index, b=1) for index in range(3)]
    request_id = rig.submit(Turns([calling(*three), calling(call("add", a=1, b=1)), plain_reply(Text("done"))]))
    status = rig.wait_ended(request_id)
    assert (status["tool_iters_remaining"], status["tool_calls_count"]) == (0, 4)
    result = rig.ended(request_id)
    assert [entry["iteration"] for entry in result["tool_trace"]] == [1, 1, 1, 2]
    assert (outcome(result), result["text"]) == (("completed", None), "done")


def test_seventeen_calls_of_one_turn_run_in_the_order_given(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig()
    many = [call("add", index, a=index, b=0) for index in range(17)]
    result = rig.run(Turns([calling(*many), plain_reply(Text("done"))]))
    assert [arguments["a"] for _, arguments in tools.calls] == list(range(17))
    assert [entry["arguments"] for entry in result["tool_trace"]] == [{"a": n, "b": 0} for n in range(17)]
    assert [m["content"].partition("\n")[0] for m in bodies(rig)[1]["messages"][-17:]] == [str(n) for n in range(17)]


def test_tools_of_different_requests_run_side_by_side(make_worker: MakeWorker) -> None:
    both = threading.Barrier(2)
    meeting = Tools(meet=lambda _: both.wait(WAIT_S) >= 0)
    rig = make_worker(slots=2, normal_tools=meeting.definitions, tool_runner=meeting)
    ids = [rig.submit(Turns([calling(call("meet")), plain_reply(Text("met"))])) for _ in range(2)]
    assert [rig.ended(request_id)["text"] for request_id in ids] == ["met", "met"]


def test_a_tool_is_called_on_a_thread_of_its_own_with_the_ids_of_its_request(
    make_rig: Callable[..., Rig], tools: Tools
) -> None:
    rig = make_rig()
    request_id = rig.submit(Turns([calling(call("add", a=1, b=2)), plain_reply()]), job_name="sums")
    rig.ended(request_id)
    ((called_for, job_name, thread_name),) = tools.callers
    assert (called_for, job_name) == (request_id, "sums")
    assert "tool" in thread_name


def test_the_arguments_are_the_tools_own_to_change(make_worker: MakeWorker) -> None:
    def spoil(arguments: Any) -> str:
        arguments["list"].append("spoilt")
        return "ok"

    spoiling = Tools(spoil=spoil)
    rig = make_worker(normal_tools=spoiling.definitions, tool_runner=spoiling)
    result = rig.run(Turns([calling(call("spoil", list=[1])), plain_reply()]))
    assert result["tool_trace"][0]["arguments"] == {"list": [1]}
    (sent,) = bodies(rig)[1]["messages"][-2]["tool_calls"]
    assert json.loads(sent["function"]["arguments"]) == {"list": [1]}


# --- the continuation, as the server sees it -------------------------------------------------------------


def test_the_continuation_holds_the_calls_and_one_message_per_call_under_ids_of_our_own(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    turn = calling(call("add", 0, a=1, b=2), call("echo", 1, value=[3]), before=(Reasoning("hm"), Text("Let me see.")))
    rig.run(Turns([turn, plain_reply(Text("done"))]))
    assistant, first, second = bodies(rig)[1]["messages"][-3:]
    assert (assistant["role"], assistant["content"]) == ("assistant", "Let me see.")
    assert assistant["reasoning_content"] == "hm"
    assert [(c["id"], c["type"], c["function"]["name"]) for c in assistant["tool_calls"]] == [
        ("c00000001", "function", "add"),
        ("c00000002", "function", "echo"),
    ]
    assert [json.loads(c["function"]["arguments"]) for c in assistant["tool_calls"]] == [
        {"a": 1, "b": 2},
        {"value": [3]},
    ]
    assert (first["role"], first["tool_call_id"], first["content"]) == ("tool", "c00000001", "3")
    assert (second["role"], second["tool_call_id"]) == ("tool", "c00000002")
    assert second["content"].startswith("[3]")


def test_ids_go_on_in_the_next_turn(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.run(Turns([calling(call("add", a=1, b=2)), calling(call("add", a=3, b=4)), plain_reply()]))
    said = [m for m in bodies(rig)[2]["messages"] if m["role"] == "assistant"]
    assert [m["tool_calls"][0]["id"] for m in said] == ["c00000001", "c00000002"]


def test_earlier_messages_stay_to_the_byte_the_same(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.run(Turns([calling(call("add", a=1, b=2)), calling(call("add", a=3, b=4)), plain_reply()]))
    first, second, third = (body["messages"] for body in bodies(rig))
    assert json.dumps(second[: len(first)]) == json.dumps(first)
    assert json.dumps(third[: len(second)]) == json.dumps(second)


def test_the_bios_is_regenerated_for_each_turn_and_its_volatile_part_stands_last(make_rig: Callable[..., Rig]) -> None:
    seen: list[BiosContext] = []

    def bios(ctx: BiosContext) -> BiosText:
        seen.append(ctx)
        return BiosText(stable=f"stable {len(seen)}", volatile=f"volatile {len(seen)}")

    rig = make_rig(bios_provider=bios, max_tool_iterations=5)
    rig.run(Turns([calling(call("add", a=1, b=2)), calling(call("add", a=3, b=4)), plain_reply()]))
    assert [ctx.tool_iters_remaining for ctx in seen] == [5, 4, 3]
    for number, body in enumerate(bodies(rig), 1):
        head, last = body["messages"][0]["content"], body["messages"][-1]["content"]
        assert head.startswith("stable 1")
        assert f"volatile {number}" in last
        assert f"volatile {number + 1}" not in json.dumps(body)


def test_a_bios_that_fails_after_tools_is_a_prompt_error_that_keeps_the_output(make_rig: Callable[..., Rig]) -> None:
    def bios(ctx: BiosContext) -> str:
        return "" if ctx.tool_iters_remaining == 8 else str(1 // 0)

    rig = make_rig(bios_provider=bios)
    result = rig.run(Turns([calling(call("add", a=1, b=2), before=(Text("kept"),)), plain_reply()]))
    assert (outcome(result), result["text"]) == (("failed", "prompt_error"), "kept")
    assert len(result["tool_trace"]) == 1


def test_text_and_reasoning_are_those_of_every_turn_in_order_with_nothing_inserted(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    turns = [
        calling(call("add", a=1, b=2), before=(Reasoning("r1"), Text("t1"))),
        calling(call("add", a=1, b=2), before=(Reasoning("r2"),)),
        plain_reply(Reasoning("r3"), Text("t3")),
    ]
    result = rig.run(Turns(turns))
    assert (result["text"], result["reasoning"]) == ("t1t3", "r1r2r3")


# --- when calls run, and when they do not -----------------------------------------------------------------


def test_calls_run_only_once_the_turn_has_ended_with_a_finish_reason(
    make_rig: Callable[..., Rig], tools: Tools, make_gate: Callable[[], GatePath]
) -> None:
    gate = make_gate()
    rig = make_rig()
    turn = [Headers(), Role(), call("add", a=1, b=2), Text("!"), Gate(gate.path), Finish("tool_calls"), DoneMarker()]
    request_id = rig.submit(Turns([turn, plain_reply(Text("done"))]))
    rig.wait_text(request_id, "!")
    assert (rig.request(request_id)["state"], tools.calls) == ("running", [])
    gate.open()
    assert rig.ended(request_id)["text"] == "!done"
    assert len(tools.calls) == 1


@pytest.mark.parametrize("reason", ["tool_calls", "stop"])
def test_either_finish_reason_lets_calls_run(make_rig: Callable[..., Rig], tools: Tools, reason: str) -> None:
    rig = make_rig()
    assert rig.run(Turns([plain_reply(call("add", a=1, b=2), reason=reason), plain_reply(Text("x"))]))["text"] == "x"
    assert len(tools.calls) == 1


@pytest.mark.parametrize("arguments", ['{"a": 1, "b"', '{"a": 1, "b": 2}'])
def test_a_call_cut_off_by_the_token_limit_is_not_run_and_the_request_completes(
    make_rig: Callable[..., Rig], tools: Tools, arguments: str
) -> None:
    rig = make_rig()
    result = rig.run(*plain_reply(Text("part"), ToolCall("add", arguments), reason="length"))
    assert (outcome(result), result["finish_reason"], result["text"]) == (("completed", None), "max_tokens", "part")
    assert tools.calls == []


def test_a_call_of_a_stream_that_just_ends_is_not_run(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig()
    result = rig.run(Headers(), Role(), Text("part"), call("add", a=1, b=2), Fin())
    assert (outcome(result), result["text"]) == (("failed", "stream_disconnected"), "part")
    assert tools.calls == []


def test_a_call_is_not_run_where_an_error_follows_the_finish_reason(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig()
    result = rig.run(Headers(), Role(), Text("part"), call("add", a=1, b=2), Finish("tool_calls"), ErrorData())
    assert (outcome(result), result["text"]) == (("failed", "server_error"), "part")
    assert tools.calls == []


def test_a_call_is_not_begun_for_a_request_that_is_given_up_meanwhile(
    make_rig: Callable[..., Rig], tools: Tools
) -> None:
    rig = make_rig()
    request_id = rig.submit(
        Headers(), Role(), Text("t"), call("add", a=1, b=2), Finish("tool_calls"), Note("sent"), WaitClose()
    )
    rig.journal.wait("note", name="sent")
    rig.wait_text(request_id, "t")  # read by the worker, too
    rig.stop()  # what follows the finish reason is still being waited for
    result = rig.ended(request_id)
    assert result["state"] == "failed"
    assert (result["fail_reason"], result["text"]) == ("worker_stopped", "t")
    assert tools.calls == []


def test_ids_of_old_builds_inside_the_function_are_understood(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig()
    old = ToolCall("add", {"a": 1, "b": 2}, call_id="old", pieces=3, old_form=True, repeat_name=True)
    assert rig.run(Turns([calling(old), plain_reply(Text("done"))]))["text"] == "done"
    assert tools.calls == [("add", {"a": 1, "b": 2})]


def test_calls_may_arrive_in_a_final_message(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig()
    function = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    message = {
        "role": "assistant",
        "content": "said",
        "tool_calls": [{"id": "x", "type": "function", "function": function}],
    }
    result = rig.run(Turns([[Headers(), FinalMessage(message), DoneMarker()], plain_reply(Text(" done"))]))
    assert (result["text"], tools.calls) == ("said done", [("add", {"a": 1, "b": 2})])


def test_a_call_without_arguments_has_none(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig()
    bare = Delta({"tool_calls": [{"index": 0, "id": "x", "type": "function", "function": {"name": "echo"}}]})
    assert rig.run(Turns([calling(bare), plain_reply(Text("done"))]))["text"] == "done"
    assert tools.calls == [("echo", {})]


# --- failures: partial output survives all ----------------------------------------------------------------


def test_a_call_beyond_the_budget_is_tool_execution_error(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig(max_tool_iterations=1)
    result = rig.run(Turns([calling(call("add", a=1, b=2), before=(Text("kept"),))]))
    assert outcome(result) == ("failed", "tool_execution_error")
    assert "tool iteration budget exhausted" in result["fail_detail"]
    assert (result["text"], len(tools.calls)) == ("keptkept", 1)


def test_with_no_budget_at_all_the_first_call_is_beyond_it(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig(max_tool_iterations=0)
    result = rig.run(Turns([calling(call("add", a=1, b=2))]))
    assert outcome(result) == ("failed", "tool_execution_error")
    assert tools.calls == []


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (ToolCall("nope", "{}", index=1), "nope"),
        (ToolCall("add", "[1, 2]", index=1), "add"),
        (ToolCall("add", '{"a": ', index=1), "add"),
        (ToolCall("add", '{"a": ' + "[" * 600 + "]" * 600 + "}", index=1), "add"),
    ],
    ids=["unknown name", "a list", "half an object", "nested too deeply"],
)
def test_an_unknown_name_or_bad_arguments_are_tool_parse_error_and_nothing_of_the_turn_runs(
    make_rig: Callable[..., Rig], tools: Tools, bad: ToolCall, named: str
) -> None:
    rig = make_rig()
    result = rig.run(*calling(call("add", 0, a=1, b=2), bad, before=(Text("kept"),)))
    assert outcome(result) == ("failed", "tool_parse_error")
    assert named in result["fail_detail"]
    assert (result["text"], tools.calls) == ("kept", [])


def _raise(error: BaseException) -> Callable[[Mapping[str, Any]], Any]:
    def fail(_: Mapping[str, Any]) -> Any:
        raise error

    return fail


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("wrong lever"), SystemExit(3), KeyboardInterrupt(), Unprintable()],
    ids=lambda e: type(e).__name__,
)
def test_a_tool_that_raises_anything_fails_its_request_only(make_worker: MakeWorker, error: BaseException) -> None:
    raising = Tools(bad=_raise(error), never=lambda _: 0)
    rig = make_worker(normal_tools=raising.definitions, tool_runner=raising)
    turn = calling(call("bad"), call("never", 1), before=(Reasoning("why"), Text("kept")))
    result = rig.run(Turns([turn, plain_reply()]))
    assert outcome(result) == ("failed", "tool_execution_error")
    assert type(error).__name__ in result["fail_detail"]
    assert (result["text"], result["reasoning"]) == ("kept", "why")
    assert [name for name, _ in raising.calls] == ["bad"], "calls behind one that failed are not run"
    (entry,) = result["tool_trace"]
    assert entry["ok"] is False
    assert type(error).__name__ in entry["error"]
    assert rig.run()["text"] == "Hello"
    assert rig.status()["restart_count"] == 0


def test_what_json_cannot_hold_is_tool_execution_error(make_worker: MakeWorker) -> None:
    values = [object(), {1, 2}, float("nan"), {"at": [b"bytes"]}, {3: "number as key"}, "\ud800"]
    odd = Tools(odd=lambda arguments: values[arguments["number"]])
    rig = make_worker(normal_tools=odd.definitions, tool_runner=odd)
    for number, value in enumerate(values):
        result = rig.run(Turns([calling(call("odd", number=number), before=(Text("kept"),)), plain_reply()]))
        assert outcome(result) == ("failed", "tool_execution_error"), value
        assert "JSON" in result["fail_detail"]
        assert result["text"] == "kept"


def test_nothing_found_is_a_result_and_no_failure(make_worker: MakeWorker) -> None:
    values: list[tuple[object, str]] = [([], "[]"), (None, "null"), ("", ""), (False, "false"), ({}, "{}"), (0, "0")]
    finding = Tools(find=lambda arguments: values[arguments["number"]][0])
    rig = make_worker(normal_tools=finding.definitions, tool_runner=finding, bios_provider=lambda ctx: "")
    for number, (value, sent) in enumerate(values):
        result = rig.run(Turns([calling(call("find", number=number)), plain_reply(Text("none"))]))
        assert (outcome(result), result["text"]) == (("completed", None), "none"), value
        assert bodies(rig)[-1]["messages"][-1]["content"] == sent
        assert result["tool_trace"][0]["ok"] is True


@pytest.mark.parametrize("message", [B11434_MALFORMED, OLDER_MALFORMED])
@pytest.mark.parametrize("before_the_stream", [True, False])
def test_a_servers_report_of_a_malformed_call_is_tool_parse_error_and_no_reason_to_restart(
    make_rig: Callable[..., Rig], message: str, before_the_stream: bool
) -> None:
    rig = make_rig(restart=RestartPolicy(server_errors_before_restart=1))
    steps: tuple[Step, ...] = (Headers(), Role(), Text("kept"), call("add", a=1, b=2), ErrorData(message=message))
    if before_the_stream:
        steps = (HttpError(500, message),)
    result = rig.run(*steps)
    assert outcome(result) == ("failed", "tool_parse_error")
    assert message in result["fail_detail"]
    assert result["text"] == ("" if before_the_stream else "kept")
    assert rig.run()["text"] == "Hello"
    assert rig.status()["restart_count"] == 0


# --- tools that take their time ---------------------------------------------------------------------------


def holding(rig: Rig, tools: Tools, **params: Any) -> int:
    """A request inside a tool that does not return."""
    turn = calling(call("hold"), before=(Reasoning("why"), Text("kept")))
    request_id = rig.submit(Turns([turn, plain_reply(Text(" done"))]), **params)
    tools.wait_entered()
    return request_id


def test_inside_a_tool_the_status_says_so(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig()
    request_id = holding(rig, tools)
    status = rig.request(request_id)
    assert (status["state"], status["phase"]) == ("tool_running", "tool")
    assert (status["tool_iters_remaining"], status["tool_calls_count"]) == (7, 1)
    assert rig.text(request_id) == "kept"
    tools.released.set()
    result = rig.ended(request_id)
    assert (result["text"], result["reasoning"]) == ("kept done", "why")


def test_the_trace_tells_every_call(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig()
    began_at = time.time()
    request_id = holding(rig, tools)
    time.sleep(0.05)  # what is measured, not waited for
    tools.released.set()
    (entry,) = rig.ended(request_id)["tool_trace"]
    assert (entry["tool_call_id"], entry["tool_name"], entry["arguments"]) == ("c00000001", "hold", {})
    assert (entry["iteration"], entry["ok"], "error" in entry) == (1, True, False)
    assert entry["duration_s"] >= 0.05
    assert began_at - 0.1 <= entry["started_at"] <= time.time() + 0.1


def test_a_tool_that_exceeds_its_time_fails_the_request_on_time_and_its_thread_is_counted_until_it_ends(
    make_rig: Callable[..., Rig], tools: Tools
) -> None:
    rig = make_rig(tool_timeout_s=0.2)
    assert stuck(rig) == 0
    result = rig.ended(holding(rig, tools))
    assert outcome(result) == ("failed", "tool_execution_error")
    assert "tool_timeout_s 0.2" in result["fail_detail"]
    assert (result["text"], result["reasoning"]) == ("kept", "why")
    assert 0.2 <= result["tool_trace"][0]["duration_s"] < 5
    eventually(lambda: stuck(rig) == 1, "one stuck thread")
    tools.released.set()
    eventually(lambda: stuck(rig) == 0, "no stuck thread")


def test_a_batch_that_ends_in_time_leaves_no_stuck_thread_not_even_for_a_moment(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def stuck_thread(**fields: Any) -> ToolThreadStuck:
        told.append(fields)
        return ToolThreadStuck(**fields)

    monkeypatch.setattr(tool_loop, "ToolThreadStuck", stuck_thread)
    rig = make_rig(tool_timeout_s=60.0)
    for last in (call("add", 1, a=1, b=2), call("add", 1)):  # well, and with a failure
        rig.run(Turns([calling(call("echo"), last), plain_reply(Text("done"))]))
    assert (told, stuck(rig)) == ([], 0)


def test_each_call_has_the_whole_time_to_itself(make_worker: MakeWorker) -> None:
    slow = Tools(slow=lambda _: time.sleep(0.3))
    rig = make_worker(normal_tools=slow.definitions, tool_runner=slow, tool_timeout_s=1.0)
    turn = calling(*(call("slow", index) for index in range(5)))
    assert rig.run(Turns([turn, plain_reply(Text("done"))]))["text"] == "done"


def test_after_a_timeout_the_turns_other_calls_are_not_run(make_rig: Callable[..., Rig], tools: Tools) -> None:
    rig = make_rig(tool_timeout_s=0.2)
    result = rig.run(Turns([calling(call("hold"), call("add", 1, a=1, b=2)), plain_reply()]))
    assert outcome(result) == ("failed", "tool_execution_error")
    eventually(lambda: stuck(rig) == 1, "a batch that was dropped")
    tools.released.set()
    eventually(lambda: stuck(rig) == 0, "end of the thread")
    assert [name for name, _ in tools.calls] == ["hold"]


def test_other_requests_and_stop_go_on_beside_a_tool_that_never_returns(
    make_rig: Callable[..., Rig], tools: Tools
) -> None:
    rig = make_rig(slots=2, tool_timeout_s=60.0)
    request_id = holding(rig, tools)
    turn = Turns([calling(call("add", a=1, b=2)), plain_reply(Text("3"))])
    assert rig.run(turn)["text"] == "3"
    rig.stop()
    result = rig.ended(request_id)
    assert (outcome(result), result["text"]) == (("failed", "worker_stopped"), "kept")
    eventually(lambda: stuck(rig) == 1, "one stuck thread")
    rig.start()
    assert rig.run()["text"] == "Hello"


def test_a_cancel_during_a_tool_ends_the_request_at_once_and_keeps_its_output(
    make_rig: Callable[..., Rig], tools: Tools
) -> None:
    rig = make_rig(tool_timeout_s=60.0)
    request_id = holding(rig, tools)
    assert rig.worker.cancel(request_id).get(timeout=WAIT_S) is True
    assert rig.status()["slots_used"] == 0
    result = rig.ended(request_id)
    assert (outcome(result), result["text"], result["reasoning"]) == (("canceled", "canceled"), "kept", "why")
    eventually(lambda: stuck(rig) == 1, "one stuck thread")
    tools.released.set()
    eventually(lambda: stuck(rig) == 0, "no stuck thread")
    assert rig.run()["text"] == "Hello"
    assert len(bodies(rig)) == 2, "the cancelled request went no further"


def test_the_servers_death_during_a_tool_fails_the_request_and_keeps_its_output(
    make_rig: Callable[..., Rig], tools: Tools
) -> None:
    rig = make_rig(slots=2, tool_timeout_s=60.0)
    request_id = holding(rig, tools)
    rig.submit(Headers(), KillSelf())
    result = rig.ended(request_id)
    assert (outcome(result), result["text"]) == (("failed", "server_died"), "kept")
    rig.wait_restarted()
    assert rig.run()["text"] == "Hello"


@pytest.mark.parametrize(
    "how", ["canceled", "worker_stopped", "absolute_timeout", "server_died", "tool_execution_error"]
)
def test_calls_that_had_begun_are_in_the_trace_whatever_ends_the_request(
    make_rig: Callable[..., Rig], tools: Tools, how: str
) -> None:
    limit_s = 1.0 if how == "absolute_timeout" else None
    rig = make_rig(
        slots=2,
        tool_timeout_s=0.5 if how == "tool_execution_error" else 60.0,
        timeouts=fast_timeouts(absolute_timeout_s=limit_s, liveness_probe_interval_s=0.2),
    )
    request_id = rig.submit(*calling(call("add", 0, a=1, b=2), call("hold", 1), call("echo", 2)))
    tools.wait_entered()
    if how == "canceled":
        rig.worker.cancel(request_id).get(timeout=WAIT_S)
    elif how == "worker_stopped":
        rig.stop()
    elif how == "server_died":
        rig.submit(Headers(), KillSelf())
    result = rig.ended(request_id)
    assert result["fail_reason"] == how
    returned, under_way = result["tool_trace"]
    assert (returned["tool_name"], returned["ok"], "error" in returned) == ("add", True, False)
    assert (under_way["tool_name"], under_way["ok"]) == ("hold", False)
    assert (how if how != "tool_execution_error" else "tool_timeout_s") in under_way["error"]
    assert under_way["started_at"] >= returned["started_at"] + returned["duration_s"] - 0.001


def test_a_tool_that_blocks_for_ever_changes_the_latency_of_another_slots_requests_by_less_than_20_ms(
    make_rig: Callable[..., Rig], tools: Tools
) -> None:
    rig = make_rig(slots=2, tool_timeout_s=120.0)

    def latency_s() -> float:
        began_at = time.perf_counter()
        rig.run(*plain_reply(Text("x")))
        return time.perf_counter() - began_at

    def blocked_latency_s() -> float:
        tools.released.clear()
        request_id = holding(rig, tools)
        taken_s = latency_s()
        tools.released.set()
        rig.ended(request_id)
        return taken_s

    latency_s()
    pairs = []
    for number in range(25):
        order = (latency_s, blocked_latency_s) if number % 2 else (blocked_latency_s, latency_s)
        taken = {measure: measure() for measure in order}
        pairs.append(taken[blocked_latency_s] - taken[latency_s])
    assert abs(statistics.median(pairs)) < 0.020, sorted(pairs)
