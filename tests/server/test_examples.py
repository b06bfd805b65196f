"""The examples do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_quickstart_shows_two_jobs_live_a_refusal_and_a_clean_stop(
    llama_server: str, smollm2: str, free_port: Callable[[], int]
) -> None:
    script = str(EXAMPLES / "quickstart.py")
    command = [sys.executable, script, "--server", llama_server, "--model", smollm2, "--port", str(free_port())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert re.search(r"^ready, pid \d+, 2 slots$", run.stdout, re.M)
    assert "a third request: {'ok': False, 'error': 'NO_SLOT_AVAILABLE'}" in run.stdout
    assert re.search(r"^active: \{1: 'haiku', 2: 'sum'\}", run.stdout, re.M)
    for name in ("haiku", "sum"):
        assert re.search(rf"^ *{name} \| \S", run.stdout, re.M)  # its output, line by line
        assert re.search(rf"^{name}: (stop|max_tokens), [1-9]\d* tokens, \d+ tokens/s$", run.stdout, re.M)
    assert run.stdout.endswith("stopped.\n")
