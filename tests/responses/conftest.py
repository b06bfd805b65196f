"""Responses proxies in front of scripted servers, plain listeners and the real llama-server."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import openai
import pytest

from llama_worker import LlamaWorker
from llama_worker.responses.config import ResponsesProxyConfig
from llama_worker.responses.proxy import ResponsesProxy
from tests.fake_script import Journal, Script, Step, fake_server_cmd, steps_json
from tests.responses.oracle import Event, check_events, read_sse
from tests.responses.relay import Relay
from tests.responses.scenarios import PARROT_ARGS
from tests.server.conftest import NO_PROBES, Serve, lasting_port, serve
from tests.server.pace import SERVER_ARGS

__all__ = ["lasting_port", "serve"]  # fixtures

HOST = "127.0.0.1"
WAIT_S = 300.0  # nothing here is right or wrong by the clock
HELLO = Script()  # the scripted server says "Hello"
Json = dict[str, Any]


class Reply:
    """A whole HTTP reply."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.data = response.read()

    @property
    def json(self) -> Json:
        value: Json = json.loads(self.data)
        return value


class Client:
    """Of one proxy."""

    def __init__(self, proxy: ResponsesProxy, journal: Journal | None = None) -> None:
        self.proxy = proxy
        self._journal = journal

    @property
    def journal(self) -> Journal:
        """What the scripted server wrote down."""
        assert self._journal is not None
        return self._journal

    def openai(self) -> openai.OpenAI:
        """The official client; use it as a context manager."""
        return openai.OpenAI(base_url=self.proxy.base_url, api_key="sk-test", max_retries=0, timeout=WAIT_S)

    def connection(self) -> http.client.HTTPConnection:
        """A connection of one's own; to be closed."""
        return http.client.HTTPConnection(HOST, self.proxy.port, timeout=WAIT_S)

    def send(self, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Reply:
        """One request as it is, on a connection of its own."""
        connection = self.connection()
        try:
            connection.request(method, target, body, headers or {})
            return Reply(connection.getresponse())
        finally:
            connection.close()

    def create(self, *steps: Step, target: str = "/v1/responses", **body: Any) -> Reply:
        """A request for a response; `steps` are what the scripted server does for it."""
        return self.send("POST", target, _body(steps, body), {"Content-Type": "application/json"})

    def stream(self, *steps: Step, **body: Any) -> list[Event]:
        """The events of a stream, which are checked."""
        reply = self.create(*steps, stream=True, **body)
        assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream"), reply.data
        events = read_sse(reply.data)
        check_events(events)
        return events

    @contextlib.contextmanager
    def begun(
        self, *steps: Step, until: bytes, target: str = "/v1/responses", **body: Any
    ) -> Iterator[tuple[bytes, http.client.HTTPResponse]]:
        """A stream that has come as far as `until`: what came so far, and the reply that goes on; closed at the end."""
        with contextlib.closing(self.connection()) as connection:
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
        chats = [fact for fact in self.journal.facts("request") if fact["path"] == "/v1/chat/completions"]
        body: Json = chats[-1]["body"]
        return body


def _body(steps: Sequence[Step], body: Json) -> bytes:
    script = {"fake_script": steps_json(*steps)} if steps else {}
    return json.dumps({"model": "m", "input": "Hi", **body, **script}).encode()


class MakeClient(Protocol):
    """Makes a proxy, and its upstream where none is given."""

    def __call__(
        self, script: Script = ..., *, upstream: str | None = None, slots: int = ..., **config: Any
    ) -> Client: ...


@pytest.fixture
def make_client(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[MakeClient]:
    """Proxies; without `upstream` in front of a scripted server."""
    proxies: list[ResponsesProxy] = []
    servers: list[subprocess.Popen[bytes]] = []

    def make(
        script: Script = HELLO,
        *,
        upstream: str | None = None,
        slots: int = 4,
        **config: Any,
    ) -> Client:
        journal = None
        if upstream is None:
            port = free_port()
            journal = Journal(tmp_path / f"journal-{len(servers)}")
            cmd = fake_server_cmd(script, host=HOST, port=port, slots=slots, journal=journal.path)
            servers.append(subprocess.Popen(cmd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            journal.wait("ready", timeout=WAIT_S)
            upstream = f"http://{HOST}:{port}"
        proxy = ResponsesProxy(ResponsesProxyConfig(upstream=upstream, port=0, **config))
        proxies.append(proxy)
        proxy.start().get(timeout=WAIT_S)
        return Client(proxy, journal)

    yield make
    for proxy in proxies:
        proxy.close()
    for server in servers:
        server.kill()
        server.wait()


@pytest.fixture
def fake(make_client: MakeClient) -> Client:
    """A proxy in front of a scripted server that says "Hello"."""
    return make_client()


class Upstream:
    """A listener that answers every connection with `reply(request's bytes)`, and keeps what it got."""

    def __init__(self, reply: Callable[[bytes], bytes]) -> None:
        self._reply = reply
        self.requests: list[bytes] = []
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                client.settimeout(WAIT_S)
                request = _read_request(client)
                self.requests.append(request)
                client.sendall(self._reply(request))

    def close(self) -> None:
        """End it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def _read_request(client: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if fields.get(b"transfer-encoding") == b"chunked":
        while not data.endswith(b"0\r\n\r\n"):
            data += client.recv(65536)
        return data
    while len(body) < int(fields.get(b"content-length", 0)):
        piece = client.recv(65536)
        body += piece
        data += piece
    return data


@pytest.fixture
def make_upstream() -> Iterator[Callable[[Callable[[bytes], bytes]], Upstream]]:
    """Upstreams that say any bytes."""
    made: list[Upstream] = []

    def make(reply: Callable[[bytes], bytes]) -> Upstream:
        made.append(Upstream(reply))
        return made[-1]

    yield make
    for upstream in made:
        upstream.close()


def request_bytes(target: str, body: dict[str, Any] | None = None, *, port: int) -> bytes:
    """A request as it goes over the wire; a POST where there is a body."""
    data = json.dumps(body).encode() if body is not None else b""
    head = (
        f"{'POST' if data else 'GET'} {target} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def dial(client: Client) -> socket.socket:
    """A connection to the proxy, to be closed."""
    return socket.create_connection((HOST, client.proxy.port), timeout=WAIT_S)


@pytest.fixture(scope="session")
def real_url(serve: Serve, lasting_port: Callable[[], int]) -> Iterator[str]:
    """The real llama-server as the scenarios need it, behind a relay."""
    config = serve(port=lasting_port(), slots=2, timeouts=NO_PROBES, args=(*SERVER_ARGS, *PARROT_ARGS))
    with LlamaWorker(config), Relay((config.host, config.port)) as relay:
        yield relay.url


@pytest.fixture
def real(make_client: MakeClient, real_url: str) -> Client:
    """A proxy in front of it."""
    return make_client(upstream=real_url)
