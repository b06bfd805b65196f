"""Connections: who leaves, who is slow, who may run."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_worker.responses.proxy import ResponsesProxy, ResponsesProxyConfig
from tests.actors.conftest import eventually
from tests.conftest import Leftovers
from tests.fake_script import (
    Answer,
    Gate,
    Headers,
    HttpError,
    PingEvery,
    Record,
    Repeat,
    Reply,
    Role,
    Script,
    Step,
    Text,
    ToolCall,
    WaitClose,
    plain_reply,
    steps_json,
)
from tests.responses.conftest import WAIT_S, Client, MakeClient, dial, request_bytes
from tests.responses.oracle import check_events, read_sse

MIB = 1024 * 1024


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", [False, True], ids=["close", "half-close"])
@pytest.mark.parametrize(
    ("steps", "phase"),
    [
        pytest.param([WaitClose()], "before_headers", id="before headers"),
        pytest.param([Headers(), WaitClose()], "streaming", id="in silence"),
        pytest.param([Headers(), Role(), Text("a"), WaitClose()], "streaming", id="in mid-stream"),
    ],
)
def test_a_client_that_leaves_ends_the_upstreams_work(
    fake: Client, steps: list[Any], phase: str, stream: bool, half: bool
) -> None:
    body = {"input": "Hi", "stream": stream, "fake_script": steps_json(*steps)}
    with dial(fake) as client:
        client.sendall(request_bytes("/v1/responses", body, port=fake.proxy.port))
        fake.journal.wait("started", timeout=WAIT_S)
        if phase == "streaming":
            fake.journal.wait("headers", timeout=WAIT_S)
        if half:
            client.shutdown(socket.SHUT_WR)
            fake.journal.wait("client_closed", timeout=WAIT_S, phase=phase)
    fake.journal.wait("client_closed", timeout=WAIT_S, phase=phase)


def test_a_client_that_leaves_a_passed_request_ends_the_upstreams_work(fake: Client) -> None:
    body = {"messages": [], "stream": True, "fake_script": steps_json(WaitClose())}
    with dial(fake) as client:
        client.sendall(request_bytes("/v1/chat/completions", body, port=fake.proxy.port))
        fake.journal.wait("started", timeout=WAIT_S)
    fake.journal.wait("client_closed", timeout=WAIT_S)


def test_closing_the_proxy_cuts_what_runs(fake: Client, leftovers: Leftovers) -> None:
    with dial(fake) as client:
        body = {"input": "Hi", "stream": True, "fake_script": steps_json(Headers(), Role(), Text("a"), WaitClose())}
        client.sendall(request_bytes("/v1/responses", body, port=fake.proxy.port))
        assert b"200" in client.recv(100)
        fake.proxy.close()
        fake.proxy.close()
        fake.journal.wait("client_closed", timeout=WAIT_S)
        while client.recv(65536):
            pass


# ---------------------------------------------------------------- heartbeats


def beats(data: bytes) -> int:
    """How often `response.in_progress` came."""
    return data.count(b"event: response.in_progress\n")


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([], id="no headers yet"),
        pytest.param([Headers(), Role()], id="a long prompt"),
        pytest.param([Headers(), Role(), Text("Once "), PingEvery(0.01)], id="in mid-stream, the server pings"),
        pytest.param([Headers(), Role(), ToolCall("apply_patch", '{"input": "', pieces=1)], id="a long patch"),
    ],
)
def test_a_client_that_waits_gets_events(make_client: MakeClient, tmp_path: Path, steps: list[Step]) -> None:
    fake, gate = make_client(heartbeat_s=0.02), tmp_path / "gate"
    script = [*steps, Gate(gate), *plain_reply(Text("done"))[0 if not steps else 2 :]]
    tools = [{"type": "custom", "name": "apply_patch"}]
    body = {"stream": True, "input": "Hi", "tools": tools, "fake_script": steps_json(*script)}
    with contextlib.closing(fake.connection()) as connection:
        connection.request("POST", "/v1/responses", json.dumps(body).encode())
        with connection.getresponse() as response:
            data = b""
            while beats(data) < 5:
                data += response.read1()
            gate.touch()
            data += response.read()
    assert check_events(read_sse(data))["status"] == "completed"


def test_a_refusal_that_comes_after_a_heartbeat_is_an_event(make_client: MakeClient, tmp_path: Path) -> None:
    fake, gate = make_client(heartbeat_s=0.02), tmp_path / "gate"
    refusal = HttpError(400, "too long", "exceed_context_size_error")
    with fake.begun(Gate(gate), refusal, until=b"response.in_progress") as (data, response):
        gate.touch()
        data += response.read()
    events = read_sse(data)
    assert check_events(events)["status"] == "failed"
    assert events[-2]["code"] == "context_length_exceeded"


# ---------------------------------------------------------------- slow readers and many


def test_a_slow_reader_slows_the_upstream(make_client: MakeClient) -> None:
    records = [Headers(), Role(), Repeat(None, [Text("x" * 4096)])]
    fake = make_client(Script(replies=[Reply(records)], journal_tokens=True))
    before = psutil.Process().memory_info().rss
    with dial(fake) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(request_bytes("/v1/responses", {"input": "Hi", "stream": True}, port=fake.proxy.port))
        assert b"200" in client.recv(100)
        counts: list[int] = []

        def stands_still() -> bool:
            counts.append(len(fake.journal.facts("token")))
            return len(counts) > 50 and counts[-50] == counts[-1] > 0

        eventually(stands_still, "an upstream that waits")
        assert psutil.Process().memory_info().rss - before < 60 * MIB


def test_many_streams_one_after_another_never_fail(fake: Client) -> None:
    connection = fake.connection()
    try:
        for number in range(80):
            body = json.dumps({"input": f"{number}", "stream": True}).encode()
            connection.request("POST", "/v1/responses", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert check_events(read_sse(response.read()))["status"] == "completed"
    finally:
        connection.close()


def test_more_streams_than_threads_run_side_by_side(make_client: MakeClient, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    fake = make_client(Script(replies=[Reply([*plain_reply(Gate(gate))])]), slots=30)
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(fake.create(stream=True).status)) for _ in range(30)]
    for thread in threads:
        thread.start()
    fake.journal.wait("headers", timeout=WAIT_S, count=30)
    assert fake.send("GET", "/health").status == 200
    gate.touch()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 30


def test_no_more_than_allowed_run_at_once(make_client: MakeClient) -> None:
    fake = make_client(max_concurrent=1)
    with dial(fake) as client:
        body = {"input": "Hi", "stream": True, "fake_script": steps_json(Headers(), WaitClose())}
        client.sendall(request_bytes("/v1/responses", body, port=fake.proxy.port))
        fake.journal.wait("started", timeout=WAIT_S)
        refused = fake.create()
        assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) > 0
        assert fake.send("GET", "/health").status == 200
    eventually(lambda: fake.create().status == 200, "a free place")


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_read_the_end_has_a_place(make_client: MakeClient, stream: bool) -> None:
    fake = make_client(max_concurrent=1)
    assert [fake.create(stream=stream).status for _ in range(40)] == [200] * 40


def test_responses_have_four_addresses(fake: Client) -> None:
    for target in ("/v1/responses", "/v1/responses/", "/responses", "/responses/"):
        assert fake.create(target=target).json["object"] == "response"


def test_a_body_that_is_too_large_is_a_413(make_client: MakeClient) -> None:
    client = make_client(max_body_bytes=1000)
    assert client.create(input="x" * 1000).status == 413


def test_neither_bodies_nor_keys_are_logged(fake: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    headers = {"Authorization": "Bearer sk-hush"}
    fake.send("POST", "/v1/responses", b'{"input": "hush-hush"}', headers)
    fake.send("POST", "/v1/responses", b'{"input": "hush-hush', headers)
    fake.create(Headers(), Record("hush-hush"), stream=True)
    fake.send("POST", "/v1/chat/completions", b'{"messages": "hush-hush"}', headers)
    own = [record.getMessage() for record in caplog.records if record.name.startswith("llama_worker")]
    assert not any("hush" in line for line in own)


def test_a_port_that_is_taken_is_an_error(fake: Client, make_client: MakeClient) -> None:
    proxy = ResponsesProxy(ResponsesProxyConfig(upstream="http://127.0.0.1:1", port=fake.proxy.port))
    try:
        with pytest.raises(OSError):
            proxy.start().get(timeout=WAIT_S)
    finally:
        proxy.close()


LATE = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "developer", "content": "Be terse."},
    {"role": "user", "content": "More"},
]


@pytest.mark.parametrize(
    ("answers", "role"),
    [
        pytest.param([], "system", id="a template that shows every system message"),
        pytest.param([Answer(body={"prompt": "probe-head"})], "user", id="one that loses the second"),
        pytest.param([Answer(500)], "user", id="one that fails on it"),
        pytest.param([Answer(reset=True)], "user", id="a server that does not tell"),
    ],
)
def test_late_instructions_are_sent_as_the_template_takes_them(
    make_client: MakeClient, answers: list[Answer], role: str
) -> None:
    fake = make_client(Script(apply_template=answers))
    assert fake.create(input=LATE, instructions="A").status == 200
    assert [message["role"] for message in fake.last_chat()["messages"]] == [
        "system",
        "user",
        "assistant",
        role,
        "user",
    ]
    asked = len(fake.journal.facts("request", path="/apply-template"))
    assert fake.create(instructions="A").status == 200
    assert len(fake.journal.facts("request", path="/apply-template")) == asked
