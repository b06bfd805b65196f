"""Responses proxies in front of scripted servers, plain listeners and the real llama-server."""

import contextlib
import http.client
import json
import re
import socket
import socketserver
import ssl
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llama_worker import LlamaWorker
from llama_worker.responses import app
from llama_worker.responses.api import events
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.http.client import Client as ProxyClient
from llama_worker.responses.proxy import ResponsesProxy
from llama_worker.testing.scripts import (
    JournalReader,
    Script,
    Step,
    scripted_server_cmd,
    steps_json,
)
from tests.actors.conftest import gate
from tests.responses.open_responses import check_event, check_reply
from tests.responses.oracle import Event, check_events, read_sse
from tests.responses.relay import Listener, Relay
from tests.responses.scenarios import PARROT_ARGS
from tests.server.conftest import NO_PROBES, Serve, lasting_port, serve
from tests.server.pace import SERVER_ARGS

__all__ = ["gate", "lasting_port", "serve"]  # fixtures

HOST = "127.0.0.1"
WAIT_S = 300.0  # nothing here is right or wrong by the clock
HELLO = Script()  # the scripted server says "Hello"
Json = dict[str, Any]


@contextlib.contextmanager
def held_bytes() -> Iterator[Callable[[], int]]:
    """How many bytes have been allocated since, and are still held."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="session", autouse=True)
def open_responses_faults() -> Iterator[list[str]]:
    """What the proxies of this process sent, against the schemas of Open Responses."""
    faults: list[str] = []
    sent, replied = events.sse, ProxyClient.reply

    def check(held_to: Callable[..., None], *said: Any) -> None:
        try:
            held_to(*said)
        except (AssertionError, jsonschema.ValidationError) as error:
            faults.append(f"{error}: {said}"[:2000])

    def sse(batch: list[Event]) -> bytes:
        for event in batch:
            check(check_event, event)
        return sent(batch)

    def reply(self: ProxyClient, status: int, value: Any, *headers: Any) -> None:
        check(check_reply, status, value)
        replied(self, status, value, *headers)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "sse", sse)
        patched.setattr(ProxyClient, "reply", reply)
        yield faults


@pytest.fixture(autouse=True)
def held_to_open_responses(open_responses_faults: list[str]) -> Iterator[None]:
    yield
    faults = open_responses_faults.copy()
    open_responses_faults.clear()
    assert not faults, faults


class Reply:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.data = response.read()

    @property
    def json(self) -> Json:
        value: Json = json.loads(self.data)
        return value


class Client:
    """Of one proxy; `journal`: what the scripted server wrote down."""

    def __init__(self, proxy: ResponsesProxy, journal: JournalReader) -> None:
        self.proxy, self.journal = proxy, journal

    def connection(self) -> contextlib.closing[http.client.HTTPConnection]:
        """A connection of one's own, closed at the end of the context."""
        return contextlib.closing(http.client.HTTPConnection(HOST, self.proxy.port, timeout=WAIT_S))

    def dial(self, said: bytes = b"") -> socket.socket:
        """A bare connection on which that was said, to be closed."""
        connection = socket.create_connection((HOST, self.proxy.port), timeout=WAIT_S)
        connection.sendall(said)
        return connection

    def exchange(self, said: bytes) -> bytes:
        """All that comes back on such a connection, until the proxy closes it."""
        with self.dial(said) as connection, connection.makefile("rb") as reply:
            return reply.read()

    def ask(self, *steps: Step, target: str = "/v1/responses", **body: Any) -> socket.socket:
        """A bare connection with a request, of which nothing was read."""
        return self.dial(
            request_bytes(target, json.loads(_body(steps, body)), port=self.proxy.port)
        )

    def send(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """One request as it is, on a connection of its own."""
        with self.connection() as connection:
            connection.request(method, target, body, headers or {})
            return Reply(connection.getresponse())

    def create(self, *steps: Step, target: str = "/v1/responses", **body: Any) -> Reply:
        """A request for a response; `steps` are what the scripted server does for it."""
        return self.send("POST", target, _body(steps, body), {"Content-Type": "application/json"})

    def stream(self, *steps: Step, **body: Any) -> list[Event]:
        """The events of a stream, which are checked."""
        reply = self.create(*steps, stream=True, **body)
        assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream"), (
            reply.data
        )
        events = read_sse(reply.data)
        check_events(events)
        return events

    @contextlib.contextmanager
    def begun(
        self, *steps: Step, until: bytes, target: str = "/v1/responses", **body: Any
    ) -> Iterator[tuple[bytes, http.client.HTTPResponse]]:
        """A stream that has come as far as `until`: what came so far, and the reply that goes on;
        closed at the end."""
        with self.connection() as connection:
            connection.request("POST", target, _body(steps, {"stream": True, **body}))
            with connection.getresponse() as response:
                data = b""
                while until not in data:
                    piece = response.read1()
                    assert piece, data
                    data += piece
                yield data, response

    def last_chat(self) -> Json:
        """The body of the last chat completion that the server got."""
        chats = [
            fact for fact in self.journal.facts("request") if fact["path"] == "/v1/chat/completions"
        ]
        body: Json = chats[-1]["body"]
        return body


def _body(steps: Sequence[Step], body: Json) -> bytes:
    script = {"scripted_reply": steps_json(*steps)} if steps else {}
    return json.dumps({"model": "m", "input": "Hi", **body, **script}).encode()


MakeClient = Callable[..., Client]


@contextlib.contextmanager
def scripted_server(
    script: Script, journal: JournalReader, *, port: int, slots: int
) -> Iterator[str]:
    command = scripted_server_cmd(script, host=HOST, port=port, slots=slots, journal=journal.path)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            journal.wait("ready", timeout=WAIT_S)
            yield f"http://{HOST}:{port}"
        finally:
            server.kill()


@pytest.fixture
def make_client(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[MakeClient]:
    """Proxies; without `upstream` in front of a scripted server of their own."""
    with contextlib.ExitStack() as stack:

        def make(
            script: Script = HELLO, *, upstream: str | None = None, slots: int = 4, **config: Any
        ) -> Client:
            port = free_port()
            journal = JournalReader(tmp_path / f"journal-{port}")
            upstream = upstream or stack.enter_context(
                scripted_server(script, journal, port=port, slots=slots)
            )
            proxy = ResponsesProxy(ResponsesProxyConfig(upstream=upstream, port=0, **config))
            stack.callback(proxy.close)
            proxy.start().get(timeout=WAIT_S)
            return Client(proxy, journal)

        yield make


@pytest.fixture(scope="session")
def hello_server(
    tmp_path_factory: pytest.TempPathFactory, lasting_port: Callable[[], int]
) -> Iterator[tuple[str, Path]]:
    """The URL and the journal of a scripted server that says "Hello", for all tests that leave it
    alive."""
    path = tmp_path_factory.mktemp("hello") / "journal"
    with scripted_server(HELLO, JournalReader(path), port=lasting_port(), slots=4) as url:
        yield url, path


class JournalFromNow(JournalReader):
    """What a server sees of the chats that it is asked for from now on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._before = max((seen["n"] or 0 for seen in super().facts("request")), default=0)

    def facts(self, fact: str | None = None, /, **match: Any) -> list[Json]:
        return [
            seen for seen in super().facts(fact, **match) if (seen.get("n") or 0) > self._before
        ]


@pytest.fixture
def make_fake(make_client: MakeClient, hello_server: tuple[str, Path]) -> MakeClient:
    """Proxies in front of that server."""
    url, path = hello_server
    return lambda **config: Client(make_client(upstream=url, **config).proxy, JournalFromNow(path))


@pytest.fixture
def fake(make_fake: MakeClient) -> Client:
    """A proxy in front of that server."""
    return make_fake()


class Upstream(Listener):
    """Answers every request with the same bytes, closes the connection, and keeps what it got."""

    def __init__(self, reply: bytes, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        super().__init__((HOST, port), _Answer)
        self.reply = reply
        self.requests: list[bytes] = []
        self.port: int = self.server_address[1]
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.listen()


class _Answer(socketserver.StreamRequestHandler):
    server: Upstream
    timeout = WAIT_S

    def handle(self) -> None:
        head = b""
        for line in self.rfile:
            head += line
            if line == b"\r\n":
                break
        length = re.search(rb"content-length: (\d+)", head.lower())
        self.server.requests.append(head + self.rfile.read(int(length[1]) if length else 0))
        self.wfile.write(self.server.reply)


Through = Callable[..., tuple[Client, Upstream]]


@pytest.fixture
def through(make_client: MakeClient) -> Iterator[Through]:
    """A proxy, and behind it what answers with any bytes."""
    with contextlib.ExitStack() as stack:

        def make(reply: bytes, base_path: str = "", **config: Any) -> tuple[Client, Upstream]:
            upstream = stack.enter_context(Upstream(reply))
            return make_client(
                upstream=f"http://{HOST}:{upstream.port}{base_path}", **config
            ), upstream

        yield make


def answer(body: bytes, status: bytes = b"200 OK", headers: bytes = b"") -> bytes:
    """A reply as it goes over the wire."""
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n%b\r\n" % (status, len(body), headers) + body


def request_bytes(target: str, body: Json | None = None, *, port: int) -> bytes:
    """A request as it goes over the wire; a POST where there is a body."""
    data = json.dumps(body).encode() if body is not None else b""
    line = f"{'POST' if data else 'GET'} {target} HTTP/1.1"
    return f"{line}\r\nHost: {HOST}:{port}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@pytest.fixture(scope="session")
def real_url(serve: Serve) -> Iterator[str]:
    """The real llama-server as the scenarios need it, behind a relay."""
    config = serve(slots=2, whole=True, timeouts=NO_PROBES, args=(*SERVER_ARGS, *PARROT_ARGS))
    with LlamaWorker(config), Relay((config.host, config.port)) as relay:
        yield relay.url


@pytest.fixture
def real(make_client: MakeClient, real_url: str) -> Client:
    """A proxy in front of it."""
    return make_client(upstream=real_url)
