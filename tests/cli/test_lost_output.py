"""Output that cannot be written: the exit code says why, and no traceback is shown."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, WAIT_S, environment

FLEET = '[workers.small]\nhost = "127.0.0.1"\nport = 1\nmodel = "m.gguf"\n'


def ended(args: list[str], stdout: int) -> tuple[int, str]:
    command = (*COMMAND, *args)
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, env=environment(LLAMA_SERVER="true")
    )
    return done.returncode, done.stderr


@pytest.fixture(params=["--help", "run --help", "doctor", "doctor --json", "top FLEET"])
def args(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET)
    return [str(fleet) if word == "FLEET" else word for word in request.param.split()]


def test_nobody_reads_it(args: list[str]) -> None:
    nobody, stdout = os.pipe()
    os.close(nobody)
    try:
        assert ended(args, stdout) == (141, "")
    finally:
        os.close(stdout)


def test_there_is_no_room_for_it(args: list[str]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        assert ended(args, full) == (1, "llama-worker: [Errno 28] No space left on device\n")
    finally:
        os.close(full)
