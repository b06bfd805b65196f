"""An actor that dies on its own thread: nothing hangs, no server is left, and the worker recovers.

When each of them may die, and in which order that is heard, is the simulator's.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pykka
import pytest

from llama_worker import LlamaWorkerError, WorkerClosed
from llama_worker.actors.request import RequestActor
from llama_worker.actors.worker import WorkerActor
from llama_worker.request.messages import RequestEnded, StreamEvents
from llama_worker.server.messages import BecameReady, Exited, Start
from llama_worker.testing import scripts as fs
from tests.actors.conftest import WAIT_S, MakeWorker, eventually
from tests.conftest import Leftovers, Speechless

Arm = Callable[..., threading.Event]


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Arm:
    """Makes an actor class die of the next message of a kind; the event is set when it has."""

    def arm(
        actor: Any, kind: type[Any], error: type[BaseException] = RuntimeError
    ) -> threading.Event:
        happened, whole = threading.Event(), actor.handle

        def handle(this: Any, message: Any) -> None:
            if isinstance(message, kind) and not happened.is_set():
                happened.set()
                raise error(f"accident at {kind.__name__}")
            whole(this, message)

        monkeypatch.setattr(actor, "handle", handle)
        return happened

    return arm


@pytest.mark.parametrize("error", [SystemExit, Speechless])
def test_wordless_exit_or_error_fails_request_and_restarts(
    make_worker: MakeWorker, arm: Arm, error: type[BaseException]
) -> None:
    rig = make_worker()
    happened = arm(RequestActor, StreamEvents, error)
    request = rig.submit(fs.Headers(), fs.Text("a"), fs.WaitClose())
    questions: list[Any] = [
        call(request) for call in (rig.worker.get_status, rig.worker.read_output)
    ]
    assert [question.get(timeout=WAIT_S)["ok"] for question in questions] == [True, True]
    assert rig.ended(request)["state"] == "failed"
    assert happened.is_set()
    rig.wait_restarted()
    assert rig.run(*fs.plain_reply(fs.Text("fine")))["text"] == "fine"
    events = rig.debug()["recent_events"]
    assert "actor_died" in {event["event"] for event in events}


class Bystander(pykka.ThreadingActor):
    """The host's own."""


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Start, SystemExit),
        (BecameReady, RuntimeError),
        (RequestEnded, RuntimeError),
        (Exited, RuntimeError),
    ],
)
def test_a_crashed_worker_actor_answers_every_future(
    make_worker: MakeWorker, arm: Arm, leftovers: Leftovers, kind: Any, error: type[BaseException]
) -> None:
    bystander = Bystander.start()
    rig = make_worker(start=False, slots=2)
    happened = arm(WorkerActor, kind, error)
    futures: list[Any] = []
    with contextlib.suppress(WorkerClosed):  # it had died before the call
        futures.append(rig.worker.start())
        eventually(lambda: futures[0].done(), "an answer to start()")
        for steps in ([fs.Headers(), fs.Text("a"), fs.WaitClose()], fs.plain_reply(fs.Text("b"))):
            futures.append(
                rig.worker.submit("job", "", "x", params={"scripted_reply": fs.steps_json(*steps)})
            )
        futures += [rig.worker.result(1), rig.worker.result(2), rig.worker.get_worker_status()]
        if kind is RequestEnded:
            assert happened.wait(WAIT_S)
        futures.append(rig.worker.stop())
    assert happened.wait(WAIT_S)
    notes: list[str] = []
    for future in futures:
        try:
            future.get(timeout=WAIT_S)
        except LlamaWorkerError as failure:
            notes += getattr(failure, "__notes__", [])
    assert any(f"accident at {kind.__name__}" in note for note in notes)
    with pytest.raises(WorkerClosed):
        rig.worker.get_worker_status()
    rig.worker.close()
    rig.wait_gone(0.0)
    assert bystander.is_alive()
    bystander.stop()
    assert leftovers.wait_none() == []


def test_the_hosts_stop_all_leaves_no_server(
    make_worker: MakeWorker, leftovers: Leftovers, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_all, before = pykka.ActorRegistry.get_all, set(pykka.ActorRegistry.get_all())
    rig = make_worker()
    result = rig.worker.result(rig.submit(fs.Headers(), fs.Text("a"), fs.WaitClose()))
    with monkeypatch.context() as patch:  # the actors of other tests' lasting workers are spared
        own = [ref for ref in get_all() if ref not in before]
        patch.setattr(pykka.ActorRegistry, "get_all", lambda: own)
        pykka.ActorRegistry.stop_all(timeout=WAIT_S)
    with pytest.raises(WorkerClosed):
        rig.worker.get_worker_status()
    rig.worker.close()
    rig.wait_gone(0.0)
    ended = result.get(timeout=WAIT_S)
    assert ended["ok"]
    assert ended["fail_reason"] == "worker_stopped"
    assert leftovers.wait_none() == []
