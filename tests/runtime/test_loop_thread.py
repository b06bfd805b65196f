"""The thread that reads all streams and runs the actors that a token passes."""

from __future__ import annotations

import os
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pykka
import pytest

from llama_worker.runtime.loop_thread import LoopThread, loop_thread
from tests.actors.conftest import WAIT_S, eventually, no_threads


class OnLoop(pykka.ThreadingActor):
    """A Pykka actor that lives on the loop's thread."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self._seen = seen

    def _start_actor_loop(self) -> None:
        loop_thread().run_actor(self)

    def on_start(self) -> None:
        self._seen.append(("started", threading.current_thread().name))

    def on_receive(self, message: Any) -> Any:
        if message == "raise":
            raise ValueError("asked for")
        self._seen.append(message)
        return message

    def on_stop(self) -> None:
        self._seen.append("stopped")


def test_an_actor_lives_there_as_it_does_on_a_thread_of_its_own() -> None:
    seen: list[Any] = []
    ref = OnLoop.start(seen)
    for number in range(100):
        ref.tell(number)
    assert ref.ask("question", timeout=WAIT_S) == "question"
    with pytest.raises(ValueError, match="asked for"):
        ref.ask("raise", timeout=WAIT_S)
    assert ref.stop(timeout=WAIT_S)
    assert seen == [("started", "llama_worker-loop"), *range(100), "question", "stopped"]
    assert not ref.is_alive()
    with pytest.raises(pykka.ActorDeadError):
        ref.tell("late")


def test_one_that_dies_takes_no_other_along() -> None:
    seen: list[Any] = []
    dying, other = OnLoop.start([]), OnLoop.start(seen)
    dying.tell("raise")
    eventually(lambda: not dying.is_alive(), "its death")
    assert other.ask("still here", timeout=WAIT_S) == "still here"
    other.stop(timeout=WAIT_S)


def test_no_message_is_lost_or_out_of_order_however_many_threads_tell() -> None:
    seen: list[Any] = []
    ref = OnLoop.start(seen)

    def tell(thread: int) -> None:
        for number in range(2000):
            ref.tell((thread, number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(tell, range(4)))
    ref.stop(timeout=WAIT_S)
    for thread in range(4):
        assert [number for sender, number in seen[1:-1] if sender == thread] == list(range(2000))


class Failing:
    """A channel that fails, and again when it is told so."""

    def __init__(self, end: socket.socket) -> None:
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._end = end

    def on_ready(self, mask: int) -> None:
        self._end.recv(1)
        raise RuntimeError("a mistake")

    def on_tick(self) -> None:
        raise AssertionError("it does not rest")

    def on_error(self, error: Exception) -> None:
        self.errors.put(error)
        raise error


def test_a_channel_that_raises_even_when_it_is_told_so_stops_nobody_else() -> None:
    loop = loop_thread()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Failing(ours)
        loop.watch(ours, channel, writable=False)
        for _ in range(2):
            theirs.send(b"x")
            assert isinstance(channel.errors.get(timeout=WAIT_S), RuntimeError)
        loop.forget(ours, channel)


def test_a_forked_child_has_a_loop_of_its_own() -> None:
    parents = loop_thread()
    parents.start()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if loop_thread() is not parents and isinstance(loop_thread(), LoopThread) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_loop_whose_thread_cannot_be_started_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with no_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
            LoopThread().start()
    assert len(os.listdir("/proc/self/fd")) == len(before)
