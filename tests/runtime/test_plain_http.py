"""What a probe asks with: one deadline for all of it, an abort at any time, and every framing a
server may choose.

Both ways, that of a thread that waits and that without one.
"""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable

import pytest

from llama_worker.runtime.chat_exchange import Endpoint
from llama_worker.runtime.connections import Abort, Aborted
from llama_worker.runtime.loop_thread import loop_thread
from llama_worker.runtime.plain_http import exchange
from llama_worker.runtime.question import Question
from llama_worker.runtime.timers import start_timers
from llama_worker.stream.plain_reply import PlainReply
from tests.actors.conftest import HOST, WAIT_S
from tests.runtime.conftest import MakeServer, Serve, sends

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EMPTY_OBJECT = HEAD + b"Content-Length: 2\r\n\r\n{}"


def ask(
    port: int, *, abort: Abort | None = None, within_s: float = WAIT_S, body: bytes = b""
) -> tuple[int, bytes]:
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

    def __init__(self, url: str, within_s: float = WAIT_S) -> None:
        self.ends: queue.SimpleQueue[PlainReply | Exception] = queue.SimpleQueue()
        endpoint = Endpoint(base_url=url, connect_timeout_s=WAIT_S)
        self.question = Question(
            endpoint, "/v1/models", timeout_s=within_s, name="test", on_end=self.ends.put
        )

    def answer(self) -> tuple[int, bytes]:
        """As `ask` has it."""
        end = self.ends.get(timeout=WAIT_S)
        if isinstance(end, Exception):
            raise end
        return end.status, bytes(end.body)


def ask_without_a_thread(port: int, *, within_s: float = WAIT_S) -> tuple[int, bytes]:
    return Asking(f"http://{HOST}:{port}", within_s).answer()


Ask = Callable[..., tuple[int, bytes]]
both_ways = pytest.mark.parametrize("ask", [ask, ask_without_a_thread], ids=["thread", "no thread"])

# ------------------------------------------------------------ replies


def test_the_request_is_whole_and_asks_for_no_chunks(make_server: MakeServer) -> None:
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def serve(connection: socket.socket) -> None:
        data = b""
        while not data.endswith(b"{}"):
            data += connection.recv(1 << 16)
        asked.put(data)
        connection.sendall(EMPTY_OBJECT)

    ask(make_server(serve).port, body=b"{}")
    assert asked.get().split(b"\r\n") == [
        b"GET /v1/models HTTP/1.0",
        b"Connection: close",
        b"Content-Length: 2",
        b"Host: here",
        b"",
        b"{}",
    ]


@both_ways
@pytest.mark.parametrize(
    ("pieces", "close", "told"),
    [
        ([HEAD + b"content-LENGTH: 7\r\n\r\n[1, 2]\n"], False, (200, b"[1, 2]\n")),
        ([HEAD + b"\r\n[1, ", b"2]"], True, (200, b"[1, 2]")),
        (
            [bytes([byte]) for byte in b"HTTP/1.1 503 Loading\r\nContent-Length: 2\r\n\r\n{}"],
            False,
            (503, b"{}"),
        ),
    ],
    ids=["of known length", "up to the connection's end", "in single bytes"],
)
def test_a_reply_is_read(
    ask: Ask, make_server: MakeServer, pieces: list[bytes], close: bool, told: tuple[int, bytes]
) -> None:
    assert ask(make_server(sends(*pieces, close=close, delay_s=0.001)).port) == told


@both_ways
@pytest.mark.parametrize(
    ("error", "reply"),
    [
        pytest.param(ConnectionError, b"", id="nothing"),
        pytest.param(ConnectionError, b"\r\n\r\n", id="empty lines"),
        pytest.param(ConnectionError, HEAD, id="half a head"),
        pytest.param(ConnectionError, HEAD + b"Content-Length: 10\r\n\r\n[1, 2]", id="half a body"),
        pytest.param(ValueError, b"SSH-2.0-OpenSSH_9.6\r\n\r\n", id="another protocol"),
        pytest.param(ValueError, b"SSH 200\r\n\r\n", id="not HTTP"),
        pytest.param(ValueError, b"HTTP/1.1 two hundred\r\n\r\n", id="bad status"),
        pytest.param(ValueError, HEAD + b"Content-Length: few\r\n\r\n", id="bad length"),
        pytest.param(ValueError, HEAD + b"\r\n" + bytes(5 << 20), id="too long"),
    ],
)
def test_a_reply_that_is_cut_short_or_malformed_is_an_error(
    ask: Ask, make_server: MakeServer, error: type[Exception], reply: bytes
) -> None:
    with pytest.raises(error, match=r"."):
        ask(make_server(sends(reply, close=True)).port)


@both_ways
def test_nothing_listens(ask: Ask, free_port: Callable[[], int]) -> None:
    with pytest.raises(ConnectionRefusedError):
        ask(free_port())


# ------------------------------------------------------------ deadlines


def drips(connection: socket.socket) -> None:
    connection.sendall(HEAD)
    for number in itertools.count():
        connection.sendall(b"X-%d: y\r\n" % number)
        threading.Event().wait(0.01)


@both_ways
@pytest.mark.parametrize("serve", [sends(), drips], ids=["never answers", "drips"])
def test_a_server_that_takes_too_long_is_left_when_the_time_is_up(
    ask: Ask, make_server: MakeServer, serve: Serve
) -> None:
    with pytest.raises(TimeoutError):
        ask(make_server(serve).port, within_s=0.3)


def test_a_server_that_reads_nothing_is_left_when_the_time_is_up(make_server: MakeServer) -> None:
    left = threading.Event()

    def serve(connection: socket.socket) -> None:
        left.wait(WAIT_S)

    with pytest.raises(TimeoutError):
        ask(make_server(serve).port, within_s=0.3, body=bytes(64 << 20))
    left.set()


def test_a_reply_that_is_there_when_the_time_is_up_counts() -> None:
    """As after a stop of the host: the timer may be the first to run."""
    with socket.create_server((HOST, 0)) as listener:
        asking = Asking(f"http://{HOST}:{listener.getsockname()[1]}", 100 * WAIT_S)
        with listener.accept()[0] as connection:
            connection.recv(1 << 16)
            with asking.question._lock:  # the loop's thread waits meanwhile
                connection.sendall(EMPTY_OBJECT)
            asking.question._is_late()
            assert asking.answer() == (200, b"{}")


# ------------------------------------------------------------ aborts


def test_an_abort_ends_an_exchange_that_waits(make_server: MakeServer) -> None:
    abort = Abort()

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        abort.abort()

    with pytest.raises(ConnectionError):
        ask(make_server(serve).port, abort=abort, within_s=100 * WAIT_S)


def test_a_question_is_aborted_while_it_waits(make_server: MakeServer) -> None:
    server = make_server(sends())
    asking = Asking(server.url, 100 * WAIT_S)
    assert server.served.wait(WAIT_S)
    asking.question.abort()
    with pytest.raises(Aborted):
        asking.answer()
    assert server.closed.wait(WAIT_S)
    asking.question.abort()
    assert asking.ends.empty()


# ------------------------------------------------------------ names and addresses


def test_a_question_takes_no_thread_but_for_a_name(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_thread().start()
    start_timers()
    servers = [make_server(sends(EMPTY_OBJECT)) for _ in range(2)]
    started: list[str] = []
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    assert Asking(f"http://{HOST}:{servers[0].port}").answer() == (200, b"{}")
    assert started == []
    assert Asking(servers[1].url).answer() == (200, b"{}")
    assert started == ["test-resolve"]


def test_a_question_to_a_name_that_nobody_knows() -> None:
    with pytest.raises(socket.gaierror):
        Asking("http://no-such-host.invalid:1").answer()


def test_a_question_over_ipv6() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener:
        asking = Asking(f"http://[::1]:{listener.getsockname()[1]}")
        with listener.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(EMPTY_OBJECT)
            assert asking.answer() == (200, b"{}")
