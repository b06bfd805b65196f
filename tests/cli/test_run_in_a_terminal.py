"""`llama-worker run` in a terminal of 80 columns: what is drawn, Ctrl-C once and twice, a
conversation."""

import re
from pathlib import Path

import psutil
import pytest

from llama_worker.testing import scripts as fs
from tests.cli.conftest import COLUMNS, CONTROL_SEQUENCE, MakeProgram, OpenTerminal, saying


def thinking(gate: Path) -> fs.Script:
    answer = (fs.Reasoning("let me see"), fs.Text("4\x1b]0;title\x07\x1b[2J"))
    return saying(
        fs.PromptProgress(30, 100),
        fs.Gate(gate),
        *answer,
        startup=fs.Startup(log=["load_model: loading model 'x'"]),
    )


def drawn_lines(written: str) -> list[str]:
    """Every line, also those that were drawn over, without control sequences."""
    return re.split("[\r\n]", CONTROL_SEQUENCE.sub("", re.sub(r"\x1b\[2K|\x1b\[1A", "\r", written)))


def test_it_shows_loading_prefill_reasoning_text_and_numbers(
    terminal: OpenTerminal, program: MakeProgram, model: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    screen = terminal("run", model, "2 + 2?", "--server", program(thinking(gate)).path)
    for text in ("starting", "reading the prompt", "30/100"):
        screen.expect(text)
    gate.touch()
    assert screen.wait() == 0
    assert "\x1b[2mlet me see\x1b[0m" in screen.written
    assert "4␛]0;title␇␛[2J\n" in screen.written
    assert "2 tokens" in screen.shown
    assert [harm for harm in ("\x1b]", "\x1b[2J") if harm in screen.written] == []
    assert max(map(len, drawn_lines(screen.written))) <= COLUMNS
    # the cursor is there again
    assert screen.written.rindex("\x1b[?25h") > screen.written.rindex("\x1b[?25l")


def test_a_status_line_fits_the_width(
    terminal: OpenTerminal, program: MakeProgram, model: str, tmp_path: Path
) -> None:
    gate, said = tmp_path / "gate", "loading model 'a/folder/of/models/with-a-long-name.gguf'"
    fifo = f"while [ ! -e {gate} ]; do sleep 0.02; done"
    server = Path(program(saying(fs.Text("4"), startup=fs.Startup(log=["ready to bind"]))).path)
    first, _, rest = server.read_text().partition("exec ")
    server.write_text(f'{first}[ "$1" = --model ] && echo "{said}" && {fifo}\nexec {rest}')
    screen = terminal("run", model, "2 + 2?", "--server", str(server))
    room = COLUMNS - 30
    screen.expect(f"starting: {said}"[: room - 3] + "...")
    gate.touch()
    assert screen.wait() == 0
    assert max(map(len, drawn_lines(screen.written))) <= COLUMNS


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_without_colours_nothing_is_coloured(
    terminal: OpenTerminal, program: MakeProgram, model: str, env: dict[str, str]
) -> None:
    # an open gate
    screen = terminal("run", model, "2 + 2?", "--server", program(thinking(Path("/"))).path, **env)
    assert screen.wait() == 0
    assert not re.search(r"\x1b\[[\d;]+m", screen.written.replace("\x1b[0m", ""))
    assert "[reasoning]\nlet me see\n" in screen.shown
    # the bar moves the cursor where that is possible
    assert ("\x1b" in screen.written) == ("NO_COLOR" in env)


def test_ctrl_c_cancels_and_twice_stops_at_once(
    terminal: OpenTerminal, program: MakeProgram, model: str
) -> None:
    server = program(saying(fs.Text("half"), fs.WaitClose(), ignore_term=True))
    screen = terminal("run", model, "Hi", "--server", server.path)
    screen.expect("half")
    worker = psutil.Process(server.journal.facts("launched")[-1]["pid"])
    worker.suspend()  # it takes no notice of a regular stop
    screen.send("\x03")
    screen.expect("cancelled; the output so far is above")
    screen.expect("1 token")
    screen.send("\x03")
    assert screen.wait() == 130
    assert "stopped at once" in screen.shown
    assert server.is_gone()


@pytest.mark.parametrize(("last", "code"), [("\x04", 0), ("\x03", 130)], ids=["Ctrl-D", "Ctrl-C"])
def test_a_conversation(
    terminal: OpenTerminal, program: MakeProgram, model: str, last: str, code: int
) -> None:
    long, brief = (
        fs.plain_reply(*steps) for steps in ([fs.Text("half"), fs.WaitClose()], [fs.Text("Hello")])
    )
    server = program(
        fs.Script(replies=[fs.ScriptedReply(long, marker="long"), fs.ScriptedReply(brief)])
    )
    screen = terminal("run", model, "--chat", "--server", server.path)
    for text, count, keys in [
        ("> ", 1, "a long story\r"),
        ("half", 1, "\x03"),
        ("> ", 2, "Hi\r"),
        ("> ", 3, last),
    ]:
        screen.expect(text, count)
        screen.send(keys)
    assert screen.wait() == code
    assert re.search("half.*cancelled.*Hello", screen.shown, re.DOTALL)
    (request,) = server.journal.facts("request", n=2)
    contents = [message["content"] for message in request["body"]["messages"]]
    assert contents == ["a long story", "half", "Hi"]
    assert server.is_gone()
