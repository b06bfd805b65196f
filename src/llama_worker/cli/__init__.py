"""The `llama-worker` command; it needs the extra `cli` (typer and rich)."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command with this process's arguments; its exit code (docs/command-line.md)."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started it: the next file opened would get its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115  for good
    try:
        from llama_worker.cli.app import run_app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(f"llama-worker: {missing} is missing: pip install 'llama-worker[cli]'", file=sys.stderr)
        return 1
    return run_app(sys.argv[1:])
