"""What only a whole process shows: a Ctrl-C while Python imports the command, and output that cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.cli.conftest import COMMAND, WAIT_S, environment

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
NOBODY, NO_ROOM = (141, ""), (1, "llama-worker: [Errno 28] No space left on device\n")


def ended(*command: str, stdout: int = subprocess.PIPE, **how: Any) -> subprocess.CompletedProcess[str]:
    env = environment(LLAMA_SERVER="true")
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, env=env, **how)


@pytest.mark.parametrize(
    ("name", "before", "code"), [("llama_worker.errors", signal.SIG_DFL, 130), ("typer", signal.SIG_IGN, 0)]
)
def test_ctrl_c_ends_it_at_once_and_quietly_unless_it_is_ignored(name: str, before: signal.Handlers, code: int) -> None:
    done = ended(
        sys.executable, "-c", PRESSED.format(name=name), preexec_fn=lambda: signal.signal(signal.SIGINT, before)
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert bool(done.stdout) == (code == 0)


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("--help", NOBODY),
        ("--help", NO_ROOM),
        ("doctor", NOBODY),
        ("doctor --json", NO_ROOM),
    ],  # each in a way of its own
)
def test_nobody_reads_the_output_or_there_is_no_room_for_it(words: str, ends: tuple[int, str]) -> None:
    if ends == NOBODY:
        reader, stdout = os.pipe()
        os.close(reader)
    else:
        stdout = os.open("/dev/full", os.O_WRONLY)
    with open(stdout, "wb"):
        done = ended(*COMMAND, *words.split(), stdout=stdout)
    assert (done.returncode, done.stderr) == ends
