"""The two threads that run a host's callbacks and its log handlers, so that a slow one blocks no
actor."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable

_RETRY_S = 0.25  # until the start of a thread is tried again
_logger = logging.getLogger("llama_worker.futures")


class _CallbackThread:
    """Runs the host's callbacks and log handlers on a thread, since a slow one would block an
    actor."""

    def __init__(self, name: str = "llama_worker-callbacks") -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._starting = threading.Lock()  # nobody waits for it
        self._thread: threading.Thread | None = None
        self._retry_is_set = False  # the thread could not be started; a timer tries again

    def run(self, call: Callable[[], object]) -> None:
        self._calls.put(call)
        if not self._retry_is_set:
            self._start()

    def flush(self, timeout_s: float) -> None:
        """Wait until the calls so far were made, for `timeout_s` at most."""
        if self._thread is not None:
            made = threading.Event()
            self._calls.put(made.set)
            made.wait(timeout_s)

    def _start(self) -> None:
        """Start the thread, unless it runs. If the system has none left, try again later."""
        if self._thread is None and self._starting.acquire(blocking=False):
            try:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
            except RuntimeError:  # or the host exits (3.12 on); an actor must not die of it
                self._start_later()
            finally:
                self._starting.release()

    def _start_later(self) -> None:
        from llama_worker.runtime.host.timers import call_at, now  # which imports this module

        if not self._retry_is_set:
            log_exception(
                _logger, f"cannot start the thread {self._name}; retrying every {_RETRY_S:g} s"
            )
        self._retry_is_set = False
        with contextlib.suppress(RuntimeError):  # the timers have no thread, either
            call_at(now() + _RETRY_S, self._start)
            self._retry_is_set = True

    def _run(self) -> None:
        while True:
            _run_logged(self._calls.get())


def _run_logged(call: Callable[[], object], name: str = "a callback of the host program") -> None:
    try:
        call()
    except BaseException:
        log_exception(_logger, f"{name} failed")


def log_exception(logger: logging.Logger, text: str) -> None:
    """Log the exception that is being handled. Never raises: if one of the host's handlers or
    filters does, both tracebacks go to standard error."""
    try:
        logger.exception(text)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()


_LOG_THREAD_NAME = "llama_worker-log"
_callback_thread = _CallbackThread()
_log_thread = _CallbackThread(_LOG_THREAD_NAME)


def run_callback(call: Callable[[], object]) -> None:
    """Make the call on the callback thread that all workers of this process share."""
    _callback_thread.run(call)


def call_host(call: Callable[[], object], name: str) -> None:
    """`run_callback`; an exception in the call is logged with the name."""
    run_callback(lambda: _run_logged(call, name))


def write_log(logger: logging.Logger, level: int, text: str) -> None:
    """Log the line on another thread: a handler of the host's that blocks delays lines, but no
    actor."""
    # Not `isEnabledFor`: it may wait for a lock that logging holds while a handler is made.
    if level >= logger.getEffectiveLevel():
        _log_thread.run(lambda: logger.log(level, "%s", text))


def flush_callbacks_and_log(timeout_s: float) -> None:
    """Wait until the host's callbacks so far were made, then until the log lines so far were
    written, for `timeout_s` each at most."""
    _callback_thread.flush(timeout_s)
    _log_thread.flush(timeout_s)


def _is_handled_here(record: logging.LogRecord) -> bool:
    """A filter that has the log thread write what Pykka logs on an actor's thread, when an actor
    starts or ends, as it does our own lines."""
    thread_name = threading.current_thread().name
    if thread_name == _LOG_THREAD_NAME or not thread_name.startswith("llama_worker-"):
        return True
    _log_thread.run(lambda: logging.getLogger(record.name).handle(record))
    return False


logging.getLogger("pykka").addFilter(_is_handled_here)


def _reset_after_fork() -> None:
    global _callback_thread, _log_thread  # the parent's threads do not exist in the child
    _callback_thread, _log_thread = _CallbackThread(), _CallbackThread(_LOG_THREAD_NAME)


os.register_at_fork(after_in_child=_reset_after_fork)
