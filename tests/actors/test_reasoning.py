"""Reasoning, end to end: whichever way the server sends it, text and reasoning come out apart and no answer is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from llama_worker.stream.tagged_calls import tagged_call
from llama_worker.types import ToolDef
from tests.actors.conftest import GatePath, MakeWorker, Rig, eventually
from tests.fake_script import (
    Answer,
    Delta,
    DoneMarker,
    Fin,
    Finish,
    Gate,
    Headers,
    Reasoning,
    Role,
    Script,
    Step,
    Text,
    ToolCall,
    Turns,
    plain_reply,
)

CHAT = "/v1/chat/completions"
OPENS_THINKING = Script(apply_template=[Answer(body={"prompt": "<|im_start|>assistant\n<think>\n"})])
TOOL: ToolDef = {"type": "function", "function": {"name": "one", "parameters": {"type": "object", "properties": {}}}}


class One:
    def run_tool(self, *, name: str, arguments: Mapping[str, Any], request_id: int, job_name: str) -> Any:
        return 1


def outcome(rig: Rig, *steps: Step, reason: str = "stop", **params: Any) -> tuple[str, str]:
    """(reasoning, text) of a whole reply."""
    result = rig.run(*plain_reply(*steps, reason=reason), **params)
    assert result["state"] == "completed", result
    return result["reasoning"], result["text"]


def texts(content: str, size: int = 3) -> list[Step]:
    return [Text(content[at : at + size]) for at in range(0, len(content), size)]


def bodies(rig: Rig) -> list[dict[str, Any]]:
    return [fact["body"] for fact in rig.journal.facts("request", path=CHAT)]


ROWS: list[tuple[str, list[Step], tuple[str, str]]] = [
    ("clean form", [Reasoning("abc"), Text("Ans")], ("abc", "Ans")),
    (
        "literal tags after reasoning_content",
        [Reasoning("abc"), *texts("<think>x</think> is a tag")],
        ("abc", "<think>x</think> is a tag"),
    ),
    ("legacy, separate", [Reasoning("abc"), *texts("<think>abc</think>Ans")], ("abc", "Ans")),
    ("legacy, one delta", [Delta({"reasoning_content": "abc", "content": "<think>abc</think>Ans"})], ("abc", "Ans")),
    ("newlines about the clean form", [Reasoning("\nab"), Reasoning("c\n"), *texts("\n\nAns\n")], ("abc", "Ans\n")),
    (
        "newlines about the legacy form",
        [Delta({"reasoning_content": "a\n", "content": "<think>a\n"}), Reasoning("b\n"), *texts("b\n</think>\n\nAns")],
        ("a\nb", "Ans"),
    ),
    ("nothing but reasoning", [Reasoning("abc\n"), Reasoning("\n")], ("abc", "")),
    ("content only", texts("<think>x</think>Y"), ("x", "Y")),
    ("white space around", texts("  \n<think>x</think>\n\nY"), ("x", "Y")),
    ("a tag inside the answer", texts("Here: <think>x</think>"), ("", "Here: <think>x</think>")),
    ("a closing tag alone", texts("abc\n</think>\n\nAns"), ("", "abc\n</think>\n\nAns")),
    ("a second thought", texts("<think>a</think>X<think>b</think>Y"), ("a", "X<think>b</think>Y")),
    ("never closed", texts("<think>abc"), ("abc", "")),
    ("an empty thought", texts("<think>\n\n</think>\n\nHi"), ("", "Hi")),
    ("other tags", texts("[THINK]x[/THINK]Y"), ("x", "Y")),
    ("no tags", texts("a < b <thinking>"), ("", "a < b <thinking>")),
]


def test_the_rows_of_what_servers_send(make_worker: MakeWorker) -> None:
    rig = make_worker()
    for name, steps, wanted in ROWS:
        assert outcome(rig, *steps) == wanted, name


def test_the_clean_form_is_asked_for_unless_the_caller_set_one(make_worker: MakeWorker) -> None:
    rig = make_worker()
    rig.run()
    rig.run(reasoning_format="none")
    assert [body["reasoning_format"] for body in bodies(rig)] == ["deepseek", "none"]


def test_all_reasoning_is_delivered_before_the_text_that_follows_it(
    make_worker: MakeWorker, make_gate: Callable[[], GatePath]
) -> None:
    gate = make_gate()
    rig = make_worker()
    both = Delta({"content": "Ans", "reasoning_content": "abc"})
    request_id = rig.submit(Headers(), Role(), both, Gate(gate.path), Finish(), DoneMarker())
    rig.wait_text(request_id, "Ans")
    told = rig.worker.read_output(request_id).get(timeout=5)
    assert told["ok"]
    assert (told["reasoning"], told["text"]) == ("abc", "Ans")
    gate.open()
    rig.ended(request_id)


def test_reasoning_survives_a_stream_that_breaks_inside_it(make_worker: MakeWorker) -> None:
    result = make_worker().run(Headers(), Role(), *texts("<think>half a thou"), Fin())
    assert (result["state"], result["reasoning"], result["text"]) == ("failed", "half a thou", "")


@pytest.mark.parametrize("steps", [texts("<think>a \nthou \n"), [Reasoning("a \nthou"), Reasoning(" \n")]])
def test_of_reasoning_that_breaks_off_nothing_is_lost_but_whitespace_at_its_end(
    make_worker: MakeWorker, steps: list[Step]
) -> None:
    result = make_worker().run(Headers(), Role(), *steps, Fin())
    assert (result["state"], result["reasoning"], result["text"]) == ("failed", "a \nthou", "")


def test_of_reasoning_that_is_cancelled_nothing_is_lost_but_whitespace_at_its_end(
    make_worker: MakeWorker, make_gate: Callable[[], GatePath]
) -> None:
    gate = make_gate()
    rig = make_worker()
    request_id = rig.submit(Headers(), Role(), Reasoning("a \n"), Reasoning("thou\n"), Gate(gate.path))
    eventually(lambda: rig.request(request_id)["reasoning_chars"] == len("a \nthou"), "the reasoning")
    assert rig.worker.cancel(request_id).get(timeout=5)
    result = rig.ended(request_id)
    assert (result["state"], result["reasoning"], result["text"]) == ("canceled", "a \nthou", "")


# --- a think that the template opened ---------------------------------------------------------------------


def test_content_up_to_the_closing_tag_is_reasoning(make_worker: MakeWorker) -> None:
    rig = make_worker(OPENS_THINKING)
    assert outcome(rig, *texts("abc\n</think>\n\nAns")) == ("abc", "Ans")
    assert outcome(rig, *texts("<think>abc</think>Ans")) == ("abc", "Ans")
    assert outcome(rig, *texts("</think>Ans")) == ("", "Ans")


def test_a_server_that_takes_the_reasoning_out_itself_is_believed(make_worker: MakeWorker) -> None:
    rig = make_worker(OPENS_THINKING)
    assert outcome(rig, Reasoning("abc"), *texts("Ans </think> b")) == ("abc", "Ans </think> b")


def test_an_answer_without_any_thinking_is_text_too(make_worker: MakeWorker) -> None:
    """Of a server that parses reasoning itself; while it streams it cannot be told from a thought."""
    rig = make_worker(OPENS_THINKING)
    assert outcome(rig, *texts("The answer is 4.")) == ("The answer is 4.", "The answer is 4.")
    assert outcome(rig, Text("<")) == ("<", "<")
    assert outcome(rig, Text("a <")) == ("a <", "a <")


def test_a_thought_that_the_token_limit_cut_off_is_no_answer(make_worker: MakeWorker) -> None:
    rig = make_worker(OPENS_THINKING)
    assert outcome(rig, *texts("abc"), reason="length") == ("abc", "")


def test_a_thought_whose_stream_broke_is_no_answer(make_worker: MakeWorker) -> None:
    result = make_worker(OPENS_THINKING).run(Headers(), Role(), *texts("abc"), Fin())
    assert (result["reasoning"], result["text"]) == ("abc", "")


@pytest.mark.parametrize(
    "param",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"reasoning_budget": 0},
        {"thinking_budget_tokens": 0},
        {"reasoning_effort": "none"},
    ],
    ids=lambda param: next(iter(param)),
)
def test_params_that_may_change_the_prompts_end_leave_the_content_alone(
    make_worker: MakeWorker, param: dict[str, Any]
) -> None:
    rig = make_worker(OPENS_THINKING)
    assert outcome(rig, *texts("Answer"), **param) == ("", "Answer")
    assert outcome(rig, *texts("<think>a</think>b"), **param) == ("a", "b")
    assert outcome(rig, *texts("a</think>b")) == ("a", "b")


def test_such_default_params_do_too(make_worker: MakeWorker) -> None:
    rig = make_worker(OPENS_THINKING, default_params={"chat_template_kwargs": {"enable_thinking": False}})
    assert outcome(rig, *texts("Answer")) == ("", "Answer")


# --- with tools ---------------------------------------------------------------------------------------------


def with_tool(make_worker: MakeWorker, script: Script = OPENS_THINKING, **config: Any) -> Rig:
    return make_worker(script, normal_tools=[TOOL], tool_runner=One(), **config)


@pytest.mark.parametrize(
    "thought", [texts("<think>\nhm\n</think>\n\n"), [Reasoning("hm\n")]], ids=["tagged", "clean form"]
)
def test_the_model_gets_its_own_reasoning_back_on_a_continuation(make_worker: MakeWorker, thought: list[Step]) -> None:
    rig = with_tool(make_worker, Script())
    turns = [plain_reply(*thought, ToolCall("one"), reason="tool_calls"), plain_reply(Text("done"))]
    result = rig.run(Turns(turns))
    assert (result["reasoning"], result["text"]) == ("hm", "done")
    (assistant,) = [m for m in bodies(rig)[1]["messages"] if m["role"] == "assistant"]
    assert (assistant["content"], assistant["reasoning_content"]) == ("", "hm")
    assert "<think>" not in json.dumps(bodies(rig)[1])


def test_in_each_turn_the_template_opens_a_think_of_its_own(make_worker: MakeWorker) -> None:
    rig = with_tool(make_worker)
    turns = [
        plain_reply(*texts("a</think>b"), ToolCall("one"), reason="tool_calls"),
        plain_reply(*texts("c</think>d")),
    ]
    result = rig.run(Turns(turns))
    assert (result["reasoning"], result["text"]) == ("ac", "bd")


def test_a_server_that_sent_reasoning_content_once_is_believed_for_the_rest_of_the_request(
    make_worker: MakeWorker,
) -> None:
    rig = with_tool(make_worker)
    turns = [plain_reply(Reasoning("hm"), ToolCall("one"), reason="tool_calls"), plain_reply(*texts("Answer"))]
    result = rig.run(Turns(turns))
    assert (result["reasoning"], result["text"]) == ("hm", "Answer")


def test_what_was_said_before_a_call_without_any_thinking_goes_back_as_content(make_worker: MakeWorker) -> None:
    rig = with_tool(make_worker)
    turns = [
        plain_reply(*texts("Let me see."), ToolCall("one"), reason="tool_calls"),
        plain_reply(*texts("a</think>b")),
    ]
    result = rig.run(Turns(turns))
    assert (result["reasoning"], result["text"]) == ("Let me see.a", "Let me see.b")
    (assistant,) = [m for m in bodies(rig)[1]["messages"] if m["role"] == "assistant"]
    assert assistant["content"] == "Let me see."
    assert "reasoning_content" not in assistant


def test_a_tagged_call_in_an_answer_without_any_thinking_is_run(make_worker: MakeWorker) -> None:
    rig = with_tool(make_worker, tool_call_mode="prompted")
    result = rig.run(Turns([plain_reply(*texts(tagged_call("one", "{}"))), plain_reply(*texts("a</think>b"))]))
    assert (result["state"], result["text"]) == ("completed", "b")
    assert len(result["tool_trace"]) == 1
