"""What every message needs: where it goes, where its answer goes, and the one that a timer sends.

All messages are frozen, and what they carry is never changed afterwards. Orders are imperatives,
facts are past tense. Instants (`*_at`, `now`) are monotonic seconds. News of a launch carry that
launch's `epoch`, what belongs to a stream its `turn_id`, so that what comes from a life that is
over can be told and dropped. Orders to a launch's actors carry none: each launch has its own. Each
room has the messages of its subject.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from msgspec import Struct

M_contra = TypeVar("M_contra", contravariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Mailbox(Protocol[M_contra]):
    """The sending side of an actor: `tell` never blocks and is False where the actor is dead."""

    def tell(self, message: M_contra) -> bool: ...


class Reply(Protocol[T_contra]):
    """Where a host's question is answered, once, from any thread; a second answer is ignored."""

    def answer(self, value: T_contra) -> None: ...

    def done(self) -> bool: ...

    def fail(self, error: BaseException) -> None: ...


class Tick(Struct, frozen=True, kw_only=True):
    """A timer that the receiver set has fired."""
