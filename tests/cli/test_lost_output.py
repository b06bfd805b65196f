"""Output that cannot be written: the exit code says why, and no traceback is shown."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.cli.conftest import COMMAND, WAIT_S, environment

NOBODY, NO_ROOM = (141, ""), (1, "llama-worker: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("--help", NOBODY),
        ("--help", NO_ROOM),
        ("doctor", NOBODY),
        ("doctor --json", NO_ROOM),
    ],  # each in a way of its own
)
def test_nobody_reads_it_or_there_is_no_room_for_it(words: str, ends: tuple[int, str]) -> None:
    if ends == NOBODY:
        reader, stdout = os.pipe()
        os.close(reader)
    else:
        stdout = os.open("/dev/full", os.O_WRONLY)
    with open(stdout, "wb"):
        done = subprocess.run(
            (*COMMAND, *words.split()),
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            env=environment(LLAMA_SERVER="true"),
        )
    assert (done.returncode, done.stderr) == ends
