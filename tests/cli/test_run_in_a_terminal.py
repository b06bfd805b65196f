"""`llama-worker run` in a terminal of 80 columns: what is drawn, Ctrl-C once and twice, a conversation."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import COLUMNS, CONTROL_SEQUENCE, MakeProgram, OpenTerminal
from tests.fake_script import (
    DoneMarker,
    Finish,
    Gate,
    Headers,
    PromptProgress,
    Reasoning,
    Reply,
    Script,
    Startup,
    Text,
    Usage,
    WaitClose,
)

HELD = Script(replies=[Reply([Headers(), Text("half"), WaitClose()])])


def thinking(gate: Path) -> Script:
    answer = (Reasoning("let me see"), Text("4\x1b]0;title\x07\x1b[2J"), Finish(), Usage(100, 2), DoneMarker())
    steps = [Headers(), PromptProgress(30, 100), Gate(gate), *answer]
    return Script(startup=Startup(log=["0.00.001.000 I srv    load_model: loading model 'x'"]), replies=[Reply(steps)])


def drawn_lines(written: str) -> list[str]:
    """Every line, also those that were drawn over, without control sequences."""
    return re.split("[\r\n]", CONTROL_SEQUENCE.sub("", re.sub(r"\x1b\[2K|\x1b\[1A", "\r", written)))


def test_it_shows_loading_a_bar_dim_reasoning_text_and_numbers(
    terminal: OpenTerminal, program: MakeProgram, model: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    screen = terminal("run", model, "2 + 2?", "--server", program(thinking(gate)).path)
    screen.expect("starting")
    screen.expect("reading the prompt")
    screen.expect("30/100")
    gate.touch()
    assert screen.wait() == 0
    assert "\x1b[2mlet me see\x1b[0m" in screen.written
    assert "4␛]0;title␇␛[2J\n" in screen.written
    assert "2 tokens" in screen.shown
    assert "\x1b]" not in screen.written
    assert "\x1b[2J" not in screen.written
    assert max(map(len, drawn_lines(screen.written))) <= COLUMNS
    assert screen.written.rindex("\x1b[?25h") > screen.written.rindex("\x1b[?25l")  # the cursor is there again


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_without_colours_nothing_is_coloured(
    terminal: OpenTerminal, program: MakeProgram, model: str, env: dict[str, str]
) -> None:
    screen = terminal("run", model, "2 + 2?", "--server", program(thinking(Path("/"))).path, **env)  # an open gate
    assert screen.wait() == 0
    assert not re.search(r"\x1b\[[\d;]+m", screen.written.replace("\x1b[0m", ""))
    assert "[reasoning]\nlet me see\n" in screen.shown
    assert ("\x1b" in screen.written) == ("NO_COLOR" in env)  # the bar moves the cursor where that is possible


def test_ctrl_c_cancels_and_keeps_what_came(terminal: OpenTerminal, program: MakeProgram, model: str) -> None:
    server = program(HELD)
    screen = terminal("run", model, "Hi", "--server", server.path)
    screen.expect("half")
    screen.send("\x03")
    assert screen.wait() == 130
    assert "cancelled; what had come is above" in screen.shown
    assert server.is_gone()


def test_ctrl_c_twice_stops_at_once(terminal: OpenTerminal, program: MakeProgram, model: str) -> None:
    server = program(Script(replies=HELD.replies, ignore_term=True))
    screen = terminal("run", model, "Hi", "--server", server.path)
    screen.expect("half")
    worker = psutil.Process(server.journal.facts("launched")[-1]["pid"])
    worker.suspend()  # it takes no notice of a regular stop
    screen.send("\x03")
    screen.expect("cancelled; what had come is above")
    screen.send("\x03")
    assert screen.wait() == 130
    assert "stopped at once" in screen.shown
    assert server.is_gone()


@pytest.mark.parametrize(("last", "code"), [("\x04", 0), ("\x03", 130)], ids=["Ctrl-D", "Ctrl-C"])
def test_a_conversation(terminal: OpenTerminal, program: MakeProgram, model: str, last: str, code: int) -> None:
    server = program(
        Script(replies=[Reply(HELD.replies[0].steps, marker="long"), Reply([Text("Hello"), Finish(), DoneMarker()])])
    )
    screen = terminal("run", model, "--chat", "--server", server.path)
    screen.expect("> ")
    screen.send("a long story\r")
    screen.expect("half")
    screen.send("\x03")
    screen.expect("cancelled")
    screen.expect("> ", count=2)
    screen.send("Hi\r")
    screen.expect("Hello")
    screen.expect("> ", count=3)
    screen.send(last)
    assert screen.wait() == code
    (request,) = server.journal.facts("request", n=2)
    assert [message["content"] for message in request["body"]["messages"]] == ["a long story", "half", "Hi"]
    assert server.is_gone()
