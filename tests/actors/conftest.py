"""Workers on scripted servers. `make_worker(script, **config)` gives a `Rig`: a worker, its
server's journal and the few calls that most tests need."""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
import shlex
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
import pytest

from llama_worker import LlamaWorker, RestartPolicy, TimeoutProfile, WorkerConfig
from llama_worker.runtime.host import threads
from llama_worker.testing.scripts import (
    JournalReader,
    Script,
    Step,
    scripted_server_cmd,
    steps_json,
)
from llama_worker.types.request import RequestResult, RequestStatus
from llama_worker.types.worker import WorkerDebugInfo, WorkerState, WorkerStatus
from tests.conftest import shell_program

HOST = "127.0.0.1"
WAIT_S = 120.0  # for what takes milliseconds on a quiet machine
T = TypeVar("T")
_OURS = re.compile(r"llama_worker-|\w+Actor-\d")  # the latter as Pykka names them at first


def fast_timeouts(**changes: Any) -> TimeoutProfile:
    """For tests: short waits where nothing is being waited for, long ones elsewhere."""
    return TimeoutProfile(
        **{"stop_grace_s": 3.0, "startup_timeout_s": 30.0, "connect_timeout_s": 5.0, **changes}
    )


def fast_restart(**changes: Any) -> RestartPolicy:
    """Restarts at once."""
    return RestartPolicy(**{"restart_backoff_s": 0.05, "backoff_max_s": 0.2, **changes})


def eventually(check: Callable[[], T | None], what: str, timeout_s: float = WAIT_S) -> T:
    """The first value of `check` that is true, polled; AssertionError with the last one when the
    time is up."""
    end_at = time.monotonic() + timeout_s
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < end_at, f"not in {timeout_s} s: {what}; last: {value!r}"
        time.sleep(0.01)  # what is checked tells nobody when it changes


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """In an event loop of its own, within a generous time."""
    return asyncio.run(asyncio.wait_for(main, WAIT_S))


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test as one that pytest runs; it finds the fixtures' names through `wraps`."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        run_async(test(**fixtures))

    return run


@contextmanager
def no_threads(kind: str = "") -> Iterator[threading.Event]:
    """No thread of ours with that word in its name can be started; the event is set once one was
    asked for."""
    refused = threading.Event()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if _OURS.match(thread.name) and kind in thread.name:
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", refuse)
        crowded.setattr(threads, "_spare", [])  # nor is one kept that has nothing left to do
        crowded.setattr(threads, "_MAX_SPARE", 0)
        yield refused


def server_program(
    folder: Path, script: Script, journal: Path | None = None, *, asked: str = ""
) -> str:
    """The path of a scripted llama-server that takes the words of a real one's command; `asked`:
    lines of the shell that come first."""
    words = scripted_server_cmd(script, host="HOST", port=0, slots=0, journal=journal)
    kept = shlex.join([*words[:4], *words[words.index("--script") :]])
    return shell_program(folder / "llama-server", f'{asked}exec {kept} "$@"')


@dataclass(frozen=True, slots=True)
class Rig:
    """One worker and what its servers wrote down."""

    worker: LlamaWorker
    config: WorkerConfig
    journal: JournalReader

    # -- requests --

    def submit(
        self, *steps: Step, prompt: str = "Hello?", job_name: str = "job", **params: Any
    ) -> int:
        """Admit a request whose reply is `steps` (none: what the server's script says); its id."""
        if steps:
            params["scripted_reply"] = steps_json(*steps)
        told = self.worker.submit(job_name, "Be terse.", prompt, params=params).get(timeout=WAIT_S)
        assert told["ok"] is True, told
        return told["request_id"]

    def ended(self, request_id: int, timeout_s: float = WAIT_S) -> RequestResult:
        """The result, waited for and taken."""
        told = self.worker.result(request_id).get(timeout=timeout_s)
        assert told["ok"] is True, told
        return told

    def run(self, *steps: Step, **params: Any) -> RequestResult:
        return self.ended(self.submit(*steps, **params))

    def request(self, request_id: int) -> RequestStatus:
        told = self.worker.get_status(request_id).get(timeout=WAIT_S)
        assert told["ok"] is True, told
        return told

    def wait_text(self, request_id: int, wanted: str) -> None:
        """Until the output holds it."""

        def is_there() -> bool:
            told = self.worker.read_output(request_id).get(timeout=WAIT_S)
            assert told["ok"] is True, told
            return wanted in told["text"]

        eventually(is_there, f"{wanted!r} in the output")

    # -- the worker --

    def start(self) -> WorkerStatus:
        return self.worker.start().get(timeout=WAIT_S)

    def stop(self) -> None:
        self.worker.stop().get(timeout=WAIT_S)

    def status(self) -> WorkerStatus:
        return self.worker.get_worker_status().get(timeout=WAIT_S)

    def debug(self) -> WorkerDebugInfo:
        return self.worker.get_debug_info().get(timeout=WAIT_S)

    def wait_state(self, state: WorkerState, timeout_s: float = WAIT_S) -> WorkerStatus:
        eventually(lambda: self.status()["state"] is state, f"state {state}", timeout_s)
        return self.status()

    def wait_restarted(self, count: int = 1, timeout_s: float = WAIT_S) -> WorkerStatus:
        """Until it is READY after so many restarts."""

        def restarted() -> WorkerStatus | None:
            status = self.status()
            return (
                status
                if status["restart_count"] >= count and status["state"] is WorkerState.READY
                else None
            )

        return eventually(restarted, f"READY after {count} restarts", timeout_s)

    # -- processes --

    def tree(self) -> Tree:
        """Every process that any launch is known to have had."""
        return tree(self.journal)

    def wait_gone(self, timeout_s: float = WAIT_S) -> None:
        """Until no process of any launch is left, not even as a zombie."""
        eventually(lambda: not living(self.tree()), f"end of {self.tree()}", timeout_s)


# pids, with the Unix instant at which each was there: a pid may be given away again
Tree = dict[int, float]


def tree(journal: JournalReader) -> Tree:
    """Guards, servers, and their scripted children."""
    launched, children = journal.facts("launched"), journal.facts("child")
    return {fact["pid"]: fact["at"] for fact in (*launched, *children)} | {
        f["ppid"]: f["at"] for f in launched
    }


def living(seen: Tree, *, zombies: bool = True) -> set[int]:
    """Those that are still there."""
    there = set()
    for pid, at in seen.items():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() < at + 1.0 and (
                zombies or process.status() != psutil.STATUS_ZOMBIE
            ):
                there.add(pid)
    return there


def running(seen: Tree) -> set[int]:
    """Those that still run. An orphan's zombie is left to this machine's init, which may take its
    time."""
    return living(seen, zombies=False)


class MakeWorker(Protocol):
    """`make_worker`'s type."""

    def __call__(self, script: Script = ..., *, start: bool = True, **config: Any) -> Rig: ...


@pytest.fixture
def make_worker(free_port: Callable[[], int], tmp_path: Path) -> Iterator[MakeWorker]:
    """A factory of workers on scripted servers; READY unless `start=False`; closed at the end of
    the test.

    `config` overrides any field of the WorkerConfig; `timeouts` and `restart` are short by default.
    """
    numbers = itertools.count(1)

    def make(script: Script = Script(), *, start: bool = True, **config: Any) -> Rig:  # noqa: B008 (frozen)
        name = f"w{next(numbers)}"
        journal = JournalReader(tmp_path / f"{name}.journal")
        port, slots = config.pop("port", None) or free_port(), config.get("slots", 1)
        command = config.pop("server_cmd", None) or scripted_server_cmd(
            script, host=HOST, port=port, slots=slots, journal=journal.path
        )
        usual = {"timeouts": fast_timeouts(), "restart": fast_restart()}
        config = {"name": name, **usual, **config}
        made = WorkerConfig(host=config.pop("host", HOST), port=port, server_cmd=command, **config)
        rig = Rig(cleanup.enter_context(closing(LlamaWorker(made))), made, journal)
        if start:
            rig.start()
        return rig

    with ExitStack() as cleanup:
        yield make


@pytest.fixture
def rig(make_worker: MakeWorker) -> Rig:
    """A worker that is READY."""
    return make_worker()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """For a step `Gate(gate)`: closed until `gate.touch()`."""
    return tmp_path / "gate"
