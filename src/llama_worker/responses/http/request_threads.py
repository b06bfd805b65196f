"""The threads on which requests run. One that has ended its request waits a while for another.

To start a thread takes its starter 0.1 ms, and on a busy machine far more; to wake one takes a
tenth of that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_IDLE_S = 2.0

Call = Callable[[], object]


class RequestThreads:
    """For the listener's thread. What is run must not raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The queue of each thread that waits, the latest last: where several wait for one queue,
        # others wake too.
        self._idle: list[queue.SimpleQueue[Call | None]] = []
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    @property
    def idle(self) -> int:
        """How many threads wait for a call."""
        return len(self._idle)

    def run(self, call: Call) -> None:
        """Make the call on a thread. Raises RuntimeError where none can be started."""
        with self._lock:
            waiting = self._idle.pop() if self._idle else None
        if waiting is not None:
            waiting.put(call)
            return
        thread = threading.Thread(
            target=self._work, args=(call,), name="llama_worker-response", daemon=True
        )
        with self._lock:
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._threads.discard(thread)
            raise

    def close(self) -> None:
        """Let them end after what they run, and wait until they have."""
        with self._lock:
            self._is_closed = True
            for waiting in self._idle:
                waiting.put(None)
            self._idle.clear()
            threads = tuple(self._threads)
        for thread in threads:
            thread.join()

    def _work(self, call: Call | None) -> None:
        calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        while call is not None:
            call()
            del call  # with all that belongs to it
            call = self._next(calls)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _next(self, calls: queue.SimpleQueue[Call | None]) -> Call | None:
        """The next call; None: none came in time, or none will come any more."""
        with self._lock:
            if self._is_closed:
                return None
            self._idle.append(calls)
        try:
            return calls.get(timeout=_IDLE_S)
        except queue.Empty:
            with self._lock:
                if calls in self._idle:
                    self._idle.remove(calls)
                    return None
            return calls.get()  # it was put at the last moment
