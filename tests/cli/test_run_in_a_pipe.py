"""`llama-worker run` where nobody looks: text on stdout, everything else on stderr, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import COMMAND, HELLO, WAIT_S, MakeProgram, Run, environment
from tests.fake_script import (
    DoneMarker,
    Exit,
    Finish,
    Headers,
    HttpError,
    KillSelf,
    Note,
    Prefill,
    Reasoning,
    Reply,
    Script,
    Startup,
    Text,
    Tokens,
    ToolCall,
    Usage,
    WaitClose,
)

HARMFUL = "a\x1b[31mred\x1b]0;title\x07 [bold]b[/bold]\r\n\x9b2Jc\x7f :smile:"
TOO_LONG = "request (99 tokens) exceeds the available context size (64 tokens)"
REFUSES = Script(replies=[Reply([HttpError(400, TOO_LONG)])])
ENDS = Script(exits=[Exit(1, "before_bind", log=["error: invalid argument: --frobnicate"])])


def saying(*steps: object) -> Script:
    return Script(replies=[Reply([Headers(), *steps])])  # type: ignore[list-item]


def test_the_text_is_all_that_stdout_gets(run: Run, program: MakeProgram, model: str) -> None:
    words = (Reasoning("let me see"), Text("4 [b]\x1b[1m"), Finish(), Usage(10, 2), DoneMarker())
    server = program(saying(Prefill(100, 50, 0.3), *words), extra="--parallel 1")
    done = run("run", model, "2 + 2?", "--server", server.path, "--slots", "2", FORCE_COLOR="1")
    assert (done.returncode, done.stdout) == (0, "4 [b]␛[1m\n")
    assert "the server has 1 slots, fewer than the worker's 2" in done.stderr
    assert "start it with --parallel 2" in done.stderr
    assert re.search(r"reading the prompt: \d+ of 100 tokens \(", done.stderr)
    assert "[reasoning]\nlet me see\n" in done.stderr
    assert "2 tokens" in done.stderr
    assert "\x1b" not in done.stderr
    assert server.is_gone()


def test_what_was_given_reaches_the_server(run: Run, program: MakeProgram, model: str) -> None:
    server = program()
    options = ("--system", "Be terse.", "--max-tokens", "7", "--temperature", "0", "--seed", "3", "--ctx-size", "512")
    more = ("--gpu-layers", "all", "--slots", "2", "--server-arg", "--threads", "--server-arg", "1")
    done = run("run", model, "--server", server.path, *options, *more, stdin="from\nstdin\n")
    assert done.returncode == 0, done.stderr
    (body,) = (request["body"] for request in server.journal.facts("request", n=1))
    assert body["messages"] == [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "from\nstdin\n"},
    ]
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (7, 0, 3)


def test_json_is_the_only_thing_on_stdout(run: Run, program: MakeProgram, model: str) -> None:
    call = ToolCall("declare_outcome", {"outcome": "success", "summary": "done"})
    server = program(saying(Reasoning("r"), Text(HARMFUL), call, Finish("tool_calls"), Usage(10, 5, 4), DoneMarker()))
    done = run("run", model, "Hi", "--server", server.path, "--json", "--exit-tools")
    told = json.loads(done.stdout)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "\x9b" not in done.stdout
    assert (told["outcome"], told["reason"], told["detail"]) == ("completed", "stop", None)
    assert (told["text"], told["reasoning"]) == (HARMFUL, "r")
    assert told["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 4}
    assert told["timings"]["total_s"] > 0
    assert [signal["tool_name"] for signal in told["signals"]] == ["declare_outcome"]
    assert 'signal declare_outcome: {"outcome": "success", "summary": "done"}' in done.stderr


def test_a_conversation_of_lines_goes_on_when_its_server_dies(
    run: Run, program: MakeProgram, model: str, tmp_path: Path
) -> None:
    dies = saying(Text("half"), KillSelf())
    server = program(Script(launches=[dies, Script()]))
    done = run("run", model, "One", "--chat", "--server", server.path, stdin="Two\n\nThree\n")
    assert (done.returncode, done.stdout) == (0, "half\nHello\nHello\n")
    assert "failed: server_died" in done.stderr
    *_, last = server.journal.facts("request")
    said = [message["content"] for message in last["body"]["messages"]]
    assert said == ["One", "half", "Two", "Hello", "Three"]
    assert server.is_gone()


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("script", "ends", "said"),
    [
        (REFUSES, ("failed", "context_exceeded"), "failed: context_exceeded.*what to do: .*--ctx-size"),
        (ENDS, ("not_started", "exited"), "what to do: .*`llama-server --help`.*error: invalid argument: --frobnicate"),
        (None, ("not_started", "no_port"), "no port from 20000 to 31999 is free on 127.*to do: give one with --port"),
    ],
    ids=["a request that fails", "a server that does not start", "a machine without a free port"],
)
def test_a_failure_is_told_with_what_to_do(
    run: Run, program: MakeProgram, model: str, monkeypatch: pytest.MonkeyPatch, script: Any, ends: Any, said: str
) -> None:
    if script is None:
        monkeypatch.setattr("llama_worker.runtime.free_port.can_listen", lambda address: False)
    done = run("run", model, "Hi", "--server", program(script or HELLO).path, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, (told["outcome"], told["reason"]), told["text"]) == (1, ends, "")
    assert told["detail"]
    assert re.search(said, done.stderr, re.DOTALL)


@pytest.mark.parametrize(
    ("args", "code", "said", "todo"),
    [
        (["/no/such.gguf", "Hi"], 1, "there is no file /no/such.gguf", "GGUF"),
        (["PAGE", "Hi"], 1, "it is a web page", "download"),
        (["MODEL", "Hi", "--server", "/no/such/server"], 1, "--server: /no/such/server does not exist", "LLAMA_SERVER"),
        (["MODEL"], 2, "the prompt is empty", ""),
        (["MODEL", "Hi", "--chat", "--json"], 2, "--chat and --json exclude each other", ""),
        (["MODEL", "Hi", "--server-arg=-np", "--server-arg=3"], 2, "-np 3, but slots is 1", "no --server-arg"),
        (["MODEL", "Hi", "--slots", "0"], 2, "--slots", ""),
        ([], 2, "Missing", "MODEL"),
    ],
)
def test_what_cannot_work_is_said_with_what_to_do(
    run: Run, model: str, tmp_path: Path, args: list[str], code: int, said: str, todo: str
) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html>")
    files = {"MODEL": model, "PAGE": str(page)}
    done = run("run", *(files.get(arg, arg) for arg in args), LLAMA_SERVER=sys.executable)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert todo in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_prompt_it_asks_for_one(run: Run, model: str) -> None:
    done = run("run", model, stdin=None)
    assert done.returncode == 2
    assert "Give a prompt" in done.stderr


# ---------------------------------------------------------------- ends from outside


def started(*args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        (*COMMAND, "run", *args),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tester may run under nohup
    )


def test_a_reader_that_leaves_ends_it_quietly(program: MakeProgram, model: str) -> None:
    server = program(saying(Text("one\n"), Tokens(10_000, 0.01), Finish(), DoneMarker()))
    process = started(model, "Hi", "--server", server.path, "--quiet")
    assert process.stdout is not None
    assert process.stdout.readline() == b"one\n"
    process.stdout.close()
    assert process.wait(timeout=WAIT_S) == 141
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert server.is_gone()


def test_a_signal_ends_it_and_its_server_and_keeps_what_came(program: MakeProgram, model: str) -> None:
    server = program(saying(Text("half"), WaitClose()))
    process = started(model, "Hi", "--server", server.path)
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 100) == b"half"
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, rest) == (143, b"\n")
    assert b"cancelled; what had come is above" in errors
    assert server.is_gone()


def test_a_signal_while_the_server_starts(program: MakeProgram, model: str) -> None:
    server = program(Script(startup=Startup(load_s=None)))
    process = started(model, "Hi", "--server", server.path, "--json")
    server.journal.wait("bound", timeout=WAIT_S)
    process.send_signal(signal.SIGHUP)
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 129
    assert json.loads(output)["outcome"] == "canceled"
    assert b"cancelled while the server was starting" in errors
    assert server.is_gone()


def test_closed_streams_harm_nothing(program: MakeProgram, model: str) -> None:
    # Noted before the finish reason is sent: without that the request does not complete, and its server is not ended.
    server = program(saying(Text("Hello"), Note("all said"), Finish(), DoneMarker()))
    command = shlex.join((*COMMAND, "run", model, "Hi", "--server", server.path))
    done = subprocess.run(f"{command} <&- >&- 2>&-", shell=True, timeout=WAIT_S, env=environment())
    assert done.returncode == 0, "the request completed"
    assert server.journal.facts("note", name="all said")
    assert server.is_gone()


@pytest.mark.parametrize("command", [(), ("run",), ("doctor",), ("top",), ("responses-proxy",)])
def test_the_exit_codes_are_in_the_help(run: Run, command: tuple[str, ...]) -> None:
    done = run(*command, "--help", COLUMNS="80")
    assert done.returncode == 0
    assert "130 cancelled by Ctrl-C" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80
