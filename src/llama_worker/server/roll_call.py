"""Finds the worker's actors that do not answer. Sans-IO; instants are monotonic seconds.

While the worker is busy, every actor is asked every `ASK_INTERVAL_S` whether it still takes
messages. One that has not answered for `ANSWER_TIMEOUT_S` is stuck in a handler, and counts as
dead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from llama_worker.clock import earliest


class Member(NamedTuple):
    """One of the actors of a launch."""

    epoch: int
    role: str
    slot: int | None


ASK_INTERVAL_S = 10.0
ANSWER_TIMEOUT_S = 30.0


class RollCall:
    """Tracks which actors were asked, and since when each owes an answer. Not thread-safe."""

    def __init__(self) -> None:
        self._next_at: float | None = None
        self._unanswered: dict[Member, float] = {}  # since when

    @property
    def deadline(self) -> float | None:
        """When a question is due or an answer is overdue; None: never."""
        overdue_at = (at + ANSWER_TIMEOUT_S for at in self._unanswered.values())
        return earliest(self._next_at, *overdue_at)

    def keep(self, *, busy: bool, now: float) -> None:
        """Ask from now on; stop asking if the worker is not `busy` and no answer is owed."""
        if not busy and not self._unanswered:
            self._next_at = None
        elif self._next_at is None:
            self._next_at = now + ASK_INTERVAL_S

    def due(self, members: Iterable[Member], now: float) -> list[Member]:
        """The members to ask now."""
        if self._next_at is None or now < self._next_at:
            return []
        self._next_at = now + ASK_INTERVAL_S
        return [member for member in members if member not in self._unanswered]

    def asked(self, member: Member, now: float) -> None:
        """The member was asked and owes an answer."""
        self._unanswered[member] = now

    def answered(self, member: Member) -> None:
        """The member takes messages, or has been given up: it owes no answer."""
        self._unanswered.pop(member, None)

    def overdue(self, now: float) -> list[Member]:
        """The members that count as dead."""
        return [member for member, at in self._unanswered.items() if now >= at + ANSWER_TIMEOUT_S]
