"""Runs the scripts of `tests/responses/node` with the npm packages that `make test-responses`
installs."""

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
NODE = Path(__file__).parents[1] / "node"
WAIT_S = 1500.0  # for all jobs; the scripts give up on each of them much sooner


@dataclass(frozen=True, slots=True)
class Scenario:
    """`check` raises AssertionError where what the job gave is not as the client's user expects."""

    name: str
    job: Json
    check: Callable[[Any], None]


def is_installed() -> bool:
    """Whether there is a Node with the packages."""
    return shutil.which("node") is not None and (NODE / "node_modules").is_dir()


def run_node(script: str, base_url: str, jobs: Sequence[Any]) -> list[Any]:
    """What each job gave, in order."""
    done = subprocess.run(
        ["node", str(NODE / script)],
        input=json.dumps({"baseURL": base_url, "jobs": jobs}),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: list[Any] = json.loads(done.stdout)
    return results


def run_scenarios(
    script: str, base_url: str, scenarios: Sequence[Scenario], **settings: str
) -> dict[str, Any]:
    """What each gave, by its name."""
    done = run_node(script, base_url, [{**settings, **scenario.job} for scenario in scenarios])
    return {scenario.name: result for scenario, result in zip(scenarios, done, strict=True)}
