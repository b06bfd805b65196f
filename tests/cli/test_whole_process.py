"""What only a whole process shows: signals, a Ctrl-C while Python imports the command, output that
nobody takes."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_worker.cli import terminal
from llama_worker.testing.scripts import Note, Script, Startup, Text, Tokens, WaitClose
from tests.cli.conftest import COMMAND, WAIT_S, MakeProgram, Program, environment, saying
from tests.conftest import Running, running

PRESSED = """
import os, signal, sys
import llama_worker.cli

class Pressed:
    def find_spec(self, name, *_):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Pressed())
sys.argv = ["llama-worker", "--help"]
sys.exit(llama_worker.cli.main())
"""
PRESSED_TWICE = """
import signal, tty
from llama_worker.cli.terminal import Interrupts

with Interrupts():
    tty.setcbreak(0)
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
"""
NOBODY, NO_ROOM = (141, ""), (1, "llama-worker: [Errno 28] No space left on device\n")


def ended(
    *command: str, stdout: int = subprocess.PIPE, **how: Any
) -> subprocess.CompletedProcess[str]:
    env = environment(LLAMA_SERVER="true")
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, env=env, **how
    )


@pytest.mark.parametrize(
    ("name", "before", "code"),
    [("llama_worker.errors", signal.SIG_DFL, 130), ("typer", signal.SIG_IGN, 0)],
)
def test_ctrl_c_ends_it_quietly_unless_ignored(
    name: str, before: signal.Handlers, code: int
) -> None:
    done = ended(
        sys.executable,
        "-c",
        PRESSED.format(name=name),
        preexec_fn=lambda: signal.signal(signal.SIGINT, before),
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert bool(done.stdout) == (code == 0)


@pytest.mark.parametrize(
    ("words", "ends"),
    # each in its own way
    [("--help", NOBODY), ("--help", NO_ROOM), ("doctor", NOBODY), ("doctor --json", NO_ROOM)],
)
def test_output_that_cannot_be_written(words: str, ends: tuple[int, str]) -> None:
    if ends == NOBODY:
        reader, stdout = os.pipe()
        os.close(reader)
    else:
        stdout = os.open("/dev/full", os.O_WRONLY)
    with open(stdout, "wb"):
        done = ended(*COMMAND, *words.split(), stdout=stdout)
    assert (done.returncode, done.stderr) == ends


def answering(server: Program, *args: str) -> Running:
    """`llama-worker run` in a process of its own."""
    words = (*COMMAND, "run", "--server", server.path, *args)
    heeds = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # the tester may run under nohup
    return running(*words, env=environment(), stdin=subprocess.DEVNULL, preexec_fn=heeds)


def test_a_reader_that_leaves_ends_it_quietly(program: MakeProgram, model: str) -> None:
    server = program(saying(Text("one\n"), Tokens(10_000, 0.01)))
    with answering(server, model, "Hi", "--quiet") as (process, output):
        assert output.readline() == "one\n"
        output.close()
        _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == NOBODY
    assert server.is_gone()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_keeps_what_came(
    program: MakeProgram, model: str, number: int, code: int
) -> None:
    server = program(saying(Text("half"), WaitClose()))
    with answering(server, model, "Hi") as (process, output):
        assert os.read(output.fileno(), 100) == b"half"
        process.send_signal(number)
        rest, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, rest) == (code, "\n")
    assert "cancelled; the output so far is above" in errors
    assert server.is_gone()


@pytest.mark.parametrize(
    ("again", "later_s", "exits"),
    [
        (signal.SIGTERM, 0.9, []),  # `timeout` signals its command, and then the command's group
        (signal.SIGTERM, 1.0, [143]),
        (signal.SIGINT, 0.0, [130]),
    ],
)
def test_a_signal_sent_twice_is_one(
    monkeypatch: pytest.MonkeyPatch, again: signal.Signals, later_s: float, exits: list[int]
) -> None:
    now, ended_with = [100.0], list[int]()
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(os, "_exit", ended_with.append)
    with terminal.Interrupts() as heard:
        signal.raise_signal(signal.SIGTERM)
        now[0] += later_s
        signal.raise_signal(again)
    assert (heard.ended_by, ended_with) == (signal.SIGTERM, exits)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with terminal.Interrupts() as heard:
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert not heard.asked


def test_ctrl_c_twice_leaves_a_terminal_with_echo(tmp_path: Path) -> None:
    words = shlex.join((sys.executable, "-c", PRESSED_TWICE))
    # the shell reads the modes: when it ends, the terminal hangs up and loses them
    script = f"{words}; echo $? $(stty -a) > said"
    master, slave = pty.openpty()
    with open(master, "rb", buffering=0), open(slave, "rb", buffering=0):
        subprocess.run(
            ("sh", "-c", script),
            preexec_fn=partial(os.login_tty, slave),
            cwd=tmp_path,
            env=environment(),
            timeout=WAIT_S,
            check=True,
        )
    code, *modes = (tmp_path / "said").read_text().split()
    assert code == "130"
    assert {"echo", "icanon"} <= set(modes)


def test_a_signal_while_the_server_starts(program: MakeProgram, model: str) -> None:
    server = program(Script(startup=Startup(load_s=None)))
    with answering(server, model, "Hi", "--json") as (process, _):
        server.journal.wait("bound", timeout=WAIT_S)
        process.send_signal(signal.SIGHUP)
        output, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, json.loads(output)["outcome"]) == (129, "canceled")
    assert "cancelled while the server was starting" in errors
    assert server.is_gone()


def test_closed_streams_harm_nothing(program: MakeProgram, model: str) -> None:
    # Noted before the finish reason is sent: without that the request does not complete, and its
    # server is not ended.
    server = program(saying(Text("Hello"), Note("all said")))
    command = shlex.join((*COMMAND, "run", model, "Hi", "--server", server.path))
    done = subprocess.run(f"{command} <&- >&- 2>&-", shell=True, timeout=WAIT_S, env=environment())
    assert done.returncode == 0, "the request completed"
    assert server.journal.facts("note", name="all said")
    assert server.is_gone()
