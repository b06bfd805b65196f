"""A Ctrl-C while Python still imports the command."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.cli.conftest import WAIT_S, environment

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


@pytest.mark.parametrize(
    ("name", "before", "code"),
    [("llama_worker.errors", signal.SIG_DFL, 130), ("typer", signal.SIG_IGN, 0)],
)
def test_it_ends_at_once_and_quietly_unless_it_is_ignored(name: str, before: signal.Handlers, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRESSED.format(name=name)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, before),
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert bool(done.stdout) == (code == 0)
