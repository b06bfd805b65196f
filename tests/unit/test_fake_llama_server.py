"""The scripted server does what it advertises."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.fake_script import Burn, Child, DiskReads, Headers, Journal, Note, Script, fake_server_cmd, steps_json

HOST = "127.0.0.1"
KEY = {"Authorization": "Bearer sesame"}
MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass
class Fake:
    """A running fake server."""

    process: subprocess.Popen[bytes]
    port: int
    journal: Journal
    http: requests.Session

    def ask(self, path: str, body: Any = None, **headers: str) -> requests.Response:
        """The response, of which only the head was read."""
        method, url = "GET" if body is None else "POST", f"http://{HOST}:{self.port}{path}"
        return self.http.request(method, url, json=body, headers=headers, stream=True, timeout=10)

    def chat(self, steps: Any) -> requests.Response:
        return self.ask("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "fake_script": steps})

    def cpu_ticks(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return (times.user + times.system) * os.sysconf("SC_CLK_TCK")


Launch = Callable[..., Fake]


@pytest.fixture
def launch(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Launch]:
    """Starts a fake server, and kills its group and its children at the end."""
    fakes: list[Fake] = []

    def start(script: Script | None = None, *, extra: str = "") -> Fake:
        port, journal = free_port(), Journal(tmp_path / "journal")
        cmd = fake_server_cmd(script or Script(), host=HOST, port=port, slots=2, journal=journal.path)
        with (tmp_path / "output").open("wb") as file:
            process = subprocess.Popen([*cmd, *extra.split()], stderr=file, start_new_session=True)
        fakes.append(Fake(process, port, journal, requests.Session()))
        fakes[-1].http.trust_env = False
        journal.wait("ready")
        return fakes[-1]

    yield start
    for fake in fakes:
        fake.http.close()
        for child in fake.journal.facts("child"):
            with suppress(ProcessLookupError):
                os.kill(child["pid"], signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(fake.process.pid, signal.SIGKILL)
        fake.process.wait(10)


def test_endpoints_answer_as_llama_server_does(launch: Launch) -> None:
    fake = launch(extra="-m model.gguf --api-key sesame --ctx-size=512")
    assert fake.ask("/health").status_code == 200
    assert fake.ask("/v1/models").status_code == 401
    assert fake.ask("/v1/models", **KEY).status_code == 200
    assert fake.ask("/v1/models/", **KEY).status_code == 404
    assert fake.ask("/props", **KEY).json()["total_slots"] == 2
    assert len(fake.ask("/slots", **KEY).json()) == 2
    assert fake.ask("/apply-template", {"messages": MESSAGES}, **KEY).json()["prompt"].endswith("assistant\n")
    assert "sesame" not in fake.journal.path.read_text()


def test_a_mistake_in_a_script_is_loud(launch: Launch) -> None:
    fake = launch()
    assert fake.chat([{"do": "nonsense"}]).status_code == 599
    assert fake.journal.facts("script_error")


def test_work_shows_in_proc_as_it_should(launch: Launch) -> None:
    fake = launch()
    with fake.chat(steps_json(Headers(), Note("slow"), Burn(60, ticks_per_s=8))):
        fake.journal.wait("note", name="slow")
        before, begun_at = fake.cpu_ticks(), time.monotonic()
        time.sleep(2)
        assert 4 <= (fake.cpu_ticks() - before) / (time.monotonic() - begun_at) <= 12
    fake.journal.wait("reply_ended")
    before, begun_at = fake.cpu_ticks(), time.monotonic()
    process = psutil.Process(fake.process.pid)
    read_before = process.io_counters().read_bytes
    with fake.chat(steps_json(Headers(), Note("disk"), DiskReads(60, bytes_per_s=20e6))):
        fake.journal.wait("note", name="disk")
        time.sleep(1)
        assert (fake.cpu_ticks() - before) / (time.monotonic() - begun_at) < 20
        assert process.io_counters().read_bytes - read_before > 5e6
    fake.journal.wait("reply_ended", count=2)
    before = fake.cpu_ticks()
    time.sleep(0.5)
    assert fake.cpu_ticks() - before <= 1


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
