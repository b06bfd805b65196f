"""The fixtures `scripted_server` and `scripted_worker`; see llama_worker.testing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # every run of pytest in the environment loads this module
    from llama_worker import LlamaWorker
    from llama_worker.testing import ScriptedServer


@pytest.fixture
def scripted_server(tmp_path: Path) -> ScriptedServer:
    """A stand-in for llama-server that the test scripts; a worker starts it."""
    from llama_worker.testing import ScriptedServer

    return ScriptedServer(tmp_path / "scripted_server")


@pytest.fixture
def scripted_worker(scripted_server: ScriptedServer) -> Iterator[LlamaWorker]:
    """A worker that is READY on `scripted_server`; closed at the end of the test."""
    from llama_worker import LlamaWorker

    with LlamaWorker(scripted_server.config()) as worker:
        yield worker
