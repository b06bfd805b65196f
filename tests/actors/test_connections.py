"""Connections that can be aborted: in every phase, plain and TLS, and what bounds each phase."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama_worker.runtime.chat_exchange import ChatExchange, Endpoint
from llama_worker.runtime.connections import Abort
from llama_worker.stream.events import StreamEvent, TextDelta
from llama_worker.stream.failure import StreamFailure
from llama_worker.types import RequestFailReason
from tests.actors.conftest import WAIT_S, eventually

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
RECORD = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
Serve = Callable[[socket.socket], None]
both = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


class Server:
    """Takes one connection and serves it on a thread; `closed` is set when the client has closed it."""

    def __init__(self, serve: Serve, certificate: Path | None) -> None:
        self.closed = threading.Event()
        self._serve = serve
        self._connection: socket.socket | None = None
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if certificate is not None else None
        if self._tls is not None and certificate is not None:
            self._tls.load_cert_chain(certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://localhost:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="server")
        self._thread.start()

    def close(self) -> None:
        """End the connection and the thread."""
        for end in filter(None, (self._listener, self._connection)):
            with contextlib.suppress(OSError):  # it has ended
                end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        try:
            connection, _ = self._listener.accept()
            with contextlib.ExitStack() as cleanup:
                cleanup.enter_context(connection)
                if self._tls is not None:
                    connection = cleanup.enter_context(self._tls.wrap_socket(connection, server_side=True))
                self._connection = connection
                self._serve(connection)
                while connection.recv(1 << 16):
                    pass
        except OSError:
            pass  # a reset is a close
        self.closed.set()


class Client:
    """One exchange, on a thread; `failure` once that has ended."""

    def __init__(self, url: str, *, prompt: str = "", ca_file: Path | None = None, connect_timeout_s: float) -> None:
        self.abort = Abort()
        self.opened = threading.Event()
        self.events: list[StreamEvent] = []
        self.chat: ChatExchange | None = None
        self._endpoint = Endpoint(base_url=url, connect_timeout_s=connect_timeout_s)
        self._ca_file = ca_file
        self._prompt = prompt
        self._thread = threading.Thread(target=self._run, name="client")
        self._thread.start()

    def ended(self) -> StreamFailure | None:
        """Waits for the end of the exchange, and says how it failed."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the exchange goes on"
        assert self.chat is not None
        return self.chat.failure

    def _run(self) -> None:
        ca_file = str(self._ca_file) if self._ca_file is not None else None
        self.chat = ChatExchange(self.abort, self._endpoint, ca_file=ca_file)
        if self.chat.open({"prompt": self._prompt}):
            self.opened.set()
            while (events := self.chat.read()) is not None:
                self.events += events


MakeServer = Callable[[Serve, Path | None], Server]
MakeClient = Callable[..., Client]


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    with contextlib.ExitStack() as cleanup:

        def make(serve: Serve, certificate: Path | None) -> Server:
            server = Server(serve, certificate)
            cleanup.callback(server.close)
            return server

        yield make


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    with contextlib.ExitStack() as cleanup:

        def make(url: str, **options: object) -> Client:
            client = Client(url, **{"connect_timeout_s": WAIT_S, **options})  # type: ignore[arg-type]
            cleanup.callback(client.abort.abort)
            return client

        yield make


@both
def test_an_abort_before_the_headers_ends_the_exchange(
    make_server: MakeServer, make_client: MakeClient, certificate: Path, tls: bool
) -> None:
    asked = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(1)
        asked.set()

    server = make_server(serve, certificate if tls else None)
    client = make_client(server.url, ca_file=certificate)
    assert asked.wait(WAIT_S)
    client.abort.abort()
    failure = client.ended()
    assert failure is not None
    assert failure.reason is RequestFailReason.STREAM_DISCONNECTED
    assert server.closed.wait(WAIT_S)


@both
def test_an_abort_in_mid_stream_ends_the_exchange(
    make_server: MakeServer, make_client: MakeClient, certificate: Path, tls: bool
) -> None:
    server = make_server(lambda connection: connection.sendall(HEAD + RECORD), certificate if tls else None)
    client = make_client(server.url, ca_file=certificate)
    assert client.opened.wait(WAIT_S)
    eventually(lambda: client.events == [TextDelta("x")], "the record")
    client.abort.abort()
    client.ended()
    assert server.closed.wait(WAIT_S)


def test_a_tls_server_that_is_not_trusted_is_connect_failed(
    make_server: MakeServer, make_client: MakeClient, certificate: Path
) -> None:
    server = make_server(lambda connection: None, certificate)
    failure = make_client(server.url).ended()
    assert failure is not None
    assert failure.reason is RequestFailReason.CONNECT_FAILED


@both
def test_a_long_request_may_lie_unread_for_longer_than_connecting_may_take(
    make_server: MakeServer, make_client: MakeClient, certificate: Path, tls: bool
) -> None:
    timeout_s = 1.0

    def serve(connection: socket.socket) -> None:
        threading.Event().wait(2 * timeout_s)  # busy with something else
        left = 32 << 20
        while left > 0 and (got := len(connection.recv(1 << 20))):
            left -= got
        connection.sendall(HEAD + b"data: [DONE]\n\n")
        connection.shutdown(socket.SHUT_WR)

    server = make_server(serve, certificate if tls else None)
    client = make_client(server.url, ca_file=certificate, prompt="x" * (32 << 20), connect_timeout_s=timeout_s)
    assert client.ended() is None
    assert client.opened.is_set()


@contextlib.contextmanager
def unanswered() -> Iterator[str]:
    """A port where a connect is neither taken nor refused: its queue is full."""
    with contextlib.ExitStack() as cleanup:
        listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            filler = cleanup.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_connect_that_is_not_answered_is_connect_failed_when_its_time_is_up(make_client: MakeClient) -> None:
    with unanswered() as url:
        failure = make_client(url, connect_timeout_s=0.2).ended()
    assert failure == StreamFailure(reason=RequestFailReason.CONNECT_FAILED, detail="no connection within 0.2 s")


def test_an_abort_ends_a_connect_that_is_not_answered(make_client: MakeClient) -> None:
    with unanswered() as url:
        client = make_client(url, connect_timeout_s=1e9)  # what a config allows; too much for poll
        eventually(lambda: client.abort._socket is not None, "a socket that connects")
        client.abort.abort()
        assert client.ended() is not None
