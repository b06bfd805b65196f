"""The threads that run the host's own code: tools and liveness probes. Each only sends a message
with the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from llama_worker.config.settings import WorkerConfig
from llama_worker.config.validation import takes
from llama_worker.errors import is_shortage
from llama_worker.mailbox import Mailbox
from llama_worker.request import messages
from llama_worker.request.turn import call_result
from llama_worker.runtime.host import threads
from llama_worker.runtime.host.probe_queue import run_probe
from llama_worker.server.messages import EvidenceSeen, Look
from llama_worker.types.hooks import LivenessProbe, RunningCall

_MAX_EXECUTOR_THREADS = 32  # as Python's own default executor
_logger = logging.getLogger("llama_worker")


class _DaemonExecutor(ThreadPoolExecutor):
    """The default executor of a tool's event loop, which `asyncio.to_thread` uses. The host's exit
    would wait for the threads of Python's own, however long they take."""

    def __init__(self, name: str) -> None:
        super().__init__()  # it starts no thread
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started: list[threading.Thread] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not self._idle.acquire(blocking=False) and len(self._started) < _MAX_EXECUTOR_THREADS:
            self._started.append(threads.start_thread(self._name, self._run_calls))
        self._calls.put(partial(_resolve, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end. Does not wait for them, so that an event loop closes at once."""
        for _ in self._started:
            self._calls.put(None)

    def join(self) -> None:
        """Wait for the threads, after `shutdown`."""
        for thread in self._started:
            thread.join()

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._idle.release()


def _resolve(future: Future[Any], call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


class ToolCallThread:
    """A tool call, on its own thread, which sends the outcome; see `ports.ToolThread`. Raises
    RuntimeError if the system has no thread left."""

    def __init__(self, order: messages.RunTool, config: WorkerConfig, name: str) -> None:
        assert config.tool_runner is not None
        self._order = order
        self._runner = config.tool_runner  # its attributes, too, are looked up on the thread
        deadline = time.monotonic() + config.tool_timeout_s
        self._call = RunningCall(deadline=deadline, cancelled=threading.Event())
        self._cancel_task: Callable[[], object] | None = None  # of an async runner
        self._lock = threading.Lock()  # guards what follows
        self._given_up_to: Mailbox[messages.StuckToolThreads] | None = None
        self._has_returned = False
        self._thread = threads.start_thread(name, self._run)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def give_up(self, reply_to: Mailbox[messages.StuckToolThreads]) -> None:
        with self._lock:
            if self._has_returned:
                return
            self._given_up_to = reply_to
            reply_to.tell(messages.StuckToolThreads(change=1))
        self._call.cancelled.set()
        if self._cancel_task is not None:
            self._cancel_task()

    def _run(self) -> None:
        loops = contextlib.ExitStack()  # of an async runner; closing may wait for its threads
        self._run_tool(loops)
        try:
            loops.close()
        except BaseException:
            threads.log_exception(_logger, "closing the event loop of a tool failed")
        if self._given_up_to is not None:
            self._given_up_to.tell(messages.StuckToolThreads(change=-1))

    def _run_tool(self, loops: contextlib.ExitStack) -> None:
        call = self._order.call
        ok, text = call_result(call.name, lambda: self._call_tool(loops))
        ended = messages.CallEnded(
            turn_id=self._order.turn_id, call_id=call.id, ok=ok, text=text, at=threads.now()
        )
        with self._lock:
            self._has_returned = True
            is_awaited = self._given_up_to is None
        if is_awaited:  # else a runner that obeys `cancelled` would seem to have failed
            self._order.reply_to.tell(ended)

    def _call_tool(self, loops: contextlib.ExitStack) -> Any:
        run_tool: Callable[..., Any] = self._runner.run_tool
        extra = {"call": self._call} if takes(run_tool, "call") else {}
        value = run_tool(
            name=self._order.call.name,
            arguments=copy.deepcopy(self._order.call.arguments),
            request_id=self._order.turn_id[0],
            job_name=self._order.job_name,
            **extra,
        )
        if not isinstance(value, Coroutine):  # asyncio.iscoroutine accepts generators, too (3.11)
            return value
        executor = _DaemonExecutor(f"{threading.current_thread().name}-executor")
        loops.callback(executor.join)  # the call's thread counts as stuck until these have ended
        runner = loops.enter_context(asyncio.Runner())
        runner.get_loop().set_default_executor(executor)
        return runner.run(self._awaited(value))

    async def _awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel_task() -> None:
            with contextlib.suppress(RuntimeError):  # it has ended, and its loop is closed
                loop.call_soon_threadsafe(task.cancel)

        self._cancel_task = cancel_task
        if self._call.cancelled.is_set():  # it was set before there was a task
            task.cancel()
        return await coroutine


def look(
    probe: LivenessProbe,
    order: Look,
    root_pid: int,
    reply_to: Mailbox[EvidenceSeen],
    *,
    refused: RuntimeError | None = None,
) -> None:
    """Have one probe look at the server's processes, unless it was `refused` a thread, and send one
    EvidenceSeen. A probe that raises or returns something invalid counts as no news."""
    alive, reads, detail, by_shortage = False, False, "", False
    try:
        if refused is not None:
            raise refused
        with threads.may_block_this_thread():
            if order.fresh:
                probe.reset()
            evidence = probe.probe(root_pid, time.monotonic())
        if evidence is not None:
            alive, detail = bool(evidence.alive), str(evidence.detail)
            reads = bool(getattr(evidence, "reads", False))  # older evidence lacks it
    except BaseException as error:  # a SystemExit counts only as a failure of the probe
        by_shortage = is_shortage(error)
        if not by_shortage:
            threads.log_exception(_logger, "a liveness probe failed")
    now = threads.now()
    reply_to.tell(
        EvidenceSeen(
            look=order, at=now, alive=alive, detail=detail, reads=reads, by_shortage=by_shortage
        )
    )


class SerializedProbe:
    """Makes the looks of one probe one at a time: one from a launch that is over may not have
    returned yet, and then the next one waits for it. Thread-safe."""

    def __init__(self, probe: LivenessProbe) -> None:
        self._probe = probe
        self._lock = threading.Lock()
        self._is_running = False
        self._next: Callable[..., None] | None = None

    def look(self, order: Look, root_pid: int, reply_to: Mailbox[EvidenceSeen]) -> None:
        call = partial(look, self._probe, order, root_pid, reply_to)
        with self._lock:
            if self._is_running:
                self._next = call  # replaces a waiting one, whose launch is over
                return
            self._is_running = True
        run_calls = partial(self._run_calls, call)
        run_probe(run_calls, run_calls)

    def _run_calls(self, call: Callable[..., None], refused: RuntimeError | None = None) -> None:
        following: Callable[..., None] | None = call
        while following is not None:
            following(refused=refused)
            with self._lock:
                following, self._next = self._next, None
                self._is_running = following is not None
