"""Exit codes, and the errors that end a command. Pure."""

from __future__ import annotations

from collections.abc import Sequence

DONE = 0
FAILED = 1
USAGE = 2
BY_SIGNAL = 128  # plus the signal's number, as shells report a command that a signal ended
CANCELED = BY_SIGNAL + 2  # SIGINT
OUTPUT_CLOSED = 141  # 128 + SIGPIPE

HELP = (
    "Exit codes: 0 success; 1 the start, the request or the proxy's server failed, or doctor found "
    "a problem; 2 wrong usage; 130 cancelled by Ctrl-C; 141 the reader of the output closed it; "
    "129, 143 ended by SIGHUP, SIGTERM (responses-proxy: 0)."
)


class Problem(Exception):
    """The command cannot go on. `reason` is a code for programs; `todo` tells the user what to do;
    `more` holds further lines, such as the last lines of the server's log."""

    def __init__(self, reason: str, what: str, todo: str, more: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join((what, f"what to do: {todo}", *more)))
        self.reason = reason
        self.what = what
        self.todo = todo
        self.more = tuple(more)


class UsageProblem(Exception):
    """Wrong usage; exit code 2."""
