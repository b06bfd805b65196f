"""Where the `llama-worker` command begins.

It is no part of the package: to import anything of that is to import it all, which takes a third of a second, and a
Ctrl-C in that time would show a traceback. So this module imports next to nothing.
"""

import os
import signal

_CANCELED = 130  # see llama_worker.cli.exits


def main() -> int:
    """Run the command; its exit code. A Ctrl-C ends the process at once, until the command listens to it itself."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as behind an & in a script
        signal.signal(signal.SIGINT, _end)
    from llama_worker.cli import main as command

    return command()


def _end(number: int, frame: object) -> None:
    os._exit(_CANCELED)
