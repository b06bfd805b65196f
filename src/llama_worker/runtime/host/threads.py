"""The daemon threads that all workers of a host process share: one makes the calls of timers, two
the host's callbacks and the writing of log lines, and spare ones the calls that block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from llama_worker.clock import ClockTimer, PausingClock

_MAX_SPARE = 4  # threads that are kept
_RETRY_S = 0.25  # until the start of a callback thread is tried again
_PAUSE_S = 0.1  # of the timer thread after a failure
_MAX_WAITING_LINES = 1000
_LOG_THREAD = "llama_worker-log"
_logger = logging.getLogger("llama_worker")
_callbacks_logger = logging.getLogger("llama_worker.futures")
_timers_logger = logging.getLogger("llama_worker.timers")
_Call = Callable[[], object]


_this_thread = threading.local()


def never_block_this_thread() -> None:
    """Mark the calling thread as one that others wait for: a WorkerFuture never blocks it.

    The garbage collector runs on any thread, and may call a `__del__` of the host's there that
    closes a worker: it gets no answer, rather than wait for ever.
    """
    _this_thread.never_blocks = True


def never_blocks() -> bool:
    """Whether the calling thread has that mark."""
    return getattr(_this_thread, "never_blocks", False)


@contextlib.contextmanager
def may_block_this_thread() -> Iterator[None]:
    """Lift the mark of `never_block_this_thread` within the block, which holds no lock: for the
    host's own code, which may use the worker."""
    before = never_blocks()
    _this_thread.never_blocks = False
    try:
        yield
    finally:
        _this_thread.never_blocks = before


def start_thread(name: str, target: _Call) -> threading.Thread:
    """Start a new thread, for the host's code and for what lasts. Raises RuntimeError if the system
    has none left, or the host exits."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def log_exception(logger: logging.Logger, text: str) -> None:
    """Log the exception that is being handled. Never raises: if one of the host's handlers or
    filters does, both tracebacks go to standard error."""
    try:
        logger.exception(text)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()


# ---------------------------------------------------------------- callbacks and log lines


class _CallbackThread:
    """Runs the host's callbacks and log handlers on a thread, since a slow one would block an
    actor."""

    def __init__(self, name: str = "llama_worker-callbacks") -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._starting = threading.Lock()  # nobody waits for it
        self._thread: threading.Thread | None = None
        self._retry_is_set = False  # the thread could not be started; a timer tries again

    def run(self, call: _Call) -> None:
        self._calls.put(call)
        self.start()

    def start(self) -> None:
        """Start the thread, unless it runs. If the system has none left, try again later."""
        if not self._retry_is_set:
            self._start()

    def flush(self, timeout_s: float) -> None:
        """Wait until the calls so far were made, for `timeout_s` at most."""
        if self._thread is not None:
            made = threading.Event()
            self._calls.put(made.set)
            made.wait(timeout_s)

    def _start(self) -> None:
        if self._thread is None and self._starting.acquire(blocking=False):
            try:
                if self._thread is None:
                    self._thread = start_thread(self._name, self._run)
            except RuntimeError:  # or the host exits (3.12 on); an actor must not die of it
                if not self._retry_is_set:
                    log_exception(
                        _callbacks_logger,
                        f"cannot start the thread {self._name}; retrying every {_RETRY_S:g} s",
                    )
            finally:
                self._starting.release()
            if self._thread is None:  # without the lock, which the retry needs
                self._start_later()

    def _start_later(self) -> None:
        self._retry_is_set = False
        with contextlib.suppress(RuntimeError):  # the timers have no thread, either
            call_at(now() + _RETRY_S, self._start)
            self._retry_is_set = True

    def _run(self) -> None:
        while True:
            _run_logged(self._calls.get())


def _run_logged(call: _Call, name: str = "a callback of the host program") -> None:
    try:
        call()
    except BaseException:
        log_exception(_callbacks_logger, f"{name} failed")


class _LogThread(_CallbackThread):
    """At most 1,000 lines wait for a slow handler of the host's; further ones are dropped, and
    counted in a line of their own."""

    def __init__(self) -> None:
        super().__init__(_LOG_THREAD)
        self._dropped_count = 0  # without a lock: an actor might have to wait for it

    def run(self, call: _Call) -> None:
        if self._calls.qsize() >= _MAX_WAITING_LINES:
            self._dropped_count += 1
        else:
            super().run(lambda: self._write(call))

    def _write(self, call: _Call) -> None:
        if count := self._dropped_count:
            self._dropped_count -= count
            text = "%d log lines were dropped, since a log handler was too slow"
            _run_logged(lambda: _logger.warning(text, count))
        call()


_callback_thread = _CallbackThread()
_log_thread = _LogThread()


def start_callbacks() -> None:
    """Start the callback thread, unless it runs. Call it early, as `TimerThread.start`."""
    _callback_thread.start()


def run_callback(call: _Call) -> None:
    """Make the call on the callback thread that all workers of this process share."""
    _callback_thread.run(call)


def call_host(call: _Call, name: str) -> None:
    """`run_callback`; an exception in the call is logged with the name."""
    run_callback(lambda: _run_logged(call, name))


def write_log(logger: logging.Logger, level: int, text: str) -> None:
    """Log the line on another thread: a handler of the host's that blocks delays lines, or has them
    dropped, but delays no actor."""
    # Not `isEnabledFor`: it may wait for a lock that logging holds while a handler is made.
    if level >= logger.getEffectiveLevel():
        _log_thread.run(lambda: logger.log(level, "%s", text))


def flush_callbacks_and_log(timeout_s: float) -> None:
    """Wait until the host's callbacks so far were made, then until the log lines so far were
    written, for `timeout_s` each at most."""
    _callback_thread.flush(timeout_s)
    _log_thread.flush(timeout_s)


def _is_on_our_thread() -> bool:
    """Whether this is a thread that a blocked log handler would stop, with all that wait for it."""
    name = threading.current_thread().name
    return name.startswith("llama_worker-") and name != _LOG_THREAD


def _is_handled_here(record: logging.LogRecord) -> bool:
    """A filter that has the log thread write what is logged on another thread of ours."""
    if not _is_on_our_thread():
        return True
    _log_thread.run(lambda: logging.getLogger(record.name).handle(record))
    return False


for _name in (
    *("llama_worker", "llama_worker.futures", "llama_worker.ray"),
    *("llama_worker.responses", "llama_worker.timers", "asyncio", "pykka", "py.warnings"),
):
    logging.getLogger(_name).addFilter(_is_handled_here)
# A line for every record of a stream says nothing, and would displace the others.
logging.getLogger("sseclient").addFilter(lambda _: not _is_on_our_thread())


# ---------------------------------------------------------------- timers


class TimerThread:
    """A pausing clock and the thread that waits for the first of its timers; for ever if there is
    none."""

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
                self._thread = start_thread("llama_worker-timers", self._run)

    def call_at(self, at: float, call: _Call) -> ClockTimer:
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
                log_exception(
                    _timers_logger, f"the timer thread failed; retrying in {_PAUSE_S:g} s"
                )
                time.sleep(_PAUSE_S)
                continue
            try:
                timer.fire()
            except Exception:
                log_exception(_timers_logger, "a timer's call failed")

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
    """How many seconds were lost in the gaps that are over. Never falls."""
    return _timers.clock.lost_s


def call_at(at: float, call: _Call) -> ClockTimer:
    """`TimerThread.call_at`, on the timer thread that all workers of this process share."""
    return _timers.call_at(at, call)


def start_timers() -> None:
    _timers.start()


# ---------------------------------------------------------------- calls that block


# To start a thread takes longer than most calls that block: streams, probes, token counts, the
# requests to a proxy. So a few idle ones are kept for the next call of any worker.
_spare: list[queue.SimpleQueue[tuple[str, _Call]]] = []  # the mailboxes of the idle threads
_spare_lock = threading.Lock()


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


def _reset_after_fork() -> None:
    """The parent's threads do not exist in the child."""
    global _callback_thread, _log_thread, _timers, _spare, _spare_lock
    _callback_thread, _log_thread = _CallbackThread(), _LogThread()
    _timers = TimerThread()
    _spare, _spare_lock = [], threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
