"""The scripted server does what it advertises."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.fake_script import Burn, Child, DiskReads, Headers, Journal, Note, Script, fake_server_cmd, steps_json

HOST = "127.0.0.1"
MESSAGES = [{"role": "user", "content": "hi"}]


class Fake:
    """A running fake server, with an API key and a child of each kind."""

    def __init__(self, port: int, journal: Journal) -> None:
        script = Script(children=[Child("group"), Child("session"), Child("daemon")])
        cmd = fake_server_cmd(script, host=HOST, port=port, slots=2, journal=journal.path)
        self.process = subprocess.Popen([*cmd, "-m", "model.gguf", "--api-key", "sesame"], start_new_session=True)
        self.url = f"http://{HOST}:{port}"
        self.journal = journal

    def ask(self, path: str, body: Any = None, key: str = "sesame") -> requests.Response:
        """The response, of which only the head was read."""
        method, headers = "GET" if body is None else "POST", {"Authorization": f"Bearer {key}"}
        return requests.request(method, self.url + path, json=body, headers=headers, stream=True, timeout=10)

    def chat(self, steps: Any) -> requests.Response:
        return self.ask("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "fake_script": steps})

    def cpu_ticks(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return (times.user + times.system) * os.sysconf("SC_CLK_TCK")


@pytest.fixture
def fake(tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setenv("NO_PROXY", HOST)
    fake = Fake(free_port(), Journal(tmp_path / "journal"))
    try:
        fake.journal.wait("ready")
        yield fake
    finally:
        fake.process.kill()
        fake.process.wait(10)
        for child in fake.journal.facts("child"):
            with suppress(ProcessLookupError):
                os.kill(child["pid"], signal.SIGKILL)


def test_endpoints_answer_as_llama_server_does(fake: Fake) -> None:
    assert fake.ask("/health", key="").status_code == 200
    assert fake.ask("/v1/models", key="").status_code == 401
    assert fake.ask("/v1/models").status_code == 200
    assert fake.ask("/v1/models/").status_code == 404
    assert fake.ask("/props").json()["total_slots"] == len(fake.ask("/slots").json()) == 2
    assert fake.ask("/apply-template", {"messages": MESSAGES}).json()["prompt"].endswith("assistant\n")
    assert "sesame" not in fake.journal.path.read_text()


def test_a_mistake_in_a_script_is_loud(fake: Fake) -> None:
    assert fake.chat([{"do": "nonsense"}]).status_code == 599
    assert fake.journal.facts("script_error")


def test_work_shows_in_proc_as_it_should(fake: Fake) -> None:
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


def test_children_in_every_relation_outlive_the_server(fake: Fake) -> None:
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
