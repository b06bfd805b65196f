"""Streams over a real socket: what comes out, when, and what a broken one is called."""

import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import sseclient

from llama_worker import Canary, LlamaWorkerError, RestartPolicy, WorkerStartError
from llama_worker.config.settings import Endpoint
from llama_worker.runtime.http.stream_reader import StreamReader
from llama_worker.stream.sse import SseDecoder
from llama_worker.testing import scripts as fs
from tests.actors.conftest import HOST, WAIT_S, MakeWorker, Rig, eventually, fast_timeouts

ENDS: list[tuple[list[fs.Step], str, str | None]] = [
    ([fs.Headers(), fs.Text("all"), fs.Finish(), fs.Reset()], "all", None),
    ([fs.Headers(), fs.Text("all"), fs.Finish(), fs.PingEvery(0.05), fs.WaitClose()], "all", None),
    ([fs.Headers(), fs.Text("all"), fs.DoneMarker(), fs.WaitClose()], "all", None),
    ([fs.Headers(), fs.Text("part")], "part", "stream_disconnected"),
    ([fs.Headers(), fs.Text("part"), fs.Fin()], "part", "stream_disconnected"),
    ([fs.Headers(), fs.Text("part"), fs.Reset()], "part", "stream_disconnected"),
    ([fs.Headers(framing="close"), fs.Text("part")], "part", "stream_disconnected"),
    (
        [
            fs.Headers(),
            fs.Text("part"),
            fs.Record("this is no JSON"),
            fs.Text("more"),
            fs.WaitClose(),
        ],
        "part",
        "protocol_error",
    ),
    ([fs.Reset()], "", "stream_disconnected"),
    ([fs.Headers(status=500, framing="length", length=100), fs.WaitClose()], "", "http_error"),
]


def test_how_streams_end(make_worker: MakeWorker) -> None:
    """Each request fails, or not, for itself alone: the server is the same to the end."""
    restart = RestartPolicy(
        transport_failures_before_restart=1000, server_errors_before_restart=1000
    )
    rig = make_worker(slots=len(ENDS), restart=restart)
    requests = [rig.submit(*steps) for steps, _, _ in ENDS]
    for request, (steps, text, reason) in zip(requests, ENDS, strict=True):
        result = rig.ended(request)
        assert (result["text"], result.get("fail_reason")) == (text, reason), (steps, result)
    assert rig.run()["state"] == "completed"
    assert (rig.status()["restart_count"], rig.status()["slots_used"]) == (0, 0)


def test_a_redirect_is_not_followed(rig: Rig, free_port: Callable[[], int]) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as elsewhere:
        elsewhere.setblocking(False)
        location = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/v1/chat/completions"
        for to in (location, "http://[::1"):
            result = rig.run(fs.Redirect(to, status=307))
            assert (result["fail_reason"], result["fail_detail"][:8]) == ("http_error", "HTTP 307")
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_server_refusing_connections_is_probed_and_replaced(make_worker: MakeWorker) -> None:
    # The listener goes, the process stays: SIGTERM is held up by an open stream that the script
    # never ends.
    rig = make_worker(slots=2, timeouts=fast_timeouts(health_probe_interval_s=None))
    rig.wait_text(rig.submit(fs.Headers(), fs.Text("a"), fs.WaitClose()), "a")
    os.kill(rig.status()["pid"], signal.SIGTERM)
    assert rig.journal.wait("signal")["connected"] == 1
    eventually(lambda: socket.socket().connect_ex((HOST, rig.config.port)), "a closed listener")
    assert rig.run()["fail_reason"] in ("connect_failed", "server_died")
    rig.wait_restarted()
    assert rig.run()["state"] == "completed"


def test_server_blocked_in_send_hears_of_an_abort(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not hear a FIN while our receive window is full; it hears a reset."""
    slow, stands_still, go_on = threading.Event(), threading.Event(), threading.Event()
    readers: list[StreamReader] = []
    take_in = StreamReader._take_in

    def slow_take_in(reader: StreamReader) -> None:
        if slow.is_set():
            readers.append(reader)
            stands_still.set()
            go_on.wait(WAIT_S)
        take_in(reader)

    monkeypatch.setattr(StreamReader, "_take_in", slow_take_in)
    rig = make_worker(fs.Script(journal_tokens=True), loop_detector=None)
    request = rig.submit(fs.Headers(), fs.Repeat(None, [fs.Text("token " * 1000)]))
    rig.wait_text(request, "token ")
    slow.set()
    assert stands_still.wait(WAIT_S)
    eventually(
        lambda: rig.journal.facts(n=1)[-1]["fact"] == "send_waits", "a send that does not end"
    )
    readers[0].abort()
    go_on.set()
    rig.journal.wait("client_closed", n=1, timeout=WAIT_S)


def test_sseclient_decodes_every_record_session_makes_every_request(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()

    def count(owner: type, name: str, what: str) -> None:
        real = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[f"{what} begun"] += 1  # also where it raises, as a probe of a server that ends
            told = real(*args, **kwargs)
            if isinstance(told, list | Iterator):
                told = list(told)
                counts[what] += len(told)
            return told

        monkeypatch.setattr(owner, name, counting)

    count(SseDecoder, "feed", "records")
    count(sseclient.SSEClient, "events", "decoded")
    count(socket.socket, "connect", "connections")
    count(socket.socket, "connect_ex", "connections")
    count(requests.Session, "send", "requests")
    rig = make_worker(timeouts=fast_timeouts(health_probe_interval_s=0.05))
    assert rig.run(*fs.plain_reply(fs.Tokens(1000)))["state"] == "completed"
    failed = rig.run(fs.Headers(), fs.Text("a"), fs.ErrorField(400, "full"))
    assert failed["fail_reason"] == "server_error"
    eventually(lambda: counts["requests begun"] > 10, "health probes")
    rig.stop()
    assert counts["decoded"] == counts["records"] >= 1002
    connections = "connections begun"
    eventually(lambda: counts["requests begun"] == counts[connections], "a connection for each")


def test_params_pass_but_workers_own_replaced_with_warning(rig: Rig) -> None:
    rig.run(new_knob={"deep": [1]}, stream=False, tools=[1])
    body = rig.journal.facts("request", n=1)[0]["body"]
    assert (body["stream"], body["new_knob"], "tools" in body) == (True, {"deep": [1]}, False)
    assert {"'stream'", "'tools'"} <= {
        word for line in rig.status()["warnings"] for word in line.split()
    }


KEY = "sk-very-secret-0815"


def test_the_api_key_is_sent_and_shown_nowhere(
    make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    refusal = f"Invalid API Key: {KEY}"
    answer = fs.Answer(401, {"error": {"message": refusal}})
    script = fs.Script(startup=fs.Startup(log=[f"started with --api-key {KEY}"]), tokenize=[answer])
    rig = make_worker(script, api_key=KEY, env={"LLAMA_API_KEY": KEY})
    assert rig.run()["state"] == "completed"
    refused = rig.ended(rig.submit(fs.HttpError(401, message=refusal)))
    failed = rig.ended(rig.submit(fs.Headers(), fs.ErrorData(message=refusal)))
    with pytest.raises(LlamaWorkerError, match=r"Invalid API Key: \*\*\*") as not_counted:
        rig.worker.count_tokens("", "Hello?").get(timeout=WAIT_S)
    script = fs.Script(replies=[fs.ScriptedReply([fs.HttpError(401, message=refusal)])])
    canary = Canary(prompt="2 + 2?", check=bool)
    unfit = make_worker(script, start=False, api_key=KEY, canary=canary)
    with pytest.raises(WorkerStartError, match=r"Invalid API Key: \*\*\*") as not_started:
        unfit.worker.start().get(timeout=WAIT_S)
    shown = [
        refused,
        failed,
        rig.status(),
        rig.debug(),
        rig.worker,
        rig.config,
        Endpoint.of(rig.config),
        not_counted.value,
        not_started.value,
        unfit.status(),
        caplog.text,
    ]
    assert KEY not in repr(shown) + str(rig.worker) + str(rig.config)
    assert "started with --api-key ***" in repr(shown)
    assert any(
        fact["headers"].get("authorization") == "***" for fact in rig.journal.facts("request", n=1)
    )
