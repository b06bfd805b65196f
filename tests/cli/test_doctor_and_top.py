"""`llama-worker doctor` and `llama-worker top`, as a person starts them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import CollectorRegistry, start_http_server

from llama_worker import LlamaWorker, WorkerConfig
from llama_worker.cli.top_rows import HEADINGS
from llama_worker.metrics import WorkerCollector
from tests.actors.conftest import eventually
from tests.cli.conftest import COLUMNS, WAIT_S, MakeProgram, OpenTerminal, Run
from tests.fake_script import Exit, Finish, HttpError, Reply, Script, Text, WaitClose, fake_server_cmd
from tests.responses.conftest import MakeClient

HOST = "127.0.0.1"


def told(run: Run, *args: str, **env: str) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    """(exit code, the object, its findings by subject)."""
    done = run("doctor", *args, "--json", **env)
    report = json.loads(done.stdout)
    return done.returncode, report, {finding["subject"]: finding for finding in report["findings"]}


def test_the_doctor_finds_nothing_wrong(run: Run, program: MakeProgram, model: str) -> None:
    server = program()
    code, report, findings = told(run, model, LLAMA_SERVER=server.path)
    problems = [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert (code, report["ok"]) == (int(bool(problems)), not problems)
    assert (report["server"]["how"], report["server"]["version"]) == ("LLAMA_SERVER", "7 (fake)")
    assert "4096 tokens of context" in findings["start"]["text"]
    assert findings["tools"]["text"].startswith("native")
    assert findings["/proc"]["level"] == "ok"
    assert server.is_gone()


def test_the_doctor_names_a_flag_that_the_server_does_not_know(run: Run, program: MakeProgram, model: str) -> None:
    args = ("--server-arg", "--ctx-sise", "--server-arg", "512", "--server-arg", "--cache-ram", "--server-arg", "64")
    done = run("doctor", model, "--server", program().path, *args)
    assert done.returncode == 1
    assert "problem  command" in done.stdout
    assert "this llama-server does not know --ctx-sise: did you mean --ctx-size?" in done.stdout
    assert "prompt caches" not in done.stdout


def test_the_doctor_examines_a_fleet(run: Run, program: MakeProgram, model: str, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    head = f'[defaults]\nhost = "127.0.0.1"\nexecutable = "{program().path}"\nmodel = "{model}"\ncache_ram_mib = 1\n'
    fleet.write_text(f"{head}[workers.a]\nport = 21001\n[workers.b]\nport = 21002\n")
    done = run("doctor", str(fleet))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("the llama-server knows every flag of its command") == 2
    fleet.write_text(
        f"{head}[workers.a]\nport = 21001\n"
        '[workers.b]\nport = 21002\nextra_args = ["--tools", "all"]\nmodel = "none.gguf"\ncache_ram_mib = -1\n'
    )
    done = run("doctor", str(fleet), "--json")
    told = json.loads(done.stdout)
    said = [(finding["level"], finding["subject"], finding["text"]) for finding in told["findings"]]
    assert (done.returncode, told["ok"], told["workers"]) == (1, False, ["a", "b"])
    for level, subject, text in [
        ("problem", "b", "does not know --tools"),
        ("note", "b", "server_cmd has --tools: the server may start programs"),
        ("problem", "model", "there is no file none.gguf"),
        ("note", "prompt caches", "2 servers may keep up to inf MiB of prompts in memory"),
    ]:
        assert any((level, subject) == found[:2] and text in found[2] for found in said), (text, said)
    fleet.write_text("[workers.a]\n")
    done = run("doctor", str(fleet))
    assert done.returncode == 1
    assert "fleet.toml:1: workers.a: host is missing" in done.stdout


@pytest.mark.parametrize(
    ("args", "subject", "said"),
    [
        (["--server", "/no/such/server"], "llama-server", "does not exist"),
        (["--server", "/bin/true"], "llama-server", "does not tell its version"),
        (["/no/such.gguf"], "model", "there is no file"),
    ],
)
def test_the_doctor_names_a_problem_and_goes_on(run: Run, args: list[str], subject: str, said: str) -> None:
    code, report, findings = told(run, *args)
    assert (code, report["ok"], findings[subject]["level"]) == (1, False, "problem")
    assert said in findings[subject]["text"]
    assert findings[subject]["todo"]
    assert "pidfd" in findings


def test_the_doctor_tells_why_a_server_does_not_start(run: Run, program: MakeProgram, model: str) -> None:
    log = "llama_model_load: error loading model: unknown model architecture: 'new'"
    done = run("doctor", model, "--server", program(Script(exits=[Exit(1, "before_bind", log=[log])])).path)
    assert done.returncode == 1
    assert "problem  start" in done.stdout
    assert log in done.stdout
    assert "what to do: this llama-server is too old for the model" in done.stdout


def test_the_doctor_leaves_no_program_that_does_not_tell_its_version(terminal: OpenTerminal, tmp_path: Path) -> None:
    pid_file, server = tmp_path / "pid", tmp_path / "llama-server"
    server.write_text(f"#!/bin/sh\necho $$ > {pid_file}.new && mv {pid_file}.new {pid_file}\nexec sleep 1000\n")
    server.chmod(0o755)
    screen = terminal("doctor", "--server", str(server))
    eventually(pid_file.exists, "the program was started")
    screen.process.terminate()
    assert screen.wait() == 143
    with contextlib.suppress(psutil.NoSuchProcess):  # or killed, and waiting for init to reap it
        assert psutil.Process(int(pid_file.read_text())).status() == psutil.STATUS_ZOMBIE


# ---------------------------------------------------------------- top


@pytest.fixture
def fleet(make_client: MakeClient, tmp_path: Path, free_port: Callable[[], int]) -> Path:
    """A fleet of two: one scripted server with two slots, one that is not there."""
    up = make_client(slots=2)
    port = int(up.proxy.config.upstream.rpartition(":")[2])
    path = tmp_path / "fleet.toml"
    path.write_text(
        f'[defaults]\nhost = "{HOST}"\nmodel = "m.gguf"\nslots = 2\n'
        f"[workers.planner]\nport = {port}\n[workers.coder]\nport = {free_port()}\n"
    )
    return path


def test_top_asks_the_servers_of_a_fleet(run: Run, fleet: Path) -> None:
    done = run("top", str(fleet))
    assert (done.returncode, done.stderr) == (0, "")
    heading, planner, coder = (line.split() for line in done.stdout.splitlines())
    assert heading[:3] == ["worker", "state", "slots"]
    assert planner == ["planner", "ready", "0/2", "-", "-", "-", "-", "-", "-"]
    assert coder == ["coder", "down", "-/2", "-", "-", "-", "-", "-", "connection", "refused"]


def test_top_is_live_until_q(terminal: OpenTerminal, fleet: Path) -> None:
    screen = terminal("top", str(fleet), "--interval", "2")
    screen.expect("planner", count=2)
    screen.send("q")
    assert screen.wait() == 0
    assert "connection" in screen.shown
    assert max(map(len, screen.shown.splitlines())) <= COLUMNS


def test_top_cuts_names_rather_than_reasons(
    terminal: OpenTerminal, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(f'[workers.{"planner" * 5}]\nhost = "{HOST}"\nport = {free_port()}\nmodel = "m.gguf"\n')
    screen = terminal("top", str(path), "--once", COLUMNS="40")
    assert screen.wait() == 0
    assert "refused" in screen.shown
    assert max(map(len, screen.shown.splitlines())) <= 40


@pytest.fixture
def metrics_url(free_port: Callable[[], int]) -> Iterator[str]:
    """The endpoint of a host with one worker: one request completed, one failed, one runs."""
    port, metrics_port = free_port(), free_port()
    script = Script(
        replies=[
            Reply([Text("ok"), Finish()], marker="good"),
            Reply([HttpError(400, "no")], marker="bad"),
            Reply([Text("..."), WaitClose()], marker="long"),
        ]
    )
    command = fake_server_cmd(script, host=HOST, port=port, slots=2)
    registry = CollectorRegistry()
    server, thread = start_http_server(metrics_port, addr=HOST, registry=registry)
    with LlamaWorker(WorkerConfig("planner", HOST, port, command, slots=2)) as worker:
        registry.register(WorkerCollector([worker]))
        for prompt in ("good", "bad"):
            job = worker.submit(prompt, "", prompt).get(timeout=WAIT_S)
            assert job["ok"]
            worker.result(job["request_id"]).get(timeout=WAIT_S)
        worker.submit("long", "", "long").get(timeout=WAIT_S)
        yield f"http://{HOST}:{metrics_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hosts_metrics_fit_in_80_columns_until_ctrl_c(terminal: OpenTerminal, metrics_url: str) -> None:
    screen = terminal("top", "--metrics", metrics_url)
    screen.expect("q or Ctrl-C ends")
    screen.send("\x03")
    assert screen.wait() == 0
    heading, row = screen.shown.splitlines()[:2]
    assert heading.split() == " ".join(HEADINGS).split()
    assert row.split() == ["planner", "ready", "1/2", "-", "1", "1", "0", "0", "http_error"]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "give either a fleet file or --metrics URL"),
        (["/no/such.toml"], 1, "No such file"),
        (["--metrics", f"http://{HOST}:9/metrics"], 1, "connection refused"),
        (["--metrics", "nonsense"], 1, "what to do"),
    ],
)
def test_top_says_what_to_do(run: Run, args: list[str], code: int, said: str) -> None:
    done = run("top", *args)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
