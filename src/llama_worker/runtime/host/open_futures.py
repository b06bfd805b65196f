"""Whose answer is still awaited: none of them is left waiting for ever."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any, Generic, TypeVar

from llama_worker.runtime.host.futures import WorkerFuture

W = TypeVar("W")
_SWEEP_MIN = 64


class WeakList(Generic[W]):
    """Things that are held only as long as somebody else holds them. Thread-safe.

    No WeakSet: its callbacks run on the thread that lets go of a thing, and a KeyboardInterrupt of
    the host that comes just then would be swallowed.
    """

    def __init__(self) -> None:
        self._refs: list[weakref.ref[W]] = []
        self._sweep_at = _SWEEP_MIN
        self._sweeping = threading.Lock()  # nobody waits for it

    def add(self, thing: W) -> None:
        """One more; now and then those that are gone are forgotten."""
        self._refs.append(weakref.ref(thing))
        if len(self._refs) >= self._sweep_at and self._sweeping.acquire(blocking=False):
            try:
                seen = len(self._refs)  # another thread, or a signal handler, may add one meanwhile
                self._refs[:seen] = [ref for ref in self._refs[:seen] if ref() is not None]
                self._sweep_at = max(_SWEEP_MIN, 2 * len(self._refs))
            finally:
                self._sweeping.release()

    def __bool__(self) -> bool:
        """False: nothing was added."""
        return bool(self._refs)

    def alive(self) -> list[W]:
        return [thing for ref in self._refs if (thing := ref()) is not None]


class OpenFutures:
    """The futures of one worker that are still to be answered. Thread-safe.

    Pykka does not fail a future that a message carries when the receiver dies, nor does a message
    count that came a moment too late; here both are found and failed.
    """

    def __init__(self) -> None:
        # one that nobody holds needs no answer
        self._open: WeakList[WorkerFuture[Any]] = WeakList()
        self.closed_by: BaseException | None = None  # what `close` was called with

    def add(self, future: WorkerFuture[Any]) -> None:
        """Keep an eye on the future; it is failed at once where `close` came before."""
        self._open.add(future)
        # asked behind: `close` either finds the future or is seen here
        if self.closed_by is not None:
            future.fail(copy.copy(self.closed_by))

    def close(self, error: BaseException) -> None:
        """Fail every open future, and every one still to come. The first call counts."""
        if self.closed_by is None:
            self.closed_by = error
        for future in self._open.alive():
            # its own: what is raised holds the frames of who called `get`
            future.fail(copy.copy(error))
