"""The `llama-worker` command; it needs the extra `cli` (typer and rich)."""

from __future__ import annotations

import os
import signal
import sys

from llama_worker.cli import exits


def main() -> int:
    """Run the command with this process's arguments; returns its exit code (docs/command-line.md).

    Importing the rest takes a while, and a Ctrl-C meanwhile would print a traceback. So Ctrl-C ends
    the process at once until the command installs its own handler.
    """
    # a shell starts background jobs (`&` in a script) with SIGINT ignored: keep it ignored
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(exits.CANCELED))
    for name in ("stdin", "stdout", "stderr"):
        # the parent process closed it: otherwise the next opened file gets its descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    try:
        from llama_worker.cli.app import run_app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(
            f"llama-worker: {missing} is missing: pip install 'llama-worker[cli]'", file=sys.stderr
        )
        return 1
    return run_app(sys.argv[1:])
