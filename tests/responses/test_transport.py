"""Connections: who leaves, who is slow, who may run."""

import errno
import socket
import threading
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest

from llama_worker.responses import generation
from llama_worker.responses.http.client import Client as ServedClient
from llama_worker.testing import scripts as fs
from tests.actors.conftest import eventually
from tests.responses.conftest import HOST, WAIT_S, Client, MakeClient
from tests.responses.oracle import check_events, read_sse

MIB = 1024 * 1024
Steps = list[fs.Step]
NEEDS_IPV6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6")


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("target", ["/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("steps", "phase"),
    [
        pytest.param([fs.WaitClose()], "before_headers", id="before headers"),
        pytest.param([fs.Headers(), fs.WaitClose()], "streaming", id="in silence"),
        pytest.param(
            [fs.Headers(), fs.Role(), fs.Text("a"), fs.WaitClose()], "streaming", id="in mid-stream"
        ),
    ],
)
def test_a_client_that_leaves_ends_the_upstreams_work(
    fake: Client, steps: Steps, phase: str, target: str
) -> None:
    for count, (stream, half) in enumerate(product([True, False], repeat=2), start=1):
        is_whole = not stream and target == "/v1/chat/completions"  # headers come with the body
        due = "before_headers" if is_whole else phase
        with fake.ask(*steps, stream=stream, target=target, messages=[]) as client:
            reached = "started" if due == "before_headers" else "headers"
            fake.journal.wait(reached, timeout=WAIT_S, count=count)
            if half:
                client.shutdown(socket.SHUT_WR)
                fake.journal.wait("client_closed", timeout=WAIT_S, count=count)
        closed = fake.journal.wait("client_closed", timeout=WAIT_S, count=count)
        assert closed["phase"] == due


def test_closing_the_proxy_cuts_what_runs(fake: Client) -> None:
    with fake.ask(fs.Headers(), fs.Role(), fs.Text("a"), fs.WaitClose(), stream=True) as client:
        assert b"200" in client.recv(100)
        fake.proxy.close()
        fake.proxy.close()
        fake.journal.wait("client_closed", timeout=WAIT_S)
        while client.recv(65536):
            pass


def test_closing_cuts_what_the_upstream_ignores(make_client: MakeClient) -> None:
    with socket.create_server((HOST, 0)) as upstream:
        client = make_client(upstream=f"http://{HOST}:{upstream.getsockname()[1]}")
        with client.ask(input="x" * (16 * MIB)), upstream.accept()[0] as connection:
            assert connection.recv(100)
            client.proxy.close()

        def is_left() -> bool:  # a thread that is through waits for its next task by another name
            names = [thread.name for thread in threading.enumerate()]
            return any(name.startswith("llama_worker-response") for name in names)

        eventually(lambda: not is_left(), "the end of its threads")


# ---------------------------------------------------------------- heartbeats


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([], id="no headers yet"),
        pytest.param([fs.Headers(), fs.Role()], id="a long prompt"),
        pytest.param(
            [fs.Headers(), fs.Role(), fs.Text("Once "), fs.PingEvery(0.01)],
            id="in mid-stream, with pings",
        ),
        pytest.param(
            [fs.Headers(), fs.Role(), fs.ToolCall("apply_patch", '{"input": "', pieces=1)],
            id="a long patch",
        ),
    ],
)
def test_a_client_that_waits_gets_events(make_fake: MakeClient, gate: Path, steps: Steps) -> None:
    fake = make_fake(heartbeat_s=0.02)
    script = [*steps, fs.Gate(gate), *fs.plain_reply(fs.Text("done"))[0 if not steps else 2 :]]
    tools = [{"type": "custom", "name": "apply_patch"}]
    with fake.begun(*script, until=b"in_progress", tools=tools) as (data, response):
        while data.count(b"event: response.in_progress\n") < 5:
            data += response.read1()
        gate.touch()
        assert check_events(read_sse(data + response.read()))["status"] == "completed"


@pytest.mark.parametrize("heartbeat_s", [0.4, 1.5, 10.0])
def test_a_heartbeat_is_due_when_a_wait_ends(
    make_fake: MakeClient, monkeypatch: pytest.MonkeyPatch, heartbeat_s: float
) -> None:
    made = Mock(side_effect=generation.ResponseRun)
    monkeypatch.setattr(generation, "ResponseRun", made)
    assert make_fake(heartbeat_s=heartbeat_s).create(stream=True).status == 200
    silence_s = made.call_args.kwargs["silence_s"]
    waits_count = round(heartbeat_s / silence_s)
    assert (waits_count * silence_s, silence_s <= 1.0) == (pytest.approx(heartbeat_s), True)


def test_a_refusal_after_a_heartbeat_is_an_event(make_fake: MakeClient, gate: Path) -> None:
    fake = make_fake(heartbeat_s=0.02)
    refusal = fs.HttpError(400, "too long", "exceed_context_size_error")
    with fake.begun(fs.Gate(gate), refusal, until=b"response.in_progress") as (data, response):
        gate.touch()
        events = read_sse(data + response.read())
    failed = check_events(events)
    assert failed["status"] == "failed"
    assert events[-2]["code"] == failed["error"]["code"] == "context_length_exceeded"


# ---------------------------------------------------------------- slow readers and many


def test_a_slow_reader_slows_the_upstream(make_client: MakeClient) -> None:
    records = [fs.Headers(), fs.Role(), fs.Repeat(None, [fs.Text("x" * 4096)])]
    fake = make_client(fs.Script(replies=[fs.ScriptedReply(records)], journal_tokens=True))
    counts: list[int] = []

    def stands_still() -> bool:
        counts.append(len(fake.journal.facts("token")))
        return len(counts) > 50 and counts[-50] == counts[-1] > 0

    with fake.ask(stream=True) as client:
        assert b"200" in client.recv(100)
        eventually(stands_still, "an upstream that waits")


@pytest.mark.parametrize(
    ("stream", "end"), [(True, b"event: response.completed"), (False, b'"completed"')]
)
def test_who_has_read_the_end_has_a_place(
    make_fake: MakeClient, monkeypatch: pytest.MonkeyPatch, stream: bool, end: bytes
) -> None:
    """Also where the thread that served it is halted as soon as the end is out."""
    fake, send = make_fake(max_concurrent=1), ServedClient._send
    halts, goes_on = threading.Event(), threading.Event()

    def send_and_halt(client: ServedClient, data: bytes) -> None:
        send(client, data)
        if end in data and not halts.is_set():
            halts.set()
            goes_on.wait(WAIT_S)

    monkeypatch.setattr(ServedClient, "_send", send_and_halt)
    with fake.begun(stream=stream, until=end):
        status = fake.create(stream=not stream).status
        goes_on.set()
    assert status == 200


def test_no_more_than_allowed_run_at_once(make_fake: MakeClient) -> None:
    fake = make_fake(max_concurrent=1)
    with fake.ask(fs.Headers(), fs.WaitClose(), stream=True):
        fake.journal.wait("started", timeout=WAIT_S)
        refused = fake.create()
        assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) > 0
        assert fake.send("GET", "/health").status == 200
    eventually(lambda: fake.create().status == 200, "a free place")


def test_responses_have_four_addresses(fake: Client) -> None:
    for target in ("/v1/responses", "/v1/responses/", "/responses", "/responses/"):
        assert fake.create(target=target).json["object"] == "response"


@NEEDS_IPV6
def test_listening_on_every_address_includes_ipv4(make_fake: MakeClient) -> None:
    assert make_fake(host="::").send("GET", "/health").status == 200


@NEEDS_IPV6
def test_a_link_local_address_keeps_its_interface(make_fake: MakeClient) -> None:
    """No interface has this address; without its interface it is an invalid one."""
    with pytest.raises(OSError, match="fe80::1") as refused:
        make_fake(host="fe80::1%lo")
    assert refused.value.errno == errno.EADDRNOTAVAIL


def test_what_is_ignored_is_told_in_a_header(fake: Client) -> None:
    reply = fake.create(tools=[{"type": "web_search"}])
    assert reply.status == 200
    assert "web_search" in reply.headers["x-llama-worker-warning"]


def test_neither_bodies_nor_keys_are_logged(fake: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    headers = {"Authorization": "Bearer sk-hush"}
    assert b" 400 " in fake.exchange(
        b"GET /any HTTP/1.1\r\nX-A: a\rX-B: sk-hush\r\nHost: localhost\r\n\r\n"
    )
    fake.send("POST", "/v1/responses", b'{"input": "hush-hush"}', headers)
    fake.send("POST", "/v1/responses", b'{"input": "hush-hush', headers)
    fake.create(fs.Headers(), fs.Record("hush-hush"), stream=True)
    fake.send("POST", "/v1/chat/completions", b'{"messages": "hush-hush"}', headers)
    assert "hush" not in caplog.text


@pytest.mark.parametrize(
    ("answers", "end"),
    [
        pytest.param([], ["system", "user"], id="a template that shows every system message"),
        pytest.param([fs.Answer(500, times=1), fs.Answer()], ["user", "user"], id="one that fails"),
        pytest.param([fs.Answer(500)], ["user"], id="one that wants users and answers in turn"),
        pytest.param([fs.Answer(reset=True)], ["user"], id="a server that does not tell"),
    ],
)
def test_late_instructions_follow_the_template(
    make_client: MakeClient, answers: list[fs.Answer], end: list[str]
) -> None:
    fake = make_client(fs.Script(apply_template=answers))
    late = [{"role": one, "content": one} for one in ("user", "assistant", "developer", "user")]
    assert fake.create(input=late, instructions="A").status == 200
    sent = fake.last_chat()["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", *end]
    assert "\n\n".join(message["content"] for message in sent[3:]) == "developer\n\nuser"
    asked = len(fake.journal.facts("request", path="/apply-template"))
    assert fake.create(instructions="A").status == 200
    assert len(fake.journal.facts("request", path="/apply-template")) == asked


@pytest.mark.parametrize(
    ("answers", "contents"),
    [
        pytest.param([], ["here", "Hi"], id="a template that takes them"),
        pytest.param([fs.Answer(500)], ["here\n\nHi"], id="one that refuses them"),
        pytest.param([fs.Answer(reset=True)], ["here\n\nHi"], id="a server that does not tell"),
    ],
)
def test_users_in_a_row_follow_the_template(
    make_client: MakeClient, answers: list[fs.Answer], contents: list[str]
) -> None:
    """Codex begins with two."""
    fake = make_client(fs.Script(apply_template=answers))
    users = [{"role": "user", "content": text} for text in ("here", "Hi")]
    assert fake.create(input=users, instructions="A").status == 200
    system, *sent = fake.last_chat()["messages"]
    assert (system["content"], [message["content"] for message in sent]) == ("A", contents)
    assert {message["role"] for message in sent} == {"user"}


def test_an_unanswered_probe_changes_no_role(make_client: MakeClient) -> None:
    """A busy server may not answer in time, and the prompt cache lives by the messages."""
    fake = make_client(fs.Script(apply_template=[fs.Answer(times=1), fs.Answer(reset=True)]))
    late = [{"role": one, "content": one} for one in ("user", "assistant", "developer", "user")]
    for _ in range(2):
        assert fake.create(input=late).status == 200
        assert fake.last_chat()["messages"][2]["role"] == "system"
