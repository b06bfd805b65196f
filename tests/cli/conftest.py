"""The command as a person runs it: in a pipe and in a terminal, on scripted servers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from llama_worker.cli.app import run_app
from tests.fake_script import Journal, Script, fake_server_cmd
from tests.responses.conftest import make_client
from tests.server.pace import HANG_GUARD_S

__all__ = ["make_client"]  # a fixture

COMMAND = (sys.executable, "-m", "llama_worker.cli")
WAIT_S = float(HANG_GUARD_S)  # nothing here is right or wrong by the clock
COLUMNS = 80
HELP = """\
-m,    --model FNAME                    model path to load
-np,   --parallel N                     number of server slots
--host HOST                             ip address to listen on
--port PORT                             port to listen on
-c,    --ctx-size N                     size of the prompt context
--cache-ram N                           set the maximum cache size in MiB
--metrics                               enable prometheus compatible metrics endpoint"""
HELLO = Script()  # the scripted server says so
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_CHANGING = ("PROXY_", "LLAMA_", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "LINES", "TTY_")  # of the tester
_CONTROLLING = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


def environment(**changes: str) -> dict[str, str]:
    """The tester's, without what would change the command."""
    return {**{name: text for name, text in os.environ.items() if not name.startswith(_CHANGING)}, **changes}


@dataclass(frozen=True, slots=True)
class Program:
    """A llama-server by its path; `journal` is what it saw."""

    path: str
    journal: Journal

    def is_gone(self) -> bool:
        """Waits for the end of the server that was started last; False where that does not come."""
        pid = self.journal.facts("launched")[-1]["pid"]
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(timeout=WAIT_S)
        return not psutil.pid_exists(pid)


MakeProgram = Callable[..., Program]


@pytest.fixture
def program(tmp_path: Path) -> MakeProgram:
    """Makes a scripted llama-server that can be executed by its path; `extra` words end its command."""

    def make(script: Script = HELLO, *, extra: str = "", version: str = "version: 7 (fake)") -> Program:
        journal = Journal(tmp_path / f"journal-{len(list(tmp_path.glob('journal-*')))}")
        words = fake_server_cmd(script, host="HOST", port=0, slots=0, journal=journal.path)
        kept = [*words[:4], *words[words.index("--script") :]]
        path = tmp_path / f"llama-server-{journal.path.name}"
        path.write_text(
            "#!/bin/sh\n"
            f'[ "$1" = --version ] && echo {shlex.quote(version)} && exit\n'
            f'[ "$1" = --help ] && echo {shlex.quote(HELP)} && exit\n'
            '[ "$1" = --list-devices ] && echo "Available devices:" && exit\n'
            f'exec {shlex.join(kept)} "$@" {extra}\n'
        )
        path.chmod(0o755)
        return Program(str(path), journal)

    return make


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A file that looks like a model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x00" * 64)
    return str(path)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`llama-worker` in a pipe, in this process: to start an interpreter takes longer than most commands."""

    def to_the_end(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "stdin").write_text(stdin)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with pytest.MonkeyPatch.context() as patch, open(tmp_path / "stdin") as lines:
            patch.setattr(sys, "stdin", lines)
            for name in set(os.environ) - set(environment()):
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            code = run_app(args)
        for number, handler in handlers.items():  # which a command that only ever ends its process leaves set
            signal.signal(number, handler)
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    return to_the_end


class Terminal:
    """A command in a pseudo-terminal of 80 columns, whose controlling terminal that is."""

    def __init__(self, *args: str, **env: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            (sys.executable, "-c", _CONTROLLING, *COMMAND, *args),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
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
        deadline = time.monotonic() + WAIT_S
        while self.shown.count(text) < count:
            assert self._read(deadline), f"{text!r} was not shown, but: {self.shown[-2000:]!r}"

    def send(self, keys: str) -> None:
        """What a person types."""
        os.write(self._master, keys.encode())

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        deadline = time.monotonic() + WAIT_S
        while self._read(deadline):
            pass
        return self.process.wait(timeout=WAIT_S)

    def close(self) -> None:
        """End it if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self, deadline: float) -> bool:
        """False at the end of the output, or when the time is up."""
        ready, _, _ = select.select([self._master], (), (), max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._master, 65536) if ready else b""
        except OSError:  # nobody holds the other side any more
            return False
        self._written += data
        return bool(data)


OpenTerminal = Callable[..., Terminal]


@pytest.fixture
def terminal() -> Iterator[OpenTerminal]:
    """`llama-worker` in a terminal."""
    opened: list[Terminal] = []

    def make(*args: str, **env: str) -> Terminal:
        opened.append(Terminal(*args, **env))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
