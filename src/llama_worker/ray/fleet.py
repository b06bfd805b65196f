"""A number of equal workers on the machines of a Ray cluster, used as if they were one."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray import cloudpickle

from llama_worker.errors import ConfigError, LlamaWorkerError
from llama_worker.ray.dispatcher import Dispatcher
from llama_worker.ray.errors import FleetClosed
from llama_worker.ray.types import ConfigFor, FleetStatus, ReplicaStatus
from llama_worker.ray.worker import RayWorker
from llama_worker.request.submission import validate_submit
from llama_worker.runtime.futures import OpenFutures, ResultFuture, WorkerFuture
from llama_worker.runtime.startable import Startable
from llama_worker.types import (
    ChatMessage,
    ContentPart,
    NotFound,
    NotReady,
    OutputChunk,
    RequestResult,
    RequestStatus,
    SubmitResult,
    WorkerDebugInfo,
    WorkerStatus,
)
from llama_worker.validation import checked_int, checked_seconds, checked_str

_OURS = ("max_restarts", "max_task_retries")
T = TypeVar("T")


class Fleet(Startable):
    """`replicas` equal workers, each a Ray actor with a llama-server, kept alive wherever the
    cluster has room.

    The methods are those of LlamaWorker, and so are their futures; ids are the fleet's own. What
    comes from the replicas is copied here as it comes, so that a node's death takes nothing along
    that was received: its requests fail with `server_died` and keep their output, and the replica
    comes back on another node.

    Every method may be called from any thread. All but `close` return at once. After `close` every
    method raises FleetClosed.
    """

    def __init__(
        self,
        config_for: ConfigFor,
        *,
        replicas: int,
        name: str = "fleet",
        options: Mapping[str, Any] | None = None,
        retry_s: float = 5.0,
        lease_s: float = 30.0,
    ) -> None:
        """Nothing is started yet. `config_for(port)` makes a replica's config, on the node where it
        will run.

        `options` are those of a Ray actor: `num_gpus`, `resources`, `scheduling_strategy`, ... A
        replica that did not start is tried again after `retry_s`, one that was READY and died at
        once. One that is out of reach for `lease_s` ends itself and is replaced; it gets no
        request from 3 s on. Raises TypeError, ConfigError, and LlamaWorkerError without `ray.init` before.
        """
        checked_str("name", name, empty=False)
        checked_int("replicas", replicas, at_least=1)
        checked_seconds("retry_s", retry_s, above=0)
        checked_seconds("lease_s", lease_s, at_least=10.0)
        _check_travels(config_for)
        if taken := sorted(set(_OURS) & set(options or ())):
            raise ConfigError(
                f"options must not have {taken[0]!r}: the fleet itself replaces an actor that died"
            )
        actor_class: Any = ray.remote(RayWorker).options(**(options or {}))
        if not ray.is_initialized():
            raise LlamaWorkerError(
                "Ray is not initialised in this process: call ray.init(address=...) before"
            )
        self._name = name
        self._futures = OpenFutures()
        self._closing = threading.Lock()
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"llama_worker-{name}", daemon=True
        )
        self._thread.start()

        async def dispatcher() -> Dispatcher:
            return Dispatcher(
                name, replicas, lambda: actor_class.remote(config_for), retry_s, lease_s
            )

        self._dispatcher = asyncio.run_coroutine_threadsafe(dispatcher(), self._loop).result()
        # before Ray's own, which would leave the replicas without a fleet
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"<Fleet {self._name!r}>"

    def start(self) -> WorkerFuture[FleetStatus]:
        """Create the replicas. Resolves when all have been READY, and waits while Ray has no room
        for one.

        Raises what the first one says that does not start: WorkerStartError, or ReplicaLost. It is
        tried again, and the others go on, until `close`.
        """
        return self._ask(self._dispatcher.start)

    def close(self, *, timeout_s: float = 60.0) -> None:
        """Stop every server and end every actor. Blocks; idempotent; after `timeout_s` the rest is
        killed."""
        self._is_closing = True
        with self._closing:
            if self._futures.closed_by is not None:
                return
            asyncio.run_coroutine_threadsafe(self._dispatcher.close(timeout_s), self._loop).result()
            self._futures.close(FleetClosed(self._name))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            atexit.unregister(self.close)

    def submit(
        self,
        job_name: str,
        system_prompt: str,
        user_prompt: str | Sequence[ContentPart],
        *,
        params: Mapping[str, Any] | None = None,
        messages: Iterable[ChatMessage] | None = None,
    ) -> WorkerFuture[SubmitResult]:
        """Admit a request to a replica with a free slot, the emptiest first, or refuse it.

        Where all refuse, NO_SLOT_AVAILABLE if one of them is merely busy. Raises NoLiveReplica
        where none could be asked. Resolves within milliseconds, or 3 s where the node that was
        asked has just gone out of reach.
        """
        self._check_open()
        try:
            valid = validate_submit(job_name, system_prompt, user_prompt, params, messages)
        except (TypeError, ValueError) as error:
            refused: WorkerFuture[SubmitResult] = WorkerFuture()
            refused.fail(error)
            return refused
        return self._ask(lambda: self._dispatcher.submit(valid))

    def get_status(self, request_id: int) -> WorkerFuture[RequestStatus | NotFound]:
        """How far the request is, as far as its replica has told."""
        return self._ask(lambda: self._dispatcher.get_status(request_id))

    def get_result(self, request_id: int) -> WorkerFuture[RequestResult | NotReady | NotFound]:
        """The result of a terminal request, which is then forgotten."""
        return self._ask(lambda: self._dispatcher.get_result(request_id))

    def result(self, request_id: int) -> ResultFuture[RequestResult | NotFound]:
        """Resolves when the request is terminal; it is forgotten once a `get` has returned the
        value."""
        future: ResultFuture[RequestResult | NotFound] = ResultFuture(
            lambda value: self._release(request_id) if value["ok"] else None
        )
        self._check_open()
        self._futures.add(future)
        self._run(lambda: self._dispatcher.await_result(request_id, future), future.fail)
        return future

    def read_output(
        self, request_id: int, *, text_offset: int = 0, reasoning_offset: int = 0
    ) -> WorkerFuture[OutputChunk | NotFound]:
        """What was added behind the offsets (in characters); releases nothing."""
        return self._ask(
            lambda: self._dispatcher.read_output(request_id, text_offset, reasoning_offset)
        )

    def cancel(self, request_id: int) -> WorkerFuture[bool]:
        """Cancel a running request. True once it is cancelled; False where it was not running, or
        was lost."""
        return self._ask(lambda: self._dispatcher.cancel(request_id))

    def get_fleet_status(self) -> WorkerFuture[FleetStatus]:
        """How the fleet and each of its replicas is."""
        return self._ask(self._dispatcher.status)

    def get_worker_status(self, replica: int) -> WorkerFuture[WorkerStatus]:
        """How the worker of replica 0, 1, ... is. Its request ids are its own. Raises
        ReplicaLost."""
        return self._ask(lambda: self._dispatcher.ask(replica, "get_worker_status"))

    def get_debug_info(self, replica: int) -> WorkerFuture[WorkerDebugInfo]:
        """What a person needs to see what happened there. Raises ReplicaLost."""
        return self._ask(lambda: self._dispatcher.ask(replica, "get_debug_info"))

    def replace(self, replica: int) -> WorkerFuture[ReplicaStatus]:
        """Put a new actor in the place of replica 0, 1, ... without losing a request.

        It takes no more requests, those in flight end, and `config_for` is called anew wherever Ray
        puts the next one. Resolves when that is READY. Raises ReplicaLost where the replica is not
        READY, and what `start` raises.
        """
        return self._ask(lambda: self._dispatcher.replace(replica))

    def _check_open(self) -> None:
        if self._is_closing:
            raise FleetClosed(self._name)

    def _ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> WorkerFuture[T]:
        """Run the question in the loop; the future is answered in any case."""
        self._check_open()
        future: WorkerFuture[T] = WorkerFuture()
        self._futures.add(future)

        async def answer() -> None:
            future.answer(await question())

        self._run(answer, future.fail)
        return future

    def _run(
        self,
        question: Callable[[], Coroutine[Any, Any, None]],
        fail: Callable[[BaseException], object],
    ) -> None:
        async def run() -> None:
            try:
                await question()
            except asyncio.CancelledError:
                fail(FleetClosed(self._name))
            except Exception as error:
                fail(error)

        def begin() -> None:
            if self._is_closing:
                fail(FleetClosed(self._name))
                return
            task = self._loop.create_task(run())
            self._tasks.add(task)  # the loop itself holds tasks only weakly
            task.add_done_callback(self._tasks.discard)

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:  # closed meanwhile
            fail(FleetClosed(self._name))

    def _release(self, request_id: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._dispatcher.release, request_id)
        except RuntimeError:
            return  # closed: everything is forgotten


def _check_travels(config_for: object) -> None:
    if not callable(config_for):
        raise TypeError(
            "config_for must be a function that makes a WorkerConfig for a port, not "
            f"{type(config_for).__name__}"
        )
    try:
        cloudpickle.dumps(config_for)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigError(
            f"config_for cannot be sent to another machine: {error}; what cannot travel (a "
            "tool runner with a lock, "
            "a client, an open file) has to be made inside the function"
        ) from error
