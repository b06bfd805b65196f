"""A WebSocket disturbs nobody, whatever its client does; what each of them can do is in
conformance.py."""

import contextlib
import gc
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from llama_worker.responses import app
from llama_worker.responses.http import websocket
from llama_worker.runtime.http import session
from llama_worker.stream.failure import StreamFailure
from llama_worker.testing import scripts as fs
from tests.responses.conftest import HOST, WAIT_S, Client, MakeClient, held_bytes
from tests.responses.open_responses import SOCKET_ERROR
from tests.responses.oracle import TERMINAL, Event

_UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\n"
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@contextlib.contextmanager
def opened(client: Client, **options: Any) -> Iterator[Connection]:
    url = f"ws://{HOST}:{client.proxy.port}/v1/responses"
    with connect(url, open_timeout=WAIT_S, proxy=None, **options) as socket:
        yield socket


def create(*steps: fs.Step, **body: Any) -> str:
    script = {"scripted_reply": fs.steps_json(*steps)} if steps else {}
    return json.dumps({"type": "response.create", "model": "m", "input": "Hi", **body, **script})


def frame(message: str) -> bytes:
    data = message.encode()
    assert 126 <= len(data) < 65536
    return b"\x81\xfe" + len(data).to_bytes(2, "big") + b"\0\0\0\0" + data


def turn(socket: Connection, message: str) -> list[Event]:
    socket.send(message)
    events: list[Event] = []
    while not events or events[-1]["type"] not in (*TERMINAL, "error"):
        events.append(json.loads(socket.recv(WAIT_S)))
    return events


@pytest.mark.parametrize("begun", [[], [fs.Headers(), fs.Role(), fs.Text("Once")]])
def test_ping_is_answered_while_the_server_is_silent(
    make_fake: MakeClient, begun: list[fs.Step]
) -> None:
    fake = make_fake(heartbeat_s=2 * WAIT_S)
    with opened(fake) as socket:
        socket.send(create(*begun, fs.WaitClose()))
        fake.journal.wait("started", timeout=WAIT_S)
        while begun and "Once" not in str(socket.recv(WAIT_S)):
            pass
        assert socket.ping().wait(WAIT_S)


def test_a_client_that_closes_ends_the_servers_work(fake: Client) -> None:
    with opened(fake) as socket:
        socket.send(create(fs.Headers(), fs.Role(), fs.Text("Once"), fs.WaitClose()))
        while "Once" not in str(socket.recv(WAIT_S)):
            pass
    fake.journal.wait("client_closed", timeout=WAIT_S)


def test_client_that_closes_during_a_refusal_is_no_fault(
    fake: Client, gate: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failure, is_read = session.HttpReply.failure, threading.Event()

    def reading(self: session.HttpReply) -> StreamFailure:
        is_read.set()
        return failure(self)

    monkeypatch.setattr(session.HttpReply, "failure", reading)
    head = fs.Raw("HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\n", framed=False)
    body = [fs.Raw("{", framed=False), fs.WaitClose()]
    with fake.dial(_UPGRADE + frame(create(head, fs.Gate(gate), *body))) as connection:
        assert is_read.wait(WAIT_S)
        connection.sendall(b"\x88\x80\0\0\0\0")
        gate.touch()
        while connection.recv(65536):
            pass
    assert not caplog.records


@pytest.mark.parametrize(
    "message", ["[]", "{", '{"type": "response.cancel"}', create(input=3), create(tools=3)]
)
def test_a_malformed_message_costs_only_itself(fake: Client, message: str) -> None:
    with opened(fake) as socket:
        (refused,) = turn(socket, message)
        SOCKET_ERROR.validate(refused)
        assert refused["status"] == 400
        assert turn(socket, create(stream=False, background=True))[-1]["type"] in TERMINAL


def test_a_failure_is_one_terminal_event(fake: Client) -> None:
    with opened(fake) as socket:
        events = turn(socket, create(fs.Headers(), fs.Role(), fs.Text("a"), fs.ErrorData()))
        assert events[-1]["type"] == "response.failed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert turn(socket, create())[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        pytest.param(b"\x81\x01a", 1002, id="unmasked"),
        pytest.param(b"\x83\x80\0\0\0\0", 1002, id="unknown kind of frame"),
        pytest.param(b"\xc1\x81\0\0\0\0a", 1002, id="a reserved bit"),
        pytest.param(b"\x81\x81\0\0\0\0\xff", 1007, id="not UTF-8"),
        pytest.param(b"\x82\x81\0\0\0\0a", 1003, id="binary"),
        pytest.param(b"\x81\xfe\x04\0\0\0\0\0" + b"a" * 1024, 1009, id="too long"),
        pytest.param(
            b"\x81\xff" + (1 << 25).to_bytes(8) + bytes(4) + b"a" * (1 << 24),
            1009,
            id="too long, and still coming",
        ),
        pytest.param((b"\x01\x81\0\0\0\0a" + b"\x00\x81\0\0\0\0a" * 1000), 1009, id="many pieces"),
        pytest.param(b"\x81\x81\0\0\0\0a" * 1000, 1009, id="many messages"),
        pytest.param(b"\x81\x80\0\0\0\0" * 1000, 1009, id="many empty messages"),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection(
    make_fake: MakeClient, frame: bytes, code: int
) -> None:
    fake = make_fake(max_body_bytes=500)
    data = fake.exchange(_UPGRADE + frame)
    head, _, goodbye = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    assert b"\x88" in goodbye
    closing = goodbye[goodbye.rindex(b"\x88") :]
    assert int.from_bytes(closing[2:4], "big") == code
    assert fake.create().status == 200


def test_tiny_pieces_are_held_at_their_size(make_fake: MakeClient) -> None:
    count = 10_000
    with make_fake().dial(_UPGRADE) as connection:
        connection.recv(65536)
        with held_bytes() as held:
            connection.sendall(b"\x01\x82\0\0\0\0ab" + b"\x00\x82\0\0\0\0ab" * count)
            connection.sendall(b"\x89\x80\0\0\0\0")  # a ping, answered behind all that
            connection.recv(65536)
            assert held() < 20 * count  # a string each would be 60


@pytest.mark.parametrize(
    ("odd", "status"),
    [
        (_UPGRADE.replace(b"Version: 13", b"Version: 12"), 400),
        (re.sub(rb"HTTP/1.1\r\nHost: [^\r]+", b"HTTP/1.0", _UPGRADE), 400),
        (_UPGRADE.replace(b"GET ", b"DELETE "), 404),  # by the upstream
    ],
)
def test_a_handshake_that_is_none_is_refused(fake: Client, odd: bytes, status: int) -> None:
    with fake.dial(odd) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 %d " % status)


def test_a_web_page_gets_no_socket(fake: Client) -> None:
    with pytest.raises(InvalidStatus, match="403"), opened(fake, origin="http://evil.example"):
        pass


def test_the_number_of_open_sockets_is_bounded(
    make_fake: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_MAX_SOCKETS", 1)
    fake = make_fake()
    with opened(fake) as first:
        with pytest.raises(InvalidStatus, match="503"), opened(fake):
            pass
        assert turn(first, create())[-1]["type"] == "response.completed"
    for _ in range(1000):  # until the proxy has noticed
        with contextlib.suppress(InvalidStatus), opened(fake) as next_one:
            assert turn(next_one, create())[-1]["type"] == "response.completed"
            return
    pytest.fail("no place was given back")


def test_a_silent_one_is_closed(fake: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_IDLE_S", 0.01)
    with opened(fake) as socket, pytest.raises(ConnectionClosed) as closed:
        socket.recv(WAIT_S)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001


def test_who_only_pings_is_closed(fake: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def ping() -> None:
        for _ in range(10_000):
            socket.ping()
            with contextlib.suppress(TimeoutError):
                socket.recv(0.01)

    monkeypatch.setattr(websocket, "_IDLE_S", 0.1)
    with opened(fake) as socket, pytest.raises(ConnectionClosed):
        ping()


def test_a_client_that_reads_nothing_is_cut_off(make_fake: MakeClient) -> None:
    fake = make_fake(client_timeout_s=0.05)
    flood = create(fs.Headers(), fs.Role(), fs.Repeat(None, [fs.Text("x" * 4096)]))
    with fake.dial(_UPGRADE + frame(flood)):
        fake.journal.wait("client_closed", timeout=WAIT_S)


@pytest.mark.parametrize(
    ("items", "ahead"),
    [
        ([], {"generate": False}),
        ([{"role": "user", "content": "early"}], {"prompt_cache_options": {"prewarm": True}}),
    ],
)
def test_what_is_sent_ahead_generates_nothing(
    fake: Client, items: list[dict[str, str]], ahead: dict[str, Any]
) -> None:
    with opened(fake) as socket:
        *begun, end = turn(socket, create(input=items, store=False, **ahead))
        assert [event["type"] for event in begun] == ["response.created", "response.in_progress"]
        assert (end["response"]["status"], end["response"]["output"]) == ("completed", [])
        again = create(input="Hi", previous_response_id=end["response"]["id"])
        assert turn(socket, again)[-1]["type"] == "response.completed"
    (chat,) = fake.journal.facts("request", method="POST")
    said = [message["content"] for message in chat["body"]["messages"]]
    assert said == [*(item["content"] for item in items), "Hi"]


@pytest.mark.parametrize("store", [True, False])
def test_a_continuation_may_refer_to_items(fake: Client, store: bool) -> None:
    stored = fake.create(*fs.plain_reply(fs.Text("once stored"))).json
    with opened(fake) as socket:
        latest = turn(socket, create(*fs.plain_reply(fs.Text("just said")), store=store))[-1][
            "response"
        ]
        ids = [response["output"][0]["id"] for response in (stored, latest)]
        items = [{"type": "item_reference", "id": item_id} for item_id in ids]
        again = create(store=store, previous_response_id=latest["id"], input=[*items, "Go on."])
        assert turn(socket, again)[-1]["type"] == "response.completed"
    said = [message["content"] for message in fake.last_chat()["messages"]]
    assert said == ["Hi", "just said", "once stored", "just said", "Go on."]


def test_stored_continuation_may_refer_to_something_not_stored(fake: Client) -> None:
    own = [{"role": "user", "id": f"own_{number}", "content": f"{number}"} for number in range(9)]
    with opened(fake) as socket:
        unstored = create(*fs.plain_reply(fs.Text("unstored")), store=False)
        first = turn(socket, unstored)[-1]["response"]
        again = create(previous_response_id=first["id"], input=own)
        second = turn(socket, again)[-1]["response"]
        ids = [first["output"][0]["id"], *(item["id"] for item in own)]
        items = [{"type": "item_reference", "id": item_id} for item_id in ids]
        third = create(previous_response_id=second["id"], input=items)
        assert turn(socket, third)[-1]["type"] == "response.completed"
    said = [message["content"] for message in fake.last_chat()["messages"]]
    assert said[-10:] == ["unstored", *(item["content"] for item in own)]


@pytest.mark.parametrize("store", [True, False])
def test_continuation_has_the_call_that_the_limit_cut(fake: Client, store: bool) -> None:
    half_call = fs.ToolCall("f", '{"a": ')
    with opened(fake) as socket:
        latest = turn(socket, create(*fs.plain_reply(half_call, reason="length"), store=store))[-1]
        assert latest["type"] == "response.incomplete"
        again = create(previous_response_id=latest["response"]["id"], input="Go on.")
        assert turn(socket, again)[-1]["type"] == "response.completed"
    assert [message["role"] for message in fake.last_chat()["messages"]] == [
        "user",
        "assistant",
        "user",
    ]


def test_a_conversation_is_held_at_its_size(fake: Client) -> None:
    with opened(fake) as socket:
        message = create(input=[{"role": "user", "content": "a"}] * 5000, generate=False)
        assert turn(socket, create(store=False, generate=False))[-1]["type"] in TERMINAL
        with held_bytes() as held:
            turn(socket, message.replace('"m"', '"m", "store": false'))
            assert socket.ping().wait(WAIT_S)  # it waits for the next message by now
            gc.collect()
            assert held() < 2 * len(message)


def test_what_it_keeps_of_a_conversation_is_bounded(make_fake: MakeClient) -> None:
    fake = make_fake(max_stored_bytes=5000)
    with opened(fake) as socket:
        latest, kept = "", 0
        while True:
            previous = {"previous_response_id": latest} if latest else {}
            end = turn(socket, create(store=False, input="x" * 100, **previous))[-1]
            if end["type"] == "error":
                break
            latest, kept = end["response"]["id"], kept + 1
        assert end["error"]["code"] == "previous_response_not_found"
        assert 2 <= kept < 10


def test_an_open_socket_does_not_delay_closing(fake: Client) -> None:
    with opened(fake) as socket:
        assert turn(socket, create())[-1]["type"] == "response.completed"
        fake.proxy.close()
        with pytest.raises(ConnectionClosed):
            socket.recv(WAIT_S)
