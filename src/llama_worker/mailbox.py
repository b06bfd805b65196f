"""The types that all messages share: where one goes, where its answer goes, and a timer's Tick.

All messages are frozen, and what they carry is never changed afterwards. Orders are imperatives,
facts are past tense. Instants (`*_at`, `now`) are monotonic seconds. Facts about a launch carry its
`epoch`, those about a stream its `turn_id`, so that stale ones are recognised and dropped. Of the
orders to a launch's actors only `Launch` carries an `epoch`: each launch has its own actors. The
other messages are defined in the packages that they concern.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from msgspec import Struct

M_contra = TypeVar("M_contra", contravariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Mailbox(Protocol[M_contra]):
    """The sending side of an actor: `tell` never blocks; False: the actor is dead."""

    def tell(self, message: M_contra) -> bool: ...


class Reply(Protocol[T_contra]):
    """Takes the answer to a host's call, once, from any thread; a second answer is ignored."""

    def answer(self, value: T_contra) -> None: ...

    def done(self) -> bool: ...

    def fail(self, error: BaseException) -> None: ...


class Tick(Struct, frozen=True, kw_only=True):
    """A timer that the receiver set has fired."""
