"""Requests that can be aborted: in every phase, plain and TLS, what bounds each phase, every
framing a server may choose, and what a failure says to a person: no classes, no addresses of
objects.
"""

import contextlib
import errno
import itertools
import os
import queue
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
import trustme

from llama_worker.clock import PausingClock
from llama_worker.config.settings import Endpoint
from llama_worker.errors import is_shortage
from llama_worker.responses.generation import ResponseRun
from llama_worker.runtime.host import threads
from llama_worker.runtime.host.threads import TimerThread
from llama_worker.runtime.http import abortable_socket, session
from llama_worker.runtime.http.abortable_socket import Abort, AbortableSocket, Aborted
from llama_worker.runtime.http.leased_exchange import LeasedExchange
from llama_worker.stream.events import StreamEvent, TextDelta
from llama_worker.stream.failure import StreamFailure
from llama_worker.types.request import RequestFailReason
from tests.actors.conftest import HOST, WAIT_S, eventually
from tests.runtime.conftest import MakeServer, Serve, Server, sends
from tests.tables import cases

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
        silence_s: float | None = None,
    ) -> None:
        self.abort = Abort()
        self.waits = 0  # for the headers
        self.opened = False
        self.events: list[StreamEvent] = []
        endpoint = Endpoint(
            base_url=url,
            connect_timeout_s=connect_timeout_s,
            ca_file=None if ca_file is None else str(ca_file),
        )
        exchange: Any = SimpleNamespace(
            abort=self.abort,
            leased=LeasedExchange(self.abort),
            upstream=SimpleNamespace(endpoint=endpoint),
            announce=self._before_reading,
        )
        events: Any = None  # no response is made
        self._chat = ResponseRun(
            exchange,
            events,
            sink=None,
            heartbeat_s=WAIT_S,
            silence_s=silence_s,
            on_end=lambda: None,
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

    def _before_reading(self) -> None:
        self.waits += 1

    def _run(self, prompt: str) -> None:
        if self._chat.open({"prompt": prompt}, {}):
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
        pytest.param(HEAD + RECORD, RequestFailReason.STREAM_DISCONNECTED, id="in mid-stream"),
    ],
)
def test_an_abort_ends_the_exchange(
    connect: Connect, reply: bytes, reason: RequestFailReason
) -> None:
    server, client = connect(sends(reply))
    assert server.served.wait(WAIT_S)
    eventually(lambda: client.events == [TextDelta("x")] * bool(reply), "the record")
    client.abort.abort()
    failed, detail = client.failed()
    assert failed is reason
    assert detail.endswith(": the request was aborted")  # whatever it looked like to the socket
    assert server.closed.wait(WAIT_S)


def test_long_request_may_stay_unread_beyond_connect_timeout(connect: Connect) -> None:
    timeout_s, clients = 1.0, list[Client]()

    def serve(connection: socket.socket) -> None:
        threading.Event().wait(2 * timeout_s)  # busy with something else
        # heartbeats meanwhile
        eventually(lambda: clients != [] and clients[0].waits > 2, "waits after each silence")
        left = 32 << 20
        while left > 0 and (got := len(connection.recv(1 << 20))):
            left -= got
        connection.sendall(HEAD + b"data: [DONE]\n\n")
        connection.shutdown(socket.SHUT_WR)

    _, client = connect(serve, prompt="x" * (32 << 20), connect_timeout_s=timeout_s, silence_s=0.1)
    clients.append(client)
    assert client.ended() is None
    assert client.opened


def test_wait_for_headers_ends_after_each_silence(connect: Connect) -> None:
    """Also after a TLS server's session tickets: they can be read, and hold none of the reply."""
    _, client = connect(sends(), silence_s=0.01)
    eventually(lambda: client.waits >= 10, "heartbeats for the client")


def never_ends(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 503 Busy\r\n\r\n")
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"x" * 1024)


BUSY, FULL = b"HTTP/1.1 503 Busy\r\nContent-Length: ", b'\r\n\r\n{"error":{"message":"full"}}'
CHUNKED = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n1c" + FULL[2:] + b"\r\nno size"


@cases(
    "serve, waits_s, says",
    {
        "whole": (sends(BUSY + b"28" + FULL), WAIT_S, "full"),
        "malformed": (sends(CHUNKED), WAIT_S, "full"),
        "cut off": (sends(BUSY + b"99" + FULL, close=True), WAIT_S, "full"),
        "without an end": (never_ends, WAIT_S, "xxx"),
        "late": (sends(BUSY + b"99\r\n\r\npart"), 0.05, "part"),
        "slow": (sends(BUSY + b"28\r\n\r\n", FULL[4:], delay_s=0.1), WAIT_S, "full"),
    },
)
def test_an_error_status_says_why_in_its_body(
    make_server: MakeServer,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
    serve: Serve,
    waits_s: float,
    says: str,
) -> None:
    monkeypatch.setattr(session, "_ERROR_BODY_S", waits_s)
    failure = make_client(make_server(serve).url, silence_s=0.01).ended()
    assert failure is not None
    assert failure.http_status == 503
    assert failure.detail.startswith(f"HTTP 503: {says}")


def test_a_refusal_of_a_long_request_is_read(connect: Connect) -> None:
    """The server closes the connection before it has read the rest."""

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the reply goes out first
        connection.recv(1024)
        connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 28" + FULL)
        connection.close()

    _, client = connect(serve, prompt="x" * (16 << 20))
    failure = client.ended()
    assert failure is not None
    assert (failure.http_status, failure.detail) == (413, "HTTP 413: full")


def test_a_body_is_waited_for_as_long_as_set(make_server: MakeServer) -> None:
    server = make_server(sends(HEAD, b"x", delay_s=0.1))
    with contextlib.closing(session.send(Abort(), at(server.port), "GET", "/")) as reply:
        connection, _ = reply.take_over()
        for silence_s, received in ((None, b"x"), (0.01, None)):
            connection.set_silence(silence_s)
            assert connection.receive(9) == received


OTHER = "127.0.0.2"  # an address of this machine, too


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


def test_unanswered_connect_times_out_as_connect_failed(make_client: MakeClient) -> None:
    with unanswered() as url:
        failed = make_client(url, connect_timeout_s=0.2).failed()
    assert failed == (RequestFailReason.CONNECT_FAILED, "no connection within 0.2 s")


def resolves(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[Any, ...]) -> None:
    """Every name has these."""
    families = {2: socket.AF_INET, 4: socket.AF_INET6}
    found = [(families[len(each)], socket.SOCK_STREAM, 0, "", each) for each in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)


def test_unanswering_host_is_tried_at_its_next_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with unanswered() as url:
        port = urlsplit(url).port or 0
        resolves(monkeypatch, (HOST, port), (OTHER, port))
        with socket.create_server((OTHER, port)):
            connected = abortable_socket.connect(Abort(), "of.two.addresses", port, 0.2)
            with contextlib.closing(connected):
                assert connected.getpeername() == (OTHER, port)
                # the end of a long prompt waits for no acknowledgement
                assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_question_leaves_time_for_the_next_address(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unanswered() as url:
        server, waits_s = make_server(sends(EMPTY_OBJECT)), list[float]()
        resolves(monkeypatch, (HOST, urlsplit(url).port), (HOST, server.port))

        def no_answer(connection: socket.socket, timeout_s: float) -> bool:
            waits_s.append(timeout_s)
            return False

        monkeypatch.setattr(abortable_socket, "_wait_by_clock", no_answer)
        abort = Abort()
        assert ask(server.port, abort=abort) == (200, b"{}")
        abortable_socket.connect(abort, HOST, server.port, 2 * WAIT_S).close()
    assert 0 < waits_s[0] <= WAIT_S / 2
    assert waits_s[1] == 2 * WAIT_S, "a question that is over"


@cases(
    "code, comes_first",
    {
        "no address of it is this machine's": (errno.EADDRNOTAVAIL, False),
        "it is turned off": (errno.EAFNOSUPPORT, False),
        "it is turned off, and tried first": (errno.EAFNOSUPPORT, True),
    },
)
def test_a_lack_of_ipv6_hides_no_refusal(
    free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch, code: int, comes_first: bool
) -> None:
    port = free_port()
    addresses: list[tuple[Any, ...]] = [(HOST, port), ("::1", port, 0, 0)]
    resolves(monkeypatch, *(reversed(addresses) if comes_first else addresses))
    connect_ex = AbortableSocket.connect_ex

    def connect(made: AbortableSocket, address: Any) -> int:
        return connect_ex(made, address) if made.family == socket.AF_INET else code

    def make(family: int, *rest: int) -> AbortableSocket:
        if family == socket.AF_INET6 and code == errno.EAFNOSUPPORT:
            raise OSError(code, os.strerror(code))
        return AbortableSocket(family, *rest)

    monkeypatch.setattr(AbortableSocket, "connect_ex", connect)
    monkeypatch.setattr(abortable_socket, "AbortableSocket", make)
    with pytest.raises(ConnectionRefusedError):
        abortable_socket.connect(Abort(), "localhost", port, WAIT_S)


def test_shortage_at_the_first_address_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all ports to it are in use: the server may be well."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (at, 1)) for at in (HOST, OTHER)]
    codes = Mock(side_effect=[errno.EADDRNOTAVAIL, errno.ECONNREFUSED])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    monkeypatch.setattr(AbortableSocket, "connect_ex", codes)
    with pytest.raises(OSError, match="Cannot assign") as raised:
        abortable_socket.connect(Abort(), "of.two.addresses", 1, WAIT_S)
    assert is_shortage(raised.value)


def test_abort_ends_a_connect_that_is_not_answered(make_client: MakeClient) -> None:
    with unanswered() as url:
        client = make_client(url, connect_timeout_s=1e9)  # what a config allows; too much for poll
        eventually(lambda: client.abort._socket is not None, "a socket that connects")
        client.abort.abort()
        client.failed()


def test_an_aborted_request_does_not_connect(make_client: MakeClient) -> None:
    abort = Abort()
    abort.abort()
    with pytest.raises(Aborted):
        session.send(abort, at(1), "GET", "/")


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


def test_a_refusal_after_an_answer_is_no_lost_connection(make_server: MakeServer) -> None:
    abort = Abort()
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        ask(make_server(sends(EMPTY_OBJECT)).port, abort=abort)
        with pytest.raises(ConnectionRefusedError) as refused:
            session.send(abort, at(bound.getsockname()[1]), "GET", "/")
    failure = session.send_failure(refused.value, abort, at(1))
    assert failure.reason is RequestFailReason.CONNECT_FAILED


def test_a_host_that_nobody_knows(make_client: MakeClient) -> None:
    """That says nothing about the server: the worker must not count it as a failure of its."""
    reason, detail = make_client("http://no-such-host.invalid:1").failed()
    assert reason is RequestFailReason.UNKNOWN_ERROR
    assert detail.startswith("cannot open a connection: socket.gaierror: ")


def test_an_untrusted_certificate_is_connect_failed(
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


def test_renewed_ca_file_counts_from_the_next_connection(
    make_server: MakeServer, make_client: MakeClient, certificate: Path, tmp_path: Path
) -> None:
    """While a renewal has removed the file or written half of it, what it held before counts."""
    ca_file, renewed = tmp_path / "ca.pem", tmp_path / "renewed.pem"

    def trusts_now() -> bool:
        server = make_server(sends(EMPTY_OBJECT, close=True), certificate)
        client = make_client(server.url, ca_file=ca_file)
        client.ended()
        return client.opened

    trustme.CA().cert_pem.write_to_path(str(ca_file))
    assert not trusts_now()
    renewed.write_bytes(certificate.read_bytes())
    renewed.replace(ca_file)
    assert trusts_now()
    ca_file.unlink()
    assert trusts_now()
    ca_file.write_text("-----BEGIN CERTIFICATE-----")
    assert trusts_now()


def test_the_rest_of_a_tls_record_is_readable(make_server: MakeServer, certificate: Path) -> None:
    """It has left the socket already."""
    server, abort = make_server(sends(b"xy"), certificate), Abort()

    def read() -> None:
        plain = abortable_socket.connect(abort, "localhost", server.port, WAIT_S)
        with abortable_socket.secure(abort, plain, "localhost", str(certificate)) as secured:
            secured.sendall(b"GET")
            assert secured.read_reply(1) == b"x"
            assert abort.wait_readable(0.0)
            assert secured.read_reply(1) == b"y"
            assert not abort.wait_readable(0.0)

    with ThreadPoolExecutor(1) as pool:  # `secure` blocks a signal in its thread
        pool.submit(read).result(WAIT_S)


def test_a_broken_tls_connection_kills_no_host(make_server: MakeServer, certificate: Path) -> None:
    came: list[int] = []

    def serve(connection: socket.socket) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPIPE,))  # it is of this process, too
        connection.sendall(b"x")

    server = make_server(serve, certificate)

    def write() -> None:
        abort = Abort()
        plain = abortable_socket.connect(abort, "localhost", server.port, WAIT_S)
        with abortable_socket.secure(abort, plain, "localhost", str(certificate)) as secured:
            assert secured.recv(1) == b"x"  # it writes no more
            abort.abort()
            for _ in range(2):  # the first may be told of a reset, for which there is no signal
                with pytest.raises(OSError):
                    secured.sendall(b"data")

    before = signal.signal(signal.SIGPIPE, lambda number, _: came.append(number))
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(write).result(WAIT_S)
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert came == []


# ------------------------------------------------------------ questions

JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EMPTY_OBJECT = JSON_HEAD + b"Content-Length: 2\r\n\r\n{}"


def at(port: int, host: str = HOST) -> Endpoint:
    return Endpoint(base_url=f"http://{host}:{port}", connect_timeout_s=WAIT_S)


def ask(
    port: int, *, abort: Abort | None = None, within_s: float = WAIT_S, body: object = None
) -> tuple[int, bytes]:
    """One small question."""
    return session.ask(at(port), "GET", "/v1/models", timeout_s=within_s, body=body, abort=abort)


# ------------------------------------------------------------ replies


def test_the_request_is_sent_completely(make_server: MakeServer) -> None:
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def serve(connection: socket.socket) -> None:
        data = b""
        while not data.endswith(b"{}"):
            data += connection.recv(1 << 16)
        asked.put(data)
        connection.sendall(EMPTY_OBJECT)

    ask(make_server(serve).port, body={})
    line, *headers = asked.get().split(b"\r\n")
    assert line == b"GET /v1/models HTTP/1.1"
    assert {b"Connection: close", b"Content-Length: 2", b"Accept-Encoding: identity"} <= {*headers}
    assert headers[-1] == b"{}"


def test_a_body_goes_out_with_its_head(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is woken once for both."""
    holds_back: list[int] = []
    send = AbortableSocket.send

    def sending(connection: AbortableSocket, data: bytes, flags: int = 0) -> int:
        holds_back.append(flags & socket.MSG_MORE)
        return send(connection, data, flags)

    monkeypatch.setattr(AbortableSocket, "send", sending)
    ask(make_server(sends(EMPTY_OBJECT)).port, body={})
    ask(make_server(sends(EMPTY_OBJECT)).port)
    assert holds_back == [socket.MSG_MORE, 0, 0]


@pytest.mark.parametrize(
    ("pieces", "close", "told"),
    [
        ([JSON_HEAD + b"content-LENGTH: 7\r\n\r\n[1, 2]\n"], False, (200, b"[1, 2]\n")),
        ([JSON_HEAD + b"\r\n[1, ", b"2]"], True, (200, b"[1, 2]")),
        (
            [bytes([byte]) for byte in b"HTTP/1.1 503 Loading\r\nContent-Length: 2\r\n\r\n{}"],
            False,
            (503, b"{}"),
        ),
    ],
    ids=["of known length", "up to the connection's end", "in single bytes"],
)
def test_a_reply_is_read(
    make_server: MakeServer, pieces: list[bytes], close: bool, told: tuple[int, bytes]
) -> None:
    assert ask(make_server(sends(*pieces, close=close, delay_s=0.001)).port) == told


@pytest.mark.parametrize(
    ("error", "reply"),
    [
        pytest.param(ConnectionError, b"", id="nothing"),
        pytest.param(ConnectionError, b"\r\n\r\n", id="empty lines"),
        pytest.param(ConnectionError, JSON_HEAD, id="half a head"),
        pytest.param(
            ConnectionError, JSON_HEAD + b"Content-Length: 10\r\n\r\n[1, 2]", id="half a body"
        ),
        pytest.param(ValueError, b"SSH-2.0-OpenSSH_9.6\r\n\r\n", id="another protocol"),
        pytest.param(ValueError, b"SSH 200\r\n\r\n", id="not HTTP"),
        pytest.param(ValueError, b"HTTP/1.1 two hundred\r\n\r\n", id="bad status"),
        pytest.param(ValueError, JSON_HEAD + b"Content-Length: few\r\n\r\n", id="bad length"),
        pytest.param(ValueError, JSON_HEAD + b"\r\n" + bytes(5 << 20), id="too long"),
    ],
)
def test_cut_short_or_malformed_reply_is_an_error(
    make_server: MakeServer, error: type[Exception], reply: bytes
) -> None:
    with pytest.raises(error, match=r"."):
        ask(make_server(sends(reply, close=True)).port)


def test_a_reply_that_is_not_http_is_shown(make_server: MakeServer) -> None:
    pieces = b"HTTP/1.1 20", b"0 OK\r\nContent-Length: few\r\n\r\n"
    with pytest.raises(ValueError, match=r"the reply is not HTTP .* begins with 'HTTP/1.1 20"):
        ask(make_server(sends(*pieces, delay_s=0.01)).port)


def test_server_resetting_during_connect_is_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = abortable_socket._wait
    with socket.create_server((HOST, 0)) as listener:

        def closes_and_resets(*args: Any) -> bool:
            accepted, _ = listener.accept()
            accepted.shutdown(socket.SHUT_WR)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()
            return wait(*args)

        monkeypatch.setattr(abortable_socket, "_wait", closes_and_resets)
        with pytest.raises(BrokenPipeError):
            session.ask(at(listener.getsockname()[1]), "GET", "/health", timeout_s=WAIT_S)


# ------------------------------------------------------------ deadlines


def drips(connection: socket.socket) -> None:
    connection.sendall(JSON_HEAD)
    for number in itertools.count():
        connection.sendall(b"X-%d: y\r\n" % number)
        threading.Event().wait(0.01)


@pytest.mark.parametrize("serve", [sends(), drips], ids=["never answers", "drips"])
def test_a_server_that_takes_too_long_times_out(make_server: MakeServer, serve: Serve) -> None:
    with pytest.raises(TimeoutError) as late:
        ask(make_server(serve).port, within_s=0.3)
    assert not is_shortage(late.value)


def test_a_server_that_reads_nothing_times_out(make_server: MakeServer) -> None:
    left = threading.Event()

    def serve(connection: socket.socket) -> None:
        left.wait(WAIT_S)

    with pytest.raises(TimeoutError):
        ask(make_server(serve).port, within_s=0.3, body="x" * (64 << 20))
    left.set()


def test_a_limit_ends_only_what_is_done_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timer may be firing as it is cancelled."""
    abort, call_at = Abort(), Mock()
    monkeypatch.setattr(threads, "call_at", call_at)
    with abort.within(WAIT_S):
        first_is_up = call_at.call_args.args[1]
    first_is_up()
    assert abort.error is None
    with abort.within(WAIT_S):
        first_is_up()
        assert abort.error is None
        abort.abort()
        call_at.call_args.args[1]()
        assert isinstance(abort.error, Aborted)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_reply_already_there_when_time_is_up_counts(
    make_server: MakeServer, certificate: Path, tls: bool
) -> None:
    """As after a stop of the host."""
    head, body = EMPTY_OBJECT[:-2], EMPTY_OBJECT[-2:]
    server = make_server(sends(head, body), certificate if tls else None)
    endpoint = Endpoint(base_url=server.url, connect_timeout_s=WAIT_S, ca_file=str(certificate))
    abort = Abort()
    with abort.within(WAIT_S):
        reply = session.send(abort, endpoint, "GET", "/")
        assert server.served.wait(WAIT_S)
        with abort._lock:
            abort._end(TimeoutError())
        with contextlib.closing(reply):
            assert reply.read() == b"{}"
    assert abort.error is None


@pytest.fixture
def stop_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """This program stops, and its clock then stands until the end of the test."""
    stopped_s = [0.0]
    own = TimerThread(lambda: time.monotonic() + stopped_s[0])
    own.clock = clock = PausingClock(pause_s=100 * WAIT_S)  # however slow this machine is
    monkeypatch.setattr(threads, "_timers", own)

    def stop() -> None:
        stopped_s[0] = 3600.0
        with own._changed:
            own._changed.notify()  # it sees what time it is
        eventually(lambda: clock._paused_until is not None, "the clock stands")

    yield stop
    # The timers of whoever else lives in this process are not left standing.
    with own._changed:
        stopped_s[0], clock._paused_until = 0.0, None
        own._changed.notify()


def test_time_lost_by_this_program_is_not_silence(
    make_server: MakeServer, stop_for_an_hour: Callable[[], None]
) -> None:
    """It is stopped as soon as it has asked, and the server, too."""

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        stop_for_an_hour()
        connection.sendall(EMPTY_OBJECT)

    assert ask(make_server(serve).port, within_s=WAIT_S) == (200, b"{}")


def test_time_lost_while_connecting_does_not_count(
    make_server: MakeServer, stop_for_an_hour: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = abortable_socket._wait
    pending: list[Callable[[], object]] = [stop_for_an_hour, lambda: None]

    def not_yet(connection: socket.socket, event: int, timeout_s: float | None) -> bool:
        if pending:
            pending.pop()()
            return False
        return wait(connection, event, timeout_s)

    monkeypatch.setattr(abortable_socket, "_wait", not_yet)
    server = make_server(sends(EMPTY_OBJECT))
    # no timer is due sooner: the clock stands at the limit itself
    endpoint = Endpoint(base_url=server.url, connect_timeout_s=WAIT_S / 2)
    assert session.ask(endpoint, "GET", "/", timeout_s=WAIT_S) == (200, b"{}")


# ------------------------------------------------------------ aborts


def test_abort_during_a_tls_handshake_closes_the_connection(certificate: Path) -> None:
    """Once the handshake is over, and even while the error is kept."""
    tls, abort = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Abort()
    tls.load_cert_chain(certificate)
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        endpoint = Endpoint(
            base_url=f"https://localhost:{listener.getsockname()[1]}",
            connect_timeout_s=WAIT_S,
            ca_file=str(certificate),
        )
        asked = pool.submit(session.ask, endpoint, "GET", "/", timeout_s=WAIT_S, abort=abort)
        with listener.accept()[0] as connection:
            connection.settimeout(WAIT_S)
            connection.recv(1, socket.MSG_PEEK)  # its half of the handshake has begun
            abort.abort()
            # what the server still sends may be answered by a reset
            with (
                contextlib.suppress(ConnectionError, ssl.SSLError),
                tls.wrap_socket(connection, server_side=True) as secured,
            ):
                assert secured.recv(1) == b""
        assert isinstance(asked.exception(WAIT_S), Aborted)


@pytest.mark.parametrize("reply", [b"", b"SSH 200\r\n\r\n"], ids=["ended", "not HTTP"])
def test_connection_is_not_closed_while_being_shut_down(
    monkeypatch: pytest.MonkeyPatch, make_server: MakeServer, reply: bytes
) -> None:
    """Its descriptor may be another connection's in the next instant."""
    abort, open_while_cut = Abort(), list[bool]()
    asked, may_end, cutting, may_go_on = (threading.Event() for _ in range(4))

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        asked.set()
        may_end.wait(WAIT_S)
        connection.sendall(reply)
        connection.close()

    def shut_down(connection: socket.socket) -> None:
        cutting.set()
        may_go_on.wait(WAIT_S)
        open_while_cut.append(connection.fileno() >= 0)

    monkeypatch.setattr(abortable_socket, "shut_down", shut_down)
    with ThreadPoolExecutor() as threads:
        question = threads.submit(ask, make_server(serve).port, abort=abort)
        assert asked.wait(WAIT_S)
        cut = threads.submit(abort.abort)
        assert cutting.wait(WAIT_S)
        may_end.set()
        wait([question], timeout=0.2)  # it waits, too
        may_go_on.set()
        cut.result(WAIT_S)
        assert isinstance(question.exception(WAIT_S), Aborted)
    assert open_while_cut == [True]


def test_a_question_over_ipv6() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener, ThreadPoolExecutor() as pool:
        endpoint = at(listener.getsockname()[1], "[::1]")
        answer = pool.submit(session.ask, endpoint, "GET", "/", timeout_s=WAIT_S, max_bytes=2)
        with listener.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(EMPTY_OBJECT)
            assert answer.result(WAIT_S) == (200, b"{}")


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_an_ipv6_address_needs_no_port(
    monkeypatch: pytest.MonkeyPatch, scheme: str, port: int
) -> None:
    connect = Mock(side_effect=ConnectionRefusedError)
    monkeypatch.setattr(session, "connect", connect)
    endpoint = Endpoint(base_url=f"{scheme}://[::1]", connect_timeout_s=WAIT_S)
    with pytest.raises(ConnectionRefusedError):
        session.ask(endpoint, "GET", "/", timeout_s=WAIT_S)
    assert connect.call_args.args[1:3] == ("::1", port)


def test_a_self_connected_socket_counts_as_refused(
    free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    connect_ex = AbortableSocket.connect_ex

    def from_that_very_port(made: socket.socket, address: Any) -> int:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        return connect_ex(made, address)

    monkeypatch.setattr(AbortableSocket, "connect_ex", from_that_very_port)
    with pytest.raises(ConnectionRefusedError):
        ask(port)
    with socket.socket() as server:
        server.bind((HOST, port))  # nor is it occupied, as by a connection that has just ended


def test_nothing_of_the_environment_is_used(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text(f"machine {HOST} login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("http_proxy", f"http://{HOST}:1")
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def serve(connection: socket.socket) -> None:
        asked.put(connection.recv(1 << 16))
        connection.sendall(JSON_HEAD + b"Set-Cookie: a=b\r\nContent-Length: 2\r\n\r\n{}")

    for _ in range(2):
        assert ask(make_server(serve).port) == (200, b"{}")
        told = asked.get().lower()
        assert b"authorization" not in told
        assert b"cookie" not in told


def test_forked_child_has_a_session_of_its_own() -> None:
    parents = session._session
    pid = os.fork()
    if pid == 0:
        os._exit(0 if session._session is not parents else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_forked_child_needs_no_lock_of_parent_requests(free_port: Callable[[], int]) -> None:
    with AbortableSocket.abort._lock, pytest.raises(ConnectionRefusedError):
        abortable_socket.connect(Abort(), HOST, free_port(), WAIT_S)


def test_abort_reaches_the_server_despite_a_forked_copy(make_server: MakeServer) -> None:
    is_here, is_copied = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        is_here.set()
        is_copied.wait(WAIT_S)
        connection.sendall(JSON_HEAD + b"Content-Length: 99\r\n\r\nmore than 2")

    server, abort = make_server(serve), Abort()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            partial(
                session.ask, at(server.port), "GET", "/", timeout_s=WAIT_S, max_bytes=2, abort=abort
            )
        )
        assert is_here.wait(WAIT_S)
        assert abort._socket is not None
        with abort._socket.dup():  # as by a fork
            is_copied.set()
            assert isinstance(asked.exception(WAIT_S), ValueError)
            assert server.closed.wait(WAIT_S)
