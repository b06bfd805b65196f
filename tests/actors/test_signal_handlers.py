"""A signal handler may call the handle whatever its thread is doing, the same call included: it
never deadlocks."""

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from llama_worker import LlamaWorker, WorkerClosed
from llama_worker.testing.scripts import Script
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, fast_timeouts, running

pytestmark = pytest.mark.timeout(120)
Handle = Callable[[Callable[[], object]], None]


@pytest.fixture
def on_signal() -> Iterator[Handle]:
    """Makes the call in the handler of SIGUSR1, from now on."""
    before = signal.getsignal(signal.SIGUSR1)

    def handle(call: Callable[[], object]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: call() and None)

    yield handle
    signal.signal(signal.SIGUSR1, before)


def is_interrupted(call: Callable[[], object], line: int) -> bool:
    """Make the call, with the signal at its line number `line`, in whatever module; False: it has
    fewer lines."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and next(lines) == line:
            signal.raise_signal(signal.SIGUSR1)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return next(lines) > line


def interrupt_everywhere(make_call: Callable[[], Callable[[], object]]) -> int:
    """A call again and again, with the signal at each of its lines in turn; how many lines it
    has."""
    return next(line for line in itertools.count() if not is_interrupted(make_call(), line))


CALLS: dict[str, Callable[[Rig], object]] = {
    "submit": lambda rig: rig.worker.submit("job", "", "x").get(timeout=WAIT_S),
    "get_status": lambda rig: rig.worker.get_status(7).get(timeout=WAIT_S),
    "result": lambda rig: rig.worker.result(7).get(timeout=WAIT_S),
    "get_worker_status": lambda rig: rig.worker.get_worker_status().get(timeout=WAIT_S),
    "stop": lambda rig: rig.worker.stop().get(timeout=WAIT_S),
}


@pytest.mark.parametrize("name", CALLS)
def test_nested_same_call_in_handler_is_also_answered(
    make_worker: MakeWorker, on_signal: Handle, name: str
) -> None:
    rig = make_worker(start=False)
    answers: list[object] = []
    on_signal(lambda: answers.append(CALLS[name](rig)))
    lines = interrupt_everywhere(lambda: partial(CALLS[name], rig))
    assert len(answers) == lines > 10
    assert all(answer == answers[0] for answer in answers)


def test_close_in_handler_over_every_line_of_close(
    make_worker: MakeWorker, on_signal: Handle
) -> None:
    workers: list[LlamaWorker] = []

    def make_close() -> Callable[[], None]:
        workers.append(make_worker(start=False).worker)
        on_signal(workers[-1].close)
        return workers[-1].close

    assert interrupt_everywhere(make_close) > 10
    for worker in workers:
        with pytest.raises(WorkerClosed):
            worker.submit("job", "", "x")


def test_close_in_handler_while_close_awaits_the_server(
    make_worker: MakeWorker, on_signal: Handle
) -> None:
    rig = make_worker(Script(term_delay_s=60), timeouts=fast_timeouts(stop_grace_s=0.5))
    left: list[set[int]] = []

    def close_again() -> None:
        rig.worker.close()
        left.append(running(rig.tree()))

    def send(to: int) -> None:
        rig.journal.wait("signal")  # the server was told to end, and takes its time
        signal.pthread_kill(to, signal.SIGUSR1)

    on_signal(close_again)
    sender = threading.Thread(target=send, args=(threading.get_ident(),))
    sender.start()
    rig.worker.close()
    sender.join(WAIT_S)
    assert left == [set()]
