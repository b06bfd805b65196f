"""What an event costs the thread that serves a client: counted, never by the clock."""

import queue
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from llama_worker.actors.base import Ref
from llama_worker.config.settings import Endpoint
from llama_worker.request.table import Admitted
from llama_worker.responses.api.events import ResponseEvents, sse
from llama_worker.responses.generation import EventSink, ResponseRun
from llama_worker.responses.http.client import Client
from llama_worker.responses.http.reply import ReplyFramer
from llama_worker.responses.http.request_reader import RequestReader
from llama_worker.responses.messages import (
    ListenerEnded,
    ResponseBegun,
    ResponseEnded,
    StopListening,
)
from llama_worker.runtime.http import leased_exchange
from llama_worker.runtime.http.abortable_socket import Abort
from llama_worker.runtime.http.leased_exchange import LeasedExchange
from tests.actors.conftest import WAIT_S
from tests.responses.conftest import Client as ProxiedClient
from tests.runtime.conftest import MakeServer, make_server
from tests.runtime.test_stream_reader import HEAD, text

__all__ = ["make_server"]  # a fixture

EVENTS = 100
MAX_CALLS = 47  # of Python functions, for one event


class Stream:
    """A stream whose head has come, with a lease, and the client that it is for."""

    def __init__(self, make_server: MakeServer) -> None:
        accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

        def serve(connection: socket.socket) -> None:
            connection.recv(1 << 16)
            connection.sendall(HEAD)
            accepted.put(connection)

        abort = Abort()
        self.leased = LeasedExchange(abort)
        admitted = Admitted(1, 0, "responses:r", 0.0, is_leased=True)
        self.leased.begin(admitted, api_key=None, unix=lambda at: at)
        ours, self.reader = socket.socketpair()
        ours.setblocking(False)
        http = RequestReader(max_body_bytes=1, allowed_origin=lambda _: None)
        http.reply = ReplyFramer("POST")
        http.reply.begin(200, [])
        self.client = Client(ours, http, WAIT_S)
        self.client.on_stall = self.leased.stopped_waiting
        endpoint = Endpoint(base_url=make_server(serve).url, connect_timeout_s=WAIT_S)
        exchange: Any = SimpleNamespace(
            abort=abort,
            leased=self.leased,
            upstream=SimpleNamespace(endpoint=endpoint),
            announce=lambda: None,
        )
        self.send: Callable[[bytes], None] = lambda data: None  # what is for the client
        self.chat = ResponseRun(
            exchange,
            ResponseEvents(unique="1", clock=lambda: 0.0, echo={}),
            sink=EventSink(send=lambda data: self.send(data), encode=sse),
            heartbeat_s=WAIT_S,
            silence_s=WAIT_S,
            on_end=lambda: None,
        )
        assert self.chat.open({}, {})
        self.server = accepted.get(timeout=WAIT_S)
        self._abort = abort

    def is_waited_for(self) -> bool:
        """Whether the server's silence counts."""
        return not self.leased.progress().concluding

    def close(self) -> None:
        self._abort.abort()
        self.chat.close()
        self.reader.close()
        self.client.socket.close()


@pytest.fixture
def stream(make_server: MakeServer) -> Iterator[Stream]:
    made = Stream(make_server)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("target", "asked", "told"),
    [
        pytest.param("/v1/chat/completions", {"messages": []}, [], id="passed through"),
        pytest.param("/v1/responses", {"store": False}, [], id="a response"),
        pytest.param("/v1/responses", {}, [ResponseBegun, ResponseEnded], id="a stored response"),
    ],
)
def test_a_request_tells_its_actors_little(
    fake: ProxiedClient,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    asked: dict[str, Any],
    told: list[type],
) -> None:
    assert fake.create(store=False).status == 200  # the server has been asked for its sampling
    monkeypatch.setattr(leased_exchange, "UNWATCHED_WAIT_S", WAIT_S)
    counts: Counter[type] = Counter()
    tell = Ref.tell

    def telling(ref: Ref[Any], message: Any) -> bool:
        counts[type(message)] += 1
        return tell(ref, message)

    monkeypatch.setattr(Ref, "tell", telling)
    assert fake.create(target=target, **asked).status == 200
    fake.proxy.close()
    del counts[StopListening], counts[ListenerEnded]
    assert counts == Counter(told)


@pytest.mark.parametrize(
    ("soon_s", "replies", "is_watched"),
    [(WAIT_S, True, False), (1e-9, False, True), (-1.0, True, True)],
    ids=["in time", "silent", "later"],
)
def test_lease_is_told_when_the_server_is_slow(
    monkeypatch: pytest.MonkeyPatch, soon_s: float, replies: bool, is_watched: bool
) -> None:
    monkeypatch.setattr(leased_exchange, "UNWATCHED_WAIT_S", soon_s)
    abort, told = Abort(), list[str]()
    leased = LeasedExchange(abort, tell_lease=lambda: told.append("lease"))
    ours, server = socket.socketpair()
    with ours, server:
        abort.attach(ours)
        if replies:
            server.send(b"reply")
        for _ in range(2):
            leased.before_reading()
            assert leased.is_watched is is_watched
    assert told == ["lease"] * is_watched


def test_an_event_costs_one_read_and_one_send(stream: Stream) -> None:
    """Each event comes when the one before it has been sent on."""
    calls: Counter[str] = Counter()
    sent_count = 0

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            calls[called.__name__] += 1
        elif event == "call":
            calls["Python"] += 1

    def send(data: bytes) -> None:
        nonlocal sent_count
        stream.client.write(data)
        sys.setprofile(None)
        stream.reader.recv(1 << 16)
        sent_count += 1
        if sent_count < EVENTS:
            stream.server.sendall(text("x"))
        elif sent_count == EVENTS:
            stream.server.shutdown(socket.SHUT_RDWR)
        if 10 <= sent_count < EVENTS:
            sys.setprofile(count)

    stream.server.sendall(text("x"))
    try:
        stream.send = send
        stream.chat.to_the_end()
    finally:
        sys.setprofile(None)
    counted = EVENTS - 10
    assert (calls["recv"], calls["send"], calls["poll"]) == (counted, counted, 0)
    assert calls["Python"] <= MAX_CALLS * counted


def test_a_slow_client_excuses_the_server(stream: Stream) -> None:
    """What came meanwhile is read first: until then the server is not waited for either."""
    waited_for: list[bool] = []

    def drain() -> None:
        waited_for.append(stream.is_waited_for())
        stream.server.sendall(text("y"))  # lies ready when the client has taken all
        while stream.reader.recv(1 << 20):
            pass

    reader = threading.Thread(target=drain)
    stopped_waiting = stream.leased.stopped_waiting

    def slow() -> None:
        stopped_waiting()
        reader.start()

    stream.client.on_stall = slow
    stream.leased.started_waiting()
    assert stream.is_waited_for()
    stream.client.write(b"x" * (8 << 20))
    stream.leased.before_reading()
    waited_for.append(stream.is_waited_for())
    assert stream.chat.read()
    stream.leased.before_reading()
    waited_for.append(stream.is_waited_for())
    stream.client.cut()
    reader.join()
    assert waited_for == [False, False, True]
