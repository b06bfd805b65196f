"""The one timer thread of a host process: at each deadline it makes a call, which must not
block.

It sleeps until the earliest deadline, and for ever if there is none.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from llama_worker.clock import ClockTimer, PausingClock
from llama_worker.runtime.host.callbacks import log_exception
from llama_worker.runtime.host.futures import never_block_this_thread

_PAUSE_S = 0.1
_logger = logging.getLogger("llama_worker.timers")


class TimerThread:
    """A pausing clock and the daemon thread that waits for the first of its timers."""

    def __init__(self, system: Callable[[], float] = time.monotonic) -> None:
        self.clock = PausingClock()
        self.system = system
        self._changed = threading.Condition()  # guards its timers
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs. Call it early: from Python 3.12 on a host that exits
        can start none."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="llama_worker-timers", daemon=True)
                thread.start()
                self._thread = thread

    def call_at(self, at: float, call: Callable[[], object]) -> ClockTimer:
        """Make the call on the timer thread once `now` has reached `at`. It must not block."""
        self.start()
        with self._changed:
            wakes_at = self.clock.wakes_at
            timer = self.clock.call_at(at, call, self.system())
            if self.clock.wakes_at != wakes_at:
                self._changed.notify()
        return timer

    def _run(self) -> None:
        never_block_this_thread()
        while True:
            try:
                timer = self._wait_for_due()
            except Exception:  # no memory to wait with; without this thread no timer ever fires
                log_exception(_logger, f"the timer thread failed; retrying in {_PAUSE_S:g} s")
                time.sleep(_PAUSE_S)
                continue
            try:
                timer.fire()
            except Exception:
                log_exception(_logger, "a timer's call failed")

    def _wait_for_due(self) -> ClockTimer:
        with self._changed:
            while (timer := self.clock.due(system := self.system())) is None:
                wakes_at = self.clock.wakes_at
                self._changed.wait(
                    None if wakes_at is None else min(wakes_at - system, threading.TIMEOUT_MAX)
                )
        return timer


_timers = TimerThread()


def now() -> float:
    """Seconds of the pausing clock that all workers of this process share. Any thread."""
    return _timers.clock.now(_timers.system())


def lost_s() -> float:
    """By how many seconds `now` is behind `time.monotonic()`."""
    return _timers.clock.lost_s


def call_at(at: float, call: Callable[[], object]) -> ClockTimer:
    """`TimerThread.call_at`, on the timer thread that all workers of this process share."""
    return _timers.call_at(at, call)


def start_timers() -> None:
    _timers.start()


def _reset_after_fork() -> None:
    global _timers
    _timers = TimerThread()  # the parent's thread does not exist in the child


os.register_at_fork(after_in_child=_reset_after_fork)
