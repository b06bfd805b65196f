"""The handle's own rules: start, stop, close, admission, results."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pykka
import pytest

from llama_worker import LlamaWorker, WorkerClosed, WorkerStartError
from llama_worker.actors.messages import GetWorkerStatus
from llama_worker.runtime.host.threads import call_at
from llama_worker.stream.lazy_reading import LazyReading
from llama_worker.testing import scripts as fs
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, eventually, fast_timeouts
from tests.conftest import Leftovers


def _all_at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each returns, on a thread of its own; the first exception is raised here."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait(WAIT_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [ended.result(WAIT_S) for ended in [pool.submit(run, call) for call in calls]]


def test_stop_ends_an_unanswered_health_probe(make_worker: MakeWorker) -> None:
    rig = make_worker(fs.Script(models=[fs.Answer(times=1), fs.Answer(hang=True)]))
    probes = len(rig.journal.facts("request", path="/v1/models"))
    # a reason to probe at once
    assert rig.run(fs.Headers(), fs.Fin())["fail_reason"] == "stream_disconnected"
    rig.journal.wait("request", path="/v1/models", count=probes + 1)
    rig.stop()
    assert rig.status()["restart_count"] == 0


def test_a_file_with_options_is_among_the_warnings(make_worker: MakeWorker, tmp_path: Path) -> None:
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "config.ini").touch()
    rig = make_worker(env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert [line for line in rig.status()["warnings"] if str(tmp_path) in line]


# ------------------------------------------------------------ close


def _questions(worker: LlamaWorker) -> tuple[Callable[[int], Any], ...]:
    """About one request."""
    return worker.result, worker.get_result, worker.get_status, worker.read_output


def _every_call(worker: LlamaWorker) -> list[Callable[[], Any]]:
    of_a_request = (*_questions(worker), worker.iter_output, worker.cancel, worker.release)
    about_all = (
        *(worker.start, worker.restart, worker.stop, worker.drain),
        *(worker.wait_slot, worker.get_worker_status, worker.get_debug_info),
    )
    return [
        partial(worker.submit, "job", "", "x"),
        partial(worker.ask, "x"),
        partial(worker.count_tokens, "", "x"),
        *(partial(call, 1) for call in of_a_request),
        *about_all,
    ]


def test_every_call_raises_after_many_threads_close_together(
    make_worker: MakeWorker, leftovers: Leftovers
) -> None:
    rig = make_worker(slots=2)
    waiting = rig.worker.result(rig.submit(fs.Headers(), fs.Text("a"), fs.WaitClose()))

    def close() -> None:
        rig.worker.close()
        rig.wait_gone(0.0)

    _all_at_once([close] * 6)
    result = waiting.get(timeout=WAIT_S)
    assert result["ok"]
    assert result["fail_reason"] == "worker_stopped"
    assert leftovers.wait_none() == []
    for call in _every_call(rig.worker):
        with pytest.raises(WorkerClosed, match=rig.config.name):
            call()


def test_with_closes_after_a_start_that_failed(
    make_worker: MakeWorker, leftovers: Leftovers
) -> None:
    rig = make_worker(fs.Script(exits=[fs.Exit(code=3, when="before_bind")]), start=False)
    with pytest.raises(WorkerStartError), LlamaWorker(rig.config) as worker:
        pytest.fail(f"{worker} is ready")
    assert leftovers.wait_none(0.0) != []  # the fixture's own worker
    rig.worker.close()
    assert leftovers.wait_none() == []


def test_a_garbage_collected_handle_ends_its_server(
    make_worker: MakeWorker, leftovers: Leftovers
) -> None:
    rig = make_worker(start=False)
    rig.worker.close()
    worker = LlamaWorker(rig.config)
    worker.start().get(timeout=WAIT_S)
    worker.submit("job", "", "x", params={"scripted_reply": []}).get(timeout=WAIT_S)
    del worker
    gc.collect()
    rig.wait_gone()
    assert leftovers.wait_none() == []


@pytest.mark.parametrize("thread", ["worker", "timers", "stream"])
def test_close_on_thread_it_would_await_returns(
    make_worker: MakeWorker, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a `__del__` of the host's, which the garbage collector calls on any thread."""
    rig = make_worker(fs.Script(ignore_term=True), timeouts=fast_timeouts(stop_grace_s=0.2))
    closed = threading.Event()

    def close(*_: object) -> None:
        rig.worker.close()
        closed.set()

    if thread == "timers":
        call_at(0.0, close)
    elif thread == "stream":
        monkeypatch.setattr(LazyReading, "received", close)
        rig.submit(fs.Text("Hello"), fs.WaitClose())
    else:
        rig.worker._backend.tell(GetWorkerStatus(reply=Mock(answer=close)))
    assert closed.wait(WAIT_S)
    rig.wait_gone()


# ------------------------------------------------------------ admission


def test_bad_input_takes_no_slot(rig: Rig) -> None:
    for refused in (rig.worker.submit("job", "", b"x"), rig.worker.ask(7)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="user_prompt"):
            refused.get(timeout=WAIT_S)
    assert rig.status()["slots_used"] == 0
    assert rig.submit() == 1


# ------------------------------------------------------------ results


def test_all_waiters_get_same_result_released_once_taken(rig: Rig, gate: Path) -> None:
    request = rig.submit(fs.Gate(gate), *fs.plain_reply(fs.Text("same")))
    futures = [rig.worker.result(request) for _ in range(8)]
    rig.status()  # the messages that carried them are handled
    gate.touch()
    eventually(lambda: all(future.done() for future in futures), "the result")
    assert rig.request(request)["state"] == "completed", "resolved, and not taken"
    taken = _all_at_once([partial(future.get, timeout=WAIT_S) for future in futures])
    assert [told["text"] for told in taken] == ["same"] * 8
    taken[0]["signals"].append("mine")
    assert taken[1]["signals"] == []
    assert futures[1].get(timeout=WAIT_S) is taken[1]
    for call in _questions(rig.worker):
        assert call(request).get(timeout=WAIT_S) == {"ok": False, "error": "NOT_FOUND"}


def test_a_host_may_change_what_it_is_answered(rig: Rig, gate: Path) -> None:
    running, unknown = rig.submit(fs.Gate(gate)), 99
    for calls, request, error in (
        ((rig.worker.get_result,), running, "NOT_READY"),
        (_questions(rig.worker), unknown, "NOT_FOUND"),
    ):
        for call in calls * 2:
            answer: Any = call(request).get(timeout=WAIT_S)
            assert answer == {"ok": False, "error": error}
            answer["seen_by"] = "the host"


def test_polling_for_a_result_leaves_no_futures_behind(rig: Rig, gate: Path) -> None:
    request_id = rig.submit(*fs.plain_reply(fs.Text("a"), fs.Gate(gate), fs.Text("b")))
    polled = []
    for _ in range(20):
        future = rig.worker.result(request_id)
        with pytest.raises(pykka.Timeout):
            future.get(timeout=0.005)
        polled.append(weakref.ref(future))
        del future
    rig.status()  # the messages that carried them are handled
    gc.collect()
    assert [ref for ref in polled if ref() is not None] == []
    called = threading.Event()
    # nobody else holds this one
    rig.worker.result(request_id).add_done_callback(lambda _: called.set())
    gc.collect()
    gate.touch()
    assert called.wait(WAIT_S)
    assert rig.ended(request_id)["text"] == "ab"
