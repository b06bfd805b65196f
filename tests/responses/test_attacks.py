"""Nobody who is silent, slow, malformed or greedy disturbs a client; memory and descriptors stay
bounded."""

import contextlib
import errno
import math
import os
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pykka
import pytest

from llama_worker.responses import proxy as proxy_module
from llama_worker.responses.actor import ResponsesProxyActor
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.http import listener
from llama_worker.responses.http.client import Client as ProxyClient
from llama_worker.responses.http.listener import SocketListener
from llama_worker.responses.http.request_reader import HttpRequest
from llama_worker.responses.proxy import ResponsesProxy
from llama_worker.testing.scripts import Headers, Repeat, Role, Text
from tests.actors.conftest import eventually
from tests.conftest import LLAMA_WORKER, no_descriptors
from tests.responses.conftest import HOST, WAIT_S, Client, MakeClient, held_bytes, request_bytes

MIB = 1024 * 1024
CROWD = 1000
_ROUNDS = 8
HALVES = {
    "silent": b"",
    "half a head": b"POST /v1/responses HTTP/1.1\r\nHost: local",
    "half a body": (
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    ),
    "half a chunk": (
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"ff\r\n{"
    ),
}


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Of the test and the proxy, which share a process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def crowd(client: Client, said: Sequence[bytes], count: int) -> Iterator[list[socket.socket]]:
    """So many connections that have each said one of these, and nothing more."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(client.dial(said[number % len(said)])) for number in range(count)
        ]


def first_event_s(client: Client) -> float:
    """From a new client's connect to its first event: the least of many, since other work only ever
    adds."""
    taken = []
    for _ in range(25):
        began = time.perf_counter()
        with client.begun(until=b"response.created"):
            taken.append(time.perf_counter() - began)
    return min(taken)


def request_threads_count() -> int:
    return [thread.name for thread in threading.enumerate()].count(listener.REQUEST_THREAD)


@pytest.mark.usefixtures("many_descriptors")
def test_a_silent_crowd_delays_nobody(fake: Client) -> None:
    """Alone and beside the crowd in turns: what else the machine does falls on both."""
    alone, crowded = math.inf, math.inf
    for _ in range(_ROUNDS):
        alone = min(alone, first_event_s(fake))
        with crowd(fake, list(HALVES.values()), CROWD):
            crowded = min(crowded, first_event_s(fake))
            eventually(lambda: request_threads_count() == 0, "no thread for who is silent")
        if crowded < 1.5 * alone:
            return
    pytest.fail(f"{crowded} s beside the crowd, {alone} s alone")


FLOOD = [Headers(), Role(), Repeat(None, [Text("x" * 4096)])]


@pytest.mark.usefixtures("many_descriptors")
def test_clients_that_never_read_leave_the_others_alone(make_client: MakeClient) -> None:
    fake, proxys = make_client(slots=200), psutil.Process()
    before = proxys.memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(fake.ask(*FLOOD, stream=True))
        fake.journal.wait("headers", timeout=WAIT_S, count=60)
        assert fake.create().status == 200
        assert proxys.memory_info().rss - before < 120 * MIB


def test_a_client_that_takes_nothing_is_cut_off(make_fake: MakeClient) -> None:
    fake = make_fake(client_timeout_s=0.05)
    with fake.ask(*FLOOD, stream=True):
        fake.journal.wait("client_closed", timeout=WAIT_S)


def test_threads_are_given_back(fake: Client) -> None:
    request = request_bytes("/v1/responses", {"input": "Hi"}, port=fake.proxy.port)
    with crowd(fake, [request], 40) as connections:
        for connection in connections:
            assert b"200 OK" in connection.recv(65536)
        eventually(lambda: request_threads_count() == 0, "threads that have ended")


Connect = Callable[[], socket.socket]


@contextlib.contextmanager
def listening(
    serve: Callable[[HttpRequest, ProxyClient], None] = lambda request, client: None, **config: Any
) -> Iterator[tuple[SocketListener, Connect]]:
    """A listener without a thread, which goes on by `_turn()`, and what connects to it."""
    proxy_config = ResponsesProxyConfig(upstream="http://127.0.0.1:1", port=0, **config)
    listener = SocketListener(proxy_config, serve)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.serve)
        stack.callback(listener.stop)
        yield (
            listener,
            lambda: stack.enter_context(socket.create_connection((HOST, listener.port))),
        )


def test_client_still_sending_may_read_its_refusal_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(listener, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with listening(max_body_bytes=9) as (refusing, connect):
        client = connect()
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n")
        refusing._handle_events()
        while refusing._clients:
            now[0] += 1.5
            client.sendall(b"x")
            refusing._handle_events()
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert 128 < now[0] < 132, "it is cut off at last"


def test_what_is_refused_is_not_kept() -> None:
    piece = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
    with held_bytes() as held, listening(max_body_bytes=MIB) as (refusing, connect):
        client = connect()
        client.sendall(HALVES["half a chunk"].removesuffix(b"ff\r\n{"))
        for _ in range(31):
            client.sendall(piece)
            refusing._handle_events()
        client.sendall(b"ffff\r\n")
        while refusing._pending_bytes:
            refusing._handle_events()
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
        assert held() < MIB // 2


def test_a_refused_head_is_not_kept() -> None:
    head = b"GET / HTTP/1.1\r\nX: %b" % (b"a" * 70_000)
    with held_bytes() as held, listening() as (refusing, connect):
        for _ in range(16):
            client = connect()
            client.sendall(head)
            while not select.select([client], [], [], 0)[0]:
                refusing._handle_events()
            assert client.recv(65536).startswith(b"HTTP/1.1 431 ")
        assert held() < MIB // 2


def test_too_much_pending_costs_its_sender(make_fake: MakeClient) -> None:
    fake = make_fake(max_body_bytes=MIB * 32)
    head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (
        MIB * 32
    )
    with crowd(fake, [head], 8) as connections:
        half = b"x" * (MIB * 31)
        for connection in connections:
            with contextlib.suppress(OSError):  # a refused one is closed in the middle
                connection.sendall(half)
        assert fake.create().status == 200


# ---------------------------------------------------------------- descriptors


def test_where_descriptors_run_out_the_silent_make_room(hello_server: tuple[str, Path]) -> None:
    """Of a process of its own, with 64 of them."""
    command = [*LLAMA_WORKER, "responses-proxy", "--upstream", hello_server[0], "--port=0"]
    with (
        psutil.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        port = int(process.stdout.readline().split()[0].split(":")[2].split("/")[0])
        process.rlimit(psutil.RLIMIT_NOFILE, (64, 64))
        for _ in range(300):
            stack.enter_context(socket.create_connection((HOST, port), timeout=WAIT_S))
        with socket.create_connection((HOST, port), timeout=WAIT_S) as client:
            client.sendall(request_bytes("/v1/responses", {"input": "Hi"}, port=port))
            assert b"200 OK" in client.recv(65536)
        used = sum(process.cpu_times()[:2])
        stack.enter_context(socket.create_connection((HOST, port), timeout=WAIT_S)).settimeout(1.0)
        threading.Event().wait(1.0)
        # of one second: it waits, it does not spin
        assert sum(process.cpu_times()[:2]) - used < 0.2


def test_a_reused_descriptor_is_a_new_client() -> None:
    """Within one turn: what had happened to that descriptor before is not the new client's."""
    has_left: list[bool] = []

    def serve(request: HttpRequest, client: ProxyClient) -> None:
        client.set_disconnect_callback(lambda: has_left.append(True))
        client.reply(200, {})

    with listening(serve) as (listener, connect):
        listener._max_clients = 1
        old = connect()
        listener._handle_events()
        connect()
        new = connect()
        new.sendall(request_bytes("/health", port=listener.port))
        old.sendall(b"G")
        listener._handle_events()
        listener._handle_events()
        assert b"200 OK" in new.recv(65536)
    assert not has_left


def test_a_connection_that_cannot_be_watched_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `max_user_watches` is reached."""

    def serve(request: HttpRequest, client: ProxyClient) -> None:
        client.reply(200, {})

    class FullEpoll:
        def __getattr__(self, name: str) -> object:
            return getattr(epoll, name)

        def register(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with listening(serve) as (listener, connect):
        epoll = listener._epoll
        with monkeypatch.context() as full:
            full.setattr(listener, "_epoll", FullEpoll())
            closed = connect()
            listener._handle_events()
        assert closed.recv(1) == b""
        served = connect()
        served.sendall(request_bytes("/health", port=listener.port))
        for _ in range(2):
            listener._handle_events()
        assert b"200 OK" in served.recv(65536)


def test_a_forked_child_keeps_no_socket(fake: Client) -> None:
    begin, end = os.pipe()
    with fake.dial(b"GET / HTTP/1.1\r\n") as waiting:
        waiting.settimeout(WAIT_S)
        fake.send("GET", "/health")  # the connection before it has been taken by then
        child = os.fork()
        if child == 0:
            os.close(end)
            os.read(begin, 1)
            os._exit(0)
        try:
            port = fake.proxy.port
            fake.proxy.close()
            assert waiting.recv(1) == b""
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, port), timeout=WAIT_S)
        finally:
            os.close(end)
            os.close(begin)
            assert os.waitpid(child, 0)[1] == 0


def test_a_copy_of_a_connection_in_a_forked_child_changes_nothing() -> None:
    """As of a fork between the accept and the client's entry."""
    with listening(lambda request, client: None) as (listener, connect):
        client = connect()
        client.sendall(request_bytes("/health", port=listener.port))
        listener._handle_events()
        (accepted,) = listener._clients.values()
        copy = accepted.socket.dup()
        with copy:
            listener._handle_events()  # its reply broke off
            assert client.recv(1) == b""
            assert listener._epoll.poll(0) == []


def test_start_and_close_beside_a_close_that_ends_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their orders come to an actor that reads no more."""
    is_ending, go_on = threading.Event(), threading.Event()
    unregister = pykka.ActorRegistry.unregister

    def unregister_later(actor: pykka.ActorRef[Any]) -> None:
        if actor.actor_class is ResponsesProxyActor:
            is_ending.set()
            go_on.wait(WAIT_S)
        unregister(actor)

    monkeypatch.setattr(pykka.ActorRegistry, "unregister", unregister_later)
    monkeypatch.setattr(proxy_module, "_STOP_S", 10 * WAIT_S)
    closed = ResponsesProxy(ResponsesProxyConfig(upstream=f"http://{HOST}:1"))
    closing = [threading.Thread(target=closed.close, daemon=True) for _ in range(2)]
    closing[0].start()
    assert is_ending.wait(WAIT_S)
    port = closed.start()
    closing[1].start()
    go_on.set()
    for thread in closing:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        port.get(timeout=WAIT_S)


def test_a_close_on_the_listeners_thread_does_not_wait_for_itself(
    fake: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a finalizer of the host's that the collector runs there."""
    monkeypatch.setattr(proxy_module, "_STOP_S", 10 * WAIT_S)
    returned = threading.Event()

    def accept(self: SocketListener) -> None:
        fake.proxy.close()
        returned.set()

    monkeypatch.setattr(SocketListener, "_accept", accept)
    with contextlib.suppress(ConnectionResetError), fake.dial():  # as it closes its port
        pass
    assert returned.wait(WAIT_S)
    fake.proxy.close()


def test_forked_child_waits_for_no_parent_thread() -> None:
    config = ResponsesProxyConfig(upstream=f"http://{HOST}:1")
    with contextlib.closing(ResponsesProxy(config)) as proxy:
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # for what takes no time
            is_answered = proxy.start().done()
            proxy.close()
            os._exit(0 if is_answered else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_without_descriptors_it_waits_without_spinning(fake: Client) -> None:
    """Taken by the host program: there is nobody to take one from."""
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(socket.socket()) for _ in range(3)]
        with no_descriptors():
            for one in waiting:
                one.connect((HOST, fake.proxy.port))
            began, used = time.monotonic(), time.process_time()
            threading.Event().wait(1.0)
            assert time.process_time() - used < 0.3 * (time.monotonic() - began)
        waiting[-1].settimeout(WAIT_S)
        waiting[-1].sendall(request_bytes("/health", port=fake.proxy.port))
        assert b"200 OK" in waiting[-1].recv(65536)


def test_without_a_descriptor_to_wait_with_none_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    before = os.listdir("/proc/self/fd")
    config = ResponsesProxyConfig(upstream="http://127.0.0.1:1", port=0)
    monkeypatch.setattr("select.epoll", none_left)
    with pytest.raises(OSError, match="Too many") as refused:
        SocketListener(config, lambda request, client: None)
    assert os.listdir("/proc/self/fd") == before, refused  # which holds what was made


def test_a_request_without_a_thread_is_refused(
    fake: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(listener, "run_on_thread", none_left)
        refused = fake.send("GET", "/health")
        assert (refused.status, refused.headers["retry-after"]) == (503, "2")
    assert fake.send("GET", "/health").status == 200


def test_client_without_memory_for_it_ends_nobody_else(
    fake: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as lacking:
        lacking.setattr(listener, "_READ_BYTES", 1 << 62)
        # A close with something unread is a reset, or an end and then a reset.
        request = fake.dial(b"GET /health HTTP/1.1\r\n\r\n")
        with request as client, contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert fake.send("GET", "/health").status == 200
