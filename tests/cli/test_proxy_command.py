"""`llama-worker responses-proxy`, as a person starts it."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.cli.conftest import COMMAND, WAIT_S, Run, environment
from tests.fake_script import Journal, Script, Startup, fake_server_cmd
from tests.responses.conftest import HOST, MakeClient

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """The command in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*args: str, **env: str) -> subprocess.Popen[str]:
        command = (*COMMAND, "responses-proxy", *args)
        process = subprocess.Popen(
            command, env=environment(**env), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    """What it prints once it listens."""
    assert process.stdout is not None
    return process.stdout.readline().split()[0]


def ask(url: str) -> Any:
    return requests.post(f"{url}/responses", json={"input": "Hi"}, timeout=WAIT_S).json()


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str]:
    process.send_signal(number)
    _, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, errors


def test_in_front_of_a_server_that_is_there(make_client: MakeClient, start: Start) -> None:
    process = start("--upstream", make_client().proxy.config.upstream, "--port", "0")
    url = url_of(process)
    assert url.startswith("http://127.0.0.1:")
    assert ask(url)["status"] == "completed"
    assert end(process)[0] == 0


def test_the_environment_in_place_of_options(
    make_client: MakeClient, start: Start, free_port: Callable[[], int]
) -> None:
    fake = make_client()
    port = free_port()
    env = {"LLAMA_CPP_URL": fake.proxy.config.upstream, "PROXY_HOST": "localhost", "PROXY_PORT": str(port)}
    process = start("--api-key-env", "MY_KEY", **env, MY_KEY="sk-hush")
    assert url_of(process) == f"http://localhost:{port}/v1"
    ask(f"http://127.0.0.1:{port}/v1")
    (request,) = fake.journal.facts("request")
    assert request["headers"]["authorization"] == "***"
    code, errors = end(process)
    assert (code, "hush" in errors) == (0, False)


def command_of(script: Script, journal: Journal) -> str:
    """For --server-cmd."""
    words = fake_server_cmd(script, host=HOST, port=11111, slots=22222, journal=journal.path)
    return shlex.join(words).replace("11111", "{port}").replace("22222", "{slots}")


def test_with_a_server_of_its_own_that_ends_with_it(start: Start, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    process = start("--server-cmd", command_of(Script(), journal), "--slots", "2", "--port", "0")
    assert ask(url_of(process))["output"][0]["content"][0]["text"] == "Hello"
    server = journal.wait("launched")["pid"]
    assert end(process)[0] == 0
    assert not psutil.pid_exists(server)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_its_server_starts(start: Start, tmp_path: Path, number: int) -> None:
    journal = Journal(tmp_path / "journal")
    never = Script(startup=Startup(load_s=None))
    process = start("--server-cmd", command_of(never, journal), "--port", "0")
    server = journal.wait("launched", timeout=WAIT_S)["pid"]
    journal.wait("bound", timeout=WAIT_S)
    assert end(process, number)[0] == 0
    assert not psutil.pid_exists(server)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "give --upstream (or LLAMA_CPP_URL), --model or --server-cmd"),
        (["--upstream", "http://a", "--model", "b"], 2, "give one of"),
        (["--upstream", "ftp://a"], 2, "upstream must be a URL"),
        (["--upstream", "http://user:hush@a"], 2, "must hold no user or password"),
        (["--upstream", "http://a", "--api-key-env", "NO_SUCH_VARIABLE"], 2, "NO_SUCH_VARIABLE is not set"),
        (["--upstream", "http://a", "--max-concurrent", "0"], 2, "--max-concurrent"),
        (["--upstream", "http://a", "--port", "99999"], 2, "--port"),
        (["--upstream", "https://a", "--ca-file", "/no/such/file"], 2, "--ca-file: /no/such/file holds no"),
        (["--upstream", "https://a", "--ca-file", "MODEL"], 2, "holds no certificates"),
        (["--server-cmd", "llama-server 'x"], 2, "--server-cmd: No closing quotation"),
        (["--server-cmd", "llama-server --port 1"], 2, "make them agree"),
        (["--upstream", "http://a", "--host", "192.0.2.1"], 1, "192.0.2.1"),
        (["--model", "/no/such/file"], 1, "there is no file /no/such/file"),
        (["--model", "MODEL", "--server", "/no/such/server"], 1, "--server: /no/such/server does not exist"),
        (["--server-cmd", "no-such-server --port {port}"], 1, "there is no program 'no-such-server' on the PATH"),
        (["--upstream", "http://a", "--port", "TAKEN"], 1, "what to do: give another --port"),
    ],
)
def test_what_cannot_work_is_said_and_ends_it(run: Run, model: str, args: list[str], code: int, said: str) -> None:
    with socket.create_server((HOST, 0)) as taken:
        known = {"MODEL": model, "TAKEN": str(taken.getsockname()[1])}
        done = run("responses-proxy", *(known.get(arg, arg) for arg in args))
    assert done.returncode == code
    assert said in done.stderr
    assert "hush" not in done.stderr
    assert "Traceback" not in done.stderr
