"""A moment without threads or descriptors: what cannot be done says so, and the server is not
blamed."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from zoneinfo import ZoneInfo

import psutil
import pytest

from llama_worker import LlamaWorker, RestartPolicy, WorkerStartError
from llama_worker.request.messages import StreamEvents
from llama_worker.request.request import Request
from llama_worker.responses.http.client import Client
from llama_worker.responses.http.request_reader import RequestReader
from llama_worker.runtime.http.abortable_socket import AbortableSocket
from llama_worker.stream.events import TextDelta
from llama_worker.testing.scripts import Gate, Text, ToolCall, Turns, plain_reply
from llama_worker.types.worker import StartFailReason, WorkerState
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, eventually, no_threads
from tests.conftest import Leftovers, no_descriptors

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SUSPICIOUS = RestartPolicy(transport_failures_before_restart=1, restart_backoff_s=0.05)


def sockets_to(port: int) -> list[Any]:
    """This process's connections to the server, in any state."""
    return [
        each
        for each in psutil.Process().net_connections("tcp")
        if each.raddr and each.raddr.port == port
    ]


def assert_as_before(rig: Rig) -> None:
    assert rig.run(*plain_reply(Text("fine")))["text"] == "fine"
    status = rig.status()
    assert status["state"] is WorkerState.READY
    assert (status["restart_count"], status["slots_used"]) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("-stream", "unknown_error"), ("-tool-", "tool_execution_error"), ("-bios", "prompt_error")],
)
def test_without_thread_request_fails_but_server_stays(
    make_worker: MakeWorker, kind: str, reason: str
) -> None:
    rig = make_worker(
        normal_tools=[TOOL], tool_runner=Mock(), bios_provider=lambda _: "bios", restart=SUSPICIOUS
    )
    turns = Turns([plain_reply(ToolCall("look"), reason="tool_calls"), plain_reply(Text("done"))])
    with no_threads(kind) as refused:
        result = rig.run(turns)
    assert refused.is_set()
    assert result["fail_reason"] == reason
    assert "can't start new thread" in result["fail_detail"]
    assert_as_before(rig)


def test_a_worker_that_gets_no_thread_raises(make_worker: MakeWorker) -> None:
    config = make_worker(start=False).config
    before = Leftovers()
    with no_threads("WorkerActor"), pytest.raises(RuntimeError, match="new thread"):
        LlamaWorker(config)
    assert before.wait_none() == []


@pytest.mark.parametrize("actor", ["Process", "Transport", "ToolLoop", "Watchdog", "Request"])
def test_a_launch_that_gets_no_threads_fails(make_worker: MakeWorker, actor: str) -> None:
    rig = make_worker(start=False)
    before = Leftovers()
    with no_threads(f"{actor}Actor"), pytest.raises(WorkerStartError, match="new thread"):
        rig.worker.start().get(timeout=WAIT_S)
    assert before.wait_none() == []
    rig.start()
    assert_as_before(rig)


def test_without_descriptors_request_fails_but_server_stays_stoppable(
    make_worker: MakeWorker,
) -> None:
    rig = make_worker(restart=SUSPICIOUS, slots=2)
    # The look at /slots that follows READY would give its descriptor back, to one of the requests.
    eventually(lambda: rig.journal.facts("request", path="/slots"), "the look at /slots")
    eventually(lambda: not sockets_to(rig.config.port), "its connection's end")
    with no_descriptors():
        told = [rig.ended(request) for request in (rig.submit(), rig.submit())]
    for result in told:
        assert result["fail_reason"] == "unknown_error"
        assert "Too many open files" in result["fail_detail"]
    assert_as_before(rig)
    with no_descriptors():
        rig.stop()
    rig.wait_gone(0.0)


def test_without_name_server_request_fails_but_server_stays(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_worker(restart=SUSPICIOUS)
    with monkeypatch.context() as patched:
        unknown = Mock(side_effect=socket.gaierror(socket.EAI_AGAIN, "no name server"))
        patched.setattr(socket, "getaddrinfo", unknown)
        result = rig.run()
    assert result["fail_reason"] == "unknown_error"
    assert "no name server" in result["fail_detail"]
    assert_as_before(rig)


def test_a_zone_is_read_once(make_worker: MakeWorker) -> None:
    """Every prompt has the time."""
    rig = make_worker(timezone_name="Europe/Vienna", restart=SUSPICIOUS)
    ZoneInfo.clear_cache()  # as by a host that uses many of them
    eventually(lambda: rig.journal.facts("request", path="/slots"), "the look at /slots")
    eventually(lambda: not sockets_to(rig.config.port), "its connection's end")
    with no_descriptors():
        assert rig.run()["fail_reason"] == "unknown_error"
    assert_as_before(rig)


@pytest.mark.parametrize("lack", ["can't start new thread", "Too many open files"])
def test_start_lacking_something_names_cause_and_is_repeatable(
    make_worker: MakeWorker, lack: str
) -> None:
    rig = make_worker(start=False)
    crowded: Any = no_threads("-server") if "thread" in lack else no_descriptors()
    with crowded, pytest.raises(WorkerStartError, match=lack) as failure:
        rig.worker.start().get(timeout=WAIT_S)
    assert failure.value.reason is StartFailReason.SPAWN_FAILED
    assert rig.status()["state"] is WorkerState.FAILED
    rig.start()
    assert_as_before(rig)


def test_host_ignoring_sigchld_hears_of_every_end(make_worker: MakeWorker) -> None:
    """The disposition is inherited by what the host starts: its children are nobody's to wait
    for."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(WorkerStartError, match="No such file"):
            make_worker(server_cmd=("/nowhere/llama-server",))
        rig = make_worker()
        os.kill(rig.status()["pid"], signal.SIGKILL)
        rig.wait_restarted()
        (event,) = [e for e in rig.debug()["recent_events"] if e["event"] == "exited"]
        assert event["returncode"] == -signal.SIGKILL
        rig.stop()
        rig.wait_gone(0.0)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_request_without_memory_ends_alone_keeping_its_output(
    make_worker: MakeWorker, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_worker(slots=2, restart=SUSPICIOUS)
    neighbour = rig.submit(*plain_reply(Text("one"), Gate(gate), Text(" two")))
    rig.wait_text(neighbour, "one")
    step = Request.step

    def lacking(request: Request, message: Any, now: float) -> Any:
        if isinstance(message, StreamEvents) and TextDelta("b") in message.events:
            raise MemoryError("none is left")
        return step(request, message, now)

    monkeypatch.setattr(Request, "step", lacking)
    request_id = rig.submit(*plain_reply(Text("a"), Gate(gate), Text("b")))
    rig.wait_text(request_id, "a")
    gate.touch()
    result = rig.ended(request_id)
    assert (result["fail_reason"], result["text"]) == ("unknown_error", "a")
    assert result["fail_detail"] == "MemoryError: none is left"
    assert rig.ended(neighbour)["text"] == "one two"
    assert_as_before(rig)


@pytest.fixture
def broken_pipes() -> Iterator[list[int]]:
    """The SIGPIPEs that came; a host that has that signal as the system does is killed by one."""
    came: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, frame: came.append(number))
    yield came
    signal.signal(signal.SIGPIPE, before)


def test_a_server_that_ends_kills_no_host(make_worker: MakeWorker, broken_pipes: list[int]) -> None:
    rig = make_worker()
    os.kill(rig.status()["pid"], signal.SIGKILL)
    rig.wait_restarted()
    rig.run()
    rig.stop()
    rig.wait_gone(0.0)
    assert broken_pipes == []


def _to_a_server(connection: socket.socket, data: bytes) -> None:
    with AbortableSocket(fileno=connection.detach()) as ours:
        ours.sendall(data)


def _to_a_client(connection: socket.socket, data: bytes) -> None:
    reader = RequestReader(max_body_bytes=0, allowed_origin=Mock())
    Client(connection, reader, WAIT_S).send_raw(data)


@pytest.mark.parametrize("send", [_to_a_server, _to_a_client])
def test_a_closed_peer_kills_no_host(
    send: Callable[[socket.socket, bytes], None], broken_pipes: list[int]
) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(BrokenPipeError):
        send(ours, b"data")
    assert broken_pipes == []
