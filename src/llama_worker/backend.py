"""Sends a LlamaWorker's calls to its WorkerActor, and closes workers when the host exits."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pykka

from llama_worker.actors.base import LiveSet, Ref
from llama_worker.actors.messages import HostMessage
from llama_worker.actors.worker import WorkerActor
from llama_worker.config.settings import WorkerConfig
from llama_worker.errors import WorkerClosed, WorkerStopError
from llama_worker.ports import Runtime
from llama_worker.runtime.host.futures import OpenFutures, WorkerFuture
from llama_worker.runtime.host.threads import flush_callbacks_and_log
from llama_worker.server.messages import Stop

_EXIT_GRACE_S = 2.0  # at the host's exit: from a server's SIGTERM to its SIGKILL
_LEAVE_S = 5.0  # how long close() waits for the actors to end after the stop
_FLUSH_S = 1.0  # for the host's callbacks, and for the last log lines, if one of them is slow
F = TypeVar("F", bound=WorkerFuture[Any])


class Backend:
    """A LlamaWorker's link to its actors; outlives a handle that is lost without `close`.
    Thread-safe."""

    def __init__(self, config: WorkerConfig, runtime: Runtime) -> None:
        self.config = config
        self._runtime = runtime
        self._pid = os.getpid()
        self._live = LiveSet()
        self._futures = OpenFutures()
        self._closing = threading.RLock()  # a signal handler may interrupt close() and call it
        self._stopping: WorkerFuture[None] | None = None  # set once close() was called
        self.actor_ref: pykka.ActorRef[Any] = WorkerActor.start(
            self._live, runtime, config, self._futures
        )
        self._worker: Ref[Any] = Ref(self.actor_ref)
        open_backends.add(self)

    def check_open(self) -> None:
        """Raise WorkerClosed after `close`, after the worker's actor failed, and in a forked
        child, which has none of the threads."""
        if os.getpid() != self._pid:
            forked = WorkerClosed(self.config.name)
            forked.add_note(f"this process was forked: the worker belongs to process {self._pid}")
            raise forked
        if self._stopping is not None or self._futures.closed_by is not None:
            raise WorkerClosed(self.config.name) from self._futures.closed_by

    def ask(self, future: F, message: Callable[[F], HostMessage]) -> F:
        """Send the message that carries the future, which is resolved even if the actor dies. Bad
        arguments fail the future, and nothing is sent."""
        self.check_open()
        try:
            sent = message(future)
        except (TypeError, ValueError) as error:
            future.fail(error)
            return future
        self._futures.add(future)
        self.tell(sent)
        return future

    def tell(self, message: HostMessage) -> None:
        """Send; if the actor is dead, every future has been failed already."""
        self._worker.tell(message)

    def close(self) -> None:
        """Stop the server and end the actors; returns when both are done."""
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads, and the server is its parent's
        with self._closing:  # one Stop is sent; every caller waits for it
            stopping = self._stopping = self._stopping or self.begin_close(None)
        self.finish_close(stopping, timeout_s=None)
        self.wait_gone(_LEAVE_S)
        open_backends.discard(self)

    def begin_close(self, grace_s: float | None) -> WorkerFuture[None]:
        """Send Stop. Never blocks."""
        stopped: WorkerFuture[None] = WorkerFuture()
        self._futures.add(stopped)
        self.tell(Stop(reply=stopped, grace_s=grace_s))
        return stopped

    def finish_close(self, stopped: WorkerFuture[None], timeout_s: float | None) -> None:
        """Wait for the stop, then tell the actors to end."""
        self._runtime.wait(stopped, timeout_s)
        try:
            stopped.get(timeout=0)
        except (WorkerClosed, pykka.Timeout) as error:
            # The actor died, or the time is up: its release kills the rest. The error's traceback
            # would keep the handle alive as long as this object lives.
            error.__traceback__ = None
        except WorkerStopError as error:
            error.__traceback__ = None
            self._runtime.write_log(
                logging.ERROR, f"close() of worker {self.config.name!r}: {error}"
            )
        self._worker.stop()

    def wait_gone(self, timeout_s: float) -> None:
        """Wait until the actors have ended, at most `timeout_s`."""
        self._runtime.wait(self._live, timeout_s)

    def abandon(self) -> None:
        """End the actors without waiting: the handle was lost without `close`."""
        if os.getpid() == self._pid:
            self._worker.stop()
        open_backends.discard(self)


open_backends: set[Backend] = set()


def _close_all_at_exit() -> None:
    """Close all open workers concurrently when the host exits; no thread can be started then."""
    deadline = time.monotonic() + _EXIT_GRACE_S + 1.5
    stopping = [(backend, backend.begin_close(_EXIT_GRACE_S)) for backend in tuple(open_backends)]
    for backend, stopped in stopping:
        backend.finish_close(stopped, timeout_s=max(0.0, deadline - time.monotonic()))
    for backend, _ in stopping:
        backend.wait_gone(max(0.0, deadline - time.monotonic()))
    flush_callbacks_and_log(_FLUSH_S)


atexit.register(_close_all_at_exit)
os.register_at_fork(after_in_child=open_backends.clear)
