"""What a worker counts over its life."""

from __future__ import annotations

from typing import Any

import pytest

from llama_worker.request.table import RequestRecord
from llama_worker.server.totals import BOUNDS_S, Totals
from llama_worker.types import RequestFailReason, RequestFinishReason, RequestState


def record(state: RequestState = RequestState.COMPLETED, *, tokens: int | None = None, **result: Any) -> RequestRecord:
    return RequestRecord(
        request_id=1,
        job_name="j",
        status={} if tokens is None else {"tokens_received": tokens},  # type: ignore[typeddict-item]
        result={"state": state, "finish_reason": RequestFinishReason.STOP, **result},  # type: ignore[typeddict-item]
        ended_at=1.0,
    )


def counted(*records: RequestRecord) -> Any:
    totals = Totals()
    for ended in records:
        totals.request_ended(ended)
    return totals.snapshot()


def test_nothing_is_counted_at_first_and_every_outcome_is_there() -> None:
    told = counted()
    assert told["requests"] == {"completed": {}, "failed": {}, "canceled": {}}
    assert told["restarts"] == {}
    assert set(told["duration"]) == set(told["requests"])


def test_requests_are_counted_by_outcome_and_reason() -> None:
    told = counted(
        record(),
        record(),
        record(finish_reason=RequestFinishReason.MAX_TOKENS),
        record(RequestState.FAILED, fail_reason=RequestFailReason.SERVER_DIED),
        record(RequestState.CANCELED, fail_reason=RequestFailReason.CANCELED),
    )
    completed = {"stop": 2, "max_tokens": 1}
    assert told["requests"] == {"completed": completed, "failed": {"server_died": 1}, "canceled": {"canceled": 1}}


def test_tokens_add_up_also_those_of_requests_without_usage() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 5, "cached_tokens": 60}
    told = counted(record(tokens=5, usage=usage), record(tokens=3), record())
    assert (told["prompt_tokens"], told["cached_tokens"], told["generated_tokens"]) == (100, 60, 8)


@pytest.mark.parametrize(
    ("seconds", "index"), [(0.0, 0), (0.1, 0), (0.11, 1), (3600.0, len(BOUNDS_S) - 1), (3601.0, len(BOUNDS_S))]
)
def test_a_duration_is_counted_once_where_it_is_not_above_the_bound(seconds: float, index: int) -> None:
    told = counted(record(timings={"total_s": seconds, "ttft_s": seconds}))
    counts = [int(at == index) for at in range(len(BOUNDS_S) + 1)]
    once = {"bounds_s": list(BOUNDS_S), "counts": counts, "sum_s": pytest.approx(seconds)}
    assert (told["ttft"], told["duration"]["completed"]) == (once, once)
    assert sum(told["duration"]["failed"]["counts"]) == 0


def test_a_request_without_a_token_has_no_time_to_it() -> None:
    assert sum(counted(record(timings={"total_s": 1.0}))["ttft"]["counts"]) == 0


def test_restarts_are_counted_by_cause() -> None:
    totals = Totals()
    for cause in ("server_died", "stall_timeout", "server_died"):
        totals.restarted(cause)
    assert totals.snapshot()["restarts"] == {"server_died": 2, "stall_timeout": 1}


def test_a_snapshot_is_a_copy() -> None:
    totals = Totals()
    before = totals.snapshot()
    totals.request_ended(record(tokens=1, timings={"total_s": 1.0, "ttft_s": 1.0}))
    totals.restarted("server_died")
    assert before == Totals().snapshot()
