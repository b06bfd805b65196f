"""The one timer thread of a host process: it turns deadlines into calls that only tell.

It sleeps until the earliest deadline and for ever where there is none.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sched
import threading
import time
from collections.abc import Callable

from llama_worker.runtime.host.futures import log_exception

_logger = logging.getLogger("llama_worker.timers")


class OneTimer:
    """One deadline. `cancel` is idempotent and may be called from any thread."""

    def __init__(self, scheduler: sched.scheduler, event: sched.Event) -> None:
        self._scheduler = scheduler
        self._event = event

    def cancel(self) -> None:
        """Forget the call; one that is being made at this moment may still arrive."""
        with contextlib.suppress(ValueError):  # it was made, or cancelled
            self._scheduler.cancel(self._event)


class TimerThread:
    """The deadlines and the daemon thread that waits for the first of them."""

    def __init__(self) -> None:
        self._scheduler = sched.scheduler(time.monotonic, lambda seconds: None)
        self._sleeps_until = math.inf  # anything earlier wakes it
        self._wake = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs. Early: from Python 3.12 on a host that exits can start
        none."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="llama_worker-timers", daemon=True)
                thread.start()
                self._thread = thread

    def call_at(self, at: float, call: Callable[[], object]) -> OneTimer:
        """Make the call on the timer thread once `time.monotonic()` has reached `at`. It must not
        block."""
        self.start()
        event = self._scheduler.enterabs(at, 0, call)
        if at < self._sleeps_until:
            self._wake.set()
        return OneTimer(self._scheduler, event)

    def _run(self) -> None:
        while True:
            self._sleeps_until = math.inf  # until it is known: what is set meanwhile wakes it
            self._wake.clear()
            try:
                wait_s = self._scheduler.run(blocking=False)
            except Exception:
                log_exception(_logger, "a timer's call failed")
                continue
            if wait_s is not None:
                self._sleeps_until = time.monotonic() + wait_s
                wait_s = min(wait_s, threading.TIMEOUT_MAX)
            self._wake.wait(wait_s)


_timers = TimerThread()


def call_at(at: float, call: Callable[[], object]) -> OneTimer:
    """See `TimerThread.call_at`; on the timer thread that all workers of this process share."""
    return _timers.call_at(at, call)


def start_timers() -> None:
    _timers.start()


def _forget_after_fork() -> None:
    global _timers
    _timers = TimerThread()  # the parent's thread does not exist in the child


os.register_at_fork(after_in_child=_forget_after_fork)
