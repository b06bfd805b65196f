"""What the actors rely on in Pykka. A failure here after an upgrade says which of it has moved."""

import ast
import inspect
import queue
import threading
from pathlib import Path
from typing import Any

import pykka
import pytest

import llama_worker
from llama_worker.actors.base import SupervisedActor
from tests.actors.conftest import WAIT_S, eventually

SEAMS = {"_start_actor_loop", "_create_actor_inbox"}  # for those who make new kinds of actors
HOOKS = {"on_start", "on_stop", "on_failure", "on_receive"}


class Sample(pykka.ThreadingActor):
    """Overrides every seam as our actors do."""

    use_daemon_thread = True
    seen: queue.SimpleQueue[Any]

    def __init__(self, seen: queue.SimpleQueue[Any]) -> None:
        super().__init__()
        self.seen = seen

    @staticmethod
    def _create_actor_inbox() -> Any:
        return queue.SimpleQueue()

    def _start_actor_loop(self) -> None:
        self.seen.put("starts")
        super()._start_actor_loop()

    def on_start(self) -> None:
        self.seen.put(threading.current_thread())

    def on_receive(self, message: Any) -> Any:
        self.seen.put(message)
        if message == "leave":
            pykka.ActorRegistry.unregister(self.actor_ref)
            self.actor_stopped.set()
        return message

    def on_stop(self) -> None:
        self.seen.put("stops")

    def on_failure(self, *error: Any) -> None:
        self.seen.put(error)


@pytest.fixture
def seen() -> queue.SimpleQueue[Any]:
    return queue.SimpleQueue()


def told(seen: queue.SimpleQueue[Any]) -> Any:
    return seen.get(timeout=WAIT_S)


def test_pykkas_extension_points_exist_and_are_called(seen: queue.SimpleQueue[Any]) -> None:
    for name in SEAMS | HOOKS:
        assert callable(getattr(pykka.ThreadingActor, name)), name
    assert isinstance(
        inspect.getattr_static(pykka.ThreadingActor, "_create_actor_inbox"), staticmethod
    )
    ref = Sample.start(seen)
    assert told(seen) == "starts"
    thread = told(seen)
    assert thread.daemon
    assert thread is not threading.current_thread()
    ref.tell("hello")
    assert told(seen) == "hello"
    assert ref.stop(timeout=WAIT_S)
    assert told(seen) == "stops"
    with pytest.raises(pykka.ActorDeadError):
        ref.tell("late")


def test_an_actor_may_unregister_while_handling_a_message(seen: queue.SimpleQueue[Any]) -> None:
    ref = Sample.start(seen)
    for message in ("leave", "never read"):
        ref.tell(message)
    assert [told(seen) for _ in range(3)][2] == "leave"
    assert not ref.is_alive()
    assert ref not in pykka.ActorRegistry.get_all()
    eventually(lambda: "Sample" not in str(threading.enumerate()), "the end of the thread")
    assert seen.empty()


def test_no_other_private_name_of_pykka_is_used() -> None:
    kinds = (pykka.ThreadingActor, pykka.ActorRef, pykka.ActorRegistry, pykka.ThreadingFuture)
    private = {
        name
        for kind in kinds
        for name in dir(kind)
        if name.startswith("_") and not name.startswith("__")
    }
    assert private >= SEAMS
    package = Path(llama_worker.__file__).parent
    sources = {
        path.read_text() for folder in ("", "actors") for path in (package / folder).rglob("*.py")
    }
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.name
        for source in sources
        if "import pykka" in source
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute | ast.FunctionDef)
    }
    assert used & private == SEAMS
    assert vars(SupervisedActor).keys() >= SEAMS
