"""How many scenarios of each list go well against a base URL."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from functools import partial

from tests.responses.scenarios import ai_sdk, openai_node, openai_python
from tests.responses.scenarios.node import NODE

Failures = dict[str, str]  # by scenario: why; only those that failed
Checks = dict[str, Callable[[], object]]


def lists() -> dict[str, tuple[int, Callable[[str], Failures]]]:
    """By the client's name: how many scenarios, and what runs them."""
    packages: dict[str, str] = json.loads((NODE / "package.json").read_text())["dependencies"]
    found: dict[str, tuple[int, Callable[[str], Failures]]] = {}
    for line in ai_sdk.LINES:
        name, _, version = packages[line].removeprefix("npm:").rpartition("@")
        found[f"{name} {version}"] = (len(ai_sdk.SCENARIOS), partial(_ai_sdk, line))
    found["openai (Python), openai-agents"] = (len(openai_python.SCENARIOS), _openai_python)
    found[f"openai (npm) {packages['openai']}"] = (len(openai_node.SCENARIOS), _openai_node)
    return found


def _ai_sdk(line: str, base_url: str) -> Failures:
    done = ai_sdk.run_line(line, base_url)
    return _failures(
        {
            scenario.name: partial(scenario.check, done[scenario.name])
            for scenario in ai_sdk.SCENARIOS
        }
    )


def _openai_python(base_url: str) -> Failures:
    with openai_python.make_client(base_url) as client:
        return _failures({run.__name__: partial(run, client) for run in openai_python.SCENARIOS})


def _openai_node(base_url: str) -> Failures:
    done = openai_node.run_all(base_url)
    scenarios = openai_node.SCENARIOS
    return _failures(
        {scenario.name: partial(scenario.check, done[scenario.name]) for scenario in scenarios}
    )


def _failures(checks: Checks) -> Failures:
    failures = {}
    for name, check in checks.items():
        try:
            check()
        except Exception as error:  # whatever a client raises is what its user sees
            line = traceback.extract_tb(error.__traceback__)[-1].line
            failures[name] = f"{type(error).__name__}: {str(error)[:200] or line}"
    return failures
