"""Tools and exit tools on real servers: the examples, as a person would call them, and a server without tools."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llama_worker import LlamaWorker, WorkerConfig, llama_server_cmd
from llama_worker.types import ToolDef
from tests.server.pace import SERVER_ARGS, lean_server, patience

pytestmark = pytest.mark.server
EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = Path(__file__).parent / "templates" / "tools.jinja"
LOOK: ToolDef = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def run_example(name: str, folder: Path, model: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), "--server", str(lean_server(folder)), "--model", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * patience(), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_decision_asked_for_by_one_worker_is_taken_by_another_and_carried_back(
    tmp_path: Path, thin_model: str
) -> None:
    told = run_example("hivemind.py", tmp_path, thin_model)
    asked = re.search(r"planner asks: .+\? \['(.+)', '(.+)'\], else '(.+)'", told)
    decided = re.search(r"judge decides: (.+) \(", told)
    assert asked, told
    assert decided, told
    assert decided[1] in asked.groups()[:2]
    assert "(the planner's draft: running)" in told  # it was decided before the first model had ended
    assert re.search(r"^planner's draft: canceled\nplanner: \w.+\nstopped\.", told, re.M), told


class Looking:
    def run_tool(self, *, name: str, arguments: Mapping[str, Any], request_id: int, job_name: str) -> Any:
        return "seen"


def test_a_server_that_refuses_tools_gets_the_request_again_in_prompted_mode(
    llama_server: str, thin_model: str, free_port: Callable[[], int]
) -> None:
    """With --no-jinja, b11434 says in /props that this template has tools, and refuses them with a 500."""
    port = free_port()
    command = llama_server_cmd(
        thin_model,
        host="127.0.0.1",
        port=port,
        slots=1,
        executable=llama_server,
        extra_args=(*SERVER_ARGS, "--no-jinja", "--chat-template-file", str(TEMPLATE), "--ctx-size", "2048"),
    )
    config = WorkerConfig(
        name="old", host="127.0.0.1", port=port, server_cmd=command, normal_tools=[LOOK], tool_runner=Looking()
    )
    with LlamaWorker(config) as worker:
        admitted = worker.submit("job", "", "Say ok.", params={"max_tokens": 4}).get(timeout=patience())
        assert admitted["ok"]
        result = worker.result(admitted["request_id"]).get(timeout=patience())
        assert result["ok"]
        assert result["state"] == "completed", result
        (warning,) = worker.get_worker_status().get(timeout=patience())["warnings"]
        assert "tools param requires --jinja flag" in warning
