"""Workers on a real Ray cluster of two nodes, in a program of its own: tests.ray.scenarios."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.conftest import eventually
from tests.ray.cluster import cluster_environment, cluster_processes
from tests.ray.scenarios import SCENARIOS, TOLD
from tests.ray.stage import WAIT_S
from tests.server.pace import HANG_GUARD_S

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def errors() -> Iterator[dict[str, str | None]]:
    """What the program told of every scenario. When it has ended, nothing that it started runs any
    more."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.ray.scenarios", str(folder)],
            cwd=ROOT,
            env={**os.environ, **cluster_environment(folder), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=HANG_GUARD_S / 2,  # of all scenarios: each has bounds of its own
        )
        assert done.returncode == 0, done.stderr
        told = [json.loads(line) for line in (folder / TOLD).read_text().splitlines()]
        eventually(
            lambda: not cluster_processes(folder), "end of every process of the cluster", WAIT_S
        )
        yield {each["scenario"]: each["error"] for each in told}
    finally:
        for process in cluster_processes(folder):
            process.kill()
        shutil.rmtree(folder)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_a_cluster(errors: dict[str, str | None], scenario: str) -> None:
    assert errors[scenario] is None, errors[scenario]
