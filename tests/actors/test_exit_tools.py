"""Exit tools, end to end: recorded whenever they appear, and nothing else ever comes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

import pytest

from llama_worker.exit_tools import ALL_EXIT_TOOLS
from llama_worker.types import ExitSignal, RequestResult, ToolDef
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, eventually
from tests.fake_script import (
    DoneMarker,
    ErrorData,
    Fin,
    Finish,
    Gate,
    Headers,
    KillSelf,
    Role,
    Step,
    Text,
    ToolCall,
    Turns,
    WaitClose,
    plain_reply,
)

CHAT = "/v1/chat/completions"
ISSUE = {"code": "missing_input", "severity": "error", "summary": "No file."}
LOOK: ToolDef = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Looking:
    """The runner of `look`; it is asked for nothing else."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def run_tool(self, *, name: str, arguments: Mapping[str, Any], request_id: int, job_name: str) -> Any:
        self.calls.append(name)
        return "seen"


@pytest.fixture
def looking() -> Looking:
    return Looking()


@pytest.fixture
def rig(make_worker: MakeWorker, looking: Looking) -> Rig:
    return make_worker(
        normal_tools=[LOOK], tool_runner=looking, exit_tools=ALL_EXIT_TOOLS, max_tool_iterations=1, slots=2
    )


def issue(index: int = 0) -> ToolCall:
    return ToolCall("signal_issue", ISSUE, index=index, call_id=f"exit-{index}", pieces=3)


def look(index: int = 0) -> ToolCall:
    return ToolCall("look", "{}", index=index, call_id=f"look-{index}")


def calling(*steps: Step) -> list[Step]:
    return plain_reply(*steps, reason="tool_calls")


def signals(result: RequestResult) -> list[tuple[str, Mapping[str, Any], str | None]]:
    return [(s["tool_name"], s["arguments"], s.get("malformed")) for s in result["signals"]]


def bodies(rig: Rig) -> list[dict[str, Any]]:
    return [fact["body"] for fact in rig.journal.facts("request", path=CHAT)]


def test_both_lists_are_offered_to_the_model(rig: Rig) -> None:
    rig.run()
    assert bodies(rig)[0]["tools"] == [LOOK, *ALL_EXIT_TOOLS]


def test_with_only_exit_calls_in_a_turn_the_request_completes_as_the_model_left_it(rig: Rig, looking: Looking) -> None:
    request_id = rig.submit(*calling(Text("My answer."), issue()))
    status = rig.wait_ended(request_id)
    assert [s["tool_name"] for s in status["signals"]] == ["signal_issue"]
    assert (status["tool_calls_count"], status["tool_iters_remaining"]) == (0, 1)
    result = rig.ended(request_id)
    assert (result["state"], result["finish_reason"], result["text"]) == ("completed", "stop", "My answer.")
    assert signals(result) == [("signal_issue", ISSUE, None)]
    assert (result["tool_trace"], looking.calls, len(bodies(rig))) == ([], [], 1)


def test_a_signal_says_when_it_was_emitted(rig: Rig) -> None:
    request_id = rig.submit(*calling(issue()))
    status = rig.wait_ended(request_id)
    (signal,) = rig.ended(request_id)["signals"]
    assert status["created_at"] <= signal["emitted_at"] <= status["completed_at"]


def test_a_signal_is_seen_while_the_model_still_speaks(make_worker: MakeWorker, make_gate: Any) -> None:
    heard: SimpleQueue[tuple[Any, int, str]] = SimpleQueue()

    def on_signal(signal: ExitSignal, *, request_id: int, job_name: str) -> None:
        heard.put((signal, request_id, job_name))
        raise RuntimeError("and nobody minds")

    gate = make_gate()
    rig = make_worker(exit_tools=ALL_EXIT_TOOLS, on_signal=on_signal)
    first, second = issue(), ToolCall("declare_outcome", {"outcome": "success", "summary": "s"}, index=1)
    request_id = rig.submit(Headers(), Role(), first, Gate(gate.path), second, Finish("tool_calls"), DoneMarker())
    signal, *whose = heard.get(timeout=WAIT_S)
    assert (signal["tool_name"], whose) == ("signal_issue", [request_id, "job"])
    status = rig.request(request_id)
    assert (status["state"], status["signals"]) == ("running", [signal])
    assert rig.worker.get_debug_info().get(timeout=WAIT_S)["totals"]["signals"] == {"signal_issue": 1}
    gate.open()
    result = rig.ended(request_id)
    assert [told["tool_name"] for told in result["signals"]] == ["signal_issue", "declare_outcome"]
    assert heard.get(timeout=WAIT_S)[0]["tool_name"] == "declare_outcome"
    assert heard.empty()


def test_beside_normal_calls_they_leave_no_trace_in_the_continuation_and_take_no_id(rig: Rig, looking: Looking) -> None:
    turn = calling(Text("t"), issue(0), look(1), issue(2))
    result = rig.run(Turns([turn, plain_reply(Text("done"))]))
    assert (result["state"], result["text"], looking.calls) == ("completed", "tdone", ["look"])
    assert signals(result) == [("signal_issue", ISSUE, None)] * 2
    assert [entry["tool_name"] for entry in result["tool_trace"]] == ["look"]
    said = bodies(rig)[1]["messages"]
    (assistant,) = [m for m in said if m["role"] == "assistant"]
    assert [(c["id"], c["function"]["name"]) for c in assistant["tool_calls"]] == [("c00000001", "look")]
    assert [m["tool_call_id"] for m in said if m["role"] == "tool"] == ["c00000001"]
    assert "missing_input" not in json.dumps(said)


def test_they_cost_no_iteration(rig: Rig) -> None:
    result = rig.run(Turns([calling(look()), calling(issue(), Text("done"))]))
    assert (result["state"], result["text"]) == ("completed", "done")
    assert len(result["signals"]) == 1


def test_signals_of_every_turn_are_kept_in_order(rig: Rig) -> None:
    outcome = ToolCall("declare_outcome", {"outcome": "success", "summary": "ok"})
    result = rig.run(Turns([calling(issue(0), look(1)), calling(outcome)]))
    assert [name for name, _, _ in signals(result)] == ["signal_issue", "declare_outcome"]


@pytest.mark.parametrize("raw", ["[1]", '{"code": ', "nope", '{"code": ' + "[" * 600 + "]" * 600 + "}"], ids=range(4))
def test_malformed_ones_are_recorded_with_their_text_and_fail_nothing(rig: Rig, raw: str) -> None:
    result = rig.run(*calling(Text("t"), ToolCall("signal_issue", raw)))
    assert (result["state"], result["text"]) == ("completed", "t")
    assert signals(result) == [("signal_issue", {}, raw)]


@pytest.mark.parametrize("beside", [ToolCall("nope", "{}", index=1), ToolCall("look", "[", index=1)])
def test_they_are_recorded_beside_unknown_and_malformed_calls(rig: Rig, beside: ToolCall) -> None:
    result = rig.run(*calling(issue(), beside))
    assert (result["state"], result["fail_reason"]) == ("failed", "tool_parse_error")
    assert signals(result) == [("signal_issue", ISSUE, None)]


def test_they_are_recorded_beside_a_call_beyond_the_budget(rig: Rig) -> None:
    result = rig.run(Turns([calling(look()), calling(look(0), issue(1))]))
    assert (result["state"], result["fail_reason"]) == ("failed", "tool_execution_error")
    assert signals(result) == [("signal_issue", ISSUE, None)]


def test_they_are_recorded_where_the_token_limit_cut_the_turn(rig: Rig) -> None:
    cut = ToolCall("signal_issue", '{"code": "x', index=1)
    result = rig.run(*plain_reply(issue(), cut, reason="length"))
    assert (result["state"], result["finish_reason"]) == ("completed", "max_tokens")
    assert signals(result) == [("signal_issue", ISSUE, None), ("signal_issue", {}, '{"code": "x')]


@pytest.mark.parametrize("finished", [False, True], ids=["in mid-turn", "behind the finish reason"])
def test_they_are_recorded_after_a_cancel(rig: Rig, finished: bool) -> None:
    counted = {"predicted_n": 77}
    last = Finish("tool_calls", timings=counted) if finished else Text("t", extra={"timings": counted})
    request_id = rig.submit(Headers(), Role(), issue(), last, WaitClose())
    eventually(lambda: rig.request(request_id)["tokens_received"] == 77, "the last piece")
    assert rig.worker.cancel(request_id).get(timeout=WAIT_S) is True
    result = rig.ended(request_id)
    assert result["state"] == "canceled"
    assert signals(result) == [("signal_issue", ISSUE, None)]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ((ErrorData(),), "server_error"),
        ((Finish("tool_calls"), ErrorData()), "server_error"),
        ((Fin(),), "stream_disconnected"),
        ((KillSelf(),), "server_died"),
    ],
    ids=["error", "error behind the finish reason", "disconnect", "server's death"],
)
def test_they_are_recorded_after_a_failure(rig: Rig, end: tuple[Step, ...], reason: str) -> None:
    result = rig.run(Headers(), Role(), issue(), Text("t"), *end)
    assert (result["state"], result["fail_reason"], result["text"]) == ("failed", reason, "t")
    assert signals(result) == [("signal_issue", ISSUE, None)]


def test_they_are_recorded_after_a_loop(rig: Rig) -> None:
    line = "the same line of more than thirty-two characters\n"
    result = rig.run(*calling(issue(), Text(line * 40)))
    assert (result["state"], result["fail_reason"]) == ("failed", "repeated_line_loop")
    assert signals(result) == [("signal_issue", ISSUE, None)]


def test_those_of_a_turn_whose_tool_failed_are_recorded_once(make_worker: MakeWorker) -> None:
    class Failing:
        def run_tool(self, *, name: str, arguments: Mapping[str, Any], request_id: int, job_name: str) -> Any:
            raise RuntimeError("no")

    rig = make_worker(normal_tools=[LOOK], tool_runner=Failing(), exit_tools=ALL_EXIT_TOOLS)
    result = rig.run(*calling(issue(0), look(1)))
    assert (result["state"], result["fail_reason"]) == ("failed", "tool_execution_error")
    assert signals(result) == [("signal_issue", ISSUE, None)]


def test_exit_tools_need_no_runner(make_worker: MakeWorker) -> None:
    rig = make_worker(exit_tools=ALL_EXIT_TOOLS)
    assert signals(rig.run(*calling(issue()))) == [("signal_issue", ISSUE, None)]
