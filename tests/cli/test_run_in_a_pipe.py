"""`llama-worker run` where nobody looks: text on stdout, everything else on stderr, exit codes."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_worker import __version__
from llama_worker.testing import scripts as fs
from tests.cli.conftest import MakeProgram, Run, saying
from tests.conftest import shell_program
from tests.server.pace import lean_server

HARMFUL = "a\x1b[31mred\x1b]0;title\x07 [bold]b[/bold]\r\n\x9b2Jc\x7f :smile:"
TOO_LONG = "request (99 tokens) exceeds the available context size (64 tokens)"
REFUSES = fs.Script(replies=[fs.ScriptedReply([fs.HttpError(400, TOO_LONG)])])
ENDS = fs.Script(exits=[fs.Exit(1, "before_bind", log=["error: invalid argument: --frobnicate"])])


def test_the_text_is_all_that_stdout_gets(run: Run, program: MakeProgram, model: str) -> None:
    words = (fs.Reasoning("let me see"), fs.Text("4 [b]\x1b[1m"))
    server = program(
        saying(fs.PromptProgress(50, 100), fs.Sleep(0.3), *words), extra="--parallel 1"
    )
    done = run("run", model, "2 + 2?", "--server", server.path, "--slots", "2", FORCE_COLOR="1")
    assert (done.returncode, done.stdout) == (0, "4 [b]␛[1m\n")
    warned = ("the server has 1 slots, fewer than the worker's 2", "start it with --parallel 2")
    for told in (*warned, "[reasoning]\nlet me see\n", "2 tokens"):
        assert told in done.stderr
    assert re.search(r"reading the prompt: \d+ of 100 tokens \(", done.stderr)
    assert re.search(r"^generating: 2 tokens \(", done.stderr, re.MULTILINE), "while text comes"
    assert "\x1b" not in done.stderr
    assert server.is_gone()


def test_what_was_given_reaches_the_server(run: Run, program: MakeProgram, model: str) -> None:
    server = program()
    options = "--system 'Be terse.' --max-tokens 7 --temperature 0 --seed 3 --ctx-size 512"
    options += " --gpu-layers all --slots 2 --server-arg --threads --server-arg 1"
    words = ("--server", server.path, *shlex.split(options))
    done = run("run", model, *words, stdin="from\nstdin\n")
    assert done.returncode == 0, done.stderr
    (body,) = (request["body"] for request in server.journal.facts("request", n=1))
    messages = [(message["role"], message["content"]) for message in body["messages"]]
    assert messages == [("system", "Be terse."), ("user", "from\nstdin\n")]
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (7, 0, 3)


def test_bytes_that_are_no_text_are_replaced(run: Run, program: MakeProgram, model: str) -> None:
    """Wherever they come from; surrogates stand for them in what Python takes from the system."""
    server = program()
    odd = ("caf\udce9", "--system", "tr\udce8s", "--chat", "--server", server.path)
    done = run("run", model, *odd, stdin="No\udceb\n")
    assert done.returncode == 0, done.stderr
    *_, last = server.journal.facts("request", path="/v1/chat/completions")
    said = [message["content"] for message in last["body"]["messages"]]
    assert said == ["tr\ufffds", "caf\ufffd", "Hello", "No\ufffd"]


def test_options_become_flags_of_the_server(
    run: Run, program: MakeProgram, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []
    monkeypatch.setattr(
        "llama_worker.cli.run.run", lambda config, _: commands.append(" ".join(config.server_cmd))
    )
    words = "--ctx-size 64 --gpu-layers all --slots 2 --port 9 --server-arg=--no-ui"
    run("run", model, "Hi", "--server", program().path, *words.split())
    run("run", model, "Hi", "--server", program().path)
    assert commands[0].endswith(
        "--port 9 --parallel 2 --batch-size 512 --ctx-size 64 --n-gpu-layers all --no-ui"
    )
    assert commands[1].endswith("--parallel 1 --batch-size 512")


def test_json_is_the_only_thing_on_stdout(run: Run, program: MakeProgram, model: str) -> None:
    call = fs.ToolCall("declare_outcome", {"outcome": "success", "summary": "done"})
    server = program(saying(fs.Reasoning("r"), fs.Text(HARMFUL), call))
    done = run("run", model, "Hi", "--server", server.path, "--json", "--exit-tools")
    told = json.loads(done.stdout)
    assert (done.returncode, {"\x1b", "\x9b"} & set(done.stdout)) == (0, set())
    assert (told["outcome"], told["reason"], told["detail"]) == ("completed", "stop", None)
    assert (told["text"], told["reasoning"]) == (HARMFUL, "r")
    assert told["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "cached_tokens": 0}
    assert told["timings"]["total_s"] > 0
    assert [signal["tool_name"] for signal in told["signals"]] == ["declare_outcome"]
    assert 'signal declare_outcome: {"outcome": "success", "summary": "done"}' in done.stderr


@pytest.mark.parametrize("answer", ["half", ""])
def test_a_conversation_survives_its_servers_death(
    run: Run, program: MakeProgram, model: str, answer: str
) -> None:
    """A turn without an answer leaves no trace in it."""
    steps = [fs.Text(answer)] if answer else []
    server = program(fs.Script(launches=[saying(*steps, fs.KillSelf()), fs.Script()]))
    done = run("run", model, "One", "--chat", "--server", server.path, stdin="Two\n\nThree\n")
    kept = ["One", answer] if answer else []
    assert (done.returncode, done.stdout.split()) == (0, [*kept[1:], "Hello", "Hello"])
    assert "failed: server_died" in done.stderr
    *_, last = server.journal.facts("request", path="/v1/chat/completions")
    said = [message["content"] for message in last["body"]["messages"]]
    assert said == [*kept, "Two", "Hello", "Three"]
    assert server.is_gone()


@pytest.mark.parametrize("prompt", [(), ("-",)], ids=["none", "a dash"])
def test_a_conversation_begins_with_stdin(
    run: Run, program: MakeProgram, model: str, prompt: tuple[str, ...]
) -> None:
    server = program()
    done = run("run", model, *prompt, "--chat", "--server", server.path, stdin="One\n")
    assert done.returncode == 0, done.stderr
    (body,) = (request["body"] for request in server.journal.facts("request", n=1))
    assert [message["content"] for message in body["messages"]] == ["One"]


@pytest.mark.server
def test_a_prompt_for_the_real_server(run: Run, thin_model: str, tmp_path: Path) -> None:
    brief = ["--ctx-size", "512", "--max-tokens", "8"]
    options = [*brief, "--temperature", "0", "--seed", "1", "--json"]
    done = run(
        "run", thin_model, "What is 2 + 2?", "--server", str(lean_server(tmp_path)), *options
    )
    told = json.loads(done.stdout)
    assert (done.returncode, told["outcome"]) == (0, "completed")
    assert told["text"]
    assert told["usage"]["completion_tokens"] <= 8


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("script", "ends", "said"),
    [
        (
            REFUSES,
            ("failed", "context_exceeded"),
            "failed: context_exceeded.*what to do: .*--ctx-size",
        ),
        (
            ENDS,
            ("not_started", "exited"),
            "what to do: .*`llama-server --help`.*error: invalid argument: --frobnicate",
        ),
        (
            None,
            ("not_started", "no_port"),
            "no port from 20000 to 31999 is free on 127.*to do: give one with --port",
        ),
    ],
    ids=["a request that fails", "a server that does not start", "a machine without a free port"],
)
def test_a_failure_is_told_with_what_to_do(
    run: Run,
    program: MakeProgram,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    script: Any,
    ends: Any,
    said: str,
) -> None:
    if script is None:
        monkeypatch.setattr(
            "llama_worker.runtime.process.free_port.can_listen", lambda address: False
        )
    done = run("run", model, "Hi", "--server", program(script).path, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, (told["outcome"], told["reason"]), told["text"]) == (1, ends, "")
    assert told["detail"]
    assert re.search(said, done.stderr, re.DOTALL)


@pytest.mark.parametrize(
    ("args", "code", "said", "todo"),
    [
        ("/no/such.gguf Hi", 1, "there is no file /no/such.gguf", "GGUF"),
        ("PAGE Hi", 1, "it is a web page", "download"),
        (
            "MODEL Hi --server /no/such/server",
            1,
            "--server: /no/such/server does not exist",
            "LLAMA_SERVER",
        ),
        ("MODEL", 2, "the prompt is empty", ""),
        ("MODEL Hi --chat --json", 2, "--chat and --json cannot be combined", ""),
        (
            "MODEL Hi --server-arg=-np --server-arg=3",
            2,
            "-np 3, but slots is 1",
            "cannot be set by it",
        ),
        (
            "MODEL Hi --server-arg='-c 512'",
            2,
            "two words, '-c', '512'",
            "needs its own --server-arg",
        ),
        ("MODEL Hi --slots 0", 2, "--slots", ""),
        ("MODEL Hi --temperature inf", 2, "--temperature", "less than or equal"),
        ("", 2, "Missing", "run [OPTIONS]"),
    ],
)
def test_wrong_usage_says_what_to_do(
    run: Run, model: str, tmp_path: Path, args: str, code: int, said: str, todo: str
) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html>")
    files = {"MODEL": model, "PAGE": str(page)}
    words = (files.get(arg, arg) for arg in shlex.split(args))
    done = run("run", *words, LLAMA_SERVER=sys.executable)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert todo in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_name_controls_no_terminal(run: Run, tmp_path: Path) -> None:
    """A model that was downloaded may have any name."""
    (tmp_path / "clear\x1b[2J.gguf").touch()
    done = run("run", str(tmp_path / "x.gguf"), "Hi")
    assert "found " in done.stderr
    assert "clear\u241b[2J.gguf" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.server
def test_the_real_server_with_too_little_memory(run: Run, smollm2: str, tmp_path: Path) -> None:
    narrow = shell_program(
        tmp_path / "narrow", f'ulimit -v 400000\nexec {lean_server(tmp_path)} "$@"'
    )
    done = run("run", smollm2, "Hi", "--server", narrow, "--ctx-size", "8192")
    assert done.returncode == 1
    assert "what to do: the model does not fit into memory" in done.stderr


def test_without_a_prompt_it_asks_for_one(run: Run, model: str) -> None:
    done = run("run", model, stdin=None)
    assert done.returncode == 2
    assert "no prompt was given" in done.stderr


def test_its_version_is_the_librarys(run: Run) -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"llama-worker {__version__}\n")


@pytest.mark.parametrize("command", [(), ("run",), ("doctor",), ("top",), ("responses-proxy",)])
def test_the_exit_codes_are_in_the_help(run: Run, command: tuple[str, ...]) -> None:
    done = run(*command, "--help", COLUMNS="80")
    assert done.returncode == 0
    assert "130 cancelled by Ctrl-C" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80
