"""What a worker counts over its life."""

from __future__ import annotations

import pytest

from llama_worker.request.table import RequestRecord
from llama_worker.server.totals import BOUNDS_S, Totals
from llama_worker.types import (
    RequestFailReason,
    RequestFinishReason,
    RequestPhase,
    RequestResult,
    RequestState,
    RequestStatus,
)

AT = 1000.0


def record(
    state: RequestState = RequestState.COMPLETED,
    finish_reason: RequestFinishReason = RequestFinishReason.STOP,
    fail_reason: RequestFailReason | None = None,
    *,
    total_s: float = 1.0,
    ttft_s: float | None = None,
    tokens: int | None = None,
    usage: tuple[int, int, int] | None = None,
) -> RequestRecord:
    status: RequestStatus = {
        "ok": True,
        "request_id": 1,
        "job_name": "j",
        "state": state,
        "phase": RequestPhase.DONE,
        "created_at": AT,
        "completed_at": AT + 1.0,
        "output_chars": 0,
        "reasoning_chars": 0,
        "tool_iters_remaining": 0,
        "tool_calls_count": 0,
        "signals": [],
    }
    result: RequestResult = {
        "ok": True,
        "request_id": 1,
        "job_name": "j",
        "state": state,
        "finish_reason": finish_reason,
        "text": "",
        "reasoning": "",
        "signals": [],
        "tool_trace": [],
        "timings": {"total_s": total_s},
    }
    if tokens is not None:
        status["tokens_received"] = tokens
    if ttft_s is not None:
        result["timings"]["ttft_s"] = ttft_s
    if usage is not None:
        prompt, completion, cached = usage
        result["usage"] = {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached}
    if fail_reason is not None:
        result["fail_reason"] = fail_reason
    return RequestRecord(request_id=1, job_name="j", status=status, result=result, ended_at=1.0)


def test_nothing_is_counted_at_first_and_every_outcome_is_there() -> None:
    told = Totals().snapshot()
    assert told["requests"] == {"completed": {}, "failed": {}, "canceled": {}}
    assert told["restarts"] == {}
    assert (told["prompt_tokens"], told["cached_tokens"], told["generated_tokens"]) == (0, 0, 0)
    assert set(told["duration"]) == set(told["requests"])
    assert sum(told["ttft"]["counts"]) == 0


def test_requests_are_counted_by_outcome_and_reason() -> None:
    totals = Totals()
    failed, canceled = RequestFinishReason.FAILED, RequestFinishReason.CANCELED
    for ended in (
        record(),
        record(),
        record(finish_reason=RequestFinishReason.MAX_TOKENS),
        record(RequestState.FAILED, failed, RequestFailReason.SERVER_DIED),
        record(RequestState.CANCELED, canceled, RequestFailReason.CANCELED),
    ):
        totals.request_ended(ended)
    assert totals.snapshot()["requests"] == {
        "completed": {"stop": 2, "max_tokens": 1},
        "failed": {"server_died": 1},
        "canceled": {"canceled": 1},
    }


def test_tokens_add_up_also_those_of_requests_without_usage() -> None:
    totals = Totals()
    totals.request_ended(record(tokens=5, usage=(100, 5, 60)))
    totals.request_ended(record(tokens=3))
    totals.request_ended(record())
    told = totals.snapshot()
    assert (told["prompt_tokens"], told["cached_tokens"], told["generated_tokens"]) == (100, 60, 8)


@pytest.mark.parametrize(
    ("seconds", "index"),
    [(0.0, 0), (0.1, 0), (0.11, 1), (3600.0, len(BOUNDS_S) - 1), (3601.0, len(BOUNDS_S))],
)
def test_a_duration_is_counted_once_where_it_is_not_above_the_bound(seconds: float, index: int) -> None:
    totals = Totals()
    totals.request_ended(record(total_s=seconds, ttft_s=seconds))
    told = totals.snapshot()
    for durations in (told["ttft"], told["duration"]["completed"]):
        assert durations["bounds_s"] == list(BOUNDS_S)
        assert [at for at, count in enumerate(durations["counts"]) if count] == [index]
        assert durations["sum_s"] == pytest.approx(seconds)
    assert sum(told["duration"]["failed"]["counts"]) == 0


def test_a_request_without_a_token_has_no_time_to_it() -> None:
    totals = Totals()
    totals.request_ended(record())
    assert sum(totals.snapshot()["ttft"]["counts"]) == 0


def test_restarts_are_counted_by_cause() -> None:
    totals = Totals()
    for cause in ("server_died", "stall_timeout", "server_died"):
        totals.restarted(cause)
    assert totals.snapshot()["restarts"] == {"server_died": 2, "stall_timeout": 1}


def test_a_snapshot_is_a_copy() -> None:
    totals = Totals()
    before = totals.snapshot()
    totals.request_ended(record(ttft_s=1.0, tokens=1))
    totals.restarted("server_died")
    assert before == Totals().snapshot()
