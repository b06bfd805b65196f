"""A stream on a socket: what is told at once, what waits, and who may fetch it. The loop's calls
are made by hand."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from llama_worker.messages import OpenStream, StreamClosed, StreamEvents, StreamOpened
from llama_worker.runtime import loop_connection, stream_reader
from llama_worker.runtime.chat_exchange import Endpoint
from llama_worker.runtime.loop_thread import LoopThread
from llama_worker.runtime.stream_reader import StreamReader
from llama_worker.stream.events import Finish, PromptProgress, TextDelta, ToolCallDelta
from llama_worker.types import RequestFailReason

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def record(delta: dict[str, Any], **beside: Any) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **beside}
    data = f"data: {json.dumps(chunk)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def text(said: str) -> bytes:
    return record({"content": said})


class HandMadeLoop(LoopThread):
    """Nothing runs; who rests is seen."""

    def start(self) -> select.epoll:
        if self._epoll is None:
            self._epoll = select.epoll()
        return self._epoll

    @property
    def resting(self) -> bool:
        return bool(self._resting)

    def close(self) -> None:
        self.start().close()


@dataclass
class Rig:
    """A stream, and the server's end of its connection."""

    loop: HandMadeLoop
    reader: StreamReader
    server: socket.socket
    told: list[Any]

    def arrives(self, data: bytes) -> None:
        """The server sends, and the loop sees to what that makes ready: of a resting socket,
        nothing."""
        self.server.sendall(data)
        self.serve()

    def serve(self) -> None:
        for _, mask in self.loop.start().poll(0.05):
            self.reader.on_ready(mask)

    def events(self) -> list[Any]:
        """Of every message since the last time, in order."""
        told = self.told.copy()
        self.told.clear()
        return [
            event
            for message in told
            if isinstance(message, StreamEvents)
            for event in message.events
        ]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(stream_reader, "TICK_S", 1e9)  # nothing is late
    with socket.create_server(("127.0.0.1", 0)) as listener:
        loop = HandMadeLoop()
        monkeypatch.setattr(loop_connection, "loop_thread", lambda: loop)
        endpoint = Endpoint(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=10.0
        )
        told: list[Any] = []
        host: Any = SimpleNamespace(tell=told.append)
        order = OpenStream(turn_id=(1, 1), body={"stream": True}, reply_to=host)
        reader = StreamReader(order, endpoint, on_closed=host, name="test")
        with listener.accept()[0] as server:
            made = Rig(loop, reader, server, told)
            made.serve()
            yield made
            reader.abort()
        loop.close()


@pytest.fixture
def streaming(rig: Rig) -> Rig:
    """The first token has been told."""
    rig.arrives(HEAD + text("first"))
    assert isinstance(rig.told[0], StreamOpened)
    assert rig.told[0].stream is rig.reader
    assert rig.events() == [TextDelta("first")]
    return rig


def test_text_that_comes_fast_waits_for_more_and_wakes_nobody_up_to_a_tick_without_news(
    streaming: Rig,
) -> None:
    streaming.arrives(text("a"))
    assert streaming.loop.resting
    streaming.arrives(text("b"))
    assert streaming.told == []
    streaming.reader.on_tick()
    assert streaming.events() == [TextDelta("a"), TextDelta("b")]
    assert streaming.loop.resting
    streaming.reader.on_tick()
    assert not streaming.loop.resting
    assert streaming.told == []


@pytest.mark.parametrize("was_resting", [False, True])
def test_flush_tells_what_lies_in_the_socket(streaming: Rig, was_resting: bool) -> None:
    if was_resting:
        streaming.arrives(text("a"))
        assert streaming.reader.flush()
        streaming.events()
    streaming.server.sendall(text("b"))
    assert streaming.reader.flush()
    assert streaming.events() == [TextDelta("b")]
    assert not streaming.reader.flush()


def test_who_waits_gets_the_next_text_at_once(streaming: Rig) -> None:
    streaming.arrives(text("a"))
    streaming.reader.hurry()  # something waits already
    assert streaming.events() == [TextDelta("a")]
    streaming.reader.hurry()
    streaming.arrives(text("b"))
    assert streaming.events() == [TextDelta("b")]
    streaming.arrives(text("c"))
    assert streaming.told == []


def test_what_is_not_text_is_told_at_once_and_ends_the_rest(streaming: Rig) -> None:
    streaming.arrives(text("a"))
    call = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "add", "arguments": "{"}}]}
    streaming.server.sendall(record(call))
    streaming.reader.on_tick()  # which finds it
    streaming.arrives(record(call))  # and this one is not waited for
    assert streaming.events() == [TextDelta("a"), *[ToolCallDelta(0, "c", "add", "{")] * 2]
    assert not streaming.loop.resting


def test_progress_does_not_use_up_the_hurry_of_the_first_token(rig: Rig) -> None:
    rig.arrives(HEAD + record({}, prompt_progress={"total": 9, "processed": 1, "cache": 0}))
    rig.arrives(text("first"))
    assert rig.events() == [PromptProgress(1, 9, 0), TextDelta("first")]


def test_the_end_is_told_at_once_with_all_that_came_before(streaming: Rig) -> None:
    streaming.arrives(text("a"))
    streaming.server.sendall(
        text("b") + record({}, choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    )
    streaming.server.sendall(b"0\r\n\r\n")
    streaming.server.shutdown(socket.SHUT_WR)
    streaming.serve()
    *events, closed, closed_too = streaming.told
    assert [event for batch in events for event in batch.events] == [
        TextDelta("a"),
        TextDelta("b"),
        Finish("stop"),
    ]
    assert isinstance(closed, StreamClosed)
    assert closed.failure is None
    assert closed_too is closed


def test_much_at_once_is_told_at_once_though_the_socket_rests(streaming: Rig) -> None:
    streaming.arrives(text("a"))
    assert streaming.loop.resting
    streaming.arrives(text("x" * 40_000))
    assert sum(len(event.text) for event in streaming.events()) == 40_001


@pytest.mark.parametrize(
    "prepare",
    [
        lambda rig: None,
        lambda rig: rig.arrives(HEAD),
        lambda rig: rig.arrives(HEAD + text("a") + text("b")),
    ],
    ids=["before the headers", "after them", "in the text"],
)
def test_an_abort_is_the_last_word_in_every_phase(rig: Rig, prepare: Callable[[Rig], None]) -> None:
    prepare(rig)
    rig.reader.abort()
    rig.reader.abort()
    closed = [message for message in rig.told if isinstance(message, StreamClosed)]
    assert len(closed) == 2  # to who reads, and to who opened it
    rig.server.settimeout(10.0)
    rig.server.recv(1 << 16)  # the request
    with contextlib.suppress(ConnectionResetError):
        assert rig.server.recv(1) == b""
    assert closed[0].failure is not None
    assert closed[0].failure.reason is RequestFailReason.STREAM_DISCONNECTED
    told = list(rig.told)
    rig.reader.on_ready(select.EPOLLIN)
    rig.reader.on_tick()
    rig.reader.hurry()
    assert not rig.reader.flush()
    assert rig.told == told


def reset(rig: Rig) -> None:
    rig.server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    rig.server.close()
    rig.serve()


@pytest.mark.parametrize(
    ("happen", "reason"),
    [
        (
            lambda rig: rig.reader.on_error(RuntimeError("a mistake")),
            RequestFailReason.UNKNOWN_ERROR,
        ),  # of our own
        (
            lambda rig: rig.reader._on_no_connection(ConnectionRefusedError()),
            RequestFailReason.CONNECT_FAILED,
        ),
        (lambda rig: rig.arrives(b"9\r\ndata: x\n\n\r\n"), RequestFailReason.PROTOCOL_ERROR),
        (reset, RequestFailReason.STREAM_DISCONNECTED),
    ],
)
def test_a_stream_that_fails_says_why(
    streaming: Rig, happen: Callable[[Rig], None], reason: RequestFailReason
) -> None:
    happen(streaming)
    closed = streaming.told[-1]
    assert isinstance(closed, StreamClosed)
    assert closed.failure is not None
    assert closed.failure.reason is reason
