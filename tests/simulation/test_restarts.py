"""What one launch leaves to the next, and what is left where none comes to be."""

from __future__ import annotations

import pytest

from llama_worker import RequestFailed, WorkerStartError
from llama_worker.server.blame import Verdict
from llama_worker.server.messages import GivenUp, Stalled
from llama_worker.server.pace import PACE_MIN_S
from llama_worker.types.request import RequestFailReason, RequestState
from llama_worker.types.worker import StartFailReason, WorkerState
from tests.simulation.bench import quiet_bench, ready_bench
from tests.simulation.server import Reply

A_PROMPT = Reply(prompt_tokens=4000, text_tokens=20, step_tokens=1)
A_TEXT = Reply(prompt_tokens=10, text_tokens=9000, step_tokens=1)
FOUND_S = 4 * PACE_MIN_S  # a fraction of `silent_work_timeout_s`


@pytest.mark.parametrize("call", ["stop", "drain", "restart"])
def test_a_call_beside_a_launch_without_threads(call: str) -> None:
    bench = quiet_bench()
    scheduler, worker = bench.scheduler, bench.worker
    with bench.in_use():
        bench.machine.lacks_threads = True
        started, called = worker.start(), getattr(worker, call)()
        assert scheduler.run_until(lambda: started.done() and called.done(), scheduler.now + 600.0)
        with pytest.raises(WorkerStartError) as failed:
            started.get(timeout=0)
        if call != "restart":
            assert failed.value.reason is StartFailReason.STOPPED
            assert called.get(timeout=0) is None
        bench.machine.lacks_threads = False
        assert bench.answer(worker.start())["state"] is WorkerState.READY


def test_requests_of_a_dead_server_keep_their_own_reason() -> None:
    with ready_bench(reply=A_TEXT) as (bench, scheduler, worker):
        for job in ("one", "two"):
            worker.submit(job, "", "a short prompt")
        ended = [worker.result(request_id) for request_id in (1, 2)]
        scheduler.run_for(5.0)
        bench.server.freeze(spins=False)
        reasons = [bench.answer(each, 600.0)["fail_reason"] for each in ended]
        assert reasons == [RequestFailReason.STALL_TIMEOUT] * 2
        assert bench.answer(worker.get_worker_status())["restart_count"] == 1


@pytest.mark.parametrize(("given_up", "restarts"), [((1, 2), 1), ((2, 1), 1), ((2,), 0)])
def test_who_has_ended_meanwhile_restarts_nothing(given_up: tuple[int, ...], restarts: int) -> None:
    with ready_bench(reply=A_PROMPT) as (bench, scheduler, worker):
        worker.submit("one", "", "a long prompt")
        worker.submit("two", "", "a long prompt")
        assert bench.answer(worker.cancel(2))
        verdict = Verdict(reason=RequestFailReason.STALL_TIMEOUT, detail="as if")
        stalled = tuple(
            GivenUp(request_id=each, verdict=verdict, restarts_server=True) for each in given_up
        )
        bench.actor.actor_ref.tell(Stalled(epoch=1, given_up=stalled))
        scheduler.run_for(60.0)
        assert bench.answer(worker.get_worker_status())["restart_count"] == restarts


def test_what_was_learnt_outlives_a_launch() -> None:
    with ready_bench(reply=A_PROMPT) as (bench, scheduler, worker):
        assert bench.answer(worker.ask("a long prompt"))["state"] is RequestState.COMPLETED
        bench.answer(worker.restart())
        worker.submit("job", "", "a long prompt")
        hung = worker.result(2)
        scheduler.run_for(0.5)
        bench.server.freeze(spins=True)  # in its first batch
        assert bench.answer(hung, FOUND_S)["fail_reason"] is RequestFailReason.STALL_TIMEOUT


@pytest.mark.parametrize("until_the_gap_s", [0.0, 0.001, 0.01, 0.1])
def test_gap_behind_the_last_kill_makes_nothing_unkillable(until_the_gap_s: float) -> None:
    with ready_bench() as (bench, scheduler, worker):
        scheduler.break_actor(bench.actor_of("watchdog"))
        worker.submit("job", "", "a prompt")  # the actor dies of it, and its launch with it
        scheduler.run_for(until_the_gap_s)
        scheduler.halt_host(60.0)
        scheduler.run_for(100.0)
        told = bench.answer(worker.get_worker_status())
        assert (told["state"], told["restart_count"]) == (WorkerState.READY, 1)
        assert told["last_error"].startswith("actor_died: watchdog")


def test_server_found_dead_by_request_gets_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its guard was killed, and the rest of its tree does not end: the worker is told late."""
    with ready_bench(reply=A_PROMPT) as (bench, scheduler, worker):
        launch = bench.machine.launched[-1]
        monkeypatch.setattr(launch, "_later", lambda *_: None)
        monkeypatch.setattr(launch, "_look_at_guard", lambda: None)
        first = worker.ask("a question")
        scheduler.run_for(0.1)
        second = worker.ask("another")
        scheduler.run_for(0.1)
        bench.server.die(-9)
        for answer in (first, second):
            with pytest.raises(RequestFailed, match="server_died"):
                bench.answer(answer, 30.0)
        refused = bench.answer(worker.submit("job", "", "too early"))
        assert refused == {"ok": False, "error": "WORKER_NOT_READY"}
        launch._exited()
        bench.answer(worker.wait_slot())
        (restart,) = bench.answer(worker.get_debug_info())["recent_restarts"]
        assert restart["reason"] == "server_died"


def test_server_dying_after_each_answer_avoids_lockout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death is told before the end of the answer was read."""
    with ready_bench(reply=A_PROMPT) as (bench, scheduler, worker):
        monkeypatch.setattr(bench.machine, "read_delay_s", lambda: 0.25)
        for _ in range(2 * bench.config.restart.max_restarts_per_window):
            answer = worker.ask("a question")
            scheduler.run_until(lambda: bool(bench.server.busy), scheduler.now + 60.0)
            scheduler.run_until(lambda: not bench.server.busy, scheduler.now + 60.0)
            bench.server.die(-11)
            assert bench.answer(answer)["state"] is RequestState.COMPLETED
            bench.answer(worker.wait_slot())
            scheduler.run_for(60.0)  # the window allows five in two minutes
