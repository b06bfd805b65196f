"""The queue of probes that all workers of a host process share, and the threads that make them."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from llama_worker.runtime.host import threads

ADD_THREADS_AFTER_S = 0.05  # a server that works answers sooner
_logger = logging.getLogger("llama_worker")
_Call = Callable[[], object]
_Refuse = Callable[[RuntimeError], object]


class _Waiting(NamedTuple):
    probe: _Call
    refuse: _Refuse


class ProbeQueue:
    """Makes probes one after the other on one thread: threads that run at the same instant wake one
    another for the interpreter's lock. Thread-safe.

    Whenever a probe waits and none was begun for `ADD_THREADS_AFTER_S`, threads are added, twice as
    many as the last time: servers that do not answer, however many, do not delay other probes. If
    the system has no thread left then, probes are refused, since they might wait for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._waiting: deque[_Waiting] = deque()
        self._threads_count = 0
        self._timer_is_set = False
        self._threads_to_add = 1  # next time

    def run(self, probe: _Call, refuse: _Refuse) -> None:
        """Make the probe soon, or else call `refuse` with the reason, on this thread or another,
        which it must not block."""
        refusals: list[_Call] = []
        with self._lock:
            self._waiting.append(_Waiting(probe, refuse))
            if self._threads_count:
                self._set_timer()
                return
            try:
                self._start_thread()
            except RuntimeError as error:
                refusals = self._refusals(error)
        for refusal in refusals:
            _make(refusal)

    def _start_thread(self) -> None:
        threads.run_on_thread("llama_worker-probes", self._run_probes)
        self._threads_count += 1

    def _set_timer(self) -> None:
        if not self._timer_is_set:
            self._timer_is_set, first = True, self._waiting[0]
            threads.call_at(threads.now() + ADD_THREADS_AFTER_S, lambda: self._add_threads(first))

    def _add_threads(self, first: _Waiting) -> None:
        """`first`: the probe that was the next when the timer was set."""
        refusals: list[_Call] = []
        with self._lock:
            self._timer_is_set = False
            if not self._waiting:
                self._threads_to_add = 1
                return
            self._set_timer()
            if self._waiting[0] is not first:
                return
            threads_count = self._threads_count
            try:
                for _ in range(min(self._threads_to_add, len(self._waiting))):
                    self._start_thread()
                self._threads_to_add *= 2
            except RuntimeError as error:
                if self._threads_count == threads_count:
                    refusals = self._refusals(error)
        for refusal in refusals:
            _make(refusal)

    def _refusals(self, error: RuntimeError) -> list[_Call]:
        """Empty the queue; returns the calls that refuse its probes."""
        waiting, self._waiting = self._waiting, deque()
        return [partial(each.refuse, error) for each in waiting]

    def _run_probes(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads_count -= 1
                    return
                probe = self._waiting.popleft().probe
            _make(probe)


def _make(probe: _Call) -> None:
    try:
        probe()
    except Exception:
        threads.log_exception(_logger, "a probe failed")


_probes = ProbeQueue()


def run_probe(probe: _Call, refuse: _Refuse) -> None:
    """`ProbeQueue.run`, in the queue that all workers of this process share."""
    _probes.run(probe, refuse)


def _reset_after_fork() -> None:
    """The parent's threads do not exist in the child."""
    global _probes
    _probes = ProbeQueue()


os.register_at_fork(after_in_child=_reset_after_fork)
