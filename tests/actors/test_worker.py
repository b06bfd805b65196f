"""The handle's own rules: start, stop, close, admission, results."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pykka
import pytest

from llama_worker import LlamaWorker, RestartPolicy, WorkerClosed, WorkerConfig, WorkerStartError
from llama_worker.actors.request import RequestActor
from llama_worker.types import RequestState, StartFailReason, WorkerState
from tests.actors.conftest import WAIT_S, GatePath, MakeWorker, eventually, fast_restart, fast_timeouts
from tests.conftest import Leftovers
from tests.fake_script import (
    Answer,
    Exit,
    Fin,
    Finish,
    Gate,
    Headers,
    Script,
    Startup,
    Text,
    WaitClose,
    plain_reply,
)

NEVER_READY = Script(startup=Startup(load_s=None))
NOT_FOUND = {"ok": False, "error": "NOT_FOUND"}
NOT_READY = {"ok": False, "error": "NOT_READY"}


def _crashes_first(times: int, tmp_path: Any, *, then: Script = Script()) -> Script:  # noqa: B008 (frozen)
    crash = Script(exits=[Exit(code=9, when="before_bind", log=["no luck"])])
    return Script(launches=[*[crash] * times, then], state_file=tmp_path / "launches")


def _start_error(future: Any) -> WorkerStartError:
    with pytest.raises(WorkerStartError) as failure:
        future.get(timeout=WAIT_S)
    return failure.value


def _all_at_once(calls: list[Callable[[], Any]]) -> None:
    """Each on a thread of its own; the first exception is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> None:
        barrier.wait(WAIT_S)
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    if errors:
        raise errors[0]


# ------------------------------------------------------------ start


def test_a_request_completes(make_worker: MakeWorker) -> None:
    rig = make_worker()
    result = rig.run()
    assert (result["state"], result["finish_reason"], result["text"]) == ("completed", "stop", "Hello")


def test_a_new_worker_has_no_server(make_worker: MakeWorker) -> None:
    rig = make_worker(start=False)
    assert rig.status()["state"] is WorkerState.STOPPED
    assert not rig.journal.facts()
    assert rig.worker.submit("job", "", "x").get() == {"ok": False, "error": "WORKER_NOT_READY"}
    rig.stop()
    assert rig.status()["restart_count"] == 0


def test_concurrent_starts_share_one_outcome(make_worker: MakeWorker) -> None:
    rig = make_worker(start=False)
    futures = [rig.worker.start() for _ in range(5)]
    assert {future.get(timeout=WAIT_S)["pid"] for future in futures} == {rig.status()["pid"]}
    assert rig.start()["pid"] == rig.status()["pid"]
    assert len(rig.journal.facts("launched")) == 1


def test_concurrent_starts_share_one_failure(make_worker: MakeWorker) -> None:
    rig = make_worker(Script(exits=[Exit(code=2, when="after_bind")]), start=False)
    futures = [rig.worker.start() for _ in range(5)]
    assert {_start_error(future).returncode for future in futures} == {2}
    assert len(rig.journal.facts("launched")) == 1


def test_the_first_launch_is_not_retried_and_a_new_start_may_succeed(make_worker: MakeWorker, tmp_path: Any) -> None:
    rig = make_worker(_crashes_first(1, tmp_path), start=False)
    error = _start_error(rig.worker.start())
    assert (error.reason, error.returncode) == (StartFailReason.EXITED, 9)
    assert rig.status()["state"] is WorkerState.FAILED
    assert "no luck" in rig.status()["last_error"]
    assert rig.worker.submit("job", "", "x").get() == {"ok": False, "error": "WORKER_FAILED"}
    status = rig.start()
    assert status["state"] is WorkerState.READY
    assert "last_error" not in status


def test_a_stop_after_a_failed_start_leaves_stopped(make_worker: MakeWorker) -> None:
    rig = make_worker(Script(exits=[Exit(code=2, when="after_bind")]), start=False)
    _start_error(rig.worker.start())
    rig.stop()
    assert rig.status()["state"] is WorkerState.STOPPED


def test_a_stop_ends_a_start(make_worker: MakeWorker) -> None:
    rig = make_worker(NEVER_READY, start=False)
    futures = [rig.worker.start() for _ in range(3)]
    rig.journal.wait("launched", timeout=WAIT_S)
    rig.stop()
    assert {_start_error(future).reason for future in futures} == {StartFailReason.STOPPED}
    assert rig.status()["state"] is WorkerState.STOPPED
    rig.wait_gone(0.0)


def test_start_may_follow_stop_at_once(make_worker: MakeWorker) -> None:
    rig = make_worker()
    first_pid = rig.status()["pid"]
    stopping, starting = rig.worker.stop(), rig.worker.start()
    assert starting.get(timeout=WAIT_S)["pid"] != first_pid
    stopping.get(timeout=WAIT_S)
    assert rig.status()["restart_count"] == 0
    assert rig.run()["state"] == "completed"


def test_the_last_of_stop_and_start_counts(make_worker: MakeWorker) -> None:
    rig = make_worker()
    futures: list[Any] = []
    for _ in range(5):
        futures += [rig.worker.stop(), rig.worker.start()]
    assert futures[-1].get(timeout=WAIT_S)["state"] is WorkerState.READY
    for future in futures[::2]:
        future.get(timeout=WAIT_S)
    for future in futures[1:-2:2]:
        assert _start_error(future).reason is StartFailReason.STOPPED
    futures = [rig.worker.stop(), rig.worker.start(), rig.worker.stop()]
    futures[2].get(timeout=WAIT_S)
    assert rig.status()["state"] is WorkerState.STOPPED
    assert _start_error(futures[1]).reason is StartFailReason.STOPPED
    rig.wait_gone(0.0)


# ------------------------------------------------------------ stop


def test_concurrent_stops_share_one_outcome(make_worker: MakeWorker) -> None:
    rig = make_worker(Script(ignore_term=True), timeouts=fast_timeouts(stop_grace_s=0.5))
    futures = [rig.worker.stop() for _ in range(5)]
    for future in futures:
        assert future.get(timeout=WAIT_S) is None
        rig.wait_gone(0.0)
    began_at = time.monotonic()
    rig.stop()
    assert time.monotonic() - began_at < 0.5


def test_stop_during_a_backoff_is_not_delayed(make_worker: MakeWorker) -> None:
    rig = make_worker(restart=RestartPolicy(restart_backoff_s=60.0))
    os.kill(rig.status()["pid"], signal.SIGKILL)
    eventually(lambda: "next_restart_at" in rig.status(), "the backoff")
    starting = rig.worker.start()
    assert rig.status()["state"] is WorkerState.RUNNING
    began_at = time.monotonic()
    rig.stop()
    assert time.monotonic() - began_at < 1.0
    assert _start_error(starting).reason is StartFailReason.STOPPED
    assert rig.status()["state"] is WorkerState.STOPPED
    assert rig.start()["state"] is WorkerState.READY


def test_stop_during_a_restarts_launch(make_worker: MakeWorker, tmp_path: Any) -> None:
    rig = make_worker(Script(launches=[Script(), NEVER_READY], state_file=tmp_path / "launches"))
    os.kill(rig.status()["pid"], signal.SIGKILL)
    rig.journal.wait("bound", count=2, timeout=WAIT_S)
    rig.stop()
    assert rig.status()["state"] is WorkerState.STOPPED
    rig.wait_gone(0.0)


def test_a_worker_that_cannot_be_made_leaves_nothing(
    free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch, leftovers: Leftovers
) -> None:
    made: list[RequestActor] = []
    construct = RequestActor.__init__

    def without_threads(this: RequestActor, *args: Any, **options: Any) -> None:
        if len(made) == 2:
            raise RuntimeError("can't start new thread")
        construct(this, *args, **options)
        made.append(this)

    monkeypatch.setattr(RequestActor, "__init__", without_threads)
    with pytest.raises(RuntimeError, match="new thread"):
        LlamaWorker(WorkerConfig("w", "127.0.0.1", free_port(), ("true",), slots=4))
    assert leftovers.wait_none() == []


def test_stop_ends_a_health_probe_that_gets_no_answer(make_worker: MakeWorker) -> None:
    rig = make_worker(Script(models=[Answer(times=1), Answer(hang=True)]))
    probes = len(rig.journal.facts("request", path="/v1/models"))
    assert rig.run(Headers(), Fin())["fail_reason"] == "stream_disconnected"  # a reason to probe at once
    rig.journal.wait("request", path="/v1/models", count=probes + 1)
    rig.stop()
    names = {"llama_worker-w1-probe"}
    eventually(lambda: not names & {thread.name for thread in threading.enumerate()}, "its end", timeout_s=5.0)
    assert rig.status()["restart_count"] == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.06, 0.1])
def test_stop_at_any_moment_of_a_restart(make_worker: MakeWorker, delay_s: float) -> None:
    rig = make_worker(slots=2)
    request = rig.submit(Headers(), Text("kept"), WaitClose())
    rig.wait_text(request, "kept")
    os.kill(rig.status()["pid"], signal.SIGKILL)
    time.sleep(delay_s)  # what is tested is a moment, not an outcome
    rig.stop()
    assert rig.status()["state"] is WorkerState.STOPPED
    rig.wait_gone(0.0)
    result = rig.ended(request)
    assert (result["text"], result["fail_reason"] in ("server_died", "worker_stopped")) == ("kept", True)


def test_a_restart_fails_what_is_in_flight_and_goes_on(make_worker: MakeWorker) -> None:
    rig = make_worker(slots=3)
    requests = [rig.submit(Headers(), Text("kept"), WaitClose()) for _ in range(3)]
    for request in requests:
        rig.wait_text(request, "kept")
    os.kill(rig.status()["pid"], signal.SIGKILL)
    assert [rig.ended(request)["fail_reason"] for request in requests] == ["server_died"] * 3
    assert rig.wait_restarted()["restart_count"] == 1
    assert rig.run()["state"] == "completed"
    (restart,) = rig.worker.get_debug_info().get()["recent_restarts"]
    assert restart["reason"] == "server_died"


def test_a_server_that_never_comes_back_locks_the_worker_out(make_worker: MakeWorker, tmp_path: Any) -> None:
    crash = Script(exits=[Exit(code=9, when="before_bind")])
    rig = make_worker(
        Script(launches=[Script(), crash], state_file=tmp_path / "launches"),
        restart=fast_restart(max_restarts_per_window=2),
    )
    os.kill(rig.status()["pid"], signal.SIGKILL)
    waiting = rig.worker.start() if rig.status()["state"] is WorkerState.RUNNING else None
    status = rig.wait_state(WorkerState.FAILED)
    assert status["restart_count"] == 2
    if waiting is not None:
        assert _start_error(waiting).reason is StartFailReason.EXITED
    assert len(rig.journal.facts("launched")) == 3


def test_results_are_readable_after_a_stop(make_worker: MakeWorker) -> None:
    rig = make_worker(slots=2)
    done, open_one = rig.submit(), rig.submit(Headers(), Text("part"), WaitClose())
    rig.wait_ended(done)
    rig.wait_text(open_one, "part")
    rig.stop()
    assert rig.request(open_one)["fail_reason"] == "worker_stopped"
    assert rig.text(open_one) == "part"
    rig.start()
    assert (rig.ended(done)["text"], rig.ended(open_one)["text"]) == ("Hello", "part")
    assert rig.submit() == 3


# ------------------------------------------------------------ close


def _every_call(worker: LlamaWorker) -> dict[str, Callable[[], Any]]:
    return {
        "start": worker.start,
        "stop": worker.stop,
        "submit": lambda: worker.submit("job", "", "x"),
        "get_status": lambda: worker.get_status(1),
        "get_result": lambda: worker.get_result(1),
        "result": lambda: worker.result(1),
        "read_output": lambda: worker.read_output(1),
        "cancel": lambda: worker.cancel(1),
        "get_worker_status": worker.get_worker_status,
        "get_debug_info": worker.get_debug_info,
    }


@pytest.mark.parametrize("started", [False, True])
def test_after_close_every_call_raises(make_worker: MakeWorker, leftovers: Leftovers, started: bool) -> None:
    rig = make_worker(start=started)
    rig.worker.close()
    for call in _every_call(rig.worker).values():
        with pytest.raises(WorkerClosed, match=rig.config.name):
            call()
    rig.worker.close()
    assert leftovers.wait_none() == []
    rig.wait_gone(0.0)


def test_close_may_be_called_by_many_threads_at_once(make_worker: MakeWorker, leftovers: Leftovers) -> None:
    rig = make_worker(slots=2)
    waiting = rig.worker.result(rig.submit(Headers(), Text("a"), WaitClose()))

    def close() -> None:
        rig.worker.close()
        rig.wait_gone(0.0)

    _all_at_once([close] * 6)
    result = waiting.get(timeout=WAIT_S)
    assert result["ok"]
    assert result["fail_reason"] == "worker_stopped"
    assert leftovers.wait_none() == []


def test_close_ends_a_start(make_worker: MakeWorker) -> None:
    rig = make_worker(NEVER_READY, start=False)
    starting = rig.worker.start()
    rig.journal.wait("launched", timeout=WAIT_S)
    rig.worker.close()
    assert _start_error(starting).reason is StartFailReason.STOPPED
    rig.wait_gone(0.0)


def test_every_future_is_answered_when_the_worker_is_closed_meanwhile(make_worker: MakeWorker) -> None:
    rig = make_worker(slots=4)
    futures: list[Any] = []
    closing = threading.Event()

    def ask() -> None:
        try:
            while True:
                futures.extend(call() for call in _every_call(rig.worker).values())
                rig.worker.get_worker_status().get(timeout=WAIT_S)  # no faster than they are answered
                if len(futures) > 100:
                    closing.set()
        except WorkerClosed:
            return

    def close() -> None:
        closing.wait(WAIT_S)
        rig.worker.close()

    _all_at_once([ask, ask, ask, close])
    for future in futures:
        try:
            future.get(timeout=WAIT_S)
        except (WorkerClosed, WorkerStartError):
            continue
    rig.wait_gone(0.0)


def test_with_closes_after_a_start_that_failed(make_worker: MakeWorker, leftovers: Leftovers) -> None:
    rig = make_worker(Script(exits=[Exit(code=3, when="before_bind")]), start=False)
    with pytest.raises(WorkerStartError), LlamaWorker(rig.config) as worker:
        pytest.fail(f"{worker} is ready")
    assert leftovers.wait_none(0.0) != []  # the fixture's own worker
    rig.worker.close()
    assert leftovers.wait_none() == []


def test_with_closes_after_an_exception_of_the_host(make_worker: MakeWorker) -> None:
    rig = make_worker(start=False)
    with pytest.raises(ZeroDivisionError), LlamaWorker(rig.config):
        raise ZeroDivisionError
    rig.wait_gone(0.0)


def test_a_lost_handle_takes_its_server_along(make_worker: MakeWorker, leftovers: Leftovers) -> None:
    rig = make_worker(start=False)
    rig.worker.close()
    worker = LlamaWorker(rig.config)
    worker.start().get(timeout=WAIT_S)
    worker.submit("job", "", "x", params={"fake_script": []}).get(timeout=WAIT_S)
    del worker
    gc.collect()
    rig.wait_gone()
    assert leftovers.wait_none() == []


def test_a_callback_is_called(make_worker: MakeWorker) -> None:
    rig = make_worker()
    called = threading.Event()
    rig.worker.get_worker_status().add_done_callback(lambda future: called.set())
    assert called.wait(WAIT_S)


# ------------------------------------------------------------ admission


def test_slots_are_held_from_admission_to_the_end(make_worker: MakeWorker, make_gate: Callable[[], GatePath]) -> None:
    rig = make_worker(slots=2)
    gate = make_gate()
    first = rig.submit(Gate(gate.path), *plain_reply(Text("1")), job_name="one")
    second = rig.submit(Headers(), WaitClose(), job_name="two")
    assert rig.worker.submit("job", "", "x").get() == {"ok": False, "error": "NO_SLOT_AVAILABLE"}
    status = rig.status()
    assert (status["slots_total"], status["slots_used"]) == (2, 2)
    assert status["active_jobs"] == {first: "one", second: "two"}
    gate.open()
    rig.wait_ended(first)
    assert rig.status()["active_request_ids"] == [second]
    assert rig.submit() == 3, "a refused request takes no id"


def test_slots_used_is_the_number_of_requests_that_are_not_terminal(make_worker: MakeWorker) -> None:
    rig = make_worker(slots=4)
    ended = threading.Event()

    def use() -> None:
        while not ended.is_set():
            told = rig.worker.submit("job", "", "x").get(timeout=WAIT_S)
            if told["ok"]:
                rig.worker.result(told["request_id"]).get(timeout=WAIT_S)

    def look() -> None:
        for _ in range(300):
            status = rig.status()
            assert status["slots_used"] == len(status["active_request_ids"]) == len(status["active_jobs"]) <= 4
        ended.set()

    _all_at_once([use] * 6 + [look])
    assert rig.status()["slots_used"] == 0


@pytest.mark.parametrize(
    ("arguments", "params", "error"),
    [
        ((1, "", "x"), None, TypeError),
        (("job", None, "x"), None, TypeError),
        (("job", "", b"x"), None, TypeError),
        (("job", "", "x"), {"a": object()}, (TypeError, ValueError)),
        (("job", "", "x"), {"a": float("nan")}, ValueError),
        (("job", "", "x"), [1], TypeError),
        (("job", "", "\ud800"), None, ValueError),
    ],
)
def test_bad_input_takes_no_slot(make_worker: MakeWorker, arguments: Any, params: Any, error: Any) -> None:
    rig = make_worker()
    with pytest.raises(error):
        rig.worker.submit(*arguments, params=params).get(timeout=WAIT_S)
    assert rig.status()["slots_used"] == 0
    assert rig.submit() == 1


# ------------------------------------------------------------ results


def test_a_result_is_released_when_it_was_taken(make_worker: MakeWorker) -> None:
    rig = make_worker()
    request = rig.submit()
    future = rig.worker.result(request)
    eventually(future.done, "the result")
    assert rig.request(request)["state"] == "completed", "resolved, and not taken"
    first = future.get(timeout=WAIT_S)
    assert first["ok"]
    assert first["text"] == "Hello"
    assert future.get(timeout=WAIT_S) == first
    for call in (rig.worker.result, rig.worker.get_result, rig.worker.get_status, rig.worker.read_output):
        assert call(request).get(timeout=WAIT_S) == NOT_FOUND


def test_a_get_that_times_out_takes_nothing(make_worker: MakeWorker, make_gate: Callable[[], GatePath]) -> None:
    rig = make_worker()
    gate = make_gate()
    request = rig.submit(Gate(gate.path), *plain_reply(Text("late")))
    future = rig.worker.result(request)
    with pytest.raises(pykka.Timeout):
        future.get(timeout=0.05)
    gate.open()
    rig.wait_ended(request)
    assert rig.request(request)["state"] == "completed"
    assert rig.ended(request)["text"] == "late"


def test_everyone_who_waits_gets_the_same_result(make_worker: MakeWorker, make_gate: Callable[[], GatePath]) -> None:
    rig = make_worker()
    gate = make_gate()
    request = rig.submit(Gate(gate.path), *plain_reply(Text("same")))
    futures = [rig.worker.result(request) for _ in range(8)]
    taken: list[Any] = []
    callbacks: list[Any] = []
    futures[0].add_done_callback(lambda future: callbacks.append(future.get()))
    rig.status()
    gate.open()
    _all_at_once([lambda future=future: taken.append(future.get(timeout=WAIT_S)) for future in futures])  # type: ignore[misc]
    eventually(lambda: callbacks, "the callback")
    assert [told["text"] for told in (*taken, *callbacks)] == ["same"] * 9
    taken[0]["signals"].append("mine")
    assert taken[1]["signals"] == []
    assert rig.worker.result(request).get(timeout=WAIT_S) == NOT_FOUND


def test_an_awaited_result_is_taken_and_does_not_block_the_loop(
    make_worker: MakeWorker, make_gate: Callable[[], GatePath]
) -> None:
    rig = make_worker()
    gate = make_gate()
    request = rig.submit(Gate(gate.path), *plain_reply(Text("awaited")))

    async def main() -> Any:
        async def open_soon() -> None:
            await asyncio.sleep(0)
            gate.open()

        result, _ = await asyncio.gather(rig.worker.result(request), open_soon())
        return result

    assert asyncio.run(main())["text"] == "awaited"
    assert rig.worker.get_result(request).get() == NOT_FOUND


def test_get_result_is_not_ready_then_the_result_then_not_found(
    make_worker: MakeWorker, make_gate: Callable[[], GatePath]
) -> None:
    rig = make_worker()
    gate = make_gate()
    request = rig.submit(Gate(gate.path), *plain_reply(Text("x")))
    assert rig.worker.get_result(request).get() == NOT_READY
    gate.open()
    rig.wait_ended(request)
    assert rig.worker.get_result(request).get()["text"] == "x"  # type: ignore[typeddict-item]
    assert rig.worker.get_result(request).get() == NOT_FOUND
    assert rig.worker.get_result(0).get() == NOT_FOUND


def test_one_of_many_takers_gets_the_result(make_worker: MakeWorker) -> None:
    rig = make_worker()
    for _ in range(10):
        request = rig.submit()
        rig.wait_ended(request)
        told: list[Any] = []

        def take(request: int = request, told: list[Any] = told) -> None:
            told.append(rig.worker.get_result(request).get(timeout=WAIT_S))

        _all_at_once([take] * 5)
        assert sorted(answer["ok"] for answer in told) == [False] * 4 + [True]


def test_unclaimed_results_are_kept(make_worker: MakeWorker) -> None:
    rig = make_worker()
    requests = []
    for _ in range(5):
        requests.append(rig.submit())
        rig.wait_ended(requests[-1])
    assert [rig.ended(request)["text"] for request in requests] == ["Hello"] * 5


def test_unclaimed_results_expire_where_that_is_asked_for(make_worker: MakeWorker) -> None:
    rig = make_worker(result_ttl_s=0.5)
    request = rig.submit()
    waiting = rig.worker.result(request)
    eventually(waiting.done, "the result")
    eventually(lambda: rig.worker.get_status(request).get() == NOT_FOUND, "the end of the record")
    assert waiting.get(timeout=WAIT_S)["ok"] is True, "who waited before has it"
    assert rig.worker.result(request).get(timeout=WAIT_S) == NOT_FOUND


def test_a_running_request_does_not_expire(make_worker: MakeWorker, make_gate: Callable[[], GatePath]) -> None:
    rig = make_worker(result_ttl_s=0.2, slots=2)
    gate = make_gate()
    request = rig.submit(Headers(), Text("a"), Gate(gate.path), Finish())
    other = rig.submit()
    eventually(lambda: rig.worker.get_status(other).get() == NOT_FOUND, "the end of the other's record")
    assert rig.request(request)["state"] is RequestState.RUNNING
    waiting = rig.worker.result(request)
    gate.open()
    assert waiting.get(timeout=WAIT_S)["ok"] is True


def test_two_workers_side_by_side_do_not_know_of_each_other(make_worker: MakeWorker) -> None:
    rigs = [make_worker(slots=2) for _ in range(3)]
    os.kill(rigs[0].status()["pid"], signal.SIGKILL)
    rigs[1].stop()
    assert rigs[2].run()["state"] == "completed"
    assert rigs[2].status()["restart_count"] == 0
    rigs[0].wait_restarted()
    assert rigs[1].status()["state"] is WorkerState.STOPPED
