"""Who waits for what on the listener's thread, how long they may, and who goes first where places
are short. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from llama_worker.responses.http.client_connection import Phase

C = TypeVar("C")

SILENT_S = 120.0  # a connection that sends nothing, a kept one too
HEAD_S = 20.0  # from a head's first byte to its last
BODY_S = 30.0  # without a byte of a body
LINGER_S = 2.0  # after the last reply: for the client to read it and to close
_ALLOWED_S = {Phase.SILENT: SILENT_S, Phase.HEAD: HEAD_S, Phase.BODY: BODY_S, None: LINGER_S}


class WaitingClients(Generic[C]):
    """Clients by what they wait for, `None` for a connection's end. Instants are monotonic
    seconds."""

    def __init__(self) -> None:
        # Of each kind the one that has waited longest comes first: all of a kind may wait equally
        # long.
        self._waiting: dict[Phase | None, dict[C, float]] = {phase: {} for phase in _ALLOWED_S}
        self._phases: dict[C, Phase | None] = {}

    def __len__(self) -> int:
        return len(self._phases)

    def __iter__(self) -> Iterator[C]:
        return iter(tuple(self._phases))

    def enter(self, client: C, phase: Phase | None, now: float) -> None:
        """It waits from now on. One that goes on with its head has no more time for it."""
        if phase is Phase.HEAD and self._phases.get(client) is Phase.HEAD:
            return
        self.leave(client)
        self._phases[client] = phase
        self._waiting[phase][client] = now + _ALLOWED_S[phase]

    def leave(self, client: C) -> None:
        """It does not wait any more; idempotent."""
        if client in self._phases:
            del self._waiting[self._phases.pop(client)][client]

    def deadline(self) -> float | None:
        """When the next one has waited long enough; None: nobody waits."""
        return min(
            (next(iter(kind.values())) for kind in self._waiting.values() if kind), default=None
        )

    def expired(self, now: float) -> list[C]:
        """Those that have."""
        found = []
        for kind in self._waiting.values():
            for client, until in kind.items():
                if until > now:
                    break
                found.append(client)
        return found

    def next_to_evict(self) -> C | None:
        """Whose place is given to another: whoever waits longest, the end of a connection or
        silence first."""
        order = (None, Phase.SILENT, Phase.HEAD, Phase.BODY)
        return next(
            (next(iter(self._waiting[phase])) for phase in order if self._waiting[phase]), None
        )
