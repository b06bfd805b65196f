"""What needs no cluster: the copy of a request, the errors, and what is refused before anything
starts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import pickle
import threading
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorHandleNotFoundError,
    ActorUnavailableError,
    RayTaskError,
)

from llama_worker import (
    ConfigError,
    LlamaWorker,
    LlamaWorkerError,
    RequestState,
    StartFailReason,
    WorkerClosed,
    WorkerConfig,
    WorkerStartError,
    WorkerState,
)
from llama_worker.ray import (
    Fleet,
    FleetClosed,
    NoLiveReplica,
    RayWorker,
    ReplicaLost,
    RequestUpdate,
)
from llama_worker.ray.calls import kill, one_line, session
from llama_worker.ray.replica import Replica
from llama_worker.ray.request_copy import RequestCopy
from llama_worker.request.submission import validate_submit
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.host.threads import run_callback
from llama_worker.types.request import RequestPhase, RequestStatus
from tests.actors.conftest import HOST, WAIT_S, in_a_loop
from tests.conftest import run_python
from tests.ray.stub_actor import set_session

# ---------------------------------------------------------------- a worker


class ScriptedWorker:
    """Stands for the LlamaWorkers of a RayWorker: the first finds its port taken."""

    made: ClassVar[list[ScriptedWorker]] = []

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.is_first = not self.made
        self.made.append(self)
        self.starts: list[WorkerFuture[Any]] = []

    def start(self) -> WorkerFuture[Any]:
        """Under way; the second resolves at once."""
        future: WorkerFuture[Any] = WorkerFuture()
        self.starts.append(future)
        if not self.is_first:
            future.answer({"state": WorkerState.READY})
        return future

    def close(self) -> None:
        """Ends what is under way, as LlamaWorker does."""
        for future in self.starts:
            future.fail(WorkerStartError(StartFailReason.STOPPED, "stop() was called"))


@pytest.fixture
def scripted_workers(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedWorker]:
    monkeypatch.setattr("llama_worker.ray.worker.LlamaWorker", ScriptedWorker)
    made: list[ScriptedWorker] = []
    monkeypatch.setattr(ScriptedWorker, "made", made)
    return made


@pytest.fixture
def ray_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the fleet believes."""
    set_session(monkeypatch, "first")


while_ray_runs = pytest.mark.usefixtures("ray_runs")


def replica(actor: Any = None, create: Any = None) -> Replica:
    made = Replica("f", 0, create or Mock(), retry_s=1e6, lease_s=30.0)
    made._actor = actor
    return made


def breaks() -> Mock:
    """The pieces of a request whose connection breaks."""
    broken = ActorUnavailableError("the connection broke", b"\1" * 16)
    return Mock(__anext__=Mock(side_effect=broken))


SUBMISSION = validate_submit("j", "", "x", None, None)


@while_ray_runs
@in_a_loop
async def test_actor_that_cannot_be_created_fails_the_start() -> None:
    """Ray checks some options, such as a runtime_env's folder, only when it creates the actor."""
    its = replica(create=Mock(side_effect=ValueError("no such working_dir")))
    try:
        with pytest.raises(ReplicaLost, match="no such working_dir"):
            await asyncio.wait_for(its.start(), 5.0)
    finally:
        await its.close(1.0)


@while_ray_runs
@in_a_loop
async def test_request_that_no_worker_can_take_loses_nothing() -> None:
    error: Any = RayTaskError  # which has no annotations
    unfit = ConfigError("image_url parts need a model with vision")
    refusal = error("submit", "a traceback", unfit).as_instanceof_cause()
    its = replica(Mock(submit=Mock(remote=answers(refusal))))
    with pytest.raises(ConfigError, match="need a model with vision"):
        await its.admit(SUBMISSION, iter(()))


@while_ray_runs
@pytest.mark.parametrize("turns", range(8))
@in_a_loop
async def test_a_close_beside_the_actors_death_ends(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """A task group that is about to end drops a cancel."""
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    death = asyncio.Event()

    async def wait_failed() -> Any:
        await death.wait()
        raise ActorDiedError

    def create() -> Any:
        actor = Mock()
        actor.get_place.remote = answers({"node_id": "n", "node_ip": "i", "pid": 1})
        actor.start.remote = answers({"slots_total": 1})
        actor.stop.remote = answers(None)
        actor.wait_failed.remote = wait_failed
        actor.renew.remote = lambda _: Mock(future=concurrent.futures.Future)
        return actor

    its = replica(create=create)
    await its.start()
    death.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    death.clear()  # the next actor lives
    await asyncio.wait_for(its.close(1.0), WAIT_S)


@while_ray_runs
@in_a_loop
async def test_a_renewal_ends_with_its_task() -> None:
    """Its failure would be reported as never retrieved."""
    renewal: concurrent.futures.Future[None] = concurrent.futures.Future()
    actor = Mock(renew=Mock(remote=Mock(return_value=Mock(future=lambda: renewal))))
    its = replica()
    its._session = session()
    renewing = asyncio.create_task(its._renew(actor))
    await asyncio.sleep(0)
    renewing.cancel()
    await asyncio.gather(renewing, return_exceptions=True)
    assert renewal.cancelled()


@while_ray_runs
@in_a_loop
async def test_cancelled_request_that_is_lost_was_not_cancelled() -> None:
    its = replica(Mock(cancel=Mock(remote=answers(True))))
    request = RequestCopy(7, progress("Once"))
    canceling = asyncio.create_task(its.cancel(request))
    for _ in range(3):
        await asyncio.sleep(0)
    request.lose("its node is gone", 5.0)
    assert await canceling is False


@while_ray_runs
def test_an_actor_of_an_earlier_ray_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "kill", Mock(side_effect=ActorHandleNotFoundError("of before")))
    kill(Mock())


@while_ray_runs
def test_kill_does_not_wait_for_an_unresponsive_head(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = threading.Event(), threading.Event()

    def wait(actor: object) -> None:
        asked.set()
        answers.wait(WAIT_S)

    monkeypatch.setattr(ray, "kill", wait)
    kill(Mock())
    assert asked.wait(WAIT_S)
    assert not answers.is_set()
    answers.set()


@in_a_loop
async def test_a_replica_without_a_place_is_not_asked() -> None:
    actor = Mock()
    with pytest.raises(ReplicaLost, match="no place for it yet"):
        await replica(actor).ask(RayWorker.get_worker_status)
    assert actor.mock_calls == []


@while_ray_runs
@in_a_loop
async def test_a_request_is_cancelled_at_its_own_actor() -> None:
    """Another may have taken its place meanwhile, with another request of that id."""
    its, other = Mock(), Mock()
    current = replica(other)
    request = current.requests[7] = RequestCopy(7, progress("Once"))
    await current._follow(its, current._lost, request, breaks())
    its.cancel.remote.assert_called_once_with(request.remote_id)
    assert other.mock_calls == []
    assert request.is_over


@pytest.mark.parametrize(
    ("is_initialized", "why"),
    [(False, "Ray was shut down"), (True, "Failed to submit")],
    ids=["shut down", "initialised anew"],
)
@in_a_loop
async def test_an_actor_that_ray_cannot_call_is_lost(
    monkeypatch: pytest.MonkeyPatch, *, is_initialized: bool, why: str
) -> None:
    """Ray itself would start a new cluster for the call, or raises a plain Exception."""
    monkeypatch.setattr(ray, "is_initialized", lambda: is_initialized)
    called = Mock(side_effect=Exception("Failed to submit task"))
    methods = ("submit", "get_debug_info", "cancel")
    actor = Mock(**{method: Mock(remote=called) for method in methods})
    its = replica(actor)
    its._place = {"node_id": "n", "node_ip": "i", "pid": 1}
    with pytest.raises(ReplicaLost, match=why):
        await its.admit(SUBMISSION, iter(()))
    with pytest.raises(ReplicaLost, match=why):
        await its.ask(RayWorker.get_debug_info)
    request = its.requests[7] = RequestCopy(7, progress("Once"))
    assert await its.cancel(request) is False
    await its._follow(actor, its._lost, request, breaks())
    assert request.is_over
    assert called.called is is_initialized


@in_a_loop
async def test_a_subscription_that_is_cancelled_is_forgotten(
    scripted_workers: list[ScriptedWorker],
) -> None:
    worker = ray_worker()
    waiting = asyncio.create_task(anext(worker.events()))
    await asyncio.sleep(0)
    assert len(worker._listeners) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert worker._listeners == []


def ray_worker(**settings: Any) -> RayWorker:
    return RayWorker(lambda port: WorkerConfig("w", HOST, port, ["llama-server"], **settings))


@in_a_loop
async def test_concurrent_starts_share_the_next_port(
    scripted_workers: list[ScriptedWorker],
) -> None:
    worker = ray_worker()
    first = asyncio.create_task(worker.start())
    await asyncio.sleep(0)
    (under_way,) = scripted_workers[0].starts
    second = asyncio.create_task(worker.start())  # it begins before the first hears of that:
    under_way.fail(WorkerStartError(StartFailReason.PORT_IN_USE, "taken"))
    started: Any = (await first, await second)
    assert started == ({"state": WorkerState.READY},) * 2
    assert [len(each.starts) for each in scripted_workers] == [2, 2]


@in_a_loop
async def test_new_worker_starts_beside_the_close_of_the_old(
    scripted_workers: list[ScriptedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `stop` during that close would be overtaken by a later start."""
    worker, closed = ray_worker(), threading.Event()
    monkeypatch.setattr(scripted_workers[0], "close", lambda: closed.wait(2 * WAIT_S))
    starting = asyncio.create_task(worker.start())
    await asyncio.sleep(0)
    (under_way,) = scripted_workers[0].starts
    under_way.fail(WorkerStartError(StartFailReason.PORT_IN_USE, "taken"))
    try:
        await asyncio.wait_for(starting, WAIT_S)
    finally:
        closed.set()


@in_a_loop
async def test_a_close_ends_the_search_for_a_port(scripted_workers: list[ScriptedWorker]) -> None:
    worker = ray_worker()
    starting = asyncio.create_task(worker.start())
    await asyncio.sleep(0)
    closing = asyncio.create_task(worker.close())
    (under_way,) = scripted_workers[0].starts
    under_way.fail(WorkerStartError(StartFailReason.PORT_IN_USE, "taken"))
    await closing
    with pytest.raises(WorkerStartError, match="taken"):
        await starting
    assert len(scripted_workers) == 1  # none that nobody would close


async def events_of(worker: RayWorker) -> list[dict[str, Any]]:
    return [event async for event in worker.events()]


@in_a_loop
async def test_events_are_whole_and_end_with_the_worker(
    scripted_workers: list[ScriptedWorker],
) -> None:
    worker = ray_worker(on_event=dict.clear)
    listening = asyncio.create_task(events_of(worker))
    await asyncio.sleep(0)
    handler = scripted_workers[0].config.on_event
    assert handler is not None
    handler({"event": "launched"})
    await worker.close()
    assert (await listening, await events_of(worker)) == ([{"event": "launched"}], [])


@in_a_loop
async def test_events_awaiting_host_code_come_before_the_end(
    scripted_workers: list[ScriptedWorker],
) -> None:
    blocked, worker = threading.Event(), ray_worker()
    listening = asyncio.create_task(events_of(worker))
    await asyncio.sleep(0)
    handler = scripted_workers[0].config.on_event
    assert handler is not None
    run_callback(lambda: blocked.wait(WAIT_S))
    run_callback(lambda: handler({"event": "exited"}))
    await worker.close()
    blocked.set()
    assert await listening == [{"event": "exited"}]


def answers(*values: Any) -> Any:
    """A method of a worker: what it answers, or raises, one after the other."""
    left = iter(values)

    async def answer(*_: Any, **__: Any) -> Any:
        value = next(left)
        if isinstance(value, Exception):
            raise value
        return value

    return answer


@in_a_loop
async def test_no_update_says_more_than_its_output(scripted_workers: list[ScriptedWorker]) -> None:
    """The request ends between two questions."""
    whole: Any = {"text_offset": 1, "reasoning_offset": 0, "text": "a", "reasoning": "", "ok": True}
    done = status(state=RequestState.COMPLETED, phase=RequestPhase.DONE)
    outputs = [{**whole, "done": is_done} for is_done in (False, False, True, True)]

    worker: Any = ray_worker()
    worker._worker = Mock(
        read_output=answers(*outputs), get_status=answers(done, done), result=answers({"ok": True})
    )
    assert ["result" in update async for update in worker.follow(3)] == [True]


@in_a_loop
async def test_worker_that_failed_itself_is_found_without_events(
    scripted_workers: list[ScriptedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_worker.ray.worker._LOOK_INTERVAL_S", 0.001)

    worker: Any = ray_worker()
    ready = {"state": WorkerState.READY}
    worker._worker = Mock(get_worker_status=answers(ready, WorkerClosed("w")))
    with pytest.raises(WorkerClosed):
        await worker.wait_failed()


# ---------------------------------------------------------------- the copy


def status(**more: Any) -> RequestStatus:
    told: dict[str, Any] = {"ok": True, "request_id": 3, "job_name": "job", "created_at": 100.0}
    told |= {"state": RequestState.RUNNING, "phase": RequestPhase.GENERATING}
    told |= {"signals": [], "output_chars": 0}
    return {**told, **more}  # type: ignore[typeddict-item]


def progress(text: str, reasoning: str = "", **more: Any) -> RequestUpdate:
    output: Any = {"ok": True, "text": text, "reasoning": reasoning, "done": False}
    return {"status": status(**more), "output": output}


def finished(text: str) -> RequestUpdate:
    result: Any = {"state": RequestState.COMPLETED, "text": text, "signals": []}
    done = progress(text, state=RequestState.COMPLETED, phase=RequestPhase.DONE)
    return {**done, "result": result}


def test_a_copy_grows_under_the_fleets_id() -> None:
    request = RequestCopy(7, progress("one ", "hm"))
    request.update(progress("two ", output_chars=8))
    whole = {"text": "one two ", "reasoning": "hm", "text_offset": 8, "reasoning_offset": 2}
    assert request.read_output(0, 0) == {"ok": True, "done": False, **whole}
    assert request.read_output(4, 2)["text"] == "two "
    assert (request.status()["request_id"], request.status()["output_chars"]) == (7, 8)
    assert (request.is_over, request.result()) == (False, None)


def test_a_copy_with_a_result_cannot_be_lost() -> None:
    request = RequestCopy(7, finished("all"))
    request.lose("too late", 200.0)
    result = request.result()
    assert result is not None
    assert (result["request_id"], result["state"], result["text"]) == (7, "completed", "all")
    assert request.read_output(0, 0)["done"]
    assert request.status()["state"] == "completed"


def test_a_lost_copy_keeps_everything_that_came() -> None:
    signal: dict[str, Any] = {"tool_name": "declare_outcome", "emitted_at": 101.0}
    signal["arguments"] = {"outcome": "success"}
    request = RequestCopy(7, progress("one ", "hm"))
    request.update(progress("two", signals=[signal]))
    request.lose("its node burned down", 200.0)
    lost = {"state": "failed", "fail_reason": "server_died", "fail_detail": "its node burned down"}
    came = {"text": "one two", "reasoning": "hm", "signals": [signal]}
    result, after = request.result(), request.status()
    assert result is not None
    assert result == {**result, "finish_reason": "failed", **lost, **came}
    assert after == {**after, "phase": "done", "completed_at": 200.0, **lost}


def test_waiter_for_a_copy_is_answered_at_end() -> None:
    request = RequestCopy(7, progress("one "))
    early, late = [WorkerFuture[Any]() for _ in range(2)], WorkerFuture[Any]()
    for waiter in early:
        request.answer_at_end(waiter)
    assert not early[0].done()
    request.update(finished("two"))
    request.answer_at_end(late)
    results = [waiter.get(timeout=0) for waiter in (*early, late)]
    assert results == [request.result()] * 3
    assert len(set(map(id, results))) == 3  # no two hosts get the same dict


def test_differing_clocks_end_no_request_before_it_began() -> None:
    request = RequestCopy(7, progress(""))
    request.lose("gone", 99.0)
    assert request.status()["completed_at"] == 100.0


def test_every_host_gets_dicts_of_its_own() -> None:
    request = RequestCopy(7, finished("all"))
    asked: list[Any] = [request.result, request.status]
    for ask in asked:
        ask()["signals"].append("of one host")
        assert ask()["signals"] == []


# ---------------------------------------------------------------- the actor's methods


BY_RAY = ("_ray_trace_ctx",)  # is added to the methods of a class that was made an actor


def public_methods(kind: type) -> dict[str, list[str]]:
    return {
        name: [word for word in inspect.signature(method).parameters if word not in BY_RAY]
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_the_actor_has_every_method_of_the_handle() -> None:
    handle, actor = public_methods(LlamaWorker), public_methods(RayWorker)
    del handle["iter_output"]  # it blocks its caller between two chunks; `follow` stands for it
    assert {name: actor.get(name) for name in handle} == handle


def test_the_handles_own_methods_stay_as_they_are() -> None:
    ray.remote(RayWorker)
    assert BY_RAY[0] in inspect.signature(RayWorker.submit).parameters
    assert BY_RAY[0] not in inspect.signature(LlamaWorker.submit).parameters


HELD_UP = """
import asyncio, time
from llama_worker import WorkerConfig
from llama_worker.ray import RayWorker

async def main():
    worker = RayWorker(lambda port: WorkerConfig("w", "127.0.0.1", port, ["llama-server"]))
    await worker.renew(0.2)
    time.sleep(3600)  # as Ray does while the owner of a streamed piece is out of reach

asyncio.run(main())
"""


def test_a_lease_ends_a_held_up_process() -> None:
    done = run_python(HELD_UP, timeout_s=WAIT_S)
    assert (done.returncode, "no lease renewal for 0.2 s" in done.stderr) == (1, True), done.stderr


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ReplicaLost(1, "n1 (10.0.0.2)", "gone"), "replica 1 on node n1 (10.0.0.2): gone"),
        (ReplicaLost(1, "n1", "gone", 7), "request 7 was lost with replica 1 on node n1: gone"),
        (ReplicaLost(1, "", "no place"), "replica 1: no place"),
        (
            NoLiveReplica("small", ["replica 0: starting", "replica 1: lost"]),
            (
                "fleet 'small' has no live replica; submit again later\n  replica 0: starting\n  "
                "replica 1: lost"
            ),
        ),
        (FleetClosed("small"), "fleet 'small' is closed; create another Fleet"),
    ],
)
def test_errors_name_the_loss_and_survive_pickling(error: LlamaWorkerError, text: str) -> None:
    assert str(error) == text
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert (str(other), other.__dict__) == (text, error.__dict__)


def test_rays_words_stand_on_one_line() -> None:
    assert "is unavailable: no answer. The task" in one_line(
        ActorUnavailableError("no\n  answer", b"\1" * 16)
    )


# ---------------------------------------------------------------- refused at once


def config_for(port: int) -> WorkerConfig:
    return WorkerConfig("w", "127.0.0.1", port, ["llama-server"])


@while_ray_runs
def test_unknown_id_that_becomes_a_request_is_refused() -> None:
    fleet = Fleet(config_for, replicas=1)
    try:
        unknown = fleet.result(7)
        assert unknown.wait(WAIT_S)
        fleet._requests[7] = RequestCopy(7, finished("all"))
        assert unknown.get() == {"ok": False, "error": "NOT_FOUND"}
        assert fleet.get_status(7).get(timeout=WAIT_S)["ok"]
    finally:
        fleet.close()


def test_a_function_that_cannot_be_pickled_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(
        ConfigError, match=r"cannot be sent to another machine: .*lock.*made inside the function"
    ):
        Fleet(lambda port: config_for(port if lock else 0), replicas=1)


def test_a_config_instead_of_a_function_is_refused() -> None:
    with pytest.raises(
        TypeError, match="config_for must be a function that makes a WorkerConfig for a port"
    ):
        Fleet(config_for(8080), replicas=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, "replicas must be 1 or more"),
        ({"replicas": 1, "name": ""}, "name must not be empty"),
        ({"replicas": 1, "retry_s": 0}, "retry_s must be"),
        ({"replicas": 1, "lease_s": 5.0}, "lease_s must be"),
        ({"replicas": 1, "options": {"max_restarts": -1}}, "options must not have 'max_restarts'"),
        ({"replicas": 1, "options": {"num_gpu": 1}}, "num_gpu"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fleet(config_for, **settings)


def test_without_ray_a_fleet_starts_nothing() -> None:
    with pytest.raises(LlamaWorkerError, match=r"call ray\.init"):
        Fleet(config_for, replicas=1)
    assert not ray.is_initialized()
