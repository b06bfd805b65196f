"""Prompted mode, end to end: tools by the text convention, and how a worker comes to use it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from llama_worker.exit_tools import SIGNAL_ISSUE
from llama_worker.profiles import RestartPolicy
from llama_worker.stream.tagged_calls import tagged_call
from llama_worker.types import RequestResult, ToolDef
from tests.actors.conftest import WAIT_S, GatePath, MakeWorker, Rig, eventually
from tests.fake_script import (
    Answer,
    DoneMarker,
    Fin,
    Finish,
    Gate,
    Headers,
    HttpError,
    Lines,
    Note,
    Reasoning,
    Reply,
    Role,
    Script,
    Step,
    Text,
    ToolCall,
    Turns,
    WaitClose,
    plain_reply,
    props_answer,
)

CHAT = "/v1/chat/completions"
CALL = tagged_call("add", '{"a": 1, "b": 2}')
ISSUE = tagged_call("signal_issue", '{"code": "x", "severity": "info", "summary": "s"}')
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
        config = {"tool_call_mode": "prompted", **config}
        return make_worker(script, normal_tools=[ADD], tool_runner=adding, exit_tools=[SIGNAL_ISSUE], **config)

    return make


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


def bodies(rig: Rig) -> list[dict[str, Any]]:
    return [fact["body"] for fact in rig.journal.facts("request", path=CHAT)]


def names(result: RequestResult) -> list[str]:
    return [signal["tool_name"] for signal in result["signals"]]


# --- the conversation ---------------------------------------------------------------------------------


def test_the_bios_lists_the_tools_and_the_convention_and_no_tools_are_sent(rig: Rig) -> None:
    rig.run()
    (body,) = bodies(rig)
    assert "tools" not in body
    system = body["messages"][0]["content"]
    for said in ("<tool_call>", '"name": "add"', "Adds two.", '"name": "signal_issue"'):
        assert said in system


def test_calls_are_taken_out_of_the_text_and_never_appear_in_it(rig: Rig, adding: Adding) -> None:
    pieces = [Text(piece) for piece in (CALL[:4], CALL[4:15], CALL[15:])]
    turns = [plain_reply(Text("Let me add. "), *pieces, Text(" Wait.")), plain_reply(Text("It is 3."))]
    result = rig.run(Turns(turns))
    assert (result["state"], result["text"]) == ("completed", "Let me add.  Wait.It is 3.")
    assert adding.calls == [{"a": 1, "b": 2}]
    assert [entry["tool_name"] for entry in result["tool_trace"]] == ["add"]


def test_the_continuation_holds_the_call_as_written_and_its_result_in_a_users_message(rig: Rig) -> None:
    rig.run(Turns([plain_reply(Reasoning("hm"), Text("Well. "), Text(CALL + ISSUE)), plain_reply(Text("3"))]))
    first, second = (body["messages"] for body in bodies(rig))
    assert json.dumps(second[: len(first)]) == json.dumps(first)
    assistant, answer = second[len(first) :]
    assert assistant == {"role": "assistant", "content": f"Well. {CALL}", "reasoning_content": "hm"}
    assert answer["role"] == "user"
    assert answer["content"].startswith('<tool_response id="c00000001" name="add">\n{"sum": 3}\n</tool_response>')
    assert "Tool iterations left: 7" in answer["content"]


def test_what_may_be_the_start_of_a_call_is_held_back_until_it_is_decided(
    rig: Rig, make_gate: Callable[[], GatePath]
) -> None:
    begun, decided = make_gate(), make_gate()
    steps: list[Step] = [Headers(), Role(), Text("a <tool_c"), Text("all"), Note("begun"), Gate(begun.path)]
    steps += [Text("er> b <tool_call>{"), Text("!"), Note("inside"), Gate(decided.path), Finish(), DoneMarker()]
    request_id = rig.submit(*steps)
    rig.wait_text(request_id, "a ")
    rig.journal.wait("note", name="begun")
    assert rig.text(request_id) == "a "
    begun.open()
    rig.wait_text(request_id, "b ")
    assert rig.text(request_id).startswith("a <tool_caller> b ")
    decided.open()
    assert rig.ended(request_id)["text"] == "a <tool_caller> b <tool_call>{!"


def test_a_whole_call_is_held_back_too(rig: Rig, make_gate: Callable[[], GatePath]) -> None:
    gate = make_gate()
    turn = [Headers(), Role(), Text("a "), Text(CALL), Text(" b"), Gate(gate.path), Finish(), DoneMarker()]
    request_id = rig.submit(Turns([turn, plain_reply(Text(" c"))]))
    rig.wait_text(request_id, "b")
    assert rig.text(request_id) == "a  b"
    gate.open()
    assert rig.ended(request_id)["text"] == "a  b c"


@pytest.mark.parametrize(
    "broken",
    ['<tool_call>{"name": "add"}</tool_call>', "<tool_call>add(1, 2)</tool_call>", '<tool_call>{"name": "add", "arg'],
)
def test_a_malformed_call_is_tool_parse_error_with_the_text_left_as_it_was(
    rig: Rig, adding: Adding, broken: str
) -> None:
    result = rig.run(*plain_reply(Text(f"{CALL}a {broken}"), Text(" b" if broken.endswith(">") else "")))
    assert (result["state"], result["fail_reason"]) == ("failed", "tool_parse_error")
    assert result["text"] == f"a {broken}" + (" b" if broken.endswith(">") else "")
    assert adding.calls == []


def test_an_unknown_tool_is_tool_parse_error(rig: Rig) -> None:
    result = rig.run(*plain_reply(Text("a "), Text(tagged_call("nope", "{}"))))
    assert (result["state"], result["fail_reason"], result["text"]) == ("failed", "tool_parse_error", "a ")


def test_a_call_cut_off_by_the_token_limit_is_not_run_and_stays_text(rig: Rig, adding: Adding) -> None:
    result = rig.run(*plain_reply(Text("a "), Text(CALL[:30]), reason="length"))
    assert (result["state"], result["finish_reason"], result["text"]) == ("completed", "max_tokens", f"a {CALL[:30]}")
    assert adding.calls == []


def test_exit_calls_are_recorded_and_leave_the_text(rig: Rig) -> None:
    result = rig.run(*plain_reply(Text("Done. "), Text(ISSUE)))
    assert (result["state"], result["text"], names(result)) == ("completed", "Done. ", ["signal_issue"])


def test_malformed_exit_calls_are_recorded_and_fail_nothing(rig: Rig) -> None:
    broken = '<tool_call>{"name": "signal_issue", "arguments": [}</tool_call>'
    result = rig.run(*plain_reply(Text("Done. "), Text(broken)))
    assert (result["state"], names(result)) == ("completed", ["signal_issue"])
    assert result["text"] == f"Done. {broken}"
    assert "signal_issue" in result["signals"][0]["malformed"]


@pytest.mark.parametrize("written", [ISSUE, ISSUE[:-20]], ids=["whole", "half"])
def test_exit_calls_are_recorded_after_a_cancel(rig: Rig, written: str) -> None:
    request_id = rig.submit(Headers(), Role(), Text("a"), Text(written), WaitClose())
    eventually(lambda: rig.request(request_id)["tokens_received"] == 2, "both pieces")
    assert rig.worker.cancel(request_id).get(timeout=WAIT_S) is True
    result = rig.ended(request_id)
    assert result["state"] == "canceled"
    assert names(result) == ["signal_issue"]


@pytest.mark.parametrize("written", [ISSUE, ISSUE[:-20]], ids=["whole", "half"])
def test_exit_calls_are_recorded_after_a_failure_and_text_held_back_is_output(rig: Rig, written: str) -> None:
    result = rig.run(Headers(), Role(), Text("a"), Text(written), Fin())
    assert (result["state"], result["fail_reason"]) == ("failed", "stream_disconnected")
    assert names(result) == ["signal_issue"]
    assert result["text"] == ("a" if written == ISSUE else f"a{written}")


# --- how a worker comes to use it ------------------------------------------------------------------------


def test_auto_uses_native_mode_where_the_template_has_tools(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Script(props=[props_answer(tools=True)]), tool_call_mode="auto")
    rig.run()
    assert "tools" in bodies(rig)[0]
    assert rig.status()["warnings"] == []


def test_auto_uses_prompted_mode_where_the_template_has_no_tools_and_warns(
    make_rig: Callable[..., Rig], adding: Adding
) -> None:
    rig = make_rig(Script(props=[props_answer(tools=False)]), tool_call_mode="auto")
    result = rig.run(Turns([plain_reply(Text(CALL)), plain_reply(Text("3"))]))
    assert (result["text"], adding.calls) == ("3", [{"a": 1, "b": 2}])
    assert "tools" not in bodies(rig)[0]
    assert any("prompted mode" in line for line in rig.status()["warnings"])


def test_auto_uses_native_mode_where_the_server_does_not_say(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Script(props=[Answer(status=404)]), tool_call_mode="auto")
    rig.run()
    assert "tools" in bodies(rig)[0]


def test_native_mode_sends_the_tools_whatever_the_template_can_do(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Script(props=[props_answer(tools=False)]), tool_call_mode="native")
    rig.run()
    assert "tools" in bodies(rig)[0]


@pytest.mark.parametrize("refusal", [B11434_REFUSAL, "Cannot use tools with stream", "Unsupported param: tools"])
def test_auto_sends_the_very_request_again_prompted_where_the_server_refuses_tools(
    make_rig: Callable[..., Rig], adding: Adding, refusal: str
) -> None:
    answers = [Reply([HttpError(500, refusal)]), Reply([Turns([plain_reply(Text(CALL)), plain_reply(Text("3"))])])]
    restart = RestartPolicy(server_errors_before_restart=1)
    rig = make_rig(Script(replies=answers), tool_call_mode="auto", restart=restart)
    result = rig.run(prompt="What is 1 + 2?", temperature=0)
    assert (result["state"], result["text"], adding.calls) == ("completed", "3", [{"a": 1, "b": 2}])
    refused, again, _ = bodies(rig)
    assert "tools" in refused
    assert "tools" not in again
    assert "<tool_call>" in again["messages"][0]["content"]
    assert {**refused, "messages": 0, "tools": 0} == {**again, "messages": 0, "tools": 0}
    assert refused["messages"][-1] == again["messages"][-1]
    status = rig.status()
    assert status["restart_count"] == 0
    assert any(refusal in line for line in status["warnings"])


def test_after_a_refusal_later_requests_are_prompted_from_the_start(make_rig: Callable[..., Rig]) -> None:
    answers = [Reply([HttpError(500, B11434_REFUSAL)]), Reply(plain_reply(Text("x")), times=None)]
    rig = make_rig(Script(replies=answers), tool_call_mode="auto")
    assert [rig.run()["text"], rig.run()["text"]] == ["x", "x"]
    assert ["tools" in body for body in bodies(rig)] == [True, False, False]


def test_in_native_mode_a_refusal_is_an_http_error(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Script(replies=[Reply([HttpError(500, B11434_REFUSAL)])]), tool_call_mode="native")
    result = rig.run()
    assert (result["state"], result["fail_reason"]) == ("failed", "http_error")
    assert B11434_REFUSAL in result["fail_detail"]
    assert len(bodies(rig)) == 1


def test_a_refusal_of_the_prompted_request_too_is_an_http_error(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Script(replies=[Reply([HttpError(500, B11434_REFUSAL)], times=None)]), tool_call_mode="auto")
    result = rig.run()
    assert (result["state"], result["fail_reason"]) == ("failed", "http_error")
    assert len(bodies(rig)) == 2


def test_a_request_cancelled_before_it_is_sent_again_is_not_sent_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Script(replies=[Reply([Note("here"), WaitClose()])]), tool_call_mode="auto")
    request_id = rig.submit()
    rig.journal.wait("note", name="here")
    assert rig.worker.cancel(request_id).get(timeout=WAIT_S) is True
    assert (rig.ended(request_id)["state"], len(bodies(rig))) == ("canceled", 1)


# --- tagged calls in native mode -------------------------------------------------------------------------


def test_in_native_mode_a_well_formed_tagged_call_is_taken_the_same_way(
    make_rig: Callable[..., Rig], adding: Adding
) -> None:
    rig = make_rig(tool_call_mode="native")
    result = rig.run(Turns([plain_reply(Text("a "), Text(CALL), Text("b")), plain_reply(Text(" 3"))]))
    assert (result["text"], adding.calls) == ("a b 3", [{"a": 1, "b": 2}])
    assistant, answer = bodies(rig)[1]["messages"][-2:]
    assert assistant["tool_calls"][0]["function"]["name"] == "add"
    assert answer["role"] == "tool"


def test_in_native_mode_a_malformed_one_is_just_text(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(tool_call_mode="native")
    broken = '<tool_call>{"name": "add"}</tool_call>'
    result = rig.run(*plain_reply(Text(f"a {broken} b")))
    assert (result["state"], result["text"]) == ("completed", f"a {broken} b")


def test_in_native_mode_beside_structured_calls_a_tagged_one_is_text(
    make_rig: Callable[..., Rig], adding: Adding
) -> None:
    rig = make_rig(tool_call_mode="native")
    structured = ToolCall("add", {"a": 5, "b": 6})
    result = rig.run(
        Turns([plain_reply(Text("a"), Text(CALL), Text("b"), structured, reason="tool_calls"), plain_reply(Text("!"))])
    )
    assert (result["text"], adding.calls) == (f"a{CALL}b!", [{"a": 5, "b": 6}])


def test_in_native_mode_text_behind_a_tagged_call_is_shown_once_a_structured_call_has_begun(
    make_rig: Callable[..., Rig], make_gate: Callable[[], GatePath]
) -> None:
    gate = make_gate()
    rig = make_rig(tool_call_mode="native")
    first = [Headers(), Role(), Text("a"), Text(f"{ISSUE}b"), ToolCall("add", {"a": 5, "b": 6}), Text(f"c{ISSUE}")]
    request_id = rig.submit(
        Turns([[*first, Gate(gate.path), Finish("tool_calls"), DoneMarker()], plain_reply(Text("!"))])
    )
    rig.wait_text(request_id, f"a{ISSUE}bc{ISSUE}")
    gate.open()
    result = rig.ended(request_id)
    assert (result["text"], names(result)) == (f"a{ISSUE}bc{ISSUE}!", [])


def test_in_native_mode_a_loop_behind_a_tagged_call_is_found(make_rig: Callable[..., Rig]) -> None:
    line = "The same sentence of more than sixty-four characters comes over and over again."
    rig = make_rig(tool_call_mode="native", max_tokens=None)
    result = rig.run(Headers(), Role(), Text(f"a{ISSUE}\n"), Lines([line], n=40), WaitClose())
    assert (result["state"], result["fail_reason"]) == ("failed", "repeated_line_loop")
    assert (result["text"], names(result)) == ("a\n" + f"{line}\n" * 8, ["signal_issue"])


def test_without_tools_a_tagged_call_is_text(make_worker: MakeWorker) -> None:
    assert make_worker().run(*plain_reply(Text(CALL)))["text"] == CALL
