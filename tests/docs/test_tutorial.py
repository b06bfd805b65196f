"""The tutorial, as a reader would do it: its files, its commands, a server killed by hand."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import running
from tests.docs.pages import DOCS, ROOT, blocks, files, runnable, with_ports
from tests.server.pace import lean_server, patience

pytestmark = pytest.mark.server


@pytest.fixture
def clone(free_port: Callable[[], int], tmp_path: Path) -> Path:
    """What the tutorial needs of a clone, and the programs that the reader writes."""
    for name in ("examples", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "build" / "tutorial").mkdir(parents=True)
    for name, code in files(with_ports((DOCS / "tutorial.md").read_text(), free_port)).items():
        (tmp_path / "build" / "tutorial" / name).write_text(code)
    return tmp_path


@pytest.fixture
def environment(clone: Path, smollm2: str) -> dict[str, str]:
    """As after `. .venv/bin/activate`."""
    lean_server(clone)  # found by tools.found, and linked by the tutorial
    path = f"{clone}/.venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        "LLAMA_SERVER": str(clone / "llama-server"),
        "LLAMA_MODEL": smollm2,
        "PATH": path,
    }


def test_tutorial_commands_show_what_the_tutorial_says(
    clone: Path, environment: dict[str, str]
) -> None:
    commands = runnable((DOCS / "tutorial.md").read_text(), "sh")
    assert len(commands.splitlines()) > 8
    shell, limit_s = ["sh", "-e", "-c", commands], 5 * patience()
    done = subprocess.run(
        shell, cwd=clone, env=environment, capture_output=True, text=True, timeout=limit_s
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout
    assert re.search(
        r"^ready\n\{'ok': True, 'request_id': 1\}\n.*?^(stop|max_tokens) \{'total_s'",
        told,
        re.M | re.S,
    )
    assert re.search(r"^(completed|failed): \d+ tokens, \d+ a second$", told, re.M)
    assert "called: add({'a': 17, 'b': 25})" in told
    assert "signal: declare_outcome" in told
    assert re.search(r"^exited 1\nexited: .+return code 1", told, re.M)
    assert "'event': 'exited'" in told


def test_the_server_that_the_reader_kills_comes_back(
    clone: Path, environment: dict[str, str], thin_model: str
) -> None:
    environment["PATH"] = f"{clone}:{environment['PATH']}"
    lean_server(clone, "--temp", "0")
    folder = clone / "build" / "tutorial"
    (folder / "model.gguf").symlink_to(thin_model)
    with running("python", "watch.py", cwd=folder, env=environment) as (program, output):
        lines = [output.readline()]
        os.kill(int(lines[0].rpartition(" ")[2]), signal.SIGKILL)
        for line in output:
            lines.append(line)
            if line.startswith("request 2"):
                program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=patience())
    assert program.returncode == 0, errors
    shown = next(
        block.code
        for block in blocks((DOCS / "tutorial.md").read_text())
        if "request 1 on" in block.code
    )
    assert plain(lines) == plain(shown.splitlines())


def plain(lines: list[str]) -> list[str]:
    """Without what differs from run to run: pids, lengths, how often the same was said, and which
    news came first.

    Where news of a death takes longer than the 0.2 s for which a broken connection waits for it,
    the connection is what the request fails of.
    """
    told = [
        re.sub(r"pid \d+|\d+ characters|server_died|stream_disconnected", "...", line.strip())
        for line in lines
    ]
    return [line for number, line in enumerate(told) if number == 0 or line != told[number - 1]]
