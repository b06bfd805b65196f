"""Mistakes of somebody who starts their first server: the first line of the error says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_worker import LlamaWorker, TimeoutProfile, WorkerStartError, llama_server_cmd
from tests.server.pace import HOST, SERVER_ARGS, patience

pytestmark = pytest.mark.server
StartError = Callable[..., list[str]]


@pytest.fixture
def start_error(llama_server: str, thin_model: str, free_port: Callable[[], int]) -> StartError:
    """The lines of the error of a start that fails."""

    def start_error(
        *args: str, model: str | Path = thin_model, executable: str = llama_server, **config: Any
    ) -> list[str]:
        worker = LlamaWorker.from_model(
            model, executable=executable, port=free_port(), extra_args=(*SERVER_ARGS, *args), **config
        )
        try:
            with pytest.raises(WorkerStartError) as caught:
                worker.start().get(timeout=patience())
        finally:
            worker.close()
        return str(caught.value).splitlines()

    return start_error


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(None, "there is no such model file: check the path", id="no file"),
        pytest.param("folder", "name the .gguf file itself", id="a folder"),
        pytest.param(b"hello, I am a text", "the file is not a GGUF model", id="a text"),
        pytest.param(0, "a folder or an empty file", id="an empty file"),
        pytest.param(40, "the model file is incomplete: download it again", id="half a head"),
        pytest.param(4_000_000, "the model file is incomplete: download it again", id="half a model"),
    ],
)
def test_a_model_that_is_none(
    start_error: StartError, thin_model: str, tmp_path: Path, content: str | bytes | int | None, told: str
) -> None:
    model = tmp_path / "model.gguf"
    if isinstance(content, str):
        model.mkdir()
    elif content is not None:
        model.write_bytes(content if isinstance(content, bytes) else Path(thin_model).read_bytes()[:content])
    assert told in start_error(model=model)[0]


def test_a_flag_that_the_server_does_not_know(start_error: StartError) -> None:
    first, *log = start_error("--ctx-sise", "512")
    assert first.startswith("exited: ")
    assert "--help" in first
    assert any("--ctx-sise" in line for line in log)


def test_a_host_that_is_another_machines(start_error: StartError) -> None:
    assert "the host must be an address of this machine" in start_error(host="192.0.2.1")[0]


def test_a_script_that_passes_no_arguments_on(
    start_error: StartError, llama_server: str, thin_model: str, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    elsewhere, script = free_port(), tmp_path / "server"
    command = llama_server_cmd(
        thin_model, host=HOST, port=elsewhere, slots=1, executable=llama_server, extra_args=SERVER_ARGS
    )
    script.write_text(f"#!/bin/sh\nexec {' '.join(command)}\n")
    script.chmod(0o755)
    line, *_ = start_error(executable=str(script), timeouts=TimeoutProfile(startup_timeout_s=3.0))
    assert f"it listens on http://{HOST}:{elsewhere}: pass it the worker's host and port" in line
