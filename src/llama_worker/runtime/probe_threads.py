"""Probes of all workers, made one after the other on one thread, which lives on.

A thread for each would cost more than the probe, and threads that run at the same instant wake one
another for the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from llama_worker.runtime.futures import log_exception
from llama_worker.runtime.timers import call_at

PATIENCE_S = 0.05  # how long a probe keeps the next one waiting; a server answers within 10 ms
_logger = logging.getLogger("llama_worker")


class ProbeThreads:
    """A queue of probes and the threads that make them. Thread-safe.

    There is one thread, and one more each time that a probe waits and none was begun for
    `PATIENCE_S`: a server that does not answer holds up no other's probe. A thread that finds
    another one idle ends.
    """

    def __init__(self) -> None:
        self._probes: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._has_thread = False
        self._idle_count = 0
        self._begun_count = 0
        self._is_watched = False  # a timer is set

    def run(self, probe: Callable[[], object]) -> None:
        """Make the probe soon. Raises RuntimeError where the system has no thread for the first."""
        with self._lock:
            if not self._has_thread:
                self._start_thread()
            self._probes.put(probe)
            self._watch()

    def _watch(self) -> None:
        if not self._is_watched and self._probes.qsize() > self._idle_count:
            self._is_watched, begun_count = True, self._begun_count
            call_at(time.monotonic() + PATIENCE_S, lambda: self._help(begun_count))

    def _help(self, begun_count: int) -> None:
        with self._lock:
            self._is_watched = False
            if self._begun_count == begun_count:
                with contextlib.suppress(RuntimeError):  # no thread is left: they wait
                    self._start_thread()
            self._watch()

    def _start_thread(self) -> None:
        threading.Thread(target=self._run, name="llama_worker-probes", daemon=True).start()
        self._has_thread = True
        self._idle_count += 1

    def _run(self) -> None:
        while True:
            probe = self._probes.get()
            with self._lock:
                self._begun_count += 1
                self._idle_count -= 1
            try:
                probe()
            except Exception:
                log_exception(_logger, "a probe failed")
            with self._lock:
                if self._idle_count and self._probes.empty():
                    return
                self._idle_count += 1


_probe_threads = ProbeThreads()


def run_probe(probe: Callable[[], object]) -> None:
    """See `ProbeThreads.run`; on the threads that all workers of this process share."""
    _probe_threads.run(probe)


def _forget_after_fork() -> None:
    global _probe_threads
    _probe_threads = ProbeThreads()  # the parent's threads do not exist in the child


os.register_at_fork(after_in_child=_forget_after_fork)
