"""A stream on a socket: what is told at once, what waits, and who may fetch it."""

import contextlib
import errno
import gc
import json
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest

from llama_worker.config.settings import Endpoint
from llama_worker.request.messages import OpenStream, StreamClosed, StreamEvents, StreamOpened
from llama_worker.runtime.http import session
from llama_worker.runtime.http.stream_reader import StreamReader
from llama_worker.stream import decoder, lazy_reading
from llama_worker.stream.events import Finish, TextDelta, ToolCallDelta
from llama_worker.types.request import RequestFailReason
from tests.actors.conftest import WAIT_S, eventually
from tests.tables import cases

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FOR_EVER_S = 1e5


def record(delta: dict[str, Any], **beside: Any) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **beside}
    data = f"data: {json.dumps(chunk)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def text(said: str) -> bytes:
    return record({"content": said})


@dataclass
class Told:
    """A mailbox that can be waited for."""

    messages: list[Any] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def tell(self, message: Any) -> bool:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()
        return True

    def wait_closed(self) -> StreamClosed:
        with self._changed:
            assert self._changed.wait_for(lambda: self._of(StreamClosed), WAIT_S), self.messages
            (closed,) = self._of(StreamClosed)
        assert isinstance(closed, StreamClosed)
        return closed

    def wait_events(self, *expected: Any) -> None:
        """Until these events were told, in this order, since the last time; nothing else was."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.events()) >= len(expected), WAIT_S)
            assert self.events() == list(expected)
            self.messages.clear()

    def events(self) -> list[Any]:
        return [event for message in self._of(StreamEvents) for event in message.events]

    def _of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


@dataclass
class Rig:
    """A stream, and the server's end of its connection."""

    reader: StreamReader
    server: socket.socket
    told: Told
    opener: Told  # who opened the stream, and hears of its end only

    def gets_lazy(self) -> None:
        """Until the thread sleeps while the kernel collects text."""
        eventually(lambda: self.reader._lazy.is_lazy, "a lazy reader")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(lazy_reading, "WAKE_INTERVAL_S", FOR_EVER_S)  # nothing is late
    monkeypatch.setattr(lazy_reading, "HURRY_S", FOR_EVER_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=10.0
        )
        told, opener = Told(), Told()
        order = OpenStream(
            turn_id=(1, 1), body={"stream": True}, max_hold_s=FOR_EVER_S, reply_to=told
        )
        reader = StreamReader(order, endpoint, on_closed=opener, name="test")
        with listener.accept()[0] as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Rig(reader, server, told, opener)
            reader.abort()
            opener.wait_closed()


@pytest.fixture
def streaming(rig: Rig) -> Rig:
    """The first token has been told."""
    rig.server.sendall(HEAD + text("first"))
    eventually(rig.told.events, "the first token")
    assert isinstance(rig.told.messages[0], StreamOpened)
    rig.told.wait_events(TextDelta("first"))
    return rig


def test_text_that_comes_fast_waits_for_whoever_asks(streaming: Rig) -> None:
    streaming.server.sendall(text("a"))
    streaming.gets_lazy()
    streaming.server.sendall(text("b"))
    assert streaming.told.messages == []
    streaming.reader.flush()
    streaming.told.wait_events(TextDelta("a"), TextDelta("b"))
    streaming.reader.flush()
    assert streaming.told.messages == []


def test_a_look_without_news_makes_it_eager(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_reading, "WAKE_INTERVAL_S", 0.1)
    rig.server.sendall(HEAD + text("first"))
    for _ in range(50):
        rig.server.sendall(text("a"))
    eventually(lambda: "".join(event.text for event in rig.told.events()) == "first" + 50 * "a", "")
    eventually(lambda: not rig.reader._lazy.is_lazy, "an eager reader")


def test_a_waiting_reader_gets_text_at_once(
    streaming: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming.server.sendall(text("a"))
    streaming.gets_lazy()
    streaming.reader.hurry()  # something waits already
    for piece in "abc":
        streaming.told.wait_events(TextDelta(piece))
        streaming.server.sendall(text(chr(ord(piece) + 1)))
    streaming.told.wait_events(TextDelta("d"))
    monkeypatch.setattr(lazy_reading, "HURRY_S", 0.0)  # and this is the first text after it
    streaming.server.sendall(text("e"))
    streaming.told.wait_events(TextDelta("e"))
    streaming.server.sendall(text("f"))
    streaming.gets_lazy()
    assert streaming.told.messages == []


def test_text_in_socket_reaches_waiting_reader_at_once(streaming: Rig) -> None:
    streaming.server.sendall(text("a"))
    streaming.gets_lazy()
    streaming.reader.flush()
    streaming.told.wait_events(TextDelta("a"))
    streaming.server.sendall(text("b"))  # which wakes nobody
    streaming.reader.hurry()
    streaming.told.wait_events(TextDelta("b"))


def test_events_other_than_text_are_sent_at_once(streaming: Rig) -> None:
    streaming.server.sendall(text("a"))
    streaming.gets_lazy()
    call = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "add", "arguments": "{"}}]}
    long_call = {"tool_calls": [{"index": 0, "function": {"arguments": "x" * 40_000}}]}
    streaming.server.sendall(record(long_call))  # enough to wake the thread
    streaming.told.wait_events(TextDelta("a"), ToolCallDelta(0, None, None, "x" * 40_000))
    streaming.server.sendall(record(call))  # and this one is not waited for
    streaming.told.wait_events(ToolCallDelta(0, "c", "add", "{"))
    assert not streaming.reader._lazy.is_lazy


def test_text_that_came_with_the_headers_is_reported(rig: Rig) -> None:
    head, body = HEAD, text("a") + text("b")
    rig.server.sendall(head + body[:-10])  # in one segment, and cut off in the second record
    eventually(rig.told.events, "the first token")
    rig.server.sendall(body[-10:])
    rig.reader.flush()
    eventually(lambda: rig.told.events() == [TextDelta("a"), TextDelta("b")], "the second")


def test_text_before_garbage_is_reported(rig: Rig) -> None:
    rig.server.sendall(HEAD + text("a") + b"not a chunk\r\n")  # in one segment
    failure = rig.told.wait_closed().failure
    assert rig.told.events() == [TextDelta("a")]
    assert failure is not None
    assert "in mid-stream: invalid HTTP in the reply" in failure.detail


@cases(
    "error, is_flushed, says",
    {
        "no memory": (MemoryError(), False, "out of memory while reading the stream"),
        # whoever flushes is an actor, which is not to die of it
        "no memory for a flush": (MemoryError(), True, "out of memory while reading the stream"),
        "a mistake of our own": (RuntimeError("a mistake"), False, "a mistake"),
    },
)
def test_unreadable_record_costs_no_text(
    streaming: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, is_flushed: bool, says: str
) -> None:
    monkeypatch.setattr(decoder, "decode_record", Mock(side_effect=error))
    streaming.server.sendall(text("a"))
    streaming.gets_lazy()
    long_call = {"tool_calls": [{"index": 0, "function": {"arguments": "x" * 40_000}}]}
    streaming.server.sendall(text("b") + record({} if is_flushed else long_call))
    if is_flushed:
        streaming.reader.flush()
    failure = streaming.told.wait_closed().failure
    assert "".join(event.text for event in streaming.told.events()) == "ab"
    assert failure is not None
    assert failure.reason is RequestFailReason.UNKNOWN_ERROR
    assert says in failure.detail


def test_end_is_reported_at_once_with_all_text(streaming: Rig) -> None:
    streaming.server.sendall(text("a"))
    streaming.gets_lazy()
    streaming.server.sendall(
        text("b") + record({}, choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    )
    streaming.server.sendall(b"0\r\n\r\n")
    streaming.server.shutdown(socket.SHUT_WR)
    assert streaming.told.wait_closed().failure is None
    assert streaming.told.events() == [TextDelta("a"), TextDelta("b"), Finish("stop")]
    assert streaming.opener.wait_closed() is streaming.told.messages[-1]


def test_flush_finding_the_end_ends_still_connected_stream(streaming: Rig) -> None:
    streaming.server.sendall(text("a"))
    streaming.gets_lazy()
    streaming.server.sendall(b"0\r\n\r\n")  # less than what wakes the thread
    streaming.reader.flush()
    assert streaming.told.wait_closed().failure is None
    assert streaming.told.events() == [TextDelta("a")]


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + text("a") + text("b")])
def test_an_abort_ends_the_stream_in_every_phase(rig: Rig, sent: bytes) -> None:
    rig.server.settimeout(WAIT_S)
    rig.server.recv(1 << 16)  # the request
    rig.server.sendall(sent)
    if sent:
        eventually(lambda: rig.told.messages, "the stream is open")
    rig.reader.abort()
    rig.reader.abort()
    closed = rig.told.wait_closed()
    assert closed is rig.opener.wait_closed()
    assert closed.failure is not None
    assert closed.failure.reason is RequestFailReason.STREAM_DISCONNECTED
    assert "abort" in closed.failure.detail
    assert closed.is_aborted
    with contextlib.suppress(ConnectionResetError):
        while rig.server.recv(1 << 16):
            pass
    told = list(rig.told.messages)
    rig.reader.hurry()
    rig.reader.flush()
    assert rig.told.messages == told
    assert "".join(event.text for event in rig.told.events()) == (
        "ab" if sent.count(b"\n") > 9 else ""
    )


@pytest.mark.parametrize("listens", [True, False], ids=["aborted", "refused"])
def test_a_stream_without_headers_needs_no_garbage_collection(listens: bool) -> None:
    """It holds the conversation."""
    opener, is_gone = Told(), threading.Event()
    order = OpenStream(turn_id=(1, 1), body={}, reply_to=Told())
    gc.disable()
    try:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            if listens:
                bound.listen()
            endpoint = Endpoint(
                base_url=f"http://127.0.0.1:{bound.getsockname()[1]}", connect_timeout_s=WAIT_S
            )
            reader = StreamReader(order, endpoint, on_closed=opener, name="test")
            weakref.finalize(reader, is_gone.set)
            if listens:
                with bound.accept()[0] as server:
                    server.recv(1 << 16)  # the request
                    reader.abort()
                    opener.wait_closed()
            opener.wait_closed()
            del reader
            assert is_gone.wait(WAIT_S)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "reason", "is_unsent"),
    [
        (ConnectionRefusedError(), RequestFailReason.CONNECT_FAILED, False),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), RequestFailReason.UNKNOWN_ERROR, True),
        (OSError(errno.EADDRNOTAVAIL, "no port is left"), RequestFailReason.UNKNOWN_ERROR, True),
        (RuntimeError("a mistake"), RequestFailReason.UNKNOWN_ERROR, False),  # of our own
    ],
)
def test_a_stream_that_gets_no_connection_says_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: RequestFailReason, is_unsent: bool
) -> None:
    def connect(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(session, "connect", connect)
    told = Told()
    order = OpenStream(turn_id=(1, 1), body={}, reply_to=told)
    endpoint = Endpoint(base_url="http://127.0.0.1:1", connect_timeout_s=WAIT_S)
    StreamReader(order, endpoint, on_closed=Told(), name="test")
    failure = told.wait_closed().failure
    assert failure is not None
    assert (failure.reason, failure.is_unsent) == (reason, is_unsent)
