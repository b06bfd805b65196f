"""What a probe asks with: one deadline for all of it, an abort at any time, and every framing a server may choose.

Both ways, that of a thread that waits and that without one.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from llama_worker.runtime.chat_exchange import Endpoint
from llama_worker.runtime.connections import Abort, Aborted
from llama_worker.runtime.loop_thread import loop_thread
from llama_worker.runtime.plain_http import exchange
from llama_worker.runtime.question import Question
from llama_worker.runtime.timers import start_timers
from llama_worker.stream.plain_reply import PlainReply
from tests.actors.conftest import HOST, WAIT_S

Serve = Callable[[socket.socket], None]
MakeServer = Callable[[Serve], int]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.fixture
def make_server(free_port: Callable[[], int]) -> Iterator[MakeServer]:
    """A factory of servers that serve one connection and keep it until the client has closed it; the port."""
    with contextlib.ExitStack() as cleanup:

        def make(serve: Serve) -> int:
            listener = cleanup.enter_context(socket.create_server((HOST, free_port())))

            def run() -> None:
                with contextlib.suppress(OSError), listener.accept()[0] as connection:  # a reset is a close
                    serve(connection)
                    while connection.recv(1 << 16):
                        pass

            thread = threading.Thread(target=run, name="server")
            thread.start()
            cleanup.callback(thread.join)
            cleanup.callback(listener.shutdown, socket.SHUT_RDWR)  # ends an accept
            return int(listener.getsockname()[1])

        yield make


def ask(port: int, *, abort: Abort | None = None, within_s: float = WAIT_S, body: bytes = b"") -> tuple[int, bytes]:
    """One exchange."""
    status, told = exchange(
        abort or Abort(),
        (HOST, port),
        "GET",
        "/v1/models",
        headers={"Host": "here"},
        body=body,
        connect_timeout_s=WAIT_S,
        deadline=time.monotonic() + within_s,
    )
    return status, bytes(told)


class Asking:
    """A Question, and what it ends with."""

    def __init__(self, url: str, within_s: float) -> None:
        self.ends: queue.SimpleQueue[PlainReply | Exception] = queue.SimpleQueue()
        endpoint = Endpoint(base_url=url, connect_timeout_s=WAIT_S)
        self.question = Question(endpoint, "/v1/models", timeout_s=within_s, name="test", on_end=self.ends.put)

    def answer(self) -> tuple[int, bytes]:
        """As `ask` has it."""
        end = self.ends.get(timeout=WAIT_S)
        if isinstance(end, Exception):
            raise end
        return end.status, bytes(end.body)


def ask_without_a_thread(port: int, *, within_s: float = WAIT_S) -> tuple[int, bytes]:
    """The same as a Question."""
    return Asking(f"http://{HOST}:{port}", within_s).answer()


class Ask(Protocol):
    """Of the two."""

    def __call__(self, port: int, *, within_s: float = WAIT_S) -> tuple[int, bytes]:
        """The reply."""


both_ways = pytest.mark.parametrize("ask", [ask, ask_without_a_thread], ids=["thread", "no thread"])


def sends(*pieces: bytes, close: bool = False, delay_s: float = 0.0) -> Serve:
    """A server that reads a request's head, sends the pieces and, perhaps, ends the connection."""

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        for piece in pieces:
            connection.sendall(piece)
            threading.Event().wait(delay_s)
        if close:
            connection.shutdown(socket.SHUT_WR)

    return serve


def test_the_request_is_whole_and_asks_for_no_chunks(make_server: MakeServer) -> None:
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def serve(connection: socket.socket) -> None:
        data = b""
        while not data.endswith(b"{}"):
            data += connection.recv(1 << 16)
        asked.put(data)
        connection.sendall(HEAD + b"Content-Length: 0\r\n\r\n")

    ask(make_server(serve), body=b"{}")
    head, _, body = asked.get().partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"GET /v1/models HTTP/1.0",
        b"Connection: close",
        b"Content-Length: 2",
        b"Host: here",
    ]
    assert body == b"{}"


@both_ways
def test_a_reply_of_known_length_is_complete_though_the_connection_stays_open(
    ask: Ask, make_server: MakeServer
) -> None:
    reply = HEAD + b"content-LENGTH: 7\r\n\r\n[1, 2]\n"
    assert ask(make_server(sends(reply))) == (200, b"[1, 2]\n")


@both_ways
def test_a_reply_without_a_length_ends_with_the_connection(ask: Ask, make_server: MakeServer) -> None:
    assert ask(make_server(sends(HEAD + b"\r\n[1, ", b"2]", close=True))) == (200, b"[1, 2]")


@both_ways
def test_a_reply_in_single_bytes_is_read(ask: Ask, make_server: MakeServer) -> None:
    reply = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"
    pieces = [bytes([byte]) for byte in reply]
    assert ask(make_server(sends(*pieces, delay_s=0.001))) == (503, b"{}")


@both_ways
@pytest.mark.parametrize(
    "reply",
    [b"", b"\r\n\r\n", HEAD, HEAD + b"Content-Length: 10\r\n\r\n[1, 2]"],
    ids=["nothing", "empty lines", "half a head", "half a body"],
)
def test_a_reply_that_is_cut_short_is_an_error(ask: Ask, make_server: MakeServer, reply: bytes) -> None:
    with pytest.raises(ConnectionError):
        ask(make_server(sends(reply, close=True)))


@both_ways
@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"SSH 200\r\n\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        HEAD + b"Content-Length: few\r\n\r\n",
        HEAD + b"\r\n" + bytes(5 << 20),
    ],
    ids=["another protocol", "no HTTP", "bad status", "bad length", "too long"],
)
def test_what_is_no_reply_is_a_value_error(ask: Ask, make_server: MakeServer, reply: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        ask(make_server(sends(reply, close=True)))


@both_ways
def test_a_server_that_never_answers_is_left_when_the_time_is_up(ask: Ask, make_server: MakeServer) -> None:
    with pytest.raises(TimeoutError):
        ask(make_server(sends()), within_s=0.2)


@both_ways
def test_a_server_that_drips_is_left_when_the_time_is_up(ask: Ask, make_server: MakeServer) -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        for number in itertools.count():
            connection.sendall(b"X-%d: y\r\n" % number)
            threading.Event().wait(0.01)

    with pytest.raises(TimeoutError):
        ask(make_server(serve), within_s=0.3)


def test_a_server_that_reads_nothing_is_left_when_the_time_is_up(make_server: MakeServer) -> None:
    left = threading.Event()

    def serve(connection: socket.socket) -> None:
        left.wait(WAIT_S)

    with pytest.raises(TimeoutError):
        ask(make_server(serve), within_s=0.3, body=bytes(64 << 20))
    left.set()


@both_ways
def test_nothing_listens(ask: Ask, free_port: Callable[[], int]) -> None:
    with pytest.raises(ConnectionRefusedError):
        ask(free_port())


def test_an_abort_ends_an_exchange_that_waits(make_server: MakeServer) -> None:
    asked = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(1)
        asked.set()

    port, abort = make_server(serve), Abort()
    failed: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            ask(port, abort=abort, within_s=100 * WAIT_S)
        except OSError as error:
            failed.put(error)

    thread = threading.Thread(target=run, name="client")
    thread.start()
    assert asked.wait(WAIT_S)
    abort.abort()
    assert isinstance(failed.get(timeout=WAIT_S), ConnectionError)
    thread.join()


def test_an_exchange_that_was_aborted_before_it_began_connects_to_nothing(make_server: MakeServer) -> None:
    port, abort = make_server(sends()), Abort()
    abort.abort()
    with pytest.raises(Aborted):
        ask(port, abort=abort)
    assert abort._socket is None


def test_a_question_is_aborted_while_it_waits(make_server: MakeServer) -> None:
    asked, left = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        asked.set()
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        left.set()

    asking = Asking(f"http://{HOST}:{make_server(serve)}", 100 * WAIT_S)
    assert asked.wait(WAIT_S)
    asking.question.abort()
    with pytest.raises(Aborted):
        asking.answer()
    assert left.wait(WAIT_S)
    asking.question.abort()
    assert asking.ends.empty()


def test_a_question_takes_no_thread_but_for_a_name(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop_thread().start()
    start_timers()
    started: list[str] = []
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    reply = sends(HEAD + b"Content-Length: 2\r\n\r\n{}")
    ports = make_server(reply), make_server(reply)
    started.clear()
    assert Asking(f"http://{HOST}:{ports[0]}", WAIT_S).answer() == (200, b"{}")
    assert started == []
    assert Asking(f"http://localhost:{ports[1]}", WAIT_S).answer() == (200, b"{}")
    assert started == ["test-resolve"]


def test_a_question_to_a_name_that_is_none() -> None:
    with pytest.raises(socket.gaierror):
        Asking("http://no-such-host.invalid:1", WAIT_S).answer()


def test_a_question_over_ipv6() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener:
        asking = Asking(f"http://[::1]:{listener.getsockname()[1]}", WAIT_S)
        with listener.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
            assert asking.answer() == (200, b"{}")


def test_a_reply_that_is_there_when_the_time_is_up_counts() -> None:
    """As after a stop of the host: the timer may be the first to run."""
    with socket.create_server((HOST, 0)) as listener:
        asking = Asking(f"http://{HOST}:{listener.getsockname()[1]}", 100 * WAIT_S)
        with listener.accept()[0] as connection:
            connection.recv(1 << 16)
            with asking.question._lock:  # the loop's thread waits meanwhile
                connection.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
            asking.question._is_late()
            assert asking.answer() == (200, b"{}")
