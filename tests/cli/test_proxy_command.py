"""`llama-worker responses-proxy`, as a person starts it."""

import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import requests
from typer.testing import CliRunner

from llama_worker import TimeoutProfile
from llama_worker.cli.app import app
from llama_worker.cli.proxy import ServerChoice, _worker_config
from llama_worker.testing.scripts import JournalReader, Script, Startup, scripted_server_cmd
from tests.actors.conftest import HOST, MakeWorker
from tests.cli.conftest import COMMAND, WAIT_S, Run, environment
from tests.conftest import Running, running


def proxy(*args: str, **env: str) -> Running:
    """The command in a process of its own; once it listens, it prints a line that begins with its
    URL."""
    return running(*COMMAND, "responses-proxy", *args, env=environment(**env))


def answer(url: str) -> str:
    reply = requests.post(f"{url}/responses", json={"input": "Hi"}, timeout=WAIT_S).json()
    return str(reply["output"][0]["content"][0]["text"])


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str]:
    process.send_signal(number)
    _, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, errors


def test_a_proxy_configured_by_the_environment(
    make_worker: MakeWorker, free_port: Callable[[], int]
) -> None:
    server, port = make_worker(), free_port()
    env = {"PROXY_HOST": "localhost", "PROXY_PORT": str(port)}
    env["LLAMA_CPP_URL"] = f"http://{HOST}:{server.config.port}"
    with proxy("--api-key-env", "MY_KEY", **env, MY_KEY="sk-hush") as (process, output):
        assert output.readline().split()[0] == f"http://localhost:{port}/v1"
        assert answer(f"http://127.0.0.1:{port}/v1") == "Hello"
        (request,) = server.journal.facts("request", path="/v1/chat/completions")
        assert request["headers"]["authorization"] == "***"
        code, errors = end(process)
    assert (code, "hush" in errors) == (0, False)


def command_of(script: Script, journal: JournalReader) -> str:
    """For --server-cmd."""
    words = scripted_server_cmd(script, host=HOST, port=11111, slots=22222, journal=journal.path)
    return shlex.join(words).replace("11111", "{port}").replace("22222", "{slots}")


def test_a_proxys_own_server_ends_with_it(tmp_path: Path) -> None:
    journal = JournalReader(tmp_path / "journal")
    words = ("--server-cmd", command_of(Script(), journal), "--slots", "2", "--port", "0")
    with proxy(*words) as (process, output):
        assert answer(output.readline().split()[0]) == "Hello"
        assert end(process)[0] == 0
    assert not psutil.pid_exists(journal.wait("launched")["pid"])


def test_a_proxy_ends_when_its_server_is_given_up(tmp_path: Path) -> None:
    """At the first death, where the command's worker would restart it for minutes."""
    journal = JournalReader(tmp_path / "journal")
    program = f"""
import sys
from dataclasses import replace
from llama_worker import RestartPolicy
from llama_worker.cli import app, proxy
made = proxy._worker_config
proxy._worker_config = lambda *args: replace(made(*args), restart=RestartPolicy.never())
words = ["responses-proxy", "--server-cmd", {command_of(Script(), journal)!r}, "--port", "0"]
sys.exit(app.run_app(words))
"""
    with running(sys.executable, "-c", program, env=environment()) as (process, output):
        assert output.readline().startswith("http://")
        psutil.Process(journal.wait("launched")["pid"]).kill()
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "the server is not started again: server_died" in " ".join(errors.split())


@pytest.mark.parametrize("named", ["", "slow", "slow_prefill", "fast"])
def test_timeouts_are_those_of_whichever_server(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that is there, and of one that is started."""
    timeouts: list[TimeoutProfile] = []
    monkeypatch.setattr(
        "llama_worker.cli.proxy.serve", lambda _, config, **__: timeouts.append(config.timeouts)
    )
    given = ["--timeouts", named] if named else []
    result = CliRunner().invoke(app, ["responses-proxy", "--upstream", "http://a", *given])
    assert result.exit_code == 0, result.output
    assert timeouts == [TimeoutProfile.fast() if named == "fast" else TimeoutProfile.slow_prefill()]
    started = ServerChoice(url=None, model=None, server=None, slots=1, command="server {port}")
    assert _worker_config(started, None, timeouts[0]).timeouts == timeouts[0]


def test_who_handled_signals_before_does_so_afterwards(free_port: Callable[[], int]) -> None:
    """In a process of its own, which has its signals to itself."""
    program = f"""
import signal
from llama_worker.cli.proxy import ServerChoice, serve
from llama_worker.responses.config import ResponsesProxyConfig
upstream = ServerChoice(url="http://{HOST}:1", model=None, server=None, slots=None, command=None)
config = ResponsesProxyConfig(host="{HOST}", port={free_port()})
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
print(serve(upstream, config, api_key_env=None))
assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
"""
    with running(sys.executable, "-c", program, env=environment()) as (process, output):
        assert output.readline().startswith("http://")
        process.send_signal(signal.SIGTERM)
        assert output.readline() == "0\n"
        assert process.wait(WAIT_S) == 0


def test_a_signal_ends_it_while_its_server_starts(tmp_path: Path) -> None:
    journal = JournalReader(tmp_path / "journal")
    command = command_of(Script(startup=Startup(load_s=None)), journal)
    with proxy("--server-cmd", command, "--port", "0") as (process, _):
        journal.wait("bound", timeout=WAIT_S)
        assert end(process, signal.SIGINT)[0] == 0
    assert not psutil.pid_exists(journal.wait("launched")["pid"])


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ("", 2, "give --upstream (or LLAMA_CPP_URL), --model or --server-cmd"),
        ("--upstream http://a --model b", 2, "give one of"),
        ("--upstream http://a --server b", 2, "--server needs --model"),
        ("--server-cmd a --server b", 2, "--server needs --model"),
        ("--upstream http://a --slots 2", 2, "--slots needs --model or --server-cmd"),
        ("--model MODEL --ca-file MODEL", 2, "--ca-file needs --upstream"),
        ("--upstream ftp://a", 2, "upstream must be a URL"),
        ("--upstream http://user:hush@a", 2, "must not contain a user or password"),
        ("--upstream http://a --api-key-env NO_SUCH_VARIABLE", 2, "NO_SUCH_VARIABLE is not set"),
        ("--upstream http://a --max-concurrent 0", 2, "--max-concurrent"),
        ("--upstream http://a --port 99999", 2, "--port"),
        ("--upstream https://a --ca-file /no/such/file", 2, "--ca-file: /no/such/file has no"),
        ("--upstream https://a --ca-file MODEL", 2, "has no certificates"),
        ('--server-cmd "llama-server \'x"', 2, "--server-cmd: No closing quotation"),
        ("--server-cmd 'llama-server --port 1'", 2, "make them agree"),
        ("--upstream http://a --host 192.0.2.1", 1, "192.0.2.1"),
        ("--model /no/such/file", 1, "there is no file /no/such/file"),
        ("--model MODEL --server /no/such/server", 1, "--server: /no/such/server does not exist"),
        (
            "--server-cmd 'no-such-server --port {port}'",
            1,
            "there is no program 'no-such-server' on the PATH",
        ),
        ("--upstream http://a --port TAKEN", 1, "what to do: give another --port"),
        # before the server is started, which would load its model in vain
        ("--model MODEL --server /bin/true --port TAKEN", 1, "what to do: give another --port"),
    ],
)
def test_what_cannot_work_is_said_and_ends_it(
    run: Run, model: str, args: str, code: int, said: str
) -> None:
    with socket.create_server((HOST, 0)) as taken:
        known = {"MODEL": model, "TAKEN": str(taken.getsockname()[1])}
        done = run("responses-proxy", *(known.get(arg, arg) for arg in shlex.split(args)))
    assert done.returncode == code
    assert said in done.stderr
    assert "hush" not in done.stderr
    assert "Traceback" not in done.stderr
