"""Keeps track of unanswered futures, so that none waits for ever."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any, Generic, TypeVar

from llama_worker.runtime.host.futures import WorkerFuture

W = TypeVar("W")
_SWEEP_MIN = 64


class WeakList(Generic[W]):
    """A list of weak references. Thread-safe.

    Not a WeakSet: its callbacks run on the thread that drops a thing, and would swallow a
    KeyboardInterrupt of the host that comes just then.
    """

    def __init__(self) -> None:
        self._refs: list[weakref.ref[W]] = []
        self._sweep_at = _SWEEP_MIN
        self._sweeping = threading.Lock()  # nobody waits for it

    def add(self, item: W) -> None:
        """Add a thing; now and then the dead references are removed."""
        self._refs.append(weakref.ref(item))
        if len(self._refs) >= self._sweep_at and self._sweeping.acquire(blocking=False):
            try:
                seen = len(self._refs)  # another thread, or a signal handler, may add one meanwhile
                self._refs[:seen] = [ref for ref in self._refs[:seen] if ref() is not None]
                self._sweep_at = max(_SWEEP_MIN, 2 * len(self._refs))
            finally:
                self._sweeping.release()

    def __bool__(self) -> bool:
        """False: the list is empty. Dead references may still be in it."""
        return bool(self._refs)

    def alive(self) -> list[W]:
        # of a copy: an `add` elsewhere may sweep meanwhile
        return [item for ref in tuple(self._refs) if (item := ref()) is not None]


class OpenFutures:
    """The unanswered futures of one worker. Thread-safe.

    Pykka does not fail the future in a message when the receiver dies, or when the message comes a
    moment too late; here both are found and failed.
    """

    def __init__(self) -> None:
        # one that nobody holds needs no answer
        self._open: WeakList[WorkerFuture[Any]] = WeakList()
        self.closed_by: BaseException | None = None  # what `close` was called with

    def add(self, future: WorkerFuture[Any]) -> None:
        """Track the future; it is failed at once if `close` was called before."""
        self._open.add(future)
        # checked after adding: either `close` finds the future, or its call is seen here
        if self.closed_by is not None:
            future.fail(copy.copy(self.closed_by))

    def close(self, error: BaseException) -> None:
        """Fail every open future, and every one still to come. The first call counts."""
        if self.closed_by is None:
            self.closed_by = error
        for future in self._open.alive():
            # a copy for each: an exception that `get` raises holds the frames of the caller
            future.fail(copy.copy(error))
