"""What needs an extra that is not installed says how to install it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDE = """
import sys

HIDDEN = sys.argv.pop()

class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hider())
"""
COMMAND = "from llama_worker.cli import main; sys.argv[1:] = {}; sys.exit(main())"


@pytest.mark.parametrize(
    ("package", "extra", "program"),
    [
        ("typer", "cli", COMMAND.format(["doctor"])),
        ("rich", "cli", COMMAND.format(["doctor"])),
        ("prometheus_client", "metrics", "from llama_worker.metrics import WorkerCollector"),
        ("ray", "ray", "from llama_worker.ray import Fleet"),
    ],
)
def test_a_missing_extra_is_named(package: str, extra: str, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{HIDE}\n{program}", package], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f"{package} is missing" in done.stderr
    assert f"pip install 'llama-worker[{extra}]'" in done.stderr
