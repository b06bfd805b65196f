"""The futures that a host gets: Pykka's, but awaitable without blocking the event loop, with
callbacks, and always answered: unanswered ones are tracked, so that none waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import pykka

from llama_worker.runtime.host.threads import never_blocks, run_callback, start_callbacks

T = TypeVar("T")
W = TypeVar("W")
_SIGNAL_CHECK_S = 1.0  # longest time a signal may go unnoticed by the main thread
_SWEEP_MIN = 64
_REMEDY = "call get(timeout=...) for its value, or await it in a coroutine"


# The futures with a callback, or on which a thread or task waits. A future that nobody holds is
# freed, so that a host may poll with one after the other.
_awaited: set[WorkerFuture[Any]] = set()


class WorkerFuture(pykka.ThreadingFuture[T], Generic[T]):
    """A value that an actor will answer. Any thread may wait; the first answer counts, later ones
    are ignored."""

    # One of the host's signal handlers may run at any line of a thread that waits, and wait for
    # another answer there. So answering needs no lock that a waiter may hold: single operations on
    # a list are atomic. Waiters take Pykka's own condition only once there is a result.
    #
    # A derived future, made by map(), filter(), join() or reduce(), has a hook and no result, so
    # that nobody can tell when it is resolved: as Pykka's own, it has only `get`.

    def __init__(self) -> None:
        super().__init__()
        self._wakers: list[Callable[[], object]] = []
        self._unanswered = threading.Lock()  # taken by the first answer and never released

    def answer(self, value: T) -> None:
        """Resolve with a value, unless already resolved."""
        with contextlib.suppress(queue.Full):
            self.set(value)

    def fail(self, error: BaseException) -> None:
        """Resolve with an exception, unless already resolved."""
        with contextlib.suppress(queue.Full):
            self.set_exception((type(error), error, error.__traceback__))

    def set(self, value: Any = None) -> None:
        """As Pykka's: raises queue.Full if the future is resolved."""
        self._claim()
        super().set(value)
        self._call_wakers()

    def set_exception(self, exc_info: Any = None) -> None:
        """As Pykka's: raises queue.Full if the future is resolved."""
        self._claim()
        super().set_exception(exc_info)
        self._call_wakers()

    def _claim(self) -> None:
        if self._get_hook is not None or not self._unanswered.acquire(blocking=False):
            raise queue.Full

    def get(self, *, timeout: float | None = None) -> T:
        """As Pykka's, but typed: block until resolved; raises pykka.Timeout after `timeout`
        seconds."""
        if self._get_hook is not None:
            # Not under Pykka's lock: a waiter would hold it, and others exceed their timeouts.
            return pykka.Future.get(self, timeout=timeout)
        if not self.wait(timeout):
            raise pykka.Timeout(f"{timeout} seconds")
        return cast("T", super().get(timeout=timeout))

    def done(self) -> bool:
        """True once resolved."""
        self._refuse_if_derived()
        return self._result is not None

    def wait(self, timeout_s: float | None) -> bool:
        """Block until resolved. Returns False after `timeout_s` seconds, and at once on a thread
        that called `never_block_this_thread`, or if the interpreter ends and nobody is left to
        answer."""
        in_vain = never_blocks() or sys.is_finalizing()
        if not self.done() and not in_vain:
            woken = threading.Lock()
            woken.acquire()
            self._add_waker(woken.release)
            try:
                _acquire(woken, timeout_s)
            finally:
                self._remove_waker(woken.release)
        return self.done()

    def add_done_callback(self, callback: Callable[[WorkerFuture[T]], object]) -> None:
        """Call `callback(self)` once resolved, on the callback thread that all workers of this
        process share.

        An exception in it is logged. It may use the worker; it should not wait long, since it keeps
        the other callbacks waiting.
        """
        self._refuse_if_derived()
        start_callbacks()  # if it becomes due at the host's exit, it is too late
        self._add_waker(lambda: run_callback(lambda: callback(self)))

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an asyncio task, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        if not self.done():
            resolved = loop.create_future()

            def wake() -> None:
                if not resolved.done():
                    resolved.set_result(None)

            def wake_threadsafe() -> None:
                try:
                    loop.call_soon_threadsafe(wake)
                except RuntimeError:
                    return  # the loop was closed; nobody waits there any more

            self._add_waker(wake_threadsafe)
            try:
                yield from resolved
            finally:
                self._remove_waker(wake_threadsafe)
        return self.get()

    def __repr__(self) -> str:
        state = (
            "resolved" if self._result is not None else "derived" if self._get_hook else "pending"
        )
        return f"<{type(self).__name__}, {state}: get(timeout=...) returns its value>"

    if not TYPE_CHECKING:  # a type checker finds a forgotten `get` by itself
        # At run time the error says so, and not only that a future has no such item.

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}; {_REMEDY}", name=name, obj=self
            )

        def __getitem__(self, key: object) -> NoReturn:
            raise TypeError(f"{type(self).__name__} has no item {key!r}; {_REMEDY}")

        def __iter__(self) -> NoReturn:
            raise TypeError(f"{type(self).__name__} is not iterable; {_REMEDY}")

    def _refuse_if_derived(self) -> None:
        if self._get_hook is not None:
            raise TypeError(
                f"a {type(self).__name__} made by map(), filter(), join() or reduce() has only "
                "get(timeout=...); await or ask the future that it was made from"
            )

    def _add_waker(self, waker: Callable[[], object]) -> None:
        self._wakers.append(waker)
        _awaited.add(self)
        if self.done():
            self._call_wakers()

    def _remove_waker(self, waker: Callable[[], object]) -> None:
        with contextlib.suppress(ValueError):  # already called
            self._wakers.remove(waker)
        if not self._wakers:
            _awaited.discard(self)
        if self._wakers:  # one was added meanwhile
            _awaited.add(self)
            if self.done():  # nobody would remove it any more
                self._call_wakers()

    def _call_wakers(self) -> None:
        """Call each waker once, also if several threads do this at the same time."""
        with contextlib.suppress(IndexError):
            while True:
                waker = self._wakers.pop(0)
                waker()
        _awaited.discard(self)


def _acquire(woken: threading.Lock, timeout_s: float | None) -> None:
    """Sleep until the lock is released, for `timeout_s` at most.

    Only the main thread handles signals. If one comes in the instant before it sleeps, or to
    another thread, it notices only when it wakes: so it wakes now and then, or a Ctrl-C would have
    no effect for as long as the wait takes.
    """
    slice_s = (
        _SIGNAL_CHECK_S
        if threading.current_thread() is threading.main_thread()
        else threading.TIMEOUT_MAX
    )
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not woken.acquire(timeout=max(0.0, min(until - time.monotonic(), slice_s))):
        if not time.monotonic() < until:  # also ends at once if the timeout is NaN
            return


class ResultFuture(WorkerFuture[T]):
    """A future whose value is handed over: the first successful `get` (or `await`) calls
    `on_taken`."""

    def __init__(self, on_taken: Callable[[T], object] | None = None) -> None:
        super().__init__()
        self._on_taken = on_taken

    def get(self, *, timeout: float | None = None) -> T:
        """As Pykka's; a `get` that times out does not take the value."""
        value = super().get(timeout=timeout)
        with self._condition:
            on_taken, self._on_taken = self._on_taken, None
        if on_taken is not None:
            on_taken(value)
        return value


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
