"""The threads on which requests run. One that has ended its request waits a while for another.

To start a thread takes its starter 0.1 ms, and on a busy machine far more; to wake one takes a tenth of that.
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
        self.idle = 0  # threads that wait, less those that a call was put for
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def run(self, call: Call) -> None:
        """Make the call on a thread. Raises RuntimeError where none can be started."""
        with self._lock:
            if self.idle:
                self.idle -= 1
                self._calls.put(call)
                return
        thread = threading.Thread(target=self._work, args=(call,), name="llama_worker-response", daemon=True)
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
            for _ in range(self.idle):
                self._calls.put(None)
            self.idle = 0
            threads = tuple(self._threads)
        for thread in threads:
            thread.join()

    def _work(self, call: Call | None) -> None:
        while call is not None:
            call()
            del call  # with all that belongs to it
            call = self._next()
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _next(self) -> Call | None:
        """The next call; None: none came in time, or none will come any more."""
        with self._lock:
            if self._is_closed:
                return None
            self.idle += 1
        try:
            return self._calls.get(timeout=_IDLE_S)
        except queue.Empty:
            with self._lock:
                if self.idle:
                    self.idle -= 1
                    return None
            return self._calls.get()  # it was put at the last moment
