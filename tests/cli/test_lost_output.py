"""Output that cannot be written: the exit code says why, and no traceback is shown."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, WAIT_S, environment

NOBODY, NO_ROOM = (141, ""), (1, "llama-worker: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("--help", NOBODY),  # each writes in a way of its own
        ("--help", NO_ROOM),
        ("doctor", NOBODY),
        ("doctor --json", NO_ROOM),
        ("top FLEET", NOBODY),
    ],
)
def test_nobody_reads_it_or_there_is_no_room_for_it(words: str, ends: tuple[int, str], tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[workers.small]\nhost = "127.0.0.1"\nport = 1\nmodel = "m.gguf"\n')
    args = [str(fleet) if word == "FLEET" else word for word in words.split()]
    if ends == NOBODY:
        reader, stdout = os.pipe()
        os.close(reader)
    else:
        stdout = os.open("/dev/full", os.O_WRONLY)
    try:
        done = subprocess.run(
            (*COMMAND, *args),
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            env=environment(LLAMA_SERVER="true"),
        )
    finally:
        os.close(stdout)
    assert (done.returncode, done.stderr) == ends
