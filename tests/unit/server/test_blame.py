"""Which verdicts on requests, which of their ends and which errors of a GPU count against the
server."""

from typing import Any

import pytest
from msgspec.structs import replace

from llama_worker.config.profiles import RestartPolicy, TimeoutProfile
from llama_worker.request.table import RequestRecord
from llama_worker.server.blame import (
    FailureCounts,
    GpuFault,
    ProbeNow,
    RestartCause,
    Verdict,
    VerdictHistory,
    fault_of_xid,
    gpu_lost,
    is_busy,
    uncorrectable_memory_error,
)
from llama_worker.types.request import RequestFailReason, RequestState
from tests.tables import cases

STALLED = Verdict(reason=RequestFailReason.STALL_TIMEOUT, detail="silent for 9 s")
BESIDE = replace(STALLED, alone=True)  # the server serves others
OVERDUE = Verdict(reason=RequestFailReason.ABSOLUTE_TIMEOUT, detail="", counts_against_server=False)
RESTART = RestartPolicy()
DEGENERATE = RestartPolicy(degenerate_outputs_before_restart=2)


def judge(
    blame: VerdictHistory, request_id: int, verdict: Verdict = BESIDE
) -> tuple[VerdictHistory, bool]:
    """What is known afterwards, and whether the server has to go; request 9 came last."""
    return blame.judge(request_id, verdict, other_is_served=False, newest_request_id=9)


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


def done(request_id: int) -> RequestRecord:
    return replace(ended(text="x"), request_id=request_id)


def canceled(request_id: int, data_at: float | None = None) -> RequestRecord:
    record = ended(RequestFailReason.CANCELED, "x", state=RequestState.CANCELED)
    return replace(record, request_id=request_id, last_data_at=data_at)


ONE_ENDED_ALONE, _ = judge(VerdictHistory(), 1)


@cases(
    "blame, request_id, verdict, costs",
    {
        "nobody else is served": (VerdictHistory(), 1, STALLED, True),
        "the first beside one that is served": (VerdictHistory(), 1, BESIDE, False),
        "the same one, told twice": (ONE_ENDED_ALONE, 1, STALLED, False),
        "the second": (ONE_ENDED_ALONE, 2, BESIDE, True),
        "one under way completed": (ONE_ENDED_ALONE.ended(done(9)), 2, BESIDE, True),
        "a new one completed": (ONE_ENDED_ALONE.ended(done(10)), 2, BESIDE, False),
        "a new one was canceled": (ONE_ENDED_ALONE.ended(canceled(10)), 2, BESIDE, True),
        "the same, with data": (ONE_ENDED_ALONE.ended(canceled(10, 9.0)), 2, BESIDE, False),
        "one that does not count": (ONE_ENDED_ALONE, 2, OVERDUE, False),
    },
)
def test_which_verdicts_restart_the_server(
    blame: VerdictHistory, request_id: int, verdict: Verdict, costs: bool
) -> None:
    after, found = judge(blame, request_id, verdict)
    assert found is costs
    assert after == blame or after in (VerdictHistory(), judge(VerdictHistory(), request_id)[0])
    if verdict is OVERDUE:
        assert after == blame


@pytest.mark.parametrize(
    ("interval_s", "age_s", "busy"),
    [(5.0, 10.0, True), (5.0, 10.1, False), (0.1, 1.0, True), (0.1, 1.1, False)],
)
def test_data_within_two_intervals_or_one_second_recent(
    interval_s: float, age_s: float, busy: bool
) -> None:
    profile = TimeoutProfile(liveness_probe_interval_s=interval_s)
    assert is_busy(1000.0, profile=profile, now=1000.0 + age_s) is busy
    assert not is_busy(None, profile=profile, now=1000.0)


def asked(reason: RequestFailReason, job: str) -> RequestRecord:
    return replace(ended(reason, job), job_key="why?")


def found(
    *records: RequestRecord, policy: RestartPolicy = RESTART
) -> ProbeNow | RestartCause | None:
    """What the last of these gives, which are told at 0.0, 1.0, ..."""
    ends, last = FailureCounts(), None
    for number, record in enumerate(records):
        ends, last = ends.after(record, policy, float(number))
    return last


LOOP = RequestFailReason.REPEATED_LINE_LOOP
TOOL_FAILED = RequestFailReason.TOOL_EXECUTION_ERROR
DONE, BROKEN = done(1), ended(RequestFailReason.STREAM_DISCONNECTED)
REFUSED = ended(RequestFailReason.HTTP_ERROR)
WITHOUT_A_CODE = ended(RequestFailReason.SERVER_ERROR, "e")
CANCELED, CANCELED_WITH_DATA = canceled(1), canceled(1, 9.0)


def does_not_fit(job: str) -> RequestRecord:
    return replace(ended(RequestFailReason.CONTEXT_EXCEEDED, job), http_status=500)


def refused(jobs: str, http: int = 500) -> list[RequestRecord]:
    return [ended(RequestFailReason.HTTP_ERROR, job, http=http) for job in jobs]


def test_broken_connections_cost_a_probe_then_the_server() -> None:
    assert found(BROKEN) == ProbeNow("a request failed with stream_disconnected")
    limit = "2 transport failures in a row (limit: transport_failures_before_restart 2)"
    assert found(BROKEN, BROKEN) == RestartCause("transport_failures", limit)


@pytest.mark.parametrize(
    "between",
    [
        DONE,
        REFUSED,
        ended(RequestFailReason.CONTEXT_EXCEEDED),
        ended(RequestFailReason.TOOL_PARSE_ERROR),
        ended(RequestFailReason.TOOL_EXECUTION_ERROR),
        ended(LOOP),
        CANCELED_WITH_DATA,
    ],
)
@pytest.mark.parametrize("policy", [RESTART, DEGENERATE])
def test_a_reply_in_between_resets_the_count(between: RequestRecord, policy: RestartPolicy) -> None:
    assert isinstance(found(BROKEN, between, BROKEN, policy=policy), ProbeNow)


@pytest.mark.parametrize(
    "between",
    [CANCELED, replace(BROKEN, last_data_at=9.0), canceled(2, 0.0)],  # its data came before
)
def test_no_reply_in_between_resets_no_count(between: RequestRecord) -> None:
    assert isinstance(found(BROKEN, between, BROKEN), RestartCause)


JOBS_REFUSED = ("server_errors", "server errors in 5 jobs, none served between")
JOBS_WITH_NOTHING = ("degenerate_outputs", "2 jobs in a row ended in a loop or without output")


@cases(
    "records, costs",
    {
        "five jobs": (refused("abcde"), JOBS_REFUSED),
        "one job that tries again and again": (refused("a" * 20), None),
        "too few jobs": (refused("ab" * 10), None),
        "a success between": ([*refused("ab"), DONE, *refused("cde")], None),
        "data and a cancel between": ([*refused("ab"), CANCELED_WITH_DATA, *refused("cde")], None),
        "a cancel without data": ([*refused("ab"), CANCELED, *refused("cde")], JOBS_REFUSED),
        "any 5xx": ([*refused("abcd"), *refused("e", 599)], JOBS_REFUSED),
        "499 is no 5xx": ([*refused("abcd"), *refused("e", 499)], None),
        "nor is 600": ([*refused("abcd"), *refused("e", 600)], None),
        "prompts that do not fit": ([does_not_fit(job) for job in "abcde"], None),
        "an error without a code": ([*refused("abcd"), WITHOUT_A_CODE], None),
        "tools that failed": ([ended(TOOL_FAILED, job) for job in "abcdef"], None),
        "others end no row": ([*refused("ab"), *refused("x", 400), *refused("cde")], JOBS_REFUSED),
        "a loop, and nothing": ([ended(LOOP, "a"), ended(job="b", text=" \n")], JOBS_WITH_NOTHING),
        "one job that tries again": ([ended(LOOP, "a"), ended(LOOP, "a")], None),
        "one question, under another name": ([asked(LOOP, "a"), asked(LOOP, "b")], None),
        "a text between": ([ended(LOOP, "a"), ended(job="b", text="x"), ended(LOOP, "c")], None),
        "a cancel between": (
            [ended(job="a"), CANCELED_WITH_DATA, ended(job="b")],
            JOBS_WITH_NOTHING,
        ),
        "a signal is something": ([ended(job="a"), ended(job="b", signals=[{}])], None),
        "so is a call": ([ended(job="a"), ended(job="b", tool_trace=[{}])], None),
        "so is reasoning": ([ended(job="a"), ended(job="b", reasoning="hm")], None),
    },
)
def test_enough_failed_jobs_restart_the_server(
    records: list[RequestRecord], costs: tuple[str, str] | None
) -> None:
    last = found(*records, policy=DEGENERATE)
    assert isinstance(last, RestartCause) is (costs is not None)
    if isinstance(last, RestartCause):
        assert (last.reason, last.detail.partition(" (")[0]) == costs


def test_without_a_limit_degenerate_output_is_ignored() -> None:
    assert found(*(ended(LOOP, f"job-{number}") for number in range(50))) is None
    assert found(*(ended(job=f"job-{number}") for number in range(50))) is None
    assert found(*refused("ab"), ended(), *refused("cde")) is None  # it is a success


# ---------------------------------------------------------------- errors of GPUs

# of NVIDIA's catalog: those whose remedy is to ignore them
HARMLESS_XIDS = (
    *(14, 37, 38, 43, 44, 45, 63, 66, 67, 92, 93),
    *(106, 107, 108, 121, 137, 141, 154, 157, 160, 161),
)


@cases(
    "xids, fatal",
    {
        "takes a reset to mend": ((46, 48, 62, 79, 95, 110, 119, 120, 140, 143, 158), True),
        "may be another process's": ((8, 13, 31, 32, 94, 109), False),
        "is left behind by a kill, or mends itself: no fault": (HARMLESS_XIDS, None),
    },
)
def test_what_an_error_means_for_the_server(xids: tuple[int, ...], fatal: bool | None) -> None:
    faults = {xid: fault_of_xid("GPU 0", xid) for xid in xids}
    assert {xid: fault.fatal if fault else None for xid, fault in faults.items()} == dict.fromkeys(
        xids, fatal
    )
    assert not any(fault and "see NVIDIA" in fault.detail for fault in faults.values())


def test_a_gpu_fault_names_gpu_xid_and_meaning() -> None:
    lost = GpuFault(fatal=True, detail="GPU 3: the GPU is lost")
    ecc = GpuFault(fatal=True, detail="GPU 3: a double-bit ECC error")
    assert (gpu_lost("GPU 3"), uncorrectable_memory_error("GPU 3")) == (lost, ecc)
    assert fault_of_xid("GPU 3", 79) == GpuFault(
        fatal=True, detail="GPU 3: Xid 79, the GPU has fallen off the bus"
    )
    assert fault_of_xid("GPU 3", 9999) == GpuFault(
        fatal=False, detail="GPU 3: Xid 9999, see NVIDIA's catalog"
    )
