"""`llama-worker` with the real llama-server and the small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.server.pace import lean_server

pytestmark = pytest.mark.server


@pytest.fixture
def real_program(tmp_path: Path) -> str:
    return str(lean_server(tmp_path))


def test_a_prompt_in_a_pipe(run: Run, real_program: str, thin_model: str) -> None:
    options = ("--ctx-size", "512", "--max-tokens", "8", "--temperature", "0", "--seed", "1")
    done = run("run", thin_model, "What is 2 + 2?", "--server", real_program, *options, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["outcome"]) == (0, "completed")
    assert told["text"]
    assert told["usage"]["completion_tokens"] <= 8


def test_too_little_memory(run: Run, real_program: str, smollm2: str, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow"
    narrow.write_text(f'#!/bin/sh\nulimit -v 400000\nexec {real_program} "$@"\n')
    narrow.chmod(0o755)
    done = run("run", smollm2, "Hi", "--server", str(narrow), "--ctx-size", "8192")
    assert done.returncode == 1
    assert "what to do: it does not fit into the memory" in done.stderr


def test_the_doctor(run: Run, real_program: str, thin_model: str) -> None:
    done = run("doctor", thin_model, "--server", real_program, "--json")
    report = json.loads(done.stdout)
    assert report["trial"]["tools"] is False  # of the model's own template
    assert report["trial"]["slots"] == 1
    assert report["trial"]["n_ctx"] > 0
