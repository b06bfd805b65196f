"""The scripted server does what it advertises."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import fake_llama_server
from tests import fake_script as fs
from tests.actors.conftest import eventually
from tests.fake_script import (
    Answer,
    Burn,
    Child,
    DiskReads,
    DoneMarker,
    Echo,
    Exit,
    Fin,
    Finish,
    Flood,
    FreezeEndpoints,
    Gate,
    Headers,
    HttpError,
    Journal,
    KillSelf,
    Lines,
    Newlines,
    Note,
    PingEvery,
    Raw,
    Record,
    Repeat,
    Reply,
    Reset,
    Role,
    Script,
    Sleep,
    SplitText,
    Startup,
    Step,
    StopSelf,
    Text,
    Tokens,
    ToolCall,
    Turns,
    Usage,
    WaitClose,
    fake_server_cmd,
    plain_reply,
    props_answer,
    steps_json,
)

HOST = "127.0.0.1"
Json = Any


@dataclass
class Fake:
    """A running fake server."""

    process: subprocess.Popen[bytes]
    port: int
    journal: Journal

    def open(self, method: str, path: str, body: Json = None, headers: str = "") -> socket.socket:
        """A connection on which a request was sent and nothing was read yet."""
        sock = socket.create_connection((HOST, self.port), timeout=10)
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}"
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return sock

    def get(self, path: str, headers: str = "") -> tuple[int, bytes]:
        with self.open("GET", path, headers=headers) as sock:
            return split(read_all(sock))

    def chat_open(self, *steps: Step, text: str = "hi", **params: Json) -> socket.socket:
        body: dict[str, Json] = {"messages": [{"role": "user", "content": text}], "stream": True, **params}
        if steps:
            body["fake_script"] = steps_json(*steps)
        return self.open("POST", "/v1/chat/completions", body)

    def chat(self, *steps: Step, text: str = "hi", **params: Json) -> bytes:
        """The whole response as it came over the wire."""
        with self.chat_open(*steps, text=text, **params) as sock:
            return read_all(sock)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            data += piece
    return data


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        piece = sock.recv(65536)
        assert piece, f"the end before {mark!r}: {data!r}"
        data += piece
    return data


def split(response: bytes) -> tuple[int, bytes]:
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def unchunk(response: bytes) -> bytes:
    """The body of a chunked response, which must be complete."""
    head, _, rest = response.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            assert rest == b"\r\n"
            return body
        body += rest[:length]
        rest = rest[length + 2 :]


def events(response: bytes) -> list[Json]:
    lines = unchunk(response).decode().split("\n\n")
    texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def contents(response: bytes) -> str:
    deltas = [e["choices"][0]["delta"] for e in events(response) if e != "[DONE]" and e["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def ticks(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        after = file.read().rpartition(")")[2].split()
    return float(after[11]) + float(after[12])


Launch = Callable[..., Fake]


@pytest.fixture
def launch(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Launch]:
    """Starts fake servers, and kills their groups and children at the end."""
    fakes: list[Fake] = []

    def start(script: Script | None = None, *, slots: int = 2, until: str = "ready", extra: str = "") -> Fake:
        port = free_port()
        path = tmp_path / f"journal-{len(fakes)}"
        cmd = fake_server_cmd(script or Script(), host=HOST, port=port, slots=slots, journal=path)
        output = tmp_path / f"output-{len(fakes)}"
        with output.open("wb") as file:
            process = subprocess.Popen([*cmd, *extra.split()], stderr=file, start_new_session=True)
        fake = Fake(process, port, Journal(path))
        fakes.append(fake)
        if until:
            fake.journal.wait(until)
        return fake

    yield start
    for fake in fakes:
        for child in fake.journal.facts("child"):
            with suppress(ProcessLookupError):
                os.kill(child["pid"], signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(fake.process.pid, signal.SIGKILL)
        fake.process.wait(10)


def step_types() -> list[type[Step]]:
    return [t for t in vars(fs).values() if isinstance(t, type) and issubclass(t, Step) and t is not Step]


@pytest.mark.parametrize("step", step_types(), ids=lambda step: step.__name__)
def test_every_typed_step_is_a_step_of_the_server_with_the_same_fields(step: Any) -> None:
    parameters = list(inspect.signature(fake_llama_server.STEPS[fs.step_name(step)]).parameters.values())[1:]
    there = {p.name: p.default for p in parameters}
    here = {f.name: inspect.Parameter.empty if f.default is MISSING else f.default for f in fields(step)}
    assert here == there


def test_the_server_has_no_step_without_a_type() -> None:
    assert set(fake_llama_server.STEPS) == {fs.step_name(step) for step in step_types()}


def test_endpoints_answer_as_llama_server_does(launch: Launch) -> None:
    fake = launch(extra="-m model.gguf --api-key sesame --ctx-size=512")
    assert fake.get("/health")[0] == 200
    assert fake.get("/v1/models")[0] == 401
    key = "Authorization: Bearer sesame\r\n"
    assert fake.get("/v1/models", key)[0] == 200
    assert fake.get("/v1/models/", key)[0] == 404
    assert json.loads(fake.get("/props", key)[1])["total_slots"] == 2
    assert len(json.loads(fake.get("/slots", key)[1])) == 2
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with fake.open("POST", "/apply-template", body, key) as sock:
        assert json.loads(split(read_all(sock))[1])["prompt"].endswith("assistant\n")
    assert "sesame" not in fake.journal.path.read_text()


def test_endpoints_change_in_time_hang_and_talk_garbage(launch: Launch) -> None:
    script = Script(
        models=[Answer(times=2), Answer(503)],
        health=[Answer(text="busy", times=1), Answer(hang=True)],
        props=[props_answer(tools=False, total_slots=7)],
        slots=[Answer(wire=b"\x00\xff not http")],
    )
    fake = launch(script)
    assert [fake.get("/v1/models")[0] for _ in range(4)] == [200, 200, 503, 503]
    assert fake.get("/health") == (200, b"busy")
    with fake.open("GET", "/health"):
        fake.journal.wait("request", path="/health", count=2)
    fake.journal.wait("client_closed", path="/health")
    assert json.loads(fake.get("/props")[1])["chat_template_caps"]["supports_tools"] is False
    with fake.open("GET", "/slots") as sock:
        assert read_all(sock) == b"\x00\xff not http"


def test_a_plain_reply_has_the_records_of_llama_server(launch: Launch) -> None:
    got = events(launch().chat())
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert got[1]["choices"][0]["delta"] == {"content": "Hello"}
    assert got[2]["choices"][0]["finish_reason"] == "stop"
    assert got[2]["timings"]["predicted_n"] == 1
    assert (got[3]["choices"], got[3]["usage"]["completion_tokens"]) == ([], 1)
    assert got[4] == "[DONE]"


def test_replies_are_chosen_by_request_then_marker_then_order(launch: Launch) -> None:
    replies = [
        Reply([Text("one")]),
        Reply([Text("two")]),
        Reply([Text("marked")], marker="JOB-A"),
    ]
    fake = launch(Script(replies=replies))
    assert [contents(fake.chat()) for _ in range(3)] == ["one", "two", "two"]
    assert contents(fake.chat(text="do JOB-A now")) == "marked"
    assert contents(fake.chat(Text("own"), text="do JOB-A now")) == "own"


def test_tool_turns_tool_calls_and_echo(launch: Launch) -> None:
    fake = launch()
    steps = [
        Turns([[ToolCall("add", {"a": 1}, pieces=3, old_form=True), Finish("tool_calls")], [Echo()]]),
    ]
    calls = [e["choices"][0]["delta"].get("tool_calls") for e in events(fake.chat(*steps))]
    first = calls[0][0]["function"]
    assert (first["name"], first["id"]) == ("add", "call00001")
    arguments = "".join(call[0]["function"]["arguments"] for call in calls if call)
    assert json.loads(arguments) == {"a": 1}
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}]
    echoed = json.loads(contents(fake.chat(*steps, messages=history, temperature=0)))
    assert (echoed["messages"], echoed["temperature"]) == (history, 0)


def test_framings(launch: Launch) -> None:
    fake = launch()
    body = b"data: x\n\n"
    whole = fake.chat(Headers(framing="length"), Raw([body]))
    assert b"Content-Length: 9\r\n" in whole
    assert split(whole)[1] == body
    assert split(fake.chat(Headers(framing="close"), Raw([body])))[1] == body
    assert split(fake.chat(Headers(framing="length", length=20), Raw([body])))[1] == body
    cut = fake.chat(Raw([body]), Fin())
    assert cut.endswith(b"9\r\n" + body + b"\r\n")
    broken = Raw([b"zz\r\nbroken"], framed=False)
    assert fake.chat(broken) == b"zz\r\nbroken"
    assert fake.chat(Headers(), broken).endswith(b"\r\n\r\nzz\r\nbroken0\r\n\r\n")


def test_newlines_splits_comments_and_odd_records(launch: Launch) -> None:
    fake = launch()
    assert b"[DONE]\r\n\r\n" in unchunk(fake.chat(Newlines("\r\n"), DoneMarker()))
    assert unchunk(fake.chat(Newlines("\r"), DoneMarker())) == b"data: [DONE]\r\r"
    assert contents(fake.chat(SplitText("a\u00e9b"))) == "a\u00e9b"
    assert unchunk(fake.chat(Record({"a": 1}, end=""))) == b'data: {"a": 1}'
    assert unchunk(fake.chat(Record({"a": 1}, cut=9))) == b'data: {"a'
    assert unchunk(fake.chat(fs.ErrorField(400, "no"))).startswith(b'error: {"code": 400')
    assert unchunk(fake.chat(fs.ErrorData(500, "no"))).startswith(b'data: {"error": {"code": 500')
    assert len(unchunk(fake.chat(fs.BigRecord(3 << 20)))) > 3 << 20
    assert unchunk(fake.chat(PingEvery(0.05), Sleep(0.3))).count(b":\n\n") >= 3
    assert contents(fake.chat(Lines(["ab", "cd"], n=2, split=2))) == "ab\ncd\nab\ncd\n"
    assert contents(fake.chat(Repeat(2, [Tokens(3, batch=2)]))) == "tok0 tok1 tok2 " * 2


def test_http_errors_and_resets(launch: Launch) -> None:
    fake = launch()
    status, body = split(fake.chat(HttpError(400, "too long", extra={"n_ctx": 512})))
    assert (status, json.loads(body)["error"]["n_ctx"]) == (400, 512)
    assert split(fake.chat(HttpError(503, body="<html>"))) == (503, b"<html>")
    assert b"Location: http://x/\r\n" in fake.chat(fs.Redirect("http://x/"))
    with fake.chat_open(Headers(), Sleep(0.1), Reset()) as sock:
        read_until(sock, b"\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


def test_a_mistake_in_a_script_is_loud(launch: Launch) -> None:
    fake = launch()
    assert split(fake.chat(fake_script=[{"do": "nonsense"}]))[0] == 599
    assert fake.journal.facts("script_error")


def test_a_request_beyond_the_slots_waits_without_headers(launch: Launch, tmp_path: Path) -> None:
    fake = launch(slots=1)
    gate = tmp_path / "gate"
    with ExitStack() as stack:
        first = stack.enter_context(fake.chat_open(Headers(), Gate(gate), Text("a")))
        read_until(first, b"\r\n\r\n")  # it has the slot
        second = stack.enter_context(fake.chat_open(Text("b")))
        with fake.chat_open(Text("c")):
            fake.journal.wait("request", count=3)
        assert fake.journal.wait("client_closed")["queued"] is True
        second.settimeout(0.2)
        with pytest.raises(TimeoutError):
            second.recv(1)
        second.settimeout(None)
        gate.touch()
        assert b'"b"' in read_all(second)


@pytest.mark.parametrize(
    ("steps", "phase"),
    [
        ([Note("here"), WaitClose()], "before_headers"),
        ([Headers(), Note("here"), Sleep(60)], "streaming"),
        ([Headers(), Note("here"), Burn(60)], "streaming"),
        ([Headers(), Note("here"), DiskReads(60)], "streaming"),
    ],
)
def test_a_close_is_noticed_at_once(launch: Launch, steps: list[Step], phase: str) -> None:
    fake = launch()
    with fake.chat_open(*steps):
        fake.journal.wait("note", name="here")
        closed_at = time.time()
    seen = fake.journal.wait("client_closed")
    assert seen["phase"] == phase
    assert seen["at"] - closed_at < 20  # a third of what the step takes otherwise
    fake.journal.wait("reply_ended", how="client_closed")


def test_a_wedged_burn_outlives_its_client_and_other_endpoints_can_freeze(launch: Launch) -> None:
    fake = launch()
    with fake.chat_open(Headers(), FreezeEndpoints(), Note("here"), Burn(None, notice_close=False)):
        fake.journal.wait("note", name="here")
    fake.journal.wait("client_closed")
    before = ticks(fake.process.pid)
    with fake.open("GET", "/health") as sock:
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            sock.recv(1)
    assert ticks(fake.process.pid) - before > 5  # an idle one has none
    assert not fake.journal.facts("reply_ended")


def test_work_shows_in_proc_as_it_should(launch: Launch) -> None:
    fake = launch()
    process = psutil.Process(fake.process.pid)
    with fake.chat_open(Headers(), Note("slow"), Burn(60, ticks_per_s=8)):
        fake.journal.wait("note", name="slow")
        before, begun_at = ticks(process.pid), time.monotonic()
        time.sleep(2)
        assert 4 <= (ticks(process.pid) - before) / (time.monotonic() - begun_at) <= 12
    fake.journal.wait("reply_ended")
    before, begun_at = ticks(process.pid), time.monotonic()
    read_before = process.io_counters().read_bytes
    with fake.chat_open(Headers(), Note("disk"), DiskReads(60, bytes_per_s=20e6)):
        fake.journal.wait("note", name="disk")
        time.sleep(1)
        assert (ticks(process.pid) - before) / (time.monotonic() - begun_at) < 20
        assert process.io_counters().read_bytes - read_before > 5e6
    fake.journal.wait("reply_ended", count=2)
    before = ticks(process.pid)
    time.sleep(0.5)
    assert ticks(process.pid) - before <= 1


def test_loading_answers_503_and_ends_by_sigterm(launch: Launch) -> None:
    fake = launch(Script(startup=Startup(load_s=None, load_work="cpu")), until="bound")
    status, body = fake.get("/v1/models")
    assert (status, json.loads(body)["error"]["message"]) == (503, "Loading model")
    assert split(fake.chat())[0] == 503
    fake.process.terminate()
    assert fake.process.wait(5) == -signal.SIGTERM


def test_sigterm_waits_for_open_requests(launch: Launch) -> None:
    fake = launch()
    with fake.chat_open(Headers(), WaitClose()) as sock:
        read_until(sock, b"\r\n\r\n")
        fake.process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            fake.process.wait(0.3)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, fake.port), timeout=1)
    assert fake.process.wait(5) == 0


def test_a_second_sigterm_exits_1(launch: Launch) -> None:
    fake = launch()
    with fake.chat_open(Headers(), WaitClose()) as sock:
        read_until(sock, b"\r\n\r\n")
        fake.process.terminate()
        fake.journal.wait("signal")
        fake.process.terminate()
        assert fake.process.wait(5) == 1


def test_sigterm_ignored(launch: Launch) -> None:
    fake = launch(Script(ignore_term=True))
    fake.process.terminate()
    fake.journal.wait("signal")
    assert fake.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("exit_spec", "code"),
    [
        (Exit(3, "before_bind", log=["no memory"]), 3),
        (Exit(1, "after_bind"), 1),
        (Exit(4, "after_s", after_s=0.1), 4),
        (Exit(-signal.SIGABRT, "after_s"), -signal.SIGABRT),
    ],
)
def test_exits_at_launch(launch: Launch, tmp_path: Path, exit_spec: Exit, code: int) -> None:
    fake = launch(Script(exits=[exit_spec]), until="")
    assert fake.process.wait(5) == code
    output = (tmp_path / "output-0").read_text()
    assert all(line in output for line in exit_spec.log)


def test_exits_at_the_nth_request_and_in_mid_stream(launch: Launch) -> None:
    fake = launch(Script(exits=[Exit(5, "request", request=2)]))
    assert split(fake.chat())[0] == 200
    fake.chat()
    assert fake.process.wait(5) == 5
    for name in ("SIGKILL", "SIGSEGV", "SIGABRT"):
        fake = launch()
        assert fake.chat(Text("a"), KillSelf(name)).endswith(b"}\n\n\r\n")
        assert fake.process.wait(5) == -signal.Signals[name]


def test_a_stopped_server_goes_on_after_sigcont(launch: Launch) -> None:
    fake = launch()
    with fake.chat_open(Text("a"), StopSelf(), Text("b")) as sock:
        fake.journal.wait("stopping_self")
        eventually(lambda: psutil.Process(fake.process.pid).status() == psutil.STATUS_STOPPED, "its halt")
        fake.process.send_signal(signal.SIGCONT)
        assert contents(read_all(sock)) == "ab"


def test_children_in_every_relation_outlive_the_server(launch: Launch) -> None:
    fake = launch(Script(children=[Child("group"), Child("session"), Child("daemon")]))
    children = {kind: fake.journal.wait("child", kind=kind) for kind in ("group", "session", "daemon")}
    fake.process.terminate()
    assert fake.process.wait(5) == 0
    assert children["group"]["pgid"] == fake.process.pid
    assert children["session"]["sid"] == children["session"]["pid"]
    assert children["daemon"]["sid"] not in (fake.process.pid, children["daemon"]["pid"])
    for child in children.values():
        os.kill(child["pid"], signal.SIGTERM)
    time.sleep(0.1)  # that they do not die of it is the claim
    alive = [psutil.Process(child["pid"]).status() for child in children.values()]
    assert psutil.STATUS_ZOMBIE not in alive


def test_a_send_that_waits_for_the_client_to_read_is_noted(launch: Launch) -> None:
    fake = launch(Script(journal_tokens=True))
    with fake.chat_open(Headers(), Repeat(None, [Text("x" * 65536)])):
        fake.journal.wait("send_waits")


def test_floods_of_bytes_and_an_endless_line(launch: Launch, tmp_path: Path) -> None:
    floods = [Flood(b"\xff\xfe", newline=False, for_s=0.2), Flood(b"slow", lines_per_s=100, stream=2)]
    begun_at = time.monotonic()
    fake = launch(Script(floods=floods))
    output = tmp_path / "output-0"
    eventually(lambda: output.read_bytes().count(b"slow\n") >= 20, "20 lines")
    assert output.read_bytes().count(b"slow\n") <= 100 * (time.monotonic() - begun_at) + 1
    eventually(lambda: output.read_bytes().count(b"\xff\xfe") > 100_000, "a flood")
    assert fake.get("/health")[0] == 200


def test_launches_differ(launch: Launch, tmp_path: Path) -> None:
    bad = Script(exits=[Exit(9, "before_bind")])
    script = Script(launches=[Script(), bad], state_file=tmp_path / "count")
    launch(script)
    assert launch(script, until="").process.wait(5) == 9
    assert launch(script, until="").process.wait(5) == 9


def test_never_binds(launch: Launch) -> None:
    fake = launch(Script(startup=Startup(never_bind=True)), until="launched")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, fake.port), timeout=1)
    fake.process.terminate()
    assert fake.process.wait(5) == -signal.SIGTERM


def test_a_taken_port_is_exit_1_with_the_words_of_llama_server(launch: Launch) -> None:
    fake = launch()
    cmd = fake_server_cmd(Script(), host=HOST, port=fake.port, slots=1)
    done = subprocess.run(cmd, stderr=subprocess.PIPE, timeout=10, check=False)
    assert done.returncode == 1
    assert b"couldn't bind HTTP server socket" in done.stderr


def test_plain_reply_wraps_its_steps(launch: Launch) -> None:
    steps = plain_reply(Text("x"))
    assert [type(step) for step in steps] == [Headers, Role, Text, Finish, Usage, DoneMarker]
    assert events(launch().chat(*steps))[-1] == "[DONE]"
