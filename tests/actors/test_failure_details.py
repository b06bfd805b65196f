"""What a connection's failure says is for a person: no classes, no addresses of objects."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from llama_worker.runtime.chat_exchange import ChatExchange, Endpoint
from llama_worker.runtime.connections import Abort
from llama_worker.types import RequestFailReason

BEFORE = "the connection ended before the response headers: "
CUT_ERROR = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 100\r\n\r\nabc"


def failure_of(base_url: str, *, aborted: bool = False) -> tuple[RequestFailReason, str]:
    abort = Abort()
    if aborted:
        abort.abort()
    exchange = ChatExchange(abort, Endpoint(base_url=base_url, connect_timeout_s=10.0))
    assert not exchange.open({})
    assert exchange.failure is not None
    return exchange.failure.reason, exchange.failure.detail


@contextlib.contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """The port of a server that reads a request, answers once, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)
                connection.shutdown(socket.SHUT_WR)

        server = threading.Thread(target=serve)
        server.start()
        yield listener.getsockname()[1]
        server.join()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_connection_that_is_refused(scheme: str) -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        told = failure_of(f"{scheme}://127.0.0.1:{bound.getsockname()[1]}")
    assert told == (RequestFailReason.CONNECT_FAILED, "cannot connect: [Errno 111] Connection refused")


def test_a_host_that_nobody_knows() -> None:
    reason, detail = failure_of("http://no-such-host.invalid:1")
    assert reason is RequestFailReason.CONNECT_FAILED
    assert detail.startswith("cannot resolve the host: ")


def test_one_that_was_aborted() -> None:
    told = failure_of("http://127.0.0.1:1", aborted=True)
    assert told == (RequestFailReason.CONNECT_FAILED, "aborted before the connection was made")


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        (b"", BEFORE + "the server sent no response"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", BEFORE + r"the reply is not HTTP: it begins with 'SSH-2.0-OpenSSH_9.2\r\n'"),
        (b"x" * 100 + b"\r\n", BEFORE + f"the reply is not HTTP: it begins with '{'x' * 40}'"),
    ],
)
def test_a_reply_that_is_none(reply: bytes, detail: str) -> None:
    with answering(reply) as port:
        assert failure_of(f"http://127.0.0.1:{port}") == (RequestFailReason.STREAM_DISCONNECTED, detail)


def test_an_error_whose_body_is_cut_off_is_told_as_far_as_it_came() -> None:
    with answering(CUT_ERROR) as port:
        assert failure_of(f"http://127.0.0.1:{port}") == (RequestFailReason.HTTP_ERROR, "HTTP 400: abc")


def test_certificates_that_are_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint(base_url=f"https://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=10.0)
        exchange = ChatExchange(Abort(), endpoint, ca_file="/no/such/file")
        assert not exchange.open({})
    assert exchange.failure is not None
    assert exchange.failure.reason is RequestFailReason.CONNECT_FAILED
    assert "/no/such/file" in exchange.failure.detail


def test_a_server_without_tls() -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        reason, detail = failure_of(f"https://127.0.0.1:{port}")
    assert reason is RequestFailReason.CONNECT_FAILED
    assert "wrong version number" in detail
