"""Which verdicts on requests, and which of their ends, count against the server."""

from __future__ import annotations

from typing import Any

import pytest

from llama_worker.config.profiles import RestartPolicy
from llama_worker.request.table import RequestRecord
from llama_worker.server.suspicion import Doubt, Suspicion, Trouble
from llama_worker.server.timeouts import Verdict
from llama_worker.types import RequestFailReason, RequestState

STALLED = Verdict(reason=RequestFailReason.STALL_TIMEOUT, detail="silent for 9 s", restart=True)
OVERDUE = Verdict(reason=RequestFailReason.ABSOLUTE_TIMEOUT, detail="", restart=False)
RESTART = RestartPolicy()
SPARE = RestartPolicy(restart_on_stall=False)
DEGENERATE = RestartPolicy(degenerate_outputs_before_restart=2)


def stalled(
    suspicion: Suspicion, request_id: int, verdict: Verdict, policy: RestartPolicy, *, busy: bool
) -> tuple[Suspicion, Trouble | None]:
    return suspicion.stalled(
        request_id, verdict, busy_neighbour=busy, newest_request_id=9, policy=policy
    )


def test_a_verdict_that_accuses_the_server_is_trouble_and_beside_a_busy_neighbour_only_the_second_is() -> (
    None
):
    assert stalled(Suspicion(), 1, STALLED, RESTART, busy=False)[1] == Trouble(
        "stall_timeout", "silent for 9 s"
    )
    once, trouble = stalled(Suspicion(), 1, STALLED, RESTART, busy=True)
    assert trouble is None
    assert stalled(once, 2, STALLED, RESTART, busy=True)[1]


@pytest.mark.parametrize(("verdict", "policy"), [(OVERDUE, RESTART), (STALLED, SPARE)])
def test_other_verdicts_never_are_and_leave_no_trace(
    verdict: Verdict, policy: RestartPolicy
) -> None:
    once, _ = stalled(Suspicion(), 1, STALLED, RESTART, busy=True)
    for suspicion in (Suspicion(), once):
        assert stalled(suspicion, 2, verdict, policy, busy=False) == (suspicion, None)


def ended(
    reason: RequestFailReason | None = None, job: str = "j", *, http: int = 500, **result: Any
) -> RequestRecord:
    state = RequestState.FAILED if reason else RequestState.COMPLETED
    nothing = {"text": "", "reasoning": "", "signals": [], "tool_trace": []}
    told: Any = {
        "status": {},
        "result": {"state": state, "fail_reason": reason, **nothing, **result},
    }
    http_status = http if reason is RequestFailReason.HTTP_ERROR else None
    return RequestRecord(request_id=1, job_name=job, **told, http_status=http_status)


def found(*records: RequestRecord, policy: RestartPolicy = RESTART) -> Doubt | Trouble | None:
    """What the last of these gives."""
    suspicion, last = Suspicion(), None
    for record in records:
        suspicion, last = suspicion.ended(record, policy)
    return last


LOOP = RequestFailReason.REPEATED_LINE_LOOP
DONE, BROKEN = ended(text="x"), ended(RequestFailReason.STREAM_DISCONNECTED)
REFUSED, WITHOUT_A_CODE = (
    ended(RequestFailReason.HTTP_ERROR),
    ended(RequestFailReason.SERVER_ERROR, "e"),
)
CANCELED = ended(job="x", state="canceled")


def refused(jobs: str, http: int = 500) -> list[RequestRecord]:
    return [ended(RequestFailReason.HTTP_ERROR, job, http=http) for job in jobs]


def test_a_broken_connection_is_a_doubt_and_two_in_a_row_are_trouble() -> None:
    assert found(BROKEN) == Doubt("a request failed with stream_disconnected")
    limit = "2 transport failures in a row (limit: transport_failures_before_restart 2)"
    assert found(BROKEN, BROKEN) == Trouble("transport_failures", limit)


@pytest.mark.parametrize("between", [DONE, REFUSED])
def test_a_server_that_speaks_between_breaks_the_row(between: RequestRecord) -> None:
    assert isinstance(found(BROKEN, between, BROKEN), Doubt)


JOBS_REFUSED = ("server_errors", "server errors in 5 jobs with no success between")
JOBS_WITH_NOTHING = ("degenerate_outputs", "2 jobs in a row ended in a loop or in nothing")


@pytest.mark.parametrize(
    ("records", "trouble"),
    [
        pytest.param(refused("abcde"), JOBS_REFUSED, id="five jobs"),
        pytest.param(refused("a" * 20), None, id="one job that tries again and again"),
        pytest.param(refused("ab" * 10), None, id="too few jobs"),
        pytest.param([*refused("ab"), DONE, *refused("cde")], None, id="a success between"),
        pytest.param([*refused("abcd"), *refused("e", 503)], JOBS_REFUSED, id="any 5xx"),
        pytest.param([*refused("abcd"), *refused("e", 499)], None, id="499 is no 5xx"),
        pytest.param([*refused("abcd"), *refused("e", 600)], None, id="nor is 600"),
        pytest.param([*refused("abcd"), WITHOUT_A_CODE], None, id="an error without a code"),
        pytest.param(
            [*refused("ab"), *refused("x", 400), *refused("cde")],
            JOBS_REFUSED,
            id="other errors end no row",
        ),
        pytest.param(
            [ended(LOOP, "a"), ended(job="b", text=" \n")],
            JOBS_WITH_NOTHING,
            id="a loop, and nothing",
        ),
        pytest.param([ended(LOOP, "a"), ended(LOOP, "a")], None, id="one job that tries again"),
        pytest.param(
            [ended(LOOP, "a"), ended(job="b", text="x"), ended(LOOP, "c")],
            None,
            id="a text between",
        ),
        pytest.param(
            [ended(job="a"), CANCELED, ended(job="b")], JOBS_WITH_NOTHING, id="a cancel between"
        ),
        pytest.param(
            [ended(job="a"), ended(job="b", signals=[{}])], None, id="a signal is something"
        ),
        pytest.param([ended(job="a"), ended(job="b", tool_trace=[{}])], None, id="so is a call"),
        pytest.param([ended(job="a"), ended(job="b", reasoning="hm")], None, id="so is reasoning"),
    ],
)
def test_errors_that_enough_jobs_met_and_jobs_in_a_row_that_come_to_nothing_are_trouble(
    records: list[RequestRecord], trouble: tuple[str, str] | None
) -> None:
    last = found(*records, policy=DEGENERATE)
    assert isinstance(last, Trouble) is (trouble is not None)
    if isinstance(last, Trouble):
        assert (last.reason, last.detail.partition(" (")[0]) == trouble


def test_without_a_limit_what_came_to_nothing_says_nothing_of_the_server() -> None:
    assert found(*(ended(LOOP, f"job-{number}") for number in range(50))) is None
    assert found(*(ended(job=f"job-{number}") for number in range(50))) is None
