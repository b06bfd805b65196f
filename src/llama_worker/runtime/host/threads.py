"""Daemon threads for calls that block: streams, probes, token counts, the requests to a proxy.

To start a thread takes longer than most of these calls, so a few idle ones are kept for the next
call of any worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable

from llama_worker.runtime.host.callbacks import log_exception
from llama_worker.runtime.host.futures import never_block_this_thread
from llama_worker.runtime.host.timers import call_at, now

ADD_THREADS_AFTER_S = 0.05  # a server that works answers sooner
_MAX_SPARE = 4  # threads that are kept
_Call = Callable[[], object]
_spare: list[queue.SimpleQueue[tuple[str, _Call]]] = []  # the mailboxes of the idle threads
_spare_lock = threading.Lock()
_logger = logging.getLogger("llama_worker")


def start_thread(name: str, target: _Call) -> threading.Thread:
    """Start a new thread, for the host's code and for what lasts. Raises RuntimeError if the system
    has none left, or the host exits."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def run_on_thread(name: str, call: _Call) -> None:
    """Make a call of this library's own code on a spare thread, or a new one. Raises as
    `start_thread`."""
    try:
        mailbox = _spare.pop()
    except IndexError:
        mailbox = queue.SimpleQueue()
        start_thread(name, lambda: _run_calls(mailbox))  # not the call: that would be kept
    mailbox.put((name, call))


def _run_calls(mailbox: queue.SimpleQueue[tuple[str, _Call]]) -> None:
    never_block_this_thread()  # others wait for the locks that these calls hold
    thread = threading.current_thread()
    while True:
        thread.name, call = mailbox.get()
        call()
        del call  # and what it holds
        with _spare_lock:
            if len(_spare) >= _MAX_SPARE:
                return
            thread.name = "llama_worker-spare"
            _spare.append(mailbox)


class ProbeQueue:
    """Makes probes one after the other on one thread: threads that run at the same instant wake one
    another for the interpreter's lock. Thread-safe.

    Whenever a probe waits and none was begun for `ADD_THREADS_AFTER_S`, threads are added, twice as
    many as the last time: servers that do not answer, however many, do not delay other probes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._waiting: deque[_Call] = deque()
        self._threads_count = 0
        self._started_count = 0
        self._timer_is_set = False
        self._threads_to_add = 1  # next time

    def run(self, probe: _Call) -> None:
        """Make the probe soon. Raises RuntimeError if the first thread cannot be started."""
        with self._lock:
            if self._threads_count:
                self._set_timer()
            else:
                self._start_thread()
            self._waiting.append(probe)

    def _start_thread(self) -> None:
        run_on_thread("llama_worker-probes", self._run_probes)
        self._threads_count += 1

    def _set_timer(self) -> None:
        if not self._timer_is_set:
            self._timer_is_set, started_count = True, self._started_count
            call_at(now() + ADD_THREADS_AFTER_S, lambda: self._add_threads(started_count))

    def _add_threads(self, started_count: int) -> None:
        with self._lock:
            self._timer_is_set = False
            if not self._waiting:
                self._threads_to_add = 1
                return
            self._set_timer()
            if self._started_count == started_count:
                with contextlib.suppress(RuntimeError):  # no thread is left: the probes wait
                    for _ in range(min(self._threads_to_add, len(self._waiting))):
                        self._start_thread()
                    self._threads_to_add *= 2

    def _run_probes(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads_count -= 1
                    return
                probe = self._waiting.popleft()
                self._started_count += 1
            try:
                probe()
            except Exception:
                log_exception(_logger, "a probe failed")


_probes = ProbeQueue()


def run_probe(probe: _Call) -> None:
    """`ProbeQueue.run`, in the queue that all workers of this process share."""
    _probes.run(probe)


def _reset_after_fork() -> None:
    global _probes, _spare, _spare_lock
    _probes, _spare = ProbeQueue(), []  # the parent's threads do not exist in the child
    _spare_lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
