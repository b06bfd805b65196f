"""Streams over a real socket: what comes out, when, and what a broken one is called."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from llama_worker import WorkerStartError
from llama_worker.runtime.chat_exchange import ChatExchange
from llama_worker.stream.events import StreamEvent
from llama_worker.types import RequestPhase, WorkerState
from tests.actors.conftest import WAIT_S, GatePath, MakeWorker, Rig, eventually, fast_timeouts
from tests.fake_script import (
    BigRecord,
    DoneMarker,
    Echo,
    End,
    ErrorData,
    ErrorField,
    Exit,
    Fin,
    Finish,
    Gate,
    Headers,
    HttpError,
    KillSelf,
    Newlines,
    Ping,
    PingEvery,
    PromptProgress,
    Raw,
    Reasoning,
    Record,
    Redirect,
    Reset,
    Role,
    Script,
    Sleep,
    SplitText,
    Step,
    Text,
    Tokens,
    Usage,
    WaitClose,
    plain_reply,
)

FRAMINGS = ["chunked", "close", "length"]
LIVE_FRAMINGS = ["chunked", "close"]
MIB = 1 << 20


@pytest.fixture
def rig(make_worker: MakeWorker) -> Rig:
    return make_worker()


def _chunk(delta: Any, finish_reason: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}, ensure_ascii=False)


def _wire(newline: str, *, bom: bool = False) -> bytes:
    """A whole body: reasoning, text in several scripts, comments, unknown fields, the end."""
    records = [
        ": a comment",
        f"data: {_chunk({'role': 'assistant', 'content': None})}",
        f"id: 7{newline}event: delta{newline}data: {_chunk({'reasoning_content': 'hm 🤔'})}{newline}unknown: x",
        f"data: {_chunk({'content': 'naïve 日本'})}",
        ":",
        f"data:{_chunk({'content': '語 🦙 end'})}",
        f"data: {_chunk({}, 'stop')}",
        "data: [DONE]",
    ]
    body = "".join(record + newline + newline for record in records).encode()
    return b"\xef\xbb\xbf" + body if bom else body


def _split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


# ------------------------------------------------------------ any split, any newline, any framing


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
def test_output_does_not_depend_on_splits_newlines_or_framing(make_worker: MakeWorker, newline: str) -> None:
    rig = make_worker(slots=4)
    chance = random.Random(7)
    wire = _wire(newline)
    cases = [[bytes([byte]) for byte in wire], [wire]]
    cases += [_split(wire, chance.sample(range(1, len(wire)), 25)) for _ in range(6)]
    cases += [_split(_wire(newline, bom=True), [1]), _split(_wire(newline, bom=True), [2, 3])]
    for number, pieces in enumerate(cases):
        result = rig.run(Headers(framing=FRAMINGS[number % 3]), Raw(pieces, delay_s=0.001 * (number % 2)))  # type: ignore[arg-type]
        assert (result["state"], result["reasoning"], result["text"]) == ("completed", "hm 🤔", "naïve 日本語 🦙 end")


@pytest.mark.parametrize("kind", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("framing", LIVE_FRAMINGS)
def test_a_token_is_there_when_it_was_sent(
    rig: Rig, make_gate: Callable[[], GatePath], framing: Any, kind: str
) -> None:
    gates = [make_gate() for _ in range(3)]
    steps: list[Step] = [Headers(framing=framing), Newlines(kind), Role()]
    for number, gate in enumerate(gates):
        steps += [Text(f"token{number} "), Gate(gate.path)]
    request = rig.submit(*steps, Finish(), DoneMarker())
    for number, gate in enumerate(gates):
        rig.wait_text(request, f"token{number} ")  # the server waits: nothing that follows can have pushed it
        assert f"token{number + 1}" not in rig.text(request)
        gate.open()
    assert rig.ended(request)["text"] == "token0 token1 token2 "


@pytest.mark.parametrize("framing", LIVE_FRAMINGS)
def test_a_character_cut_in_two_comes_out_whole(rig: Rig, framing: Any) -> None:
    result = rig.run(Headers(framing=framing), SplitText("a 🦙 b"), Finish(), DoneMarker())
    assert result["text"] == "a 🦙 b"


def test_text_and_reasoning_are_read_from_offsets(rig: Rig, make_gate: Callable[[], GatePath]) -> None:
    gate = make_gate()
    request = rig.submit(Reasoning("think"), Text("héllo"), Gate(gate.path), Text(" wörld"), Finish(), DoneMarker())
    rig.wait_text(request, "héllo")
    part = rig.worker.read_output(request, text_offset=2).get()
    assert part == {
        "ok": True, "text": "llo", "reasoning": "think", "text_offset": 5, "reasoning_offset": 5, "done": False
    }  # fmt: skip
    gate.open()
    rig.wait_ended(request)
    rest = rig.worker.read_output(request, text_offset=5, reasoning_offset=5).get()
    assert rest == {
        "ok": True, "text": " wörld", "reasoning": "", "text_offset": 11, "reasoning_offset": 5, "done": True
    }  # fmt: skip
    assert rig.ended(request)["text"] == "héllo wörld"


def test_a_flood_of_tokens_arrives_whole_and_in_order(make_worker: MakeWorker) -> None:
    rig = make_worker(slots=4)
    requests = [rig.submit(*plain_reply(Tokens(5000, batch=1 + 49 * (n % 2)))) for n in range(4)]
    expected = "".join(f"tok{i} " for i in range(5000))
    assert all(rig.ended(request)["text"] == expected for request in requests)


# ------------------------------------------------------------ ends


@pytest.mark.parametrize(
    "steps",
    [
        [Finish(), DoneMarker()],
        [Finish()],
        [DoneMarker()],
        [Finish(), Usage(), DoneMarker()],
        [Finish(), WaitClose()],
        [Finish(), Fin()],
        [Finish(), Reset()],
        [Finish(), PingEvery(0.05), WaitClose()],
        [DoneMarker(), WaitClose()],
    ],
    ids=lambda steps: "+".join(type(step).__name__ for step in steps),
)
def test_a_stream_that_said_so_is_complete(rig: Rig, steps: list[Step]) -> None:
    result = rig.run(Headers(), Text("all"), *steps)
    assert (result["state"], result["finish_reason"], result["text"]) == ("completed", "stop", "all")
    assert rig.status()["slots_used"] == 0


def test_usage_that_comes_late_is_waited_for(rig: Rig) -> None:
    result = rig.run(Text("a"), Finish(), Sleep(0.3), Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=5))
    assert result["usage"] == {"prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": 5}


@pytest.mark.parametrize("framing", LIVE_FRAMINGS)
@pytest.mark.parametrize(
    "steps",
    [
        [End()],
        [Fin()],
        [Reset()],
        [Record(_chunk({"content": "x"}), end="")],
        [Record(_chunk({"content": "x"}), end="\n")],
        [Record(_chunk({}, "stop"), end="")],
        [Record("[DONE]", end="")],
        [Record("[DONE]", end="\n")],
        [Record(_chunk({"content": "x"}), cut=30)],
        [Ping(), Fin()],
    ],
    ids=["end", "fin", "reset", "no end", "half an end", "finish, no end", "done, no end", "done, half", "cut", "ping"],
)
def test_a_stream_that_just_ends_is_disconnected(rig: Rig, framing: Any, steps: list[Step]) -> None:
    result = rig.run(Headers(framing=framing), Text("part"), *steps)
    assert (result["state"], result.get("fail_reason"), result["text"]) == ("failed", "stream_disconnected", "part")


def test_a_stream_cut_in_a_character_is_disconnected(rig: Rig) -> None:
    result = rig.run(Text("part"), Raw([b'data: {"choices": [{"delta": {"content": "\xf0\x9f']), Fin())
    assert (result.get("fail_reason"), result["text"]) == ("stream_disconnected", "part")


def test_a_server_that_closes_before_the_headers_is_disconnected(rig: Rig) -> None:
    assert rig.run(Reset())["fail_reason"] == "stream_disconnected"
    rig.wait_state(WorkerState.READY)
    assert rig.run()["state"] == "completed"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_server_that_dies_in_mid_stream_is_server_died(rig: Rig, name: str) -> None:
    result = rig.run(Headers(), Text("part"), Sleep(0.1), KillSelf(name))
    assert (result["fail_reason"], result["text"]) == ("server_died", "part")
    rig.wait_restarted()
    assert rig.run()["state"] == "completed"


def test_what_a_server_had_sent_before_it_died_is_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ChatExchange.read

    def read_late(chat: ChatExchange) -> list[StreamEvent] | None:
        eventually(lambda: rig.status()["state"] is not WorkerState.READY, "news of the death")
        return read(chat)

    monkeypatch.setattr(ChatExchange, "read", read_late)
    result = rig.run(Headers(), Tokens(1000), Text("last"), KillSelf())
    assert (result["fail_reason"], result["text"][:5], result["text"][-4:]) == ("server_died", "tok0 ", "last")


# ------------------------------------------------------------ errors


@pytest.mark.parametrize("record", [ErrorData(message="told so"), ErrorField(message="told so")], ids=["data", "field"])
@pytest.mark.parametrize("after", [[], [DoneMarker()], [WaitClose()], [Text("more"), Finish(), DoneMarker()]])
def test_an_error_record_is_terminal(rig: Rig, record: Step, after: list[Step]) -> None:
    result = rig.run(Headers(), Text("part"), record, *after)
    assert (result["state"], result["fail_reason"], result["text"]) == ("failed", "server_error", "part")
    assert "told so" in result["fail_detail"]


@pytest.mark.parametrize("record", [ErrorData(message="told so"), ErrorField(message="told so")], ids=["data", "field"])
def test_an_error_record_after_the_finish_reason_still_fails_the_request(rig: Rig, record: Step) -> None:
    result = rig.run(Text("part"), Finish(), Sleep(0.2), record)
    assert (result["fail_reason"], result["text"]) == ("server_error", "part")


def test_an_error_record_alone_is_no_empty_success(rig: Rig) -> None:
    result = rig.run(Headers(), ErrorField(message="bad request"), DoneMarker())
    assert (result["state"], result["fail_reason"]) == ("failed", "server_error")


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_a_status_other_than_200_is_http_error_with_the_servers_words(rig: Rig, status: int) -> None:
    result = rig.run(HttpError(status, message="the prompt is too long"))
    assert (result["fail_reason"], result["text"]) == ("http_error", "")
    assert str(status) in result["fail_detail"]
    assert "the prompt is too long" in result["fail_detail"]


@pytest.mark.parametrize("body", ["", "<html>Bad Gateway</html>", "{", "[]", '{"error": "as text"}', "\xff" * 10])
def test_any_error_body_can_be_shown(rig: Rig, body: str) -> None:
    result = rig.run(HttpError(502, body=body))
    assert result["fail_reason"] == "http_error"
    assert result["fail_detail"].startswith("HTTP 502: ")


def test_an_error_status_without_its_body_is_http_error_too(make_worker: MakeWorker) -> None:
    rig = make_worker(timeouts=fast_timeouts(headers_timeout_s=10.0))
    result = rig.run(Headers(status=500, framing="length", length=100), WaitClose())
    assert (result["fail_reason"], result["fail_detail"]) == ("http_error", "HTTP 500: no message")
    assert rig.run()["state"] == "completed"
    assert rig.status()["restart_count"] == 0


def test_an_error_body_without_an_end_is_cut(rig: Rig) -> None:
    result = rig.run(HttpError(500, body="x" * 100_000))
    assert result["fail_reason"] == "http_error"
    assert len(result["fail_detail"]) < 5000


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(rig: Rig, free_port: Callable[[], int], status: int) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as elsewhere:
        elsewhere.setblocking(False)
        location = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/v1/chat/completions"
        result = rig.run(Redirect(location, status=status))
        assert result["fail_reason"] == "http_error"
        assert str(status) in result["fail_detail"]
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_a_redirect_to_nowhere_is_not_even_read(rig: Rig) -> None:
    result = rig.run(Redirect("http://[::1", status=307))
    assert (result["fail_reason"], result["fail_detail"][:8]) == ("http_error", "HTTP 307")


@pytest.mark.parametrize(
    "garbage",
    [
        Record("this is no JSON"),
        Record('{"choices": ['),
        Record("[1, 2]"),
        Raw([b'data: {"choices": [{"delta": {"content": "\xff\xfe"}}]}\n\n']),
    ],
    ids=["words", "half JSON", "list", "no UTF-8"],
)
def test_garbage_is_protocol_error_and_what_came_before_is_kept(rig: Rig, garbage: Step) -> None:
    result = rig.run(Headers(), Text("good"), garbage, Text("more"), Finish(), DoneMarker())
    assert (result["fail_reason"], result["text"]) == ("protocol_error", "good")
    assert rig.run()["state"] == "completed"


def test_a_reply_that_is_no_stream_is_protocol_error(rig: Rig) -> None:
    steps = [Headers(framing="length", content_type="text/html"), Raw([b"<html>hello</html>\n"])]
    assert rig.run(*steps)["fail_reason"] in ("protocol_error", "stream_disconnected")


@pytest.mark.parametrize("terminated", [True, False])
def test_a_record_beyond_16_mib_is_protocol_error_and_what_came_before_is_kept(rig: Rig, terminated: bool) -> None:
    result = rig.run(Headers(), Text("good"), BigRecord(17 * MIB, terminated=terminated), WaitClose())
    assert (result["fail_reason"], result["text"]) == ("protocol_error", "good")
    assert rig.run()["state"] == "completed"


def test_a_record_below_16_mib_is_read(make_worker: MakeWorker) -> None:
    rig = make_worker(loop_detector=None)
    result = rig.run(Headers(), BigRecord(15 * MIB), Finish(), DoneMarker())
    assert (result["state"], len(result["text"])) == ("completed", 15 * MIB)


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nno chunk\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nContent-Type: text/event-stream\r\n\r\ndata: ",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"\x00\x01\x02",
    ],
    ids=["bad chunk", "no HTTP", "too short", "bad status", "binary"],
)
def test_broken_http_fails_the_request_alone(rig: Rig, wire: bytes) -> None:
    result = rig.run(Raw([wire], framed=False), Fin())
    assert result["fail_reason"] in ("protocol_error", "stream_disconnected")
    assert result["text"] == ""
    rig.wait_state(WorkerState.READY)
    assert rig.run()["state"] == "completed"


def test_a_server_that_refuses_connections_is_connect_failed(make_worker: MakeWorker) -> None:
    # The listener goes, the process stays: SIGTERM is held up by an open stream that the script never ends.
    rig = make_worker(slots=2, timeouts=fast_timeouts(health_probe_interval_s=None))
    rig.wait_text(rig.submit(Headers(), Text("a"), WaitClose()), "a")
    rig.journal.wait("started")
    os.kill(rig.status()["pid"], signal.SIGTERM)
    assert rig.journal.wait("signal")["connected"] == 1
    eventually(lambda: not _accepts(rig.config.port), "a closed listener")
    request = rig.submit()
    assert rig.ended(request)["fail_reason"] in ("connect_failed", "server_died")
    rig.wait_restarted()
    assert rig.run()["state"] == "completed"


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# ------------------------------------------------------------ what is sent


def test_proxy_settings_of_the_environment_are_ignored(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login somebody password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    rig = make_worker()
    assert rig.run()["state"] == "completed"
    assert all("authorization" not in fact["headers"] for fact in rig.journal.facts("request"))


def test_the_request_is_what_the_contract_says(rig: Rig) -> None:
    request = rig.submit(
        Echo(), Finish(), DoneMarker(), prompt="Hi", temperature=0.5, new_knob={"deep": [1]}, stream=False, tools=[1]
    )
    body = json.loads(rig.ended(request)["text"])
    assert body["stream"] is True
    assert body["messages"][-1]["content"].startswith("Hi")
    assert (body["temperature"], body["new_knob"], body["max_tokens"]) == (0.5, {"deep": [1]}, 4096)
    assert "tools" not in body
    assert body["return_progress"] is True
    assert {"'stream'", "'tools'"} <= {word for line in rig.status()["warnings"] for word in line.split()}


def test_readiness_asks_exactly_v1_models(rig: Rig) -> None:
    asked = [fact["path"] for fact in rig.journal.facts("request", method="GET")]
    assert "/v1/models" in asked
    assert "/v1/models/" not in asked


KEY = "sk-very-secret-0815"


def test_the_api_key_is_sent_and_shown_nowhere(make_worker: MakeWorker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig = make_worker(Script(), start=False, api_key=KEY, env={"LLAMA_API_KEY": KEY})
    rig.start()
    assert rig.run()["state"] == "completed"
    told = rig.ended(rig.submit(HttpError(401, message=f"Invalid API Key: {KEY}")))
    also = rig.ended(rig.submit(Headers(), ErrorData(message=f"Invalid API Key: {KEY}")))
    shown = [told, also, rig.status(), rig.worker.get_debug_info().get(), rig.worker, rig.config, caplog.text]
    assert KEY not in repr(shown) + str(rig.worker) + str(rig.config)
    assert any(fact["headers"].get("authorization") == "***" for fact in rig.journal.facts("request", n=1))


def test_the_api_key_in_the_servers_own_log_is_masked(make_worker: MakeWorker) -> None:
    log = [f"started with --api-key {KEY}", "fatal"]
    rig = make_worker(Script(exits=[Exit(code=1, when="before_bind", log=log)]), start=False, api_key=KEY)
    with pytest.raises(WorkerStartError) as failure:
        rig.worker.start().get(timeout=WAIT_S)
    assert KEY not in str(failure.value) + repr(failure.value) + repr(failure.value.log_tail)
    assert KEY not in repr(rig.worker.get_debug_info().get()) + repr(rig.status())


def test_a_wrong_api_key_is_a_start_that_never_gets_ready(make_worker: MakeWorker) -> None:
    rig = make_worker(
        start=False, api_key="wrong", env={"LLAMA_API_KEY": KEY}, timeouts=fast_timeouts(startup_timeout_s=1.0)
    )
    with pytest.raises(WorkerStartError) as failure:
        rig.worker.start().get(timeout=WAIT_S)
    assert failure.value.reason == "startup_timeout"


# ------------------------------------------------------------ progress


def test_phases_follow_the_stream(rig: Rig, make_gate: Callable[[], GatePath]) -> None:
    gates = [make_gate() for _ in range(3)]
    request = rig.submit(
        Gate(gates[0].path),
        *(Headers(), PromptProgress(128, 512, cache=64), Gate(gates[1].path)),
        *(Text("t"), Gate(gates[2].path), Finish(), Usage(), DoneMarker()),
    )
    for phase, gate in zip((RequestPhase.WAITING, RequestPhase.PREFILL, RequestPhase.GENERATING), gates, strict=True):
        eventually(lambda phase=phase: rig.request(request)["phase"] is phase, f"phase {phase}")  # type: ignore[misc]
        gate.open()
    status = rig.wait_ended(request)
    assert (status["phase"], status["state"]) == ("done", "completed")
    assert status["prompt_progress"] == {"processed": 128, "total": 512, "cached": 64}
    instants = [status[name] for name in ("created_at", "dispatched_at", "first_token_at", "completed_at")]
    assert instants == sorted(instants)


def test_a_keepalive_is_a_byte_and_no_progress(rig: Rig, make_gate: Callable[[], GatePath]) -> None:
    gate = make_gate()
    request = rig.submit(Headers(), Text("t"), Gate(gate.path), Ping(), WaitClose())
    rig.wait_text(request, "t")
    before = rig.request(request)
    gate.open()
    eventually(lambda: rig.request(request)["last_stream_byte_at"] > before["last_stream_byte_at"], "the keepalive")
    after = rig.request(request)
    assert after["last_progress_at"] == before["last_progress_at"] or "last_liveness_at" in after
    rig.worker.cancel(request).get()
