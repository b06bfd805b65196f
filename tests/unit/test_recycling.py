"""Planned restarts, deaths for lack of memory, degenerate outputs, canaries: what decides, with literal numbers."""

from __future__ import annotations

from typing import Any

import pytest

from llama_worker import Canary, ConfigError, Recycle, RestartPolicy
from llama_worker.messages import (
    Abandon,
    BecameReady,
    CloseAllStreams,
    Died,
    Exited,
    Launch,
    Start,
    StreamsClosed,
    Terminate,
)
from llama_worker.request.table import RequestRecord
from llama_worker.runtime.canary import canary_body, canary_problem
from llama_worker.server import lifecycle
from llama_worker.server.lifecycle import Lifecycle
from llama_worker.server.lifecycle_states import RecordRestart
from llama_worker.server.recycling import Worn, worn
from llama_worker.server.start_advice import lack_of_memory
from llama_worker.server.suspicion import Suspicion, Trouble
from llama_worker.server.traits import ServerTraits
from llama_worker.types import RequestFailReason, RequestState, WorkerState

MIB = 1 << 20


# ---------------------------------------------------------------- planned restarts


@pytest.mark.parametrize(
    ("policy", "ready_for_s", "requests", "anon", "says"),
    [
        (Recycle(max_requests=3), 1e9, 2, 1 << 60, None),
        (Recycle(max_requests=3), 0.0, 3, None, "3 requests ended (limit: max_requests 3)"),
        (Recycle(max_age_s=60), 59.9, 10**9, None, None),
        (Recycle(max_age_s=60), 60.0, 0, None, "ready for 60 s (limit: max_age_s 60)"),
        (Recycle(max_anon_mib=100), 1e9, 1, 100 * MIB - 1, None),
        (Recycle(max_anon_mib=100), 0.0, 1, 100 * MIB, "100 MiB of anonymous memory (limit: max_anon_mib 100)"),
        (Recycle(max_anon_mib=100), 1e9, 1, None, None),  # it cannot be seen
    ],
)
def test_a_server_is_worn_at_its_limit(
    policy: Recycle, ready_for_s: float, requests: int, anon: int | None, says: str | None
) -> None:
    found = worn(policy, ready_for_s=ready_for_s, requests_count=requests, anon_bytes=anon)
    assert (found.detail if found else None) == says


@pytest.mark.parametrize(
    "given", [{}, {"max_requests": 0}, {"max_anon_mib": -1}, {"max_age_s": 0}, {"max_age_s": float("inf")}]
)
def test_limits_that_limit_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"max_|recycle"):
        Recycle(**given)


def ready(policy: RestartPolicy = RestartPolicy(max_restarts_per_window=1)) -> Lifecycle:  # noqa: B008 (frozen)
    life, _ = lifecycle.step(Lifecycle(policy=policy), Start(reply=None), 0.0)  # type: ignore[arg-type]
    life, _ = lifecycle.step(life, BecameReady(epoch=1, traits=ServerTraits()), 1.0)
    return life


def test_a_worn_server_ends_in_peace_and_is_launched_at_once() -> None:
    life, effects = lifecycle.step(ready(), Worn("old"), 10.0)
    assert effects == (RecordRestart(reason="recycled", detail="old", delay_s=0.0), CloseAllStreams(epoch=1))
    assert life.public_state is WorkerState.RUNNING
    life, effects = lifecycle.step(life, StreamsClosed(epoch=1), 10.0)
    assert effects == (Terminate(epoch=1, grace_s=10.0),)
    life, effects = lifecycle.step(life, Exited(epoch=1, returncode=0, log_tail=()), 11.0)
    assert effects == (Launch(epoch=2),)
    assert (life.budget.restart_count, life.last_error) == (1, None)


def test_planned_restarts_lock_nobody_out() -> None:
    life = ready()
    for number in range(1, 20):
        life, _ = lifecycle.step(life, Worn("old"), 10.0)
        life, _ = lifecycle.step(life, StreamsClosed(epoch=number), 10.0)
        life, _ = lifecycle.step(life, Exited(epoch=number, returncode=0, log_tail=()), 10.0)
        life, _ = lifecycle.step(life, BecameReady(epoch=number + 1, traits=ServerTraits()), 10.0)
        assert life.public_state is WorkerState.READY
    assert (life.budget.restart_count, life.budget.row_count, life.budget.recent) == (19, 0, ())


def test_a_server_that_is_not_ready_is_not_recycled() -> None:
    life, _ = lifecycle.step(Lifecycle(policy=RestartPolicy()), Start(reply=None), 0.0)  # type: ignore[arg-type]
    assert lifecycle.step(life, Worn("old"), 1.0) == (life, ())


# ---------------------------------------------------------------- lack of memory


LINE = "Out of memory: Killed process 7 (llama-server) total-vm:1kB"


@pytest.mark.parametrize(
    ("returncode", "kills", "line", "log", "says"),
    [
        (-9, 0, None, (), None),  # somebody else's kill
        (-9, 1, None, (), "the kernel killed it for lack of memory (its control group counts it: oom_kill +1)"),
        (-9, 0, LINE, (), f"the kernel killed it for lack of memory: {LINE}"),
        (-6, 1, LINE, (), None),  # it was another process that the kernel killed
        (1, 0, None, ("ggml: failed to allocate buffer", "bye"), "its last words: ggml: failed to allocate buffer"),
        (-6, 0, None, ("terminate called: std::bad_alloc",), "its last words: terminate called: std::bad_alloc"),
        (0, 0, None, ("out of memory",), None),
        (1, 0, None, ("out of memory", "1", "2", "3", "4", "5"), None),  # long ago
        (None, 1, None, (), None),
    ],
)
def test_what_tells_a_lack_of_memory(
    returncode: int | None, kills: int, line: str | None, log: tuple[str, ...], says: str | None
) -> None:
    found = lack_of_memory(returncode, oom_kills=kills, kernel_line=line, log_tail=log)
    assert (found is None) == (says is None)
    assert (says or "") in (found or "")


@pytest.mark.parametrize(("why", "reason"), [(None, "server_died"), ("the kernel killed it", "out_of_memory")])
def test_the_restarts_reason_names_it_and_the_requests_fail_as_ever(why: str | None, reason: str) -> None:
    _, effects = lifecycle.step(ready(), Died(epoch=1, returncode=-9, lack_of_memory=why), 10.0)
    record, failed = effects[:2]
    assert isinstance(record, RecordRestart)
    assert isinstance(failed, Abandon)
    assert (record.reason, failed.reason) == (reason, RequestFailReason.SERVER_DIED)
    assert record.detail == failed.detail
    assert (why or "signal 9") in record.detail


# ---------------------------------------------------------------- degenerate outputs


def record(state: str, job: str, **result: Any) -> RequestRecord:
    told: Any = {"state": RequestState(state), "text": "", "reasoning": "", "signals": [], "tool_trace": [], **result}
    return RequestRecord(request_id=1, job_name=job, status={}, result=told, ended_at=0.0)  # type: ignore[typeddict-item]


LOOP = {"fail_reason": RequestFailReason.REPEATED_LINE_LOOP}


@pytest.mark.parametrize(
    ("records", "troubled"),
    [
        ([record("failed", "a", **LOOP), record("completed", "b", text=" \n")], True),
        ([record("failed", "a", **LOOP), record("failed", "a", **LOOP)], False),  # one job that tries again
        ([record("failed", "a", **LOOP), record("completed", "b", text="x"), record("failed", "c", **LOOP)], False),
        ([record("completed", "a"), record("canceled", "x"), record("completed", "b")], True),
        ([record("completed", "a"), record("completed", "b", signals=[{}])], False),
        ([record("completed", "a"), record("completed", "b", tool_trace=[{}])], False),
        ([record("completed", "a"), record("completed", "b", reasoning="hm")], False),
    ],
)
def test_jobs_in_a_row_that_come_to_nothing_accuse_the_server(records: list[RequestRecord], troubled: bool) -> None:
    policy, suspicion, found = RestartPolicy(degenerate_outputs_before_restart=2), Suspicion(), None
    for ended in records:
        suspicion, found = suspicion.ended(ended, policy)
    assert isinstance(found, Trouble) == troubled
    if isinstance(found, Trouble):
        assert (found.reason, "2 jobs in a row" in found.detail) == ("degenerate_outputs", True)


def test_without_a_limit_nothing_is_accused() -> None:
    suspicion = Suspicion()
    for number in range(50):
        suspicion, found = suspicion.ended(record("completed", f"job-{number}"), RestartPolicy())
        assert found is None


# ---------------------------------------------------------------- canary


def answer(content: Any) -> Any:
    return {"choices": [{"message": {"content": content}}]}


def raises(text: str) -> bool:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("check", "status", "told", "problem"),
    [
        (lambda text: "4" in text, 200, answer("2 + 2 = 4"), None),
        (lambda text: "4" in text, 200, answer("????"), "the canary's check refused the answer '????'"),
        (lambda text: "4" in text, 200, answer(None), "refused the answer ''"),
        (lambda text: not text, 200, [], None),
        (lambda text: True, 500, {"error": "no"}, "the canary got HTTP 500: {'error': 'no'}"),
        (raises, 200, answer("x"), "the canary's check raised SystemExit: 3"),
    ],
)
def test_a_canary_lives_or_not(check: Any, status: int, told: Any, problem: str | None) -> None:
    found = canary_problem(check, status, told)
    assert (found is None) == (problem is None)
    assert (problem or "") in (found or "")


def test_a_canary_is_greedy() -> None:
    body = canary_body(Canary(prompt="2 + 2?", check=bool, max_tokens=5))
    assert (body["temperature"], body["max_tokens"], body["messages"][0]["content"]) == (0, 5, "2 + 2?")


async def async_check(text: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"prompt": "", "check": bool}, ConfigError),
        ({"prompt": 7, "check": bool}, TypeError),
        ({"prompt": "x", "check": "yes"}, TypeError),
        ({"prompt": "x", "check": async_check}, TypeError),
        ({"prompt": "x", "check": bool, "max_tokens": 0}, ConfigError),
    ],
)
def test_a_canary_of_no_use_is_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="canary"):
        Canary(**given)
