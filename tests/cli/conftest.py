"""The command as a person runs it: in a pipe and in a terminal, on scripted servers."""

import contextlib
import io
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_worker.cli.app import run_app
from llama_worker.testing.scripts import JournalReader, Script, ScriptedReply, Step, plain_reply
from tests.actors.conftest import make_worker, server_program
from tests.conftest import LLAMA_WORKER
from tests.server.pace import HANG_GUARD_S

__all__ = ["make_worker"]  # a fixture

COMMAND = LLAMA_WORKER
WAIT_S = float(HANG_GUARD_S)  # nothing here is right or wrong by the clock
COLUMNS = 80
HELP = """\
-m,    --model FNAME                    model path to load
-np,   --parallel N                     number of server slots
--host HOST                             ip address to listen on
--port PORT                             port to listen on
-c,    --ctx-size N                     size of the prompt context
-b,    --batch-size N                   logical maximum batch size
--cache-ram N                           set the maximum cache size in MiB
--metrics                               enable prometheus compatible metrics endpoint"""
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Of the tester.
_CHANGING = (
    *("PROXY_", "LLAMA_", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "LINES", "TTY_"),
    "PYTHONUNBUFFERED",
)


def saying(*steps: Step, **script: Any) -> Script:
    """A server whose one reply, whole, has these steps."""
    return Script(replies=[ScriptedReply(plain_reply(*steps))], **script)


def environment(**changes: str) -> dict[str, str]:
    """The tester's, without what would change the command."""
    return {
        **{name: text for name, text in os.environ.items() if not name.startswith(_CHANGING)},
        **changes,
    }


@dataclass(frozen=True, slots=True)
class Program:
    """A llama-server by its path; `journal` is what it saw."""

    path: str
    journal: JournalReader

    def is_gone(self) -> bool:
        """Waits for the end of the server that was started last; False where that does not come."""
        pid = self.journal.facts("launched")[-1]["pid"]
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(timeout=WAIT_S)
        return not psutil.pid_exists(pid)


MakeProgram = Callable[..., Program]


@pytest.fixture
def program(tmp_path: Path) -> MakeProgram:
    """Makes a scripted llama-server that is run by its path; `extra` words end its command."""

    def make(script: Script | None = None, *, extra: str = "") -> Program:
        journal = JournalReader(tmp_path / "journal")
        said = {
            "version": "version: 11000 (fake)",
            "help": HELP,
            "list-devices": "Available devices:",
        }
        asked = "".join(
            f'[ "$1" = --{flag} ] && echo {shlex.quote(text)} && exit\n'
            for flag, text in said.items()
        )
        asked += f'set -- "$@" {extra}\n'
        return Program(
            server_program(tmp_path, script or Script(), journal.path, asked=asked), journal
        )

    return make


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A file that looks like a model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x00" * 64)
    return str(path)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`llama-worker` in a pipe, in this process: to start an interpreter takes longer than most
    commands.

    `stdin` None: of a person at a terminal, who types nothing.
    """

    def to_the_end(
        *args: str, stdin: str | None = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with (
            pytest.MonkeyPatch.context() as patch,
            io.TextIOWrapper(io.BytesIO((stdin or "").encode(errors="surrogateescape"))) as lines,
        ):
            patch.setattr(lines, "isatty", lambda: stdin is None)
            patch.setattr(sys, "stdin", lines)
            for name in set(os.environ) - set(environment()):
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            code = run_app(args)
        # a command that only ever ends its process leaves its own set
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    return to_the_end


class Terminal:
    """A command in a pseudo-terminal of 80 columns, whose controlling terminal that is."""

    def __init__(self, *args: str, **env: str) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, COLUMNS))
        self.process = subprocess.Popen(
            (*COMMAND, *args),
            preexec_fn=lambda: os.login_tty(slave),
            env=environment(**{"TERM": "xterm-256color", **env}),
        )
        os.close(slave)
        self._written = b""

    @property
    def written(self) -> str:
        """All that was written so far."""
        return self._written.decode(errors="replace").replace("\r\n", "\n")

    @property
    def shown(self) -> str:
        """The same without the control sequences."""
        return CONTROL_SEQUENCE.sub("", self.written)

    def expect(self, text: str, count: int = 1) -> None:
        """Wait until that has been shown so often."""
        while self.shown.count(text) < count:
            assert self._read(), f"{text!r} was not shown, but: {self.shown[-2000:]!r}"

    def send(self, keys: str) -> None:
        """What a person types."""
        os.write(self._master, keys.encode())

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        while self._read():
            pass
        return self.process.wait(timeout=WAIT_S)

    def close(self) -> None:
        """End it if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self) -> bool:
        """False at the end of the output."""
        try:
            data = os.read(self._master, 65536)
        except OSError:  # nobody holds the other side any more
            return False
        self._written += data
        return bool(data)


OpenTerminal = Callable[..., Terminal]


@pytest.fixture
def terminal() -> Iterator[OpenTerminal]:
    """`llama-worker` in a terminal."""
    with contextlib.ExitStack() as opened:
        yield lambda *args, **env: opened.enter_context(contextlib.closing(Terminal(*args, **env)))
