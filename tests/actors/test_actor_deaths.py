"""An actor that dies on its own thread: nothing hangs, no server is left, and the worker recovers.

When each of them may die, and in which order that is heard, is the simulator's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pykka
import pytest

from llama_worker import LlamaWorkerError, WorkerClosed
from llama_worker.actors.base import SupervisedActor
from llama_worker.actors.process import ProcessActor
from llama_worker.actors.request import RequestActor
from llama_worker.actors.tool_loop import ToolLoopActor
from llama_worker.actors.transport import TransportActor
from llama_worker.actors.watchdog import WatchdogActor
from llama_worker.actors.worker import WorkerActor
from llama_worker.messages import (
    BecameReady,
    Begin,
    Exited,
    GetStatus,
    Launch,
    Launched,
    OpenStream,
    RequestEnded,
    RunTool,
    Start,
    Stop,
    StreamEvents,
    Submit,
    Watch,
)
from llama_worker.request.turn import Turn
from llama_worker.types import WorkerState
from tests.actors.conftest import WAIT_S, GatePath, MakeWorker, Rig, eventually
from tests.conftest import Leftovers, Speechless
from tests.fake_script import (
    Gate,
    Headers,
    Reasoning,
    Script,
    Text,
    ToolCall,
    Turns,
    WaitClose,
    plain_reply,
    steps_json,
)

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Runner:
    """A tool that answers at once."""

    def run_tool(self, *, name: str, arguments: dict[str, Any], request_id: int, job_name: str) -> Any:
        return "seen"


class Accident:
    """Makes an actor class die of the next message of a kind, once `arm` was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.happened = threading.Event()

    def arm(
        self, actor: type[SupervisedActor[Any]], kind: type[Any], error: type[BaseException] = RuntimeError
    ) -> None:
        whole = actor.handle

        def handle(this: SupervisedActor[Any], message: Any) -> None:
            if isinstance(message, kind) and not self.happened.is_set():
                self.happened.set()
                raise error(f"accident at {kind.__name__}")
            whole(this, message)

        self._monkeypatch.setattr(actor, "handle", handle)


@pytest.fixture
def accident(monkeypatch: pytest.MonkeyPatch) -> Accident:
    return Accident(monkeypatch)


def _worker(make_worker: MakeWorker, **config: Any) -> Rig:
    return make_worker(Script(), normal_tools=[TOOL], tool_runner=Runner(), **config)


def _assert_recovers(rig: Rig) -> None:
    rig.wait_state(WorkerState.READY)
    assert rig.run(*plain_reply(Text("fine")))["text"] == "fine"
    assert rig.status()["slots_used"] == 0


@pytest.mark.parametrize(
    ("actor", "kind", "error"),
    [
        (RequestActor, Begin, RuntimeError),  # it has no record to hand over
        (TransportActor, OpenStream, RuntimeError),
        (ToolLoopActor, RunTool, RuntimeError),
        (WatchdogActor, Watch, RuntimeError),
        (RequestActor, StreamEvents, SystemExit),
        (RequestActor, StreamEvents, Speechless),
    ],
)
def test_a_death_around_a_request_is_survived(
    make_worker: MakeWorker, accident: Accident, actor: Any, kind: Any, error: Any
) -> None:
    rig = _worker(make_worker, slots=2)
    accident.arm(actor, kind, error)
    with_call = plain_reply(Text("before "), ToolCall("look"), reason="tool_calls")
    params = {"fake_script": steps_json(Turns([with_call, plain_reply(Text("after"))]))}
    asked = [rig.worker.submit("job", "", "x", params=params) for _ in range(2)]
    questions: list[Any] = [call(1) for call in (rig.worker.get_status, rig.worker.read_output)]
    results = [rig.worker.result(1), rig.worker.result(2)]
    assert accident.happened.wait(WAIT_S)
    admitted = [told["request_id"] for told in (future.get(timeout=WAIT_S) for future in asked) if told["ok"]]
    assert [result.get(timeout=WAIT_S)["ok"] for result in results[: len(admitted)]] == [True] * len(admitted)
    for question in questions:
        assert question.get(timeout=WAIT_S)["ok"] is True
    rig.wait_restarted()
    _assert_recovers(rig)
    assert any(event["event"] == "actor_died" for event in rig.worker.get_debug_info().get()["recent_events"])


def test_output_survives_a_crash_that_repeats_itself_at_the_end(
    make_worker: MakeWorker, make_gate: Callable[[], GatePath], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: Turn, *_: Any, **__: Any) -> Any:
        raise IndexError("a bug")

    rig = _worker(make_worker)
    gate = make_gate()
    request = rig.submit(Headers(), Reasoning("why"), Text("kept"), Gate(gate.path), Text(" more"), WaitClose())
    rig.wait_text(request, "kept")
    monkeypatch.setattr(Turn, "take", crash)
    monkeypatch.setattr(Turn, "finish", crash)
    gate.open()
    result = rig.ended(request)
    assert (result["fail_reason"], result["fail_detail"]) == ("unknown_error", "IndexError: a bug")
    assert (result["text"], result["reasoning"]) == ("kept", "why")
    monkeypatch.undo()
    rig.wait_restarted()
    _assert_recovers(rig)


@pytest.mark.parametrize(
    ("actor", "kind"), [(ProcessActor, Launch), (ProcessActor, Launched), (WatchdogActor, Launched)]
)
def test_a_death_during_a_start_delays_it(
    make_worker: MakeWorker, accident: Accident, leftovers: Leftovers, actor: Any, kind: Any
) -> None:
    rig = _worker(make_worker, start=False)
    accident.arm(actor, kind)
    assert rig.worker.start().get(timeout=WAIT_S)["name"] == rig.config.name
    assert accident.happened.wait(WAIT_S)
    rig.wait_restarted()
    _assert_recovers(rig)
    rig.worker.close()
    assert leftovers.wait_none() == []
    rig.wait_gone(0.0)


# ------------------------------------------------------------ the front desk itself


@pytest.mark.parametrize("kind", [Start, BecameReady, Submit, RequestEnded, Stop, Exited])
def test_a_dying_worker_actor_answers_everybody_and_leaves_nothing(
    make_worker: MakeWorker, accident: Accident, leftovers: Leftovers, kind: Any
) -> None:
    rig = _worker(make_worker, start=False, slots=2)
    accident.arm(WorkerActor, kind)
    futures: list[Any] = []
    try:
        futures.append(rig.worker.start())
        eventually(lambda: futures[0].done(), "an answer to start()")
        for steps in ([Headers(), Text("a"), WaitClose()], plain_reply(Text("b"))):
            futures.append(rig.worker.submit("job", "", "x", params={"fake_script": steps_json(*steps)}))
        futures += [call(1) for call in (rig.worker.get_status, rig.worker.read_output, rig.worker.result)]
        futures += [rig.worker.result(2), rig.worker.get_worker_status()]
        if kind is RequestEnded:
            assert accident.happened.wait(WAIT_S)
        futures.append(rig.worker.stop())
        eventually(lambda: futures[-1].done(), "an answer to stop()")
    except WorkerClosed:
        pass  # it had died before the call
    assert accident.happened.wait(WAIT_S)
    for future in futures:
        try:
            future.get(timeout=WAIT_S)
        except LlamaWorkerError:
            continue
    with pytest.raises(WorkerClosed):
        rig.worker.get_worker_status()
    began_at = time.monotonic()
    rig.worker.close()
    rig.worker.close()
    assert time.monotonic() - began_at < WAIT_S
    rig.wait_gone(0.0)
    assert leftovers.wait_none() == []


def test_a_dying_worker_actor_does_not_stop_the_hosts_own_actors(make_worker: MakeWorker, accident: Accident) -> None:
    class Bystander(pykka.ThreadingActor):
        pass

    bystander = Bystander.start()
    try:
        rig = _worker(make_worker)
        accident.arm(WorkerActor, GetStatus, SystemExit)
        with pytest.raises(WorkerClosed):
            rig.worker.get_status(1).get(timeout=WAIT_S)
        rig.worker.close()
        assert bystander.is_alive()
    finally:
        bystander.stop()


def test_the_hosts_stop_all_leaves_no_server(make_worker: MakeWorker, leftovers: Leftovers) -> None:
    rig = _worker(make_worker)
    result = rig.worker.result(rig.submit(Headers(), Text("a"), WaitClose()))
    pykka.ActorRegistry.stop_all(timeout=WAIT_S)
    with pytest.raises(WorkerClosed):
        rig.worker.get_worker_status()
    rig.worker.close()
    rig.wait_gone(0.0)
    with pytest.raises(WorkerClosed):
        result.get(timeout=WAIT_S)
    assert leftovers.wait_none() == []
