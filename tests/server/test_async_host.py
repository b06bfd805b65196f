"""The asyncio example on the real server."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.pace import lean_server, patience

pytestmark = pytest.mark.server
SLOW_STEP = re.compile(r"Executing <.*> took \d+\.\d+ seconds")  # asyncio's debug mode, on a machine that is busy
ROOT = Path(__file__).parents[2]


def test_an_asyncio_program_streams_side_by_side_and_gives_up_at_a_deadline(
    thin_model: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    program = [sys.executable, "-X", "dev", "-W", "error", str(ROOT / "examples" / "async_host.py")]
    options = ["--server", str(lean_server(tmp_path)), "--model", thin_model, "--port", str(free_port())]
    done = subprocess.run(
        [*program, *options],
        capture_output=True,
        text=True,
        timeout=patience(),
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if not SLOW_STEP.fullmatch(line)]
    assert said == []  # nothing that was never awaited, closed or retrieved
    lines = done.stdout.splitlines()
    assert lines[-1] == "stopped."
    for name in ("haiku", "sum"):
        (characters,) = re.findall(rf"^ *{name} : completed, (\d+) characters$", done.stdout, flags=re.MULTILINE)
        pieces = re.findall(rf"^ *{name} \| (.*)$", done.stdout, flags=re.MULTILINE)
        assert sum(len(ast.literal_eval(piece)) for piece in pieces) == int(characters) > 0
    assert re.search(r"endless : canceled, \d+ characters", done.stdout)
    assert sum("the event loop goes on" in line for line in lines) > 1
