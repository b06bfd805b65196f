"""The one timer thread of a host process: it turns deadlines into calls that only tell.

It sleeps until the earliest deadline and for ever where there is none.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable

from llama_worker.runtime.host.futures import log_exception

_SWEEP_MIN = 64
_PAUSE_S = 0.1
_logger = logging.getLogger("llama_worker.timers")


class HeapTimer:
    """See `ports.Timer`. Thread-safe."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self._call = None

    def _fire(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class TimerThread:
    """A heap of deadlines and the daemon thread that waits for the first of them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, HeapTimer]] = []
        self._sweep_at = _SWEEP_MIN
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs. Early: from Python 3.12 on a host that exits can start
        none."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="llama_worker-timers", daemon=True)
                thread.start()
                self._thread = thread

    def call_at(self, at: float, call: Callable[[], object]) -> HeapTimer:
        """Make the call on the timer thread once `time.monotonic()` has reached `at`. It must not
        block."""
        timer = HeapTimer(call)
        self.start()
        with self._changed:
            self._sweep()
            heapq.heappush(self._heap, (at, next(self._numbers), timer))
            if self._heap[0][2] is timer:
                self._changed.notify()
        return timer

    def _run(self) -> None:
        while True:
            try:
                timer = self._wait_for_due()
            except Exception:  # no memory to wait with; without this thread nothing is ever due
                log_exception(_logger, "the timers pause")
                time.sleep(_PAUSE_S)
                continue
            try:
                timer._fire()
            except Exception:
                log_exception(_logger, "a timer's call failed")

    def _wait_for_due(self) -> HeapTimer:
        with self._changed:
            while True:
                self._drop_cancelled()
                wait_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(None if wait_s is None else min(wait_s, threading.TIMEOUT_MAX))

    def _sweep(self) -> None:
        """Now and then forget all that were cancelled: far deadlines that change often would pile
        up."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[2]._call is not None]
            heapq.heapify(self._heap)
            self._sweep_at = max(_SWEEP_MIN, 2 * len(self._heap))

    def _drop_cancelled(self) -> None:
        """Take cancelled timers off the top, so that none of them wakes the thread."""
        while self._heap and self._heap[0][2]._call is None:
            heapq.heappop(self._heap)


_timers = TimerThread()


def call_at(at: float, call: Callable[[], object]) -> HeapTimer:
    """See `TimerThread.call_at`; on the timer thread that all workers of this process share."""
    return _timers.call_at(at, call)


def start_timers() -> None:
    _timers.start()


def _forget_after_fork() -> None:
    global _timers
    _timers = TimerThread()  # the parent's thread does not exist in the child


os.register_at_fork(after_in_child=_forget_after_fork)
