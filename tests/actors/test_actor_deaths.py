"""An actor that dies of an exception: nothing hangs, no server is left, and the worker recovers."""

from __future__ import annotations

import os
import signal
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
    AwaitResult,
    BecameReady,
    Begin,
    CancelRequest,
    CloseAllStreams,
    Died,
    EvidenceSeen,
    Exited,
    GetStatus,
    Launch,
    Launched,
    OpenStream,
    Probed,
    RequestEnded,
    RunTool,
    Start,
    Stop,
    StreamClosed,
    StreamEvents,
    StreamOpened,
    StreamsClosed,
    Submit,
    Terminate,
    Tick,
    Unwatch,
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


DEATHS_IN_A_REQUEST = [
    (RequestActor, Begin),
    (RequestActor, StreamOpened),
    (RequestActor, StreamEvents),
    (TransportActor, OpenStream),
    (TransportActor, StreamClosed),
    (ToolLoopActor, RunTool),
    (WatchdogActor, Watch),
    (WatchdogActor, EvidenceSeen),
    (WatchdogActor, Unwatch),
]


@pytest.mark.parametrize(
    ("actor", "kind", "error"),
    [
        *((*death, RuntimeError) for death in DEATHS_IN_A_REQUEST),
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


@pytest.mark.parametrize(
    ("actor", "kind"), [(RequestActor, StreamEvents), (TransportActor, OpenStream), (WatchdogActor, Watch)]
)
def test_what_was_received_before_a_death_is_kept(
    make_worker: MakeWorker, make_gate: Callable[[], GatePath], accident: Accident, actor: Any, kind: Any
) -> None:
    rig = _worker(make_worker, slots=2)
    gate = make_gate()
    request = rig.submit(Headers(), Text("kept"), Gate(gate.path), Text(" more"), WaitClose())
    rig.wait_text(request, "kept")
    accident.arm(actor, kind)
    gate.open()
    if kind is not StreamEvents:
        rig.submit(Headers(), WaitClose())
    result = rig.ended(request)
    assert (result["state"], result["text"][:4]) == ("failed", "kept")
    assert result["fail_reason"] in ("unknown_error", "worker_restarted")
    _assert_recovers(rig)


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


def test_a_death_beside_a_running_tool_keeps_the_trace_and_counts_the_thread_until_it_ends(
    make_worker: MakeWorker, accident: Accident
) -> None:
    class Slow:
        def __init__(self) -> None:
            self.entered, self.released = threading.Event(), threading.Event()

        def run_tool(self, *, name: str, arguments: dict[str, Any], request_id: int, job_name: str) -> Any:
            if arguments:
                self.entered.set()
                assert self.released.wait(WAIT_S)

    def stuck() -> int:
        return rig.worker.get_debug_info().get(timeout=WAIT_S)["stuck_tool_threads_count"]

    slow = Slow()
    rig = make_worker(Script(), normal_tools=[TOOL], tool_runner=slow, tool_timeout_s=60.0, slots=2)
    try:
        calls = [ToolCall("look", index=0), ToolCall("look", {"wait": 1}, index=1), ToolCall("look", index=2)]
        request = rig.submit(*plain_reply(*calls, reason="tool_calls"))
        assert slow.entered.wait(WAIT_S)
        accident.arm(ToolLoopActor, RunTool)
        rig.submit(*plain_reply(ToolCall("look"), reason="tool_calls"))
        result = rig.ended(request)
        assert [entry["ok"] for entry in result["tool_trace"]] == [True, False]
        assert result["fail_reason"] == "worker_restarted"
        eventually(lambda: stuck() == 1, "one stuck thread")
    finally:
        slow.released.set()
    eventually(lambda: stuck() == 0, "no stuck thread")
    rig.wait_restarted()
    _assert_recovers(rig)


DEATHS_IN_A_START = [
    (ProcessActor, Launch),
    (ProcessActor, Launched),
    (WatchdogActor, Launched),
    (WatchdogActor, Tick),
    (WatchdogActor, Probed),
]


@pytest.mark.parametrize(("actor", "kind"), DEATHS_IN_A_START)
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


@pytest.mark.parametrize(
    ("actor", "kind"),
    [
        (ProcessActor, Terminate),
        (ProcessActor, Exited),
        (TransportActor, CloseAllStreams),
        (TransportActor, StreamClosed),
        (RequestActor, CancelRequest),
    ],
)
def test_a_death_during_a_stop_does_not_hold_it_up(
    make_worker: MakeWorker, accident: Accident, actor: Any, kind: Any
) -> None:
    rig = _worker(make_worker)
    request = rig.submit(Headers(), Text("kept"), WaitClose())
    rig.wait_text(request, "kept")
    accident.arm(actor, kind)
    if kind is CancelRequest:
        assert rig.worker.cancel(request).get(timeout=WAIT_S) is False
    rig.stop()
    assert accident.happened.wait(WAIT_S)
    rig.wait_gone(0.0)
    assert rig.status()["state"] is WorkerState.STOPPED
    assert rig.ended(request)["text"] == "kept"
    assert rig.start()["state"] is WorkerState.READY
    _assert_recovers(rig)


@pytest.mark.parametrize("kind", [Exited, Launch])
def test_the_process_actor_may_die_during_a_restart(make_worker: MakeWorker, accident: Accident, kind: Any) -> None:
    rig = _worker(make_worker)
    accident.arm(ProcessActor, kind)

    os.kill(rig.status()["pid"], signal.SIGKILL)
    assert accident.happened.wait(WAIT_S)
    rig.wait_restarted()
    _assert_recovers(rig)


def test_actors_that_die_again_and_again_lock_the_worker_out(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = _worker(make_worker, start=False)

    def handle(this: Any, message: Any) -> None:
        raise RuntimeError("always")

    monkeypatch.setattr(WatchdogActor, "handle", handle)
    with pytest.raises(LlamaWorkerError):
        rig.worker.start().get(timeout=WAIT_S)
    assert rig.status()["state"] is WorkerState.FAILED
    rig.wait_gone()


# ------------------------------------------------------------ the front desk itself

DEATHS_OF_THE_DESK = [Start, Launched, BecameReady, Submit, GetStatus, AwaitResult, RequestEnded, Stop, StreamsClosed]


@pytest.mark.parametrize("kind", [*DEATHS_OF_THE_DESK, Died, Exited])
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
