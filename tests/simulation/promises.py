"""What the simulator holds the worker to, by the names of README's table of guarantees."""

from __future__ import annotations

from enum import Enum


class Promise(Enum):
    """A row of the table. Those that cannot be simulated are listed in docs/testing.md."""

    ANSWERS = "Answers at once"
    SHOWS_FAILURES = "A failure cannot be missed"
    KEEPS_OUTPUT = "Keeps output"
    ENDS_ONCE = "Ends once"
    HUNG_OR_SLOW = "Hung or slow"
    WATCHES_CLIENTS = "Watches its clients"
    SAYS_WHAT_HAPPENS = "Says what happens"
    KILLS_AND_RESTARTS = "Kill and restart"
    LEAVES_NOTHING = "Leaves nothing"
    SWAPS = "Swaps a model"
    CANCELS = "Cancels for real"
    TOOLS = "Tools"

    def __call__(self, what: str) -> Violation:
        """What to raise where it is broken."""
        return Violation(self, what)


class Violation(AssertionError):
    """An invariant is broken: the run ends, wherever that was found."""

    def __init__(self, promise: Promise, what: str) -> None:
        super().__init__(promise, what)
        self.promise, self.what = promise, what

    def __str__(self) -> str:
        return f"{self.promise.value}: {self.what}"
