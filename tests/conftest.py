"""What every test gets: free ports, and proof that it left nothing behind."""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import hypothesis
import pykka
import pytest
import trustme

from llama_worker.runtime.probes.liveness_probes import tree_pids
from tests.ports import held_ports
from tests.server.pace import HANG_GUARD_S
from tests.server.thin_model import write_thin_model
from tools.found import find_model, find_server

# One per host process, for as long as it lives.
PROCESS_WIDE_THREADS = {f"llama_worker-{kind}" for kind in ("timers", "callbacks", "log", "spare")}
# the command `llama-worker` of the package under test
_MAIN = "import sys; from llama_worker.cli import main; sys.exit(main())"
LLAMA_WORKER = (sys.executable, "-c", _MAIN)
_SETTLE_S = 60.0  # only a leak takes so long

# an example that takes long shows nothing there
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")

_LONGEST_FIRST = (
    *(
        "ray",
        "test_node_clients.py",
        "test_examples.py",
        "test_simulation.py",
        "test_supervision.py",
        "test_docs.py",
    ),
    *(
        "test_run_in_a_pipe.py",
        "server",
        "test_tutorial.py",
        "test_host_death.py",
        "responses",
        "tools",
        "cli",
    ),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make test-responses` runs more than `make test`."""
    told = "with all lines of the AI SDK, not the oldest and newest"
    parser.addoption("--every-line", action="store_true", help=told)


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and so all programs
    that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first: on several processes the rest fits in beside it."""

    def rank(item: pytest.Item) -> int:
        return next(
            (i for i, part in enumerate(_LONGEST_FIRST) if part in item.path.parts),
            len(_LONGEST_FIRST),
        )

    items.sort(key=rank)
    for item in items:
        if item.get_closest_marker("server"):
            item.add_marker(pytest.mark.timeout(HANG_GUARD_S))


class Leftovers:
    """What came since the object was made."""

    def __init__(self) -> None:
        self._before = _alive()

    def now(self) -> list[str]:
        """What is there and was not before; for a person."""
        return [text for found, text in _alive().items() if found not in self._before]

    def wait_none(self, timeout_s: float = _SETTLE_S) -> list[str]:
        """What is still there when the time is up; [] as soon as nothing is."""
        deadline = time.monotonic() + timeout_s
        while found := self.now():
            gc.collect()
            if time.monotonic() > deadline:
                return found
            time.sleep(0.01)
        return []


def _alive() -> dict[object, str]:
    """Threads, child processes, descriptors and actors, each with its name for a person."""
    threads = [
        thread for thread in threading.enumerate() if thread.name not in PROCESS_WIDE_THREADS
    ]
    found: dict[object, str] = {thread: f"thread {thread.name}" for thread in threads}
    found |= {pid: f"process {pid}" for pid in tree_pids(os.getpid())}
    found |= {actor: f"actor {actor}" for actor in pykka.ActorRegistry.get_all()}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith(("socket:", "pipe:", "anon_inode:[pidfd]")):
                found[number, target] = f"descriptor {number}: {target}"
    return found


def shell_program(path: Path, script: str) -> str:
    """Writes a program for the shell; its path."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


Running = contextlib.AbstractContextManager[tuple[subprocess.Popen[str], IO[str]]]


@contextlib.contextmanager
def running(*command: str, **how: Any) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A program under way, and its output; killed if it is still there at the end. `how`: see
    Popen."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **how) as program:
        assert program.stdout is not None
        try:
            yield program, program.stdout
        finally:
            program.kill()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key, its certificate for localhost, and the authority's that vouches for it."""
    authority, path = trustme.CA(), tmp_path_factory.mktemp("tls") / "localhost.pem"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(path))
    authority.cert_pem.write_to_path(str(path), append=True)
    return path


_PTRACE_SEIZE, _PTRACE_INTERRUPT, _PTRACE_DETACH, _WALL = 0x4206, 0x4207, 17, 0x40000000


def trace(tid: int, *, stop: bool = False) -> None:
    """Into the hands of a debugger, this thread: nobody else hears of its end before `wait_traced`
    has seen it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (_PTRACE_SEIZE, _PTRACE_INTERRUPT) if stop else (_PTRACE_SEIZE,):
        if libc.ptrace(request, tid, None, None) < 0:
            pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
    if stop:
        os.waitpid(tid, _WALL)


def release(tid: int) -> None:
    """From the hands of the debugger: it was stopped, and goes on. To be called by the thread that
    stopped it."""
    assert ctypes.CDLL(None).ptrace(_PTRACE_DETACH, tid, None, None) == 0


def wait_traced(tid: int) -> None:
    """Until it has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.WIFSTOPPED(os.waitpid(tid, _WALL)[1]):
            pass


def run_python(
    program: str, *words: str, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, to its end."""
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


# For the text of a test's program: another thread of it forks a child, which stays.
FORK_A_CHILD = """
import os, signal, threading
def fork_a_child(children, forked):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        signal.pause()
    children.append(child)
    forked.set()
def forking(children):
    forked = threading.Event()
    thread = threading.Thread(target=fork_a_child, args=[children, forked])
    thread.start()
    forked.wait(0.5)  # in vain if forks are put off
    return thread
"""


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Every descriptor that this process may have is taken. Nothing may be opened meanwhile, by the
    test neither."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    filler: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                filler.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in filler:
            os.close(fd)


class Speechless(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class OwnText(str):
    """Of a host's library: it cannot be copied or formatted, which no actor may try."""

    __slots__ = ("lock",)

    def __init__(self, text: str) -> None:
        self.lock = threading.Lock()

    def __format__(self, spec: str) -> str:
        raise RuntimeError("not on this thread")


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = Leftovers()
    yield
    assert before.wait_none() == [], "left behind"


@pytest.fixture
def leftovers() -> Leftovers:
    """For tests that look in the middle."""
    return Leftovers()


@pytest.fixture
def free_port() -> Iterator[Callable[[], int]]:
    """A factory of ports that no other test on this machine uses while this one runs."""
    with held_ports() as take:
        yield take


@pytest.fixture(scope="session")
def llama_server() -> str:
    """The real llama-server; missing, it is an error and no reason to skip."""
    return find_server()


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The small real model."""
    return find_model()


@pytest.fixture(scope="session")
def thin_model(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One layer of it: for tests in which it does not matter what the model says, or a grammar
    chooses that."""
    thin = tmp_path_factory.mktemp("thin") / Path(smollm2).name
    write_thin_model(Path(smollm2), thin)
    return str(thin)
