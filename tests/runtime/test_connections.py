"""Chat exchanges on connections that can be aborted: in every phase, plain and TLS, what bounds
each phase, and what a failure says to a person: no classes, no addresses of objects.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_worker.runtime.chat_exchange import ChatExchange, Endpoint
from llama_worker.runtime.connections import Abort
from llama_worker.stream.events import StreamEvent, TextDelta
from llama_worker.stream.failure import StreamFailure
from llama_worker.types import RequestFailReason
from tests.actors.conftest import HOST, WAIT_S, eventually
from tests.runtime.conftest import MakeServer, Serve, Server, sends

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
RECORD = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'


class Client:
    """One exchange, on a thread."""

    def __init__(
        self,
        url: str,
        *,
        prompt: str = "",
        ca_file: Path | None = None,
        connect_timeout_s: float = WAIT_S,
    ) -> None:
        self.abort = Abort()
        self.opened = False
        self.events: list[StreamEvent] = []
        endpoint = Endpoint(base_url=url, connect_timeout_s=connect_timeout_s)
        self._chat = ChatExchange(
            self.abort, endpoint, ca_file=None if ca_file is None else str(ca_file)
        )
        self._thread = threading.Thread(target=self._run, args=(prompt,), name="client")
        self._thread.start()

    def ended(self) -> StreamFailure | None:
        """Waits for the end of the exchange, and says how it failed."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the exchange goes on"
        return self._chat.failure

    def failed(self) -> tuple[RequestFailReason, str]:
        """As `ended`, of one that has failed."""
        failure = self.ended()
        assert failure is not None
        return failure.reason, failure.detail

    def _run(self, prompt: str) -> None:
        self._chat.post({"prompt": prompt})
        if self._chat.open():
            self.opened = True
            while (events := self._chat.read()) is not None:
                self.events += events


MakeClient = Callable[..., Client]


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    with contextlib.ExitStack() as cleanup:

        def make(url: str, **options: Any) -> Client:
            client = Client(url, **options)
            cleanup.callback(client.abort.abort)
            return client

        yield make


# ------------------------------------------------------------ aborts and bounds


Connect = Callable[..., tuple[Server, Client]]


@pytest.fixture(params=["plain", "tls"])
def connect(
    request: pytest.FixtureRequest,
    make_server: MakeServer,
    make_client: MakeClient,
    certificate: Path,
) -> Connect:
    """A server and the client of it."""

    def make(serve: Serve, **options: object) -> tuple[Server, Client]:
        server = make_server(serve, certificate if request.param == "tls" else None)
        return server, make_client(server.url, ca_file=certificate, **options)

    return make


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        pytest.param(b"", RequestFailReason.STREAM_DISCONNECTED, id="before the headers"),
        pytest.param(HEAD + RECORD, None, id="in mid-stream"),  # whose end is the connection's
    ],
)
def test_an_abort_ends_the_exchange(
    connect: Connect, reply: bytes, reason: RequestFailReason | None
) -> None:
    server, client = connect(sends(reply))
    assert server.served.wait(WAIT_S)
    eventually(lambda: client.events == [TextDelta("x")] * bool(reply), "the record")
    client.abort.abort()
    failure = client.ended()
    assert (failure and failure.reason) is reason
    assert server.closed.wait(WAIT_S)


def test_a_long_request_may_lie_unread_for_longer_than_connecting_may_take(
    connect: Connect,
) -> None:
    timeout_s = 1.0

    def serve(connection: socket.socket) -> None:
        threading.Event().wait(2 * timeout_s)  # busy with something else
        left = 32 << 20
        while left > 0 and (got := len(connection.recv(1 << 20))):
            left -= got
        connection.sendall(HEAD + b"data: [DONE]\n\n")
        connection.shutdown(socket.SHUT_WR)

    _, client = connect(serve, prompt="x" * (32 << 20), connect_timeout_s=timeout_s)
    assert client.ended() is None
    assert client.opened


@contextlib.contextmanager
def unanswered() -> Iterator[str]:
    """A port where a connect is neither taken nor refused: its queue is full."""
    with contextlib.ExitStack() as cleanup:
        listener = cleanup.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(3):
            filler = cleanup.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://{HOST}:{listener.getsockname()[1]}"


def test_a_connect_that_is_not_answered_is_connect_failed_when_its_time_is_up(
    make_client: MakeClient,
) -> None:
    with unanswered() as url:
        failed = make_client(url, connect_timeout_s=0.2).failed()
    assert failed == (RequestFailReason.CONNECT_FAILED, "no connection within 0.2 s")


def test_an_abort_ends_a_connect_that_is_not_answered(make_client: MakeClient) -> None:
    with unanswered() as url:
        client = make_client(url, connect_timeout_s=1e9)  # what a config allows; too much for poll
        eventually(lambda: client.abort._socket is not None, "a socket that connects")
        client.abort.abort()
        client.failed()


def test_one_that_was_aborted_before_connects_to_nothing() -> None:
    abort = Abort()
    abort.abort()
    exchange = ChatExchange(abort, Endpoint(base_url=f"http://{HOST}:1", connect_timeout_s=WAIT_S))
    exchange.post({})
    assert not exchange.open()
    reason, detail = RequestFailReason.CONNECT_FAILED, "aborted before the connection was made"
    assert exchange.failure == StreamFailure(reason=reason, detail=detail)


# ------------------------------------------------------------ failures


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_connection_that_is_refused(make_client: MakeClient, scheme: str) -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind((HOST, 0))
        failed = make_client(f"{scheme}://{HOST}:{bound.getsockname()[1]}").failed()
    assert failed == (
        RequestFailReason.CONNECT_FAILED,
        "cannot connect: [Errno 111] Connection refused",
    )


def test_a_host_that_nobody_knows(make_client: MakeClient) -> None:
    reason, detail = make_client("http://no-such-host.invalid:1").failed()
    assert reason is RequestFailReason.CONNECT_FAILED
    assert detail.startswith("cannot resolve the host: ")


def test_without_trust_there_is_no_connection(
    make_server: MakeServer, make_client: MakeClient, certificate: Path
) -> None:
    plain = make_server(sends(b"HTTP/1.1 400 Bad Request\r\n\r\n", close=True)).url.replace(
        "http", "https"
    )
    for url, ca_file, says in (
        (make_server(sends(), certificate).url, None, "CERTIFICATE_VERIFY_FAILED"),
        (make_server(sends(), certificate).url, "/no/such/file", "/no/such/file"),
        (plain, None, "wrong version number"),
    ):
        reason, detail = make_client(url, ca_file=ca_file).failed()
        assert (reason, says in detail) == (RequestFailReason.CONNECT_FAILED, True), detail
