"""What is told of a request and its end, and what to do about failures."""

from typing import Any

import pytest

from llama_worker import (
    RequestFailReason,
    RequestFinishReason,
    RequestPhase,
    RequestState,
    StartFailReason,
)
from llama_worker.cli import exits, run_report
from llama_worker.cli.run_report import Activity
from llama_worker.errors import WorkerStartError

# ---------------------------------------------------------------- what is shown


PROGRESS = {"prompt_progress": {"processed": 5, "total": 9, "cached": 0}}


@pytest.mark.parametrize(
    ("status", "activity"),
    [
        ({"phase": RequestPhase.WAITING}, Activity("waiting for the server")),
        ({"phase": RequestPhase.PREFILL}, Activity("reading the prompt")),
        ({"phase": RequestPhase.PREFILL, **PROGRESS}, Activity("reading the prompt", 5, 9)),
        (
            {"phase": RequestPhase.GENERATING, "tokens_received": 7},
            Activity("generating: 7 tokens"),
        ),
        ({"phase": RequestPhase.GENERATING, "tokens_received": 1}, Activity("generating: 1 token")),
    ],
)
def test_what_a_request_is_doing(status: Any, activity: Activity) -> None:
    assert run_report.working(status) == activity


@pytest.mark.parametrize(
    ("log", "label"),
    [
        ([], "starting"),
        (["0.00.003.896 I srv    load_model: loading model 'x'"], "starting: loading model 'x'"),
        (["llama_model_load: \x1b[31m" + "x" * 9], "starting: llama_model_load: ␛[31mxxxxxxxxx"),
        (["x" * 300], f"starting: {'x' * 187}..."),
    ],
)
def test_what_a_server_is_doing(log: list[str], label: str) -> None:
    assert run_report.starting(log).label == label


def result(state: str = "completed", **more: Any) -> Any:
    whole: dict[str, Any] = {"ok": True, "request_id": 1, "job_name": "run", "fail_reason": None}
    whole |= {"state": RequestState(state), "finish_reason": RequestFinishReason.STOP}
    whole |= {"text": "Hi", "reasoning": "", "signals": [], "tool_trace": []}
    return whole | more


def failed(reason: str, detail: str = "why") -> Any:
    return result("failed", fail_reason=RequestFailReason(reason), fail_detail=detail)


USAGE = {"prompt_tokens": 31, "completion_tokens": 12, "cached_tokens": 8}
TIMINGS = {"ttft_s": 0.41, "total_s": 0.7, "tokens_per_second": 45.24}


@pytest.mark.parametrize(
    ("ended", "lines"),
    [
        (
            result(usage=USAGE, timings=TIMINGS),
            [
                "12 tokens, 45.2 tokens/s; prompt: 31 tokens, 8 of them cached",
                "first token after 0.4 s, 0.7 s in total",
            ],
        ),
        (
            result(timings={"total_s": 3.0, "tokens_per_second": 2.0}),
            ["2.0 tokens/s", "3.0 s in total"],
        ),
        (result(), []),
    ],
)
def test_the_numbers_at_the_end(ended: Any, lines: list[str]) -> None:
    assert run_report.summary(ended) == lines


def test_tokens_that_the_server_did_not_count() -> None:
    cut = result("canceled", timings={"total_s": 3.0, "tokens_per_second": 2.0})
    assert run_report.summary(cut, 6) == ["6 tokens, 2.0 tokens/s", "3.0 s in total"]
    assert run_report.summary(result("canceled"), 6) == ["6 tokens"]
    assert run_report.summary(result("canceled"), 0) == []
    assert run_report.summary(result(usage=USAGE), 6)[0].startswith("12 tokens")


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        (result(), exits.DONE, ""),
        (result(finish_reason=RequestFinishReason.MAX_TOKENS), exits.DONE, "--max-tokens"),
        (result("canceled"), exits.CANCELED, "the output so far is above"),
        (result("canceled", text=""), exits.CANCELED, "cancelled before any output"),
        (failed("stall_timeout"), exits.FAILED, "--timeouts slow"),
        (failed("http_error", "exceeds the available context size"), exits.FAILED, "--ctx-size"),
        (failed("server_died"), exits.FAILED, "  \u241b[31mlast line"),
        (
            failed("server_died", "ended with signal 4"),
            exits.FAILED,
            "what to do: it uses instructions",
        ),
        (
            failed("server_died", "ended with signal 40"),
            exits.FAILED,
            "what to do: its last log lines",
        ),
    ],
)
def test_how_an_answer_ends(ended: Any, code: int, said: str) -> None:
    assert run_report.exit_code(ended) == code
    assert said in "\n".join(run_report.ending(ended, ["\x1b[31mlast line"]))


@pytest.mark.parametrize("reason", [reason for reason in RequestFailReason if reason != "canceled"])
def test_every_failure_says_what_to_do(reason: RequestFailReason) -> None:
    assert "what to do: " in "\n".join(run_report.ending(failed(reason), []))


def test_a_malformed_signal_is_shown_as_it_came() -> None:
    signalled: Any = {"tool_name": "t", "arguments": {}, "emitted_at": 0.0, "malformed": "{\x1b"}
    assert run_report.signal_line(signalled) == "signal t (malformed): {␛"


def test_json_tells_the_same_keys_whatever_happened() -> None:
    answered = run_report.json_report(failed("server_died"), ["w"])
    facts = [answered[key] for key in ("outcome", "reason", "warnings")]
    assert facts == ["failed", "server_died", ["w"]]
    assert set(run_report.json_without_answer("not_started", "exited", "d")) == set(answered)


# ---------------------------------------------------------------- what to do


@pytest.mark.parametrize("reason", StartFailReason)
def test_every_failed_start_says_what_to_do(reason: StartFailReason) -> None:
    problem = run_report.start_problem(WorkerStartError(reason, "detail", 1, ["\x1b[2Jline"]))
    assert problem.reason == reason
    first, second, *others = str(problem).splitlines()
    assert first == f"the server did not start: {reason}: detail (return code 1)"
    assert second == f"  what to do: {problem.todo}"
    assert "␛[2Jline" in others[-1]


def test_what_the_log_tells_comes_before_the_log() -> None:
    log = [*(f"line {number}" for number in range(40)), "model is corrupted or incomplete"]
    problem = run_report.start_problem(WorkerStartError("exited", "it ended", 1, log))
    assert problem.todo.startswith("the model file is incomplete: download it again")
    assert len(str(problem).splitlines()) < 20  # the first line stays in sight
    assert problem.more[-1].endswith(log[-1])
