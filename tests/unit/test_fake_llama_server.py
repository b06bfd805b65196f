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
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import fake_llama_server
from tests import fake_script as fs
from tests.fake_script import (
    Burn,
    Child,
    DiskReads,
    Headers,
    Journal,
    Note,
    Script,
    Step,
    fake_server_cmd,
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


def test_a_plain_reply_has_the_records_of_llama_server(launch: Launch) -> None:
    got = events(launch().chat())
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert got[1]["choices"][0]["delta"] == {"content": "Hello"}
    assert got[2]["choices"][0]["finish_reason"] == "stop"
    assert got[2]["timings"]["predicted_n"] == 1
    assert (got[3]["choices"], got[3]["usage"]["completion_tokens"]) == ([], 1)
    assert got[4] == "[DONE]"


def test_a_mistake_in_a_script_is_loud(launch: Launch) -> None:
    fake = launch()
    assert split(fake.chat(fake_script=[{"do": "nonsense"}]))[0] == 599
    assert fake.journal.facts("script_error")


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
