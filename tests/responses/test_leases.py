"""A proxy around a worker: each response holds one of its slots, and is watched as any request.

Who is spared, and what waits for a response, is the simulator's: a third of its requests are such.
"""

import errno
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from llama_worker import ConfigError, LlamaWorker, WorkerState
from llama_worker.actors.messages import BeginLease, RequestMessage
from llama_worker.actors.request import RequestActor
from llama_worker.mailbox import Tick
from llama_worker.request import leased
from llama_worker.request.leased import LeasedRequest
from llama_worker.responses.http.client import Client as ServedClient
from llama_worker.responses.proxy import ResponsesProxy, ResponsesProxyConfig
from llama_worker.runtime.http import session
from llama_worker.server import request_watch, slots
from llama_worker.testing import scripts as fs
from tests.actors.conftest import WAIT_S, MakeWorker, Rig, eventually, fast_restart, make_worker
from tests.responses.conftest import HELLO, Client, Json, MakeClient, Upstream
from tests.responses.oracle import Event, check_events, read_sse
from tests.responses.test_websocket import create, opened
from tests.scenarios.cases import _SUSPICIOUS, _slot
from tests.scenarios.scenario import TIMEOUTS
from tests.tables import cases

__all__ = ["make_worker"]  # a fixture

Steps = Sequence[fs.Step]
HALF: Steps = [fs.Headers(), fs.Role(), fs.Text("Once ")]
RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
of_either_api = pytest.mark.parametrize("target", [RESPONSES, CHAT])
WHOLE = [{"role": "user", "content": "Hi"}]
PATIENT = replace(TIMEOUTS, headers_timeout_s=600.0, idle_stream_timeout_s=600.0)


class Stage:
    """A worker on a scripted server, and a proxy around it."""

    def __init__(self, rig: Rig, client: Client) -> None:
        self.rig, self.client = rig, client

    @property
    def worker_jobs(self) -> dict[int, str]:
        return dict(self.rig.status()["active_jobs"])

    @property
    def ends(self) -> Any:
        """How many requests ended how, and why."""
        return self.rig.debug()["totals"]["requests"]

    def wait_jobs(self, count: int) -> dict[int, str]:
        eventually(lambda: len(self.worker_jobs) == count, f"{count} requests in flight", WAIT_S)
        return self.worker_jobs

    def halfway(self, gate: Path | None = None) -> AbstractContextManager[Any]:
        """A response that has begun; it goes on through the gate, or else never."""
        rest = [fs.Gate(gate), *fs.plain_reply()[1:]] if gate else [fs.WaitClose()]
        return self.client.begun(*HALF, *rest, until=b"Once ")

    def say(self, *steps: fs.Step, stream: bool = True, **body: Any) -> Any:
        """A chat completion that is passed through: its status and its bytes."""
        chat = {"messages": WHOLE, "stream": stream, "scripted_reply": fs.steps_json(*steps)}
        return self.client.send("POST", CHAT, json.dumps({**chat, **body}).encode())


MakeStage = Callable[..., Stage]


@pytest.fixture
def make_stage(make_worker: MakeWorker) -> Iterator[MakeStage]:
    with ExitStack() as stack:

        def make(
            script: fs.Script = HELLO,
            *,
            start: bool = True,
            heartbeat_s: float = 10.0,
            **config: Any,
        ) -> Stage:
            rig = make_worker(script, start=start, **{"slots": 2, "timeouts": PATIENT, **config})
            proxy_config = ResponsesProxyConfig(port=0, heartbeat_s=heartbeat_s)
            proxy = ResponsesProxy(proxy_config, worker=rig.worker)
            stack.callback(proxy.close)
            proxy.start().get(timeout=WAIT_S)
            return Stage(rig, Client(proxy, rig.journal))

        yield make


def ended(events: Sequence[Event]) -> Json:
    """The terminal event's response."""
    response: Json = events[-1]["response"]
    return response


def test_close_on_the_thread_of_a_response_returns(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a `__del__` of the host's, which the garbage collector calls on any thread."""
    stage, closed, received = make_stage(), threading.Event(), LeasedRequest.received

    def close(*args: Any) -> None:
        monkeypatch.setattr(LeasedRequest, "received", received)
        stage.rig.worker.close()
        closed.set()
        received(*args)

    monkeypatch.setattr(LeasedRequest, "received", close)
    with stage.client.ask(*HALF, fs.WaitClose()):
        assert closed.wait(WAIT_S)
        stage.rig.wait_gone()


# ---------------------------------------------------------------- a hang is found


def check_hung(client: Client, reply: Steps, text: str) -> Json:
    """The response that its client was told of, and can go on from."""
    events = read_sse(client.create(*reply, stream=True).data)
    check_events(events)
    failed = ended(events)
    assert (events[-1]["type"], events[-2]["type"]) == ("response.failed", "error")
    assert text in failed["error"]["message"]
    kept = client.send("GET", f"/v1/responses/{failed['id']}").json
    assert kept["output"][0]["content"][0]["text"] == "Once "
    return failed


def spins(*slots: fs.Answer) -> tuple[Steps, Any, Any]:
    """A server that computes without a word, what it says of its slots, and limits: too long for
    anything else to find it."""
    limits = {"idle_stream_timeout_s": 600.0, "prefill_liveness_timeout_s": 600.0}
    return [*HALF, fs.Burn(None, 30.0)], {"slots": slots}, {**_SUSPICIOUS, **limits}


SILENT = "stall_timeout: no data and no sign of work"
MOVELESS = "stall_timeout: no slot of the server made progress"
UNANSWERED = "stall_timeout: /slots has not answered"
SPUN = spins(fs.Answer(body=[_slot(decoded=3)]))
LOST = spins(fs.Answer(body=[_slot(busy=False)]))
# Once at READY, then to looks at a slot that stands still and moves on: it answers during batches.
STUCK = spins(
    fs.Answer(body=[_slot(decoded=1)], times=3),
    fs.Answer(body=[_slot(decoded=2)], times=1),
    fs.Answer(hang=True),
)


@cases(
    "reply, server, limits, text",
    {
        "SIGSTOP": ([*HALF, fs.StopSelf(), fs.WaitClose()], {}, {}, SILENT),
        "a decode that dies": ([*HALF, fs.WaitClose()], {}, {}, SILENT),
        "a server that spins": (*SPUN, MOVELESS),
        "a lost request": (*LOST, "request_lost: the server has lost the request"),
        "a stuck task queue": (*STUCK, UNANSWERED),
        "a death": ([*HALF, fs.KillSelf()], {}, {}, "server_died: the server ended with signal 9"),
    },
)
def test_a_hang_ends_with_its_reason(
    make_stage: MakeStage,
    monkeypatch: pytest.MonkeyPatch,
    reply: Steps,
    server: Any,
    limits: Any,
    text: str,
) -> None:
    reason, _, _ = text.partition(":")
    monkeypatch.setattr(request_watch, "SILENT_S", 3.0)  # of a minute
    monkeypatch.setattr(slots, "PAUSE_S", 0.3)  # of 5 s
    monkeypatch.setattr(slots, "LOOK_INTERVAL_S", 0.3)  # of 2 s
    restarts = int(reason != "request_lost")  # the server serves others
    stage = make_stage(fs.Script(**server), timeouts=replace(TIMEOUTS, **limits))
    failed = check_hung(stage.client, reply, text)
    status = stage.rig.wait_restarted(restarts)
    assert (status["slots_used"], status["restart_count"]) == (0, restarts)
    assert stage.ends["failed"] == {reason: 1}
    second = stage.client.create(previous_response_id=failed["id"])
    assert (second.status, second.json["output"][0]["content"][0]["text"]) == (200, "Hello")


@of_either_api
def test_before_its_headers_a_hang_is_a_503(make_stage: MakeStage, target: str) -> None:
    stage = make_stage(timeouts=TIMEOUTS)
    reply = stage.client.create(fs.WaitClose(), stream=True, target=target, messages=WHOLE)
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")
    assert "headers_timeout" in reply.json["error"]["message"]
    stage.rig.wait_restarted(1)
    assert stage.client.create().status == 200


# ---------------------------------------------------------------- somebody else's server


def test_a_hung_upstream_is_told_to_its_client(make_client: MakeClient) -> None:
    check_hung(make_client(timeouts=TIMEOUTS), [*HALF, fs.WaitClose()], "stall_timeout")


@of_either_api
def test_an_upstream_without_headers_is_a_gateway_timeout(
    make_client: MakeClient, target: str
) -> None:
    """Nobody starts it anew: the client is not told to come again soon."""
    client = make_client(timeouts=replace(TIMEOUTS, silent_work_timeout_s=1.0))
    reply = client.create(fs.WaitClose(), target=target, messages=WHOLE)
    assert (reply.status, reply.headers.get("retry-after")) == (504, None)
    reason = "stall_timeout" if target == CHAT else "headers_timeout"  # it has all, or nothing
    assert reason in reply.json["error"]["message"]


class Unread(Upstream):
    """Takes connections, and reads nothing from them."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._taken: list[socket.socket] = []
        super().__init__(b"", tls=tls)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._taken.append(request)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for connection in self._taken:
            connection.close()


@pytest.fixture(params=["plain", "tls"])
def before_unread(
    request: pytest.FixtureRequest, make_client: MakeClient, certificate: Path
) -> Iterator[MakeClient]:
    """Proxies in front of a server that takes no request."""
    tls = None
    if request.param == "tls":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
    with Unread(tls) as server:
        url = f"{'https' if tls else 'http'}://localhost:{server.port}"
        yield partial(make_client, upstream=url, ca_file=str(certificate))


def test_an_upstream_that_takes_no_request_is_watched(before_unread: MakeClient) -> None:
    timeouts = replace(TIMEOUTS, silent_work_timeout_s=1.0)
    reply = before_unread(timeouts=timeouts).create(input="x" * (16 << 20))
    assert reply.status == 504
    assert "headers_timeout" in reply.json["error"]["message"]


def test_client_hears_that_its_upstream_takes_no_request(before_unread: MakeClient) -> None:
    client = before_unread(heartbeat_s=0.02)
    with client.ask(stream=True, input="x" * (16 << 20)) as connection:
        heard = b""
        while heard.count(b"event: response.in_progress") < 5:
            heard += connection.recv(4096)


def test_who_would_run_unwatched_is_ended(make_client: MakeClient) -> None:
    client = make_client()
    watch = client.proxy._upstream
    assert watch is not None
    watch.stop()
    eventually(lambda: not watch.tell(Tick()), "the end of who watches", WAIT_S)
    assert client.create(fs.WaitClose()).status == 502


FINISHED = [*HALF, fs.Finish()]
FLOOD = fs.Repeat(None, [fs.Role()] * 50)


@cases(
    "target, reply, outcome",
    {
        "a flood": (RESPONSES, [*FINISHED, FLOOD], ("completed", "stop")),
        "a flood of a chat": (CHAT, [*FINISHED, FLOOD], ("completed", "stop")),
        "silence": (RESPONSES, [*FINISHED, fs.WaitClose()], ("completed", "stop")),
        "silence of a chat": (CHAT, [*FINISHED, fs.WaitClose()], ("completed", "stop")),
        "an error": (CHAT, [*HALF, fs.ErrorData(), fs.WaitClose()], ("failed", "server_error")),
    },
)
def test_behind_the_end_nothing_is_awaited_long(
    make_stage: MakeStage,
    monkeypatch: pytest.MonkeyPatch,
    reply: Steps,
    outcome: tuple[str, str],
    target: str,
) -> None:
    """A server that never ends the reply keeps neither the client nor the slot."""
    monkeypatch.setattr(leased, "SETTLE_S", 0.2)  # of 2 s
    stage = make_stage(slots=1)
    assert stage.client.create(*reply, stream=True, target=target, messages=WHOLE).status == 200
    stage.wait_jobs(0)
    assert stage.ends[outcome[0]] == {outcome[1]: 1}


@pytest.mark.parametrize("asks", [{"n": 2}, {"n": 2.0}, {"n": 1, "n_cmpl": 2}])  # b11434
def test_of_several_answers_every_one_is_awaited(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, asks: dict[str, Any]
) -> None:
    monkeypatch.setattr(leased, "SETTLE_S", 0.0)
    stage, second = make_stage(slots=1), "data: the second, which is slower\n\n"
    reply = stage.say(*FINISHED, fs.Sleep(0.2), fs.Raw(second), fs.DoneMarker(), **asks)
    assert reply.data.endswith(f"{second}data: [DONE]\n\n".encode())


def test_of_several_answers_every_one_is_watched(make_stage: MakeStage) -> None:
    """A hang in the second ends the chat with an error record."""
    stage = make_stage(slots=1, timeouts=TIMEOUTS)
    chunk = {"choices": [{"index": 1, "delta": {"content": "A second "}}]}
    words = [fs.Record(chunk), fs.Sleep(0.2)] * 10  # for longer than silence may last
    reply = stage.say(*FINISHED, *words, fs.WaitClose(), n=2)
    assert reply.data.count(b"A second ") == 10
    *_, last = [line for line in reply.data.splitlines() if line]
    assert "stall_timeout" in json.loads(last.removeprefix(b"data: "))["error"]["message"]
    stage.rig.wait_restarted()


# ---------------------------------------------------------------- slots


def test_hosts_and_clients_share_the_slots(make_stage: MakeStage, gate: Path) -> None:
    stage = make_stage(slots=2)
    host = stage.rig.submit(*HALF, fs.Gate(gate), *fs.plain_reply()[1:])
    with stage.halfway(gate) as (data, reply):
        jobs = stage.worker_jobs
        (created,) = [event for event in read_sse(data) if event["type"] == "response.created"]
        assert list(jobs.values()) == ["job", f"responses:{created['response']['id']}"]
        status = stage.rig.request(max(jobs))
        assert (status["phase"], status["output_chars"]) == ("generating", len("Once "))
        refused = stage.client.create()
        assert (refused.status, refused.headers["retry-after"]) == (503, "2")
        told = stage.rig.worker.submit("late", "", "Hi").get(timeout=WAIT_S)
        assert told == {"ok": False, "error": "NO_SLOT_AVAILABLE"}
        gate.touch()
        reply.read()
    assert stage.rig.ended(host)["state"] == "completed"
    assert stage.client.create().status == 200


def test_a_result_belongs_to_the_client(make_stage: MakeStage, gate: Path) -> None:
    stage = make_stage()
    with stage.halfway(gate) as (_, reply):
        (request_id,) = stage.worker_jobs
        worker = stage.rig.worker
        assert worker.get_result(request_id).get() == {"ok": False, "error": "NOT_READY"}
        read = worker.read_output(request_id).get(timeout=WAIT_S)
        assert read["ok"]
        assert (read["text"], read["done"]) == ("", False)
        awaited = worker.result(request_id)
        gate.touch()
        reply.read()
    result = awaited.get(timeout=WAIT_S)
    assert result["ok"]
    assert (result["state"], result["text"]) == ("completed", "")
    assert worker.get_status(request_id).get() == {"ok": False, "error": "NOT_FOUND"}
    assert stage.rig.status()["finished_request_ids"] == []


@of_either_api
@pytest.mark.parametrize("stream", [True, False])
def test_slot_is_freed_before_its_client_sees_end(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, target: str, *, stream: bool
) -> None:
    stage, end, over = make_stage(slots=1), ServedClient.end, threading.Event()

    def end_and_halt(client: ServedClient) -> None:
        end(client)
        over.wait(WAIT_S)

    monkeypatch.setattr(ServedClient, "end", end_and_halt)
    asked: Any = {"target": target, "messages": WHOLE, "stream": stream}
    for _ in range(2):
        assert stage.client.create(*fs.plain_reply(fs.Text("Once")), **asked).status == 200
    over.set()


def test_a_client_that_leaves_gives_its_slot_back(make_stage: MakeStage) -> None:
    stage = make_stage(slots=1)
    with stage.halfway():
        stage.wait_jobs(1)
    stage.wait_jobs(0)
    assert stage.ends["canceled"] == {"canceled": 1}
    stage.rig.journal.wait("client_closed", timeout=WAIT_S)


def test_a_goodbye_before_the_headers_blames_no_server(make_stage: MakeStage) -> None:
    """Of a WebSocket's client that says it and waits for the answer, connection open."""
    stage = make_stage(slots=1, heartbeat_s=0.1)
    for count in (1, 2):  # failures in a row would cost the server
        with opened(stage.client) as socket:
            socket.send(create(fs.WaitClose()))
            stage.rig.journal.wait("started", timeout=WAIT_S, count=count)
        stage.wait_jobs(0)
    assert stage.ends == {"completed": {}, "failed": {}, "canceled": {"canceled": 2}}
    assert stage.client.create().status == 200


@cases(
    "target, reply, takes_no",
    {
        "heartbeat": (RESPONSES, [fs.WaitClose()], "begin"),
        "byte of a chat": (CHAT, [*HALF, fs.WaitClose()], "write"),
    },
)
def test_a_client_that_takes_nothing_blames_no_server(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, target: str, reply: Steps, takes_no: str
) -> None:
    stage = make_stage(slots=1, heartbeat_s=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(ServedClient, takes_no, Mock(side_effect=TimeoutError("timed out")))
        with pytest.raises(HTTPException):
            stage.client.create(*reply, stream=True, target=target, messages=WHOLE)
        stage.wait_jobs(0)
    assert stage.ends == {"completed": {}, "failed": {}, "canceled": {"canceled": 1}}


def close_aside(worker: LlamaWorker) -> None:
    """It waits for the client, which is told first."""
    threading.Thread(target=worker.close).start()


@cases(
    "happen, reason, status",
    {
        "a cancel": (lambda worker: worker.cancel(1), "canceled", 200),
        "a restart": (lambda worker: worker.restart("new"), "worker_restarted", 200),
        "a close": (close_aside, "worker_stopped", 503),
    },
)
def test_what_ends_a_response_is_told_its_client(
    make_stage: MakeStage, happen: Callable[[Any], Any], reason: str, status: int
) -> None:
    stage = make_stage(slots=1)
    with stage.halfway() as (data, reply):
        future = happen(stage.rig.worker)
        assert reason in ended(read_sse(data + reply.read()))["error"]["message"]
    if future is not None:
        future.get(timeout=WAIT_S)
    assert stage.client.create().status == status


@of_either_api
def test_cancel_before_the_headers_forbids_a_retry(make_stage: MakeStage, target: str) -> None:
    stage = make_stage(slots=1)
    with stage.client.ask(fs.WaitClose(), target=target, messages=WHOLE) as connection:
        (request_id,) = stage.wait_jobs(1)
        stage.rig.journal.wait("started", timeout=WAIT_S)
        assert stage.rig.worker.cancel(request_id).get(timeout=WAIT_S) is True
        reply = HTTPResponse(connection)
        reply.begin()
    advice = reply.getheader("x-should-retry"), reply.getheader("retry-after")
    assert (reply.status, advice) == (499, ("false", None))


def test_cancel_before_the_first_byte_forbids_a_retry(make_stage: MakeStage) -> None:
    """Its reply comes in one piece, and the server has begun with it."""
    stage = make_stage(slots=1)
    steps = fs.Headers(), fs.Text("a"), fs.WaitClose()
    with stage.client.ask(*steps, input="x", stream=False) as connection:
        (request_id,) = stage.wait_jobs(1)

        def phase() -> str:
            status: Any = stage.rig.worker.get_status(request_id).get(timeout=WAIT_S)
            return str(status["phase"])

        eventually(lambda: phase() == "generating", "its first token")
        assert stage.rig.worker.cancel(request_id).get(timeout=WAIT_S) is True
        reply = HTTPResponse(connection)
        reply.begin()
    assert (reply.status, reply.getheader("x-should-retry")) == (499, "false")


# ---------------------------------------------------------------- the worker's own life


@pytest.mark.parametrize("state", ["stopped", "restarting", "draining", "failed", "closed"])
def test_without_a_server_clients_get_503(make_stage: MakeStage, state: str) -> None:
    restarts_count = 0 if state == "failed" else 5
    policy = fast_restart(restart_backoff_s=60.0, max_restarts_per_window=restarts_count)
    stage = make_stage(start=state != "stopped", restart=policy)
    rig = stage.rig
    if state in ("restarting", "failed"):
        rig.run(fs.KillSelf())
        rig.wait_state(WorkerState.FAILED if state == "failed" else WorkerState.RUNNING)
    if state == "draining":
        rig.submit(fs.WaitClose())
        rig.worker.drain()
    if state == "closed":
        rig.worker.close()
    refused = stage.client.create(stream=True)
    # a lockout lasts until the host's `start`
    comes_back = state not in ("failed", "closed")
    assert (refused.status, "retry-after" in refused.headers) == (503, comes_back)
    assert stage.say(*fs.plain_reply()).status == 503


@of_either_api
def test_a_client_that_tries_again_is_one_job(
    make_stage: MakeStage, gate: Path, target: str
) -> None:
    """A 500 is mostly the fault of what is asked: only several jobs accuse the server."""
    stage = make_stage(restart=fast_restart(server_errors_before_restart=2))
    host = stage.rig.submit(*HALF, fs.Gate(gate), *fs.plain_reply()[1:])
    asked: Any = {"target": target, "messages": WHOLE}
    for _ in range(3):
        assert stage.client.create(fs.HttpError(500), **asked).status == 500
    gate.touch()
    assert stage.rig.ended(host)["state"] == "completed"
    for words in ("Who?", "Where?"):
        other = [{"role": "user", "content": words}]
        stage.client.create(fs.HttpError(500), target=target, messages=other, input=words)
    stage.rig.wait_restarted()


@of_either_api
def test_refusal_has_the_reason_that_the_server_gives(make_stage: MakeStage, target: str) -> None:
    stage = make_stage()
    refusal = fs.HttpError(400, "the prompt is too long", "exceed_context_size_error")
    assert stage.client.create(refusal, target=target, messages=WHOLE).status == 400
    stage.wait_jobs(0)
    assert stage.ends["failed"] == {"context_exceeded": 1}


def test_a_models_malformed_call_blames_no_server(make_stage: MakeStage) -> None:
    """The server's report of it has the code of a server error."""
    stage = make_stage(restart=fast_restart(server_errors_before_restart=1))
    report = fs.ErrorData(500, "Failed to parse tool call arguments as JSON")
    for target, tool in (
        (RESPONSES, {"type": "function", "name": "look", "parameters": {}}),
        (CHAT, {"type": "function", "function": {"name": "look", "parameters": {}}}),
    ):
        said: Any = {"target": target, "messages": WHOLE, "tools": [tool]}
        assert b"parse tool call" in stage.client.create(*HALF, report, stream=True, **said).data
    assert stage.ends["failed"] == {"tool_parse_error": 2}
    assert stage.rig.status()["restart_count"] == 0


@pytest.mark.parametrize(("target", "status"), [(RESPONSES, 400), (CHAT, 500)])
@pytest.mark.parametrize(
    "says",
    [
        "image input is not supported - hint: provide the mmproj",
        "Failed to parse tool call arguments as JSON: unexpected end of input",
    ],
    ids=["an image", "a malformed call"],
)
def test_what_is_refused_blames_no_server(
    make_stage: MakeStage, target: str, status: int, says: str
) -> None:
    """What b11434 answers where its model takes none, of a request that it never could serve."""
    stage = make_stage(restart=fast_restart(server_errors_before_restart=1))
    tool = {"type": "function", "name": "look", "parameters": {}}
    said: Any = {"messages": WHOLE, "tools": [tool | {"function": tool}]}
    refusal = fs.HttpError(500, says)
    assert stage.client.create(refusal, target=target, **said).status == status
    stage.wait_jobs(0)
    assert stage.rig.run()["state"] == "completed"
    assert stage.rig.status()["restart_count"] == 0


@of_either_api
def test_a_lack_of_descriptors_blames_no_server(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    stage = make_stage(restart=fast_restart(transport_failures_before_restart=1))
    with monkeypatch.context() as crowded:
        lack = OSError(errno.EMFILE, "Too many open files")
        crowded.setattr(session, "connect", Mock(side_effect=lack))
        reply = stage.client.create(target=target, messages=WHOLE)
    assert (reply.status, b"Too many open files" in reply.data) == (502, True)
    assert stage.ends["failed"] == {"unknown_error": 1}
    assert (stage.client.create().status, stage.rig.status()["restart_count"]) == (200, 0)


# ---------------------------------------------------------------- chat completions, as they are


def test_a_chat_completion_is_watched_and_unchanged(make_stage: MakeStage, gate: Path) -> None:
    stage = make_stage()
    text = '{"choices": [ {"delta": {"content":"Once "}, "finish_reason" : null} ], "x":1e2}'
    end = '{"choices":[{"delta":{},"finish_reason":"length"}]}'
    first, last = f": hello\r\n\r\ndata: {text}\n\n", f"data:{end}\r\n\r\ndata: [DONE]\n\n"
    steps = [fs.Headers(), fs.Raw(first), fs.Gate(gate), fs.Raw(last)]
    with stage.client.begun(*steps, until=b"1e2}", target=CHAT, messages=WHOLE) as (data, reply):
        ((request_id, job),) = stage.wait_jobs(1).items()
        assert job.startswith("responses:chat_")
        assert stage.rig.request(request_id)["phase"] == "generating"
        gate.touch()
        assert data + reply.read() == (first + last).encode()
    stage.wait_jobs(0)
    assert stage.ends["completed"] == {"max_tokens": 1}


def test_a_lost_actors_response_leaves_no_record(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, whole = make_stage(slots=1), RequestActor.handle

    def handle(actor: RequestActor, message: RequestMessage) -> None:
        if isinstance(message, BeginLease):
            raise RuntimeError("an accident")
        whole(actor, message)

    monkeypatch.setattr(RequestActor, "handle", handle)
    reply = stage.client.create(*HALF, fs.WaitClose(), stream=True)
    assert b"an accident" in reply.data
    assert stage.rig.status()["finished_request_ids"] == []


def test_other_requests_hold_no_slot(make_stage: MakeStage) -> None:
    stage = make_stage(slots=1)
    with stage.halfway():
        assert stage.client.send("GET", "/v1/models").status == 200
        assert stage.client.send("GET", "/props").status == 200
        assert len(stage.worker_jobs) == 1


def test_one_of_upstream_and_worker_is_given(make_worker: MakeWorker) -> None:
    worker = make_worker(start=False).worker
    with pytest.raises(ConfigError, match="upstream"):
        ResponsesProxy(ResponsesProxyConfig(upstream="http://127.0.0.1:1"), worker=worker)
    with pytest.raises(ConfigError, match="upstream"):
        ResponsesProxy(ResponsesProxyConfig())
    for wrong in ({"config": worker}, {"worker": worker.config}, {"config": "http://127.0.0.1:1"}):
        with pytest.raises(TypeError, match="must be a"):
            ResponsesProxy(**wrong)
