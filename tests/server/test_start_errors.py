"""Mistakes of somebody who starts their first server: the first line of the error says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llama_worker import LlamaWorker, TimeoutProfile, WorkerConfig, WorkerStartError, llama_server_cmd
from tests.server.pace import SERVER_ARGS, patience

pytestmark = pytest.mark.server


def first_line(config: WorkerConfig) -> str:
    """Of the error of a start that fails."""
    worker = LlamaWorker(config)
    try:
        with pytest.raises(WorkerStartError) as caught:
            worker.start().get(timeout=patience())
    finally:
        worker.close()
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    ("kept_bytes", "told"),
    [
        (None, "there is no such model file: check the path"),
        (0, "a folder or an empty file"),
        (40, "the model file is incomplete: download it again"),
        (4_000_000, "the model file is incomplete: download it again"),
    ],
)
def test_a_model_that_cannot_be_loaded(
    llama_server: str, smollm2: str, tmp_path: Path, free_port: Callable[[], int], kept_bytes: int | None, told: str
) -> None:
    model = tmp_path / "model.gguf"
    if kept_bytes is not None:
        with open(smollm2, "rb") as whole:
            model.write_bytes(whole.read(kept_bytes))
    port = free_port()
    command = llama_server_cmd(str(model), host="127.0.0.1", port=port, slots=1, executable=llama_server)
    assert told in first_line(WorkerConfig("w", "127.0.0.1", port, command))


def test_a_folder_and_a_text_instead_of_a_model(
    llama_server: str, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("hello, I am a text")
    for model, told in ((tmp_path, "name the .gguf file itself"), (text, "the file is not a GGUF model")):
        port = free_port()
        command = llama_server_cmd(str(model), host="127.0.0.1", port=port, slots=1, executable=llama_server)
        assert told in first_line(WorkerConfig("w", "127.0.0.1", port, command))


def test_a_host_that_is_another_machines(llama_server: str, smollm2: str, free_port: Callable[[], int]) -> None:
    host, port = "192.0.2.1", free_port()
    command = llama_server_cmd(
        smollm2, host=host, port=port, slots=1, executable=llama_server, extra_args=[*SERVER_ARGS]
    )
    assert "the host must be an address of this machine" in first_line(WorkerConfig("w", host, port, command))


def test_a_script_that_passes_no_arguments_on(
    llama_server: str, smollm2: str, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    elsewhere, port = free_port(), free_port()
    script = tmp_path / "server"
    command = llama_server_cmd(
        smollm2, host="127.0.0.1", port=elsewhere, slots=1, executable=llama_server, extra_args=[*SERVER_ARGS]
    )
    script.write_text(f"#!/bin/sh\nexec {' '.join(command)}\n")
    script.chmod(0o755)
    config = WorkerConfig("w", "127.0.0.1", port, [str(script)], timeouts=TimeoutProfile(startup_timeout_s=3.0))
    assert f"it listens on http://127.0.0.1:{elsewhere}: pass it the worker's host and port" in first_line(config)
