"""What a readiness probe says of the server, or else of this machine; and what a canary is."""

import errno
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from llama_worker import Canary, ConfigError, WorkerConfig
from llama_worker.config.settings import Endpoint
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.probes import readiness
from llama_worker.runtime.probes.readiness import (
    look_at_slots,
    owns_port,
    probe_answer,
    probe_readiness,
    unanswered,
)
from llama_worker.server.messages import LookAtSlots, Probed, ProbeOutcome, SlotsSeen
from tests.actors.conftest import WAIT_S

# A server that listens on a port which it prints, until its standard input is closed.
LISTENS_ON_LOOPBACK_V4 = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    sys.stdin.read()
"""
COMPLETIONS = "/v1/chat/completions"
CONFIG = WorkerConfig(name="w", host="127.0.0.1", port=9, server_cmd=("llama-server",))


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), ProbeOutcome.FAILED),
        (TimeoutError("no complete reply within 10 s"), ProbeOutcome.FAILED),
        *(
            (OSError(lack, os.strerror(lack)), ProbeOutcome.NOT_ASKED)
            for lack in (errno.EMFILE, errno.ENFILE)
        ),
        (OSError(errno.ENOMEM, "no memory"), ProbeOutcome.NOT_ASKED),
        (MemoryError(), ProbeOutcome.NOT_ASKED),
        (socket.gaierror(socket.EAI_AGAIN, "no name server"), ProbeOutcome.NOT_ASKED),
        (RuntimeError("can't start new thread"), ProbeOutcome.NOT_ASKED),
        (RuntimeError("can't create new thread at interpreter shutdown"), ProbeOutcome.NOT_ASKED),
        (RuntimeError("a mistake"), ProbeOutcome.FAILED),
    ],
)
def test_a_probe_without_an_answer(error: Exception, outcome: ProbeOutcome) -> None:
    assert unanswered(error) == (outcome, f"GET /v1/models: {type(error).__name__}")


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        ((200, b"{}"), ProbeOutcome.READY, "200"),
        ((404, b""), ProbeOutcome.READY, "404"),  # another server, perhaps
        ((503, b""), ProbeOutcome.READY, "503"),
        (None, ProbeOutcome.FAILED, "TimeoutError"),
    ],
)
def test_upstream_is_asked_for_health_alone(
    monkeypatch: pytest.MonkeyPatch,
    answer: tuple[int, bytes] | None,
    outcome: ProbeOutcome,
    says: str,
) -> None:
    """Also one that wakes from sleep, and answers `/health` alone."""

    def ask(endpoint: Endpoint, method: str, path: str, **given: Any) -> tuple[int, bytes]:
        if path != "/health" or answer is None:
            raise TimeoutError
        return answer

    monkeypatch.setattr(readiness, "ask", ask)
    told: queue.SimpleQueue[Probed] = queue.SimpleQueue()
    probe_answer(Endpoint.of(CONFIG), epoch=3, reply_to=Mock(tell=told.put))
    probed = Probed(epoch=3, outcome=outcome, detail=f"GET /health: {says}")
    assert told.get(timeout=WAIT_S) == probed


@pytest.mark.parametrize("lack", [MemoryError(), OSError(errno.EMFILE, "no descriptor")])
def test_look_at_slots_is_answered_during_any_shortage(
    lack: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "ask", Mock(side_effect=lack))
    told: queue.SimpleQueue[SlotsSeen] = queue.SimpleQueue()
    order = LookAtSlots(epoch=3, timeout_s=WAIT_S)
    look_at_slots(Endpoint.of(CONFIG), order, Mock(tell=told.put))
    not_asked = SlotsSeen(epoch=3, look=None, by_shortage=True)
    assert told.get(timeout=WAIT_S) == not_asked
    monkeypatch.setattr(readiness, "run_probe", lambda _, refuse: refuse(RuntimeError()))
    look_at_slots(Endpoint.of(CONFIG), order, Mock(tell=told.put))
    assert told.get(timeout=WAIT_S) == not_asked


def test_an_aborted_look_at_slots_ends_at_once(listener: int) -> None:
    told: queue.SimpleQueue[SlotsSeen] = queue.SimpleQueue()
    order = LookAtSlots(epoch=3, timeout_s=2 * WAIT_S)
    endpoint = Endpoint.of(replace(CONFIG, port=listener))
    look_at_slots(endpoint, order, Mock(tell=told.put)).abort()
    assert told.get(timeout=WAIT_S) == SlotsSeen(epoch=3, look=None)


@pytest.mark.parametrize(
    ("fails", "failure", "outcome"),
    [
        ("/v1/models", ConnectionRefusedError("nobody listens"), ProbeOutcome.FAILED),
        ("/props", OSError(errno.EMFILE, "no descriptor"), ProbeOutcome.NOT_ASKED),
        ("/props", TimeoutError("no complete reply within 10 s"), ProbeOutcome.READY),
        ("/props", ConnectionResetError("it has ended"), ProbeOutcome.FAILED),
        (COMPLETIONS, OSError(errno.EMFILE, "no descriptor"), ProbeOutcome.NOT_ASKED),
        (COMPLETIONS, ConnectionResetError("it has ended"), ProbeOutcome.FAILED),
    ],
)
def test_questions_that_could_not_be_asked_are_repeated(
    monkeypatch: pytest.MonkeyPatch, fails: str, failure: Exception, outcome: ProbeOutcome
) -> None:
    """Once only is it asked for its traits: what is unknown then is unknown for its whole life."""

    def ask(endpoint: Endpoint, method: str, path: str, **given: Any) -> tuple[int, bytes]:
        if path != fails:
            return 200, b"{}"
        raise failure

    monkeypatch.setattr(readiness, "ask", ask)
    monkeypatch.setattr(readiness, "owns_port", Mock(return_value=True))
    monkeypatch.setattr(readiness, "run_probe", lambda probe, _: probe())
    seen = probed(replace(CONFIG, canary=Canary(prompt="x", check=lambda text: True)), 1)
    assert seen.outcome is outcome
    assert ("the canary request failed: " in seen.detail) is (fails == COMPLETIONS)


@pytest.mark.parametrize(
    ("status", "is_ours", "outcome"),
    [
        (401, True, ProbeOutcome.UNAUTHORIZED),
        (403, True, ProbeOutcome.UNAUTHORIZED),
        (401, False, ProbeOutcome.OTHER_PROCESS),
    ],
)
def test_only_our_own_server_refuses_our_key(
    monkeypatch: pytest.MonkeyPatch, status: int, is_ours: bool, outcome: ProbeOutcome
) -> None:
    """It is asked for nothing else: a canary would fail, too."""

    def ask(endpoint: Endpoint, method: str, path: str, **given: Any) -> tuple[int, bytes]:
        assert path == "/v1/models"
        return status, b"{}"

    monkeypatch.setattr(readiness, "ask", ask)
    monkeypatch.setattr(readiness, "owns_port", Mock(return_value=is_ours))
    monkeypatch.setattr(readiness, "run_probe", lambda probe, _: probe())
    config = replace(CONFIG, canary=Canary(prompt="x", check=bool))
    assert probed(config, 1).outcome is outcome


def test_answer_that_fits_no_memory_is_reasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "ask", Mock(return_value=(200, b"{}")))
    monkeypatch.setattr(readiness, "json_of", Mock(side_effect=[MemoryError(), {}]))
    monkeypatch.setattr(readiness, "run_probe", lambda probe, _: probe())
    outcomes = [probed(CONFIG, 1, first=False).outcome for _ in range(2)]
    assert outcomes == [ProbeOutcome.NOT_ASKED, ProbeOutcome.READY]


@pytest.mark.parametrize(
    "ask",
    [
        partial(probe_answer, Endpoint.of(CONFIG)),
        partial(probe_readiness, CONFIG, root_pid=1, first=True),
    ],
)
def test_probe_that_gets_no_thread_is_not_asked(
    ask: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    lack = RuntimeError("can't start new thread")
    monkeypatch.setattr(readiness, "run_probe", lambda _, refuse: refuse(lack))
    told: list[Probed] = []
    ask(epoch=3, reply_to=Mock(tell=told.append))
    assert [each.outcome for each in told] == [ProbeOutcome.NOT_ASKED]


# ---------------------------------------------------------------- port


@pytest.fixture
def ipv6() -> None:
    """Skips the test on a machine without IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on which this process listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_port_is_owned_if_the_tree_listens(listener: int) -> None:
    assert owns_port(os.getpid(), listener, "127.0.0.1")
    assert not owns_port(os.getpid(), 1, "127.0.0.1")
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        assert not owns_port(sleeper.pid, listener, "127.0.0.1")
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize(
    ("listens_on", "owned", "not_owned"),
    [
        ("127.0.0.1", ("127.0.0.1", "::ffff:127.0.0.1"), ("127.0.0.2", "::1")),
        ("0.0.0.0", ("127.0.0.1", "127.0.0.2"), ("::1",)),
        ("::1", ("::1", "0:0:0:0:0:0:0:1"), ("127.0.0.1", "fe80::1%lo")),
        ("::", ("::1", "127.0.0.1", "fe80::1%lo"), ()),
        ("::ffff:127.0.0.1", ("127.0.0.1",), ("::1",)),
    ],
)
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.usefixtures("ipv6")
def test_port_is_owned_only_on_the_asked_address(
    listens_on: str,
    owned: tuple[str, ...],
    not_owned: tuple[str, ...],
    hidden: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger may listen on the same port of another address."""
    if hidden:
        denied = Mock(side_effect=psutil.AccessDenied)
        monkeypatch.setattr(psutil.Process, "net_connections", denied)
    with socket.socket(socket.AF_INET6 if ":" in listens_on else socket.AF_INET) as listening:
        listening.bind((listens_on, 0))
        listening.listen()
        port = listening.getsockname()[1]
        for ip in (*owned, *not_owned):
            assert owns_port(os.getpid(), port, ip) is (ip in owned), ip


@pytest.mark.usefixtures("ipv6")
def test_an_answer_from_another_address_is_a_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` is two addresses: the server has one, the stranger the one that is asked first.

    This process is the stranger and answers; the server is a child of it.
    """
    server = subprocess.Popen(
        [sys.executable, "-S", "-c", LISTENS_ON_LOOPBACK_V4],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server, socket.socket(socket.AF_INET6) as stranger:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        stranger.bind(("::1", port))
        stranger.listen()
        for _ in range(2):
            threading.Thread(target=answer_once, args=(stranger,), daemon=True).start()
        both = [(socket.AF_INET6, ("::1", port, 0, 0)), (socket.AF_INET, ("127.0.0.1", port))]
        found = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in both]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
        told = probed(replace(CONFIG, host="localhost", port=port), server.pid)
        server.stdin.close()
    assert told.outcome is ProbeOutcome.OTHER_PROCESS
    assert told.detail == f"another process answers on [::1]:{port}"


def test_server_ending_after_its_answer_is_no_stranger() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()

    def answer_and_end() -> None:
        answer_once(server)
        server.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        config = replace(CONFIG, port=server.getsockname()[1])
        threading.Thread(target=answer_and_end, daemon=True).start()
        assert probed(config, ended.pid).outcome is ProbeOutcome.FAILED


@pytest.mark.parametrize(("uid", "is_ours"), [(os.geteuid(), True), (os.geteuid() + 1, False)])
def test_hidden_process_owns_what_its_user_listens_on(
    listener: int, uid: int, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is with a server that has file capabilities: its descriptors cannot be read."""

    def denied(process: psutil.Process, kind: str) -> Any:
        raise psutil.AccessDenied(process.pid)

    uids = SimpleNamespace(real=os.getuid(), effective=uid, saved=uid)
    monkeypatch.setattr(psutil.Process, "net_connections", denied)
    monkeypatch.setattr(psutil.Process, "uids", lambda process: uids)
    assert owns_port(os.getpid(), listener, "127.0.0.1") is is_ours
    assert not owns_port(os.getpid(), 1, "127.0.0.1")


@pytest.mark.parametrize("shown", ["", "self"], ids=["no /proc", "ProcSubset=pid"])
def test_without_proc_a_launched_server_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    (tmp_path / shown).mkdir(exist_ok=True)
    monkeypatch.setattr(readiness, "PROC", str(tmp_path))
    assert owns_port(os.getpid(), 1, "127.0.0.1")


def probed(config: WorkerConfig, root_pid: int, *, first: bool = True) -> Probed:
    """What a probe of the launch 3 says."""
    told: queue.SimpleQueue[Probed] = queue.SimpleQueue()
    host = Mock(tell=told.put)
    probe_readiness(config, epoch=3, root_pid=root_pid, first=first, reply_to=host)
    return told.get(timeout=WAIT_S)


def answer_once(listening: socket.socket) -> None:
    """Answer one request as a llama-server that is ready."""
    connection, _ = listening.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"data": []}')


# ---------------------------------------------------------------- canary


async def async_check(text: str) -> bool:
    return True


class AsyncCheck:
    async def __call__(self, text: str) -> bool:
        return bool(text)


@pytest.mark.parametrize(
    ("given", "error", "what"),
    [
        ({"prompt": "", "check": bool}, ConfigError, "prompt"),
        ({"prompt": 7, "check": bool}, TypeError, "prompt"),
        ({"prompt": "x", "check": "yes"}, TypeError, "canary check"),
        ({"prompt": "x", "check": async_check}, TypeError, "must not be async"),
        ({"prompt": "x", "check": AsyncCheck()}, TypeError, "must not be async"),
        ({"prompt": "x", "check": bool, "max_tokens": 0}, ConfigError, "max_tokens"),
    ],
)
def test_an_invalid_canary_is_refused(given: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        Canary(**given)


def test_a_canary_check_may_wait_for_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: WorkerFuture[bool] = WorkerFuture()
    told: queue.SimpleQueue[Probed] = queue.SimpleQueue()
    has_begun = threading.Event()

    def check(text: str) -> bool:
        has_begun.set()
        return judged.get(timeout=WAIT_S)

    monkeypatch.setattr(readiness, "ask", Mock(return_value=(200, b"{}")))
    monkeypatch.setattr(readiness, "owns_port", Mock(return_value=True))
    config = replace(CONFIG, canary=Canary(prompt="x", check=check))
    probe_readiness(config, epoch=3, root_pid=1, first=True, reply_to=Mock(tell=told.put))
    assert has_begun.wait(WAIT_S)
    judged.answer(True)
    probed = told.get(timeout=WAIT_S)
    assert probed.outcome is ProbeOutcome.READY, probed.detail
