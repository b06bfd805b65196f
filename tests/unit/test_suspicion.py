"""Which verdicts on requests count against the server."""

from __future__ import annotations

import pytest

from llama_worker.profiles import RestartPolicy
from llama_worker.suspicion import Suspicion, Trouble
from llama_worker.timeouts import Verdict
from llama_worker.types import RequestFailReason

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
