"""Which verdicts on requests count against the server."""

from __future__ import annotations

from typing import Any, cast

import pytest

from llama_worker.profiles import RestartPolicy
from llama_worker.request.table import RequestRecord
from llama_worker.server.suspicion import Doubt, Suspicion, Trouble
from llama_worker.server.timeouts import Verdict
from llama_worker.types import RequestFailReason, RequestState

STALLED = Verdict(reason=RequestFailReason.STALL_TIMEOUT, detail="silent for 9 s", restart=True)
OVERDUE = Verdict(reason=RequestFailReason.ABSOLUTE_TIMEOUT, detail="", restart=False)
RESTART = RestartPolicy()
SPARE = RestartPolicy(restart_on_stall=False)


def stalled(
    suspicion: Suspicion, request_id: int, verdict: Verdict, policy: RestartPolicy, *, busy: bool
) -> tuple[Suspicion, Trouble | None]:
    return suspicion.stalled(request_id, verdict, busy_neighbour=busy, newest_request_id=9, policy=policy)


def test_a_verdict_that_accuses_the_server_is_trouble() -> None:
    _, trouble = stalled(Suspicion(), 1, STALLED, RESTART, busy=False)
    assert trouble == Trouble("stall_timeout", "silent for 9 s")


def test_beside_a_busy_neighbour_only_the_second_is() -> None:
    suspicion, trouble = stalled(Suspicion(), 1, STALLED, RESTART, busy=True)
    assert trouble is None
    assert stalled(suspicion, 2, STALLED, RESTART, busy=True)[1]


@pytest.mark.parametrize(("verdict", "policy"), [(OVERDUE, RESTART), (STALLED, SPARE)])
def test_other_verdicts_never_are_and_leave_no_trace(verdict: Verdict, policy: RestartPolicy) -> None:
    once, _ = stalled(Suspicion(), 1, STALLED, RESTART, busy=True)
    for suspicion in (Suspicion(), once):
        assert stalled(suspicion, 2, verdict, policy, busy=False) == (suspicion, None)


# ------------------------------------------------------------ failures of requests


def record(reason: RequestFailReason | None, job_name: str = "j") -> RequestRecord:
    result: Any = {"state": RequestState.FAILED if reason else RequestState.COMPLETED, "fail_reason": reason}
    return RequestRecord(
        request_id=1,
        job_name=job_name,
        status=cast("Any", {}),
        result=result,
        ended_at=1.0,
        http_status=500 if reason is RequestFailReason.HTTP_ERROR else None,
    )


def found(*endings: RequestFailReason | None, jobs: str = "") -> Doubt | Trouble | None:
    """What the last of these requests gives; each belongs to a job of its own where `jobs` names them."""
    suspicion, last = Suspicion(), None
    for index, reason in enumerate(endings):
        suspicion, last = suspicion.ended(record(reason, jobs[index] if jobs else "j"), RESTART)
    return last


BROKEN, REFUSED, DONE = RequestFailReason.STREAM_DISCONNECTED, RequestFailReason.HTTP_ERROR, None


def test_a_broken_connection_is_a_doubt_and_two_in_a_row_are_trouble() -> None:
    assert found(BROKEN) == Doubt("a request failed with stream_disconnected")
    trouble = found(BROKEN, BROKEN)
    assert isinstance(trouble, Trouble)
    assert trouble.reason == "transport_failures"


@pytest.mark.parametrize("between", [DONE, REFUSED])
def test_a_server_that_speaks_between_breaks_the_row(between: RequestFailReason | None) -> None:
    assert isinstance(found(BROKEN, between, BROKEN), Doubt)


def test_errors_in_five_jobs_are_trouble_unless_one_succeeds_between() -> None:
    trouble = found(*[REFUSED] * 5, jobs="abcde")
    assert isinstance(trouble, Trouble)
    assert trouble.reason == "server_errors"
    assert found(REFUSED, REFUSED, DONE, REFUSED, REFUSED, REFUSED, jobs="abxcde") is None
    assert found(*[REFUSED] * 5, jobs="abcda") is None


def test_a_request_that_was_given_up_says_nothing_of_the_server() -> None:
    assert found(RequestFailReason.REPEATED_LINE_LOOP) is None
