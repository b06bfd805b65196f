"""Equal workers on the machines of a Ray cluster, used as if they were one."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray import cloudpickle

from llama_worker.config.validation import checked_int, checked_seconds, checked_str
from llama_worker.errors import ConfigError, LlamaWorkerError
from llama_worker.ray.replica import Replica, start_task
from llama_worker.ray.request_copy import RequestCopy
from llama_worker.ray.types import (
    ConfigFor,
    FleetClosed,
    FleetStatus,
    NoLiveReplica,
    ReplicaLost,
    ReplicaState,
    ReplicaStatus,
)
from llama_worker.ray.worker import RayWorker
from llama_worker.request.submission import Submission, validate_submit
from llama_worker.request.table import NOT_FOUND, NOT_READY
from llama_worker.runtime.host.futures import OpenFutures, ResultFuture, WorkerFuture
from llama_worker.startable import Startable
from llama_worker.types.chat import ChatMessage, ContentPart
from llama_worker.types.request import (
    NotFound,
    NotReady,
    OutputChunk,
    RequestResult,
    RequestStatus,
    SubmitErr,
    SubmitResult,
)
from llama_worker.types.worker import WorkerDebugInfo, WorkerStatus

_LEAST_LEASE_S = 10.0  # several times the 3 s after which a replica is SILENT
_RESERVED_OPTIONS = ("max_restarts", "max_task_retries")
P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=WorkerFuture[Any])


def _in_loop(
    method: Callable[Concatenate[Fleet, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Fleet, P], WorkerFuture[T]]:
    """Decorator of a coroutine method: any thread may call it; it runs in the fleet's event loop
    and returns a future."""

    @wraps(method)
    def call(self: Fleet, /, *args: P.args, **named: P.kwargs) -> WorkerFuture[T]:
        return self._run(lambda: method(self, *args, **named), WorkerFuture[T]())

    return call


class Fleet(Startable):
    """A fixed number of equal workers, each a Ray actor with a llama-server, kept alive wherever
    the cluster has room.

    The methods that LlamaWorker has too give the same answers and futures. A method defined here as
    a coroutine returns a WorkerFuture, which any thread may wait on, or await. Request ids are the
    fleet's own. What replicas send is copied here as it arrives, so that it survives the death of
    their node: the requests there fail with `server_died` and keep their output, and the replica is
    created again on another node.

    Every method may be called from any thread. All but `close` return at once. After `close` every
    method raises FleetClosed.
    """

    # All state belongs to the event loop, which runs on the fleet's own thread.

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
        """Starts no replica yet.

        Args:
            config_for: `config_for(port)` makes a replica's config, on the node where it will run.
            replicas: how many workers.
            name: for logs and errors.
            options: options of a Ray actor: `num_gpus`, `resources`, `scheduling_strategy`, ...
            retry_s: seconds after which a replica that did not start is tried again; one that was
                READY and died is replaced at once.
            lease_s: after so many seconds out of reach a replica ends itself and is replaced; after
                3 s it gets no more requests.

        Raises:
            ConfigError, TypeError: a value cannot work, or `config_for` cannot be pickled.
            LlamaWorkerError: `ray.init` was not called.
        """
        checked_str("name", name, empty=False)
        checked_int("replicas", replicas, at_least=1)
        checked_seconds("retry_s", retry_s, above=0)
        checked_seconds("lease_s", lease_s, at_least=_LEAST_LEASE_S)
        _check_picklable(config_for)
        if taken := sorted(set(_RESERVED_OPTIONS) & set(options or ())):
            raise ConfigError(
                f"options must not have {taken[0]!r}: the fleet itself replaces an actor that died"
            )
        actor_class: Any = ray.remote(RayWorker).options(**(options or {}))
        if not ray.is_initialized():
            raise LlamaWorkerError(
                "Ray is not initialised in this process: call ray.init(address=...) first"
            )
        self._name = name
        self._pid = os.getpid()
        self._replicas = [
            Replica(name, number, lambda: actor_class.remote(config_for), retry_s, lease_s)
            for number in range(replicas)
        ]
        self._ids = itertools.count(1)
        self._requests: dict[int, RequestCopy] = {}  # until the result is taken
        self._futures = OpenFutures()
        self._closing = threading.RLock()  # a signal handler may interrupt `close` and call it
        self._ending: Future[None] | None = None
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"llama_worker-{name}", daemon=True
        )
        self._thread.start()
        # runs before Ray's own exit handler, which would leave the replicas without a fleet
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"<Fleet {self._name!r}>"

    # ------------------------------------------------------------ life

    @_in_loop
    async def start(self) -> FleetStatus:
        """Create the replicas. Resolves when all have been READY, and waits while Ray has no room
        for one.

        Raises the error of the first one that does not start: WorkerStartError, or ReplicaLost.
        That one is tried again, and the others go on, until `close`, or until Ray is shut down:
        after another `ray.init()` call `start` again.
        """
        await asyncio.gather(*(replica.start() for replica in self._replicas))
        return await self.get_fleet_status()

    def close(self, *, timeout_s: float = 60.0) -> None:
        """Stop every server and end every actor. Blocks; idempotent; what has not stopped after
        `timeout_s` is killed."""
        if os.getpid() != self._pid:
            return  # a forked child has no loop thread, and the replicas are its parent's
        self._is_closing = True
        with self._closing:
            self._ending = self._ending or asyncio.run_coroutine_threadsafe(
                self._close(timeout_s), self._loop
            )
            self._ending.result()
            self._futures.close(FleetClosed(self._name))
            self._soon(self._loop.stop)
            self._thread.join()
            self._loop.close()
            atexit.unregister(self.close)

    @_in_loop
    async def replace(self, replica: int) -> ReplicaStatus:
        """Replace the actor of replica 0, 1, ... by a new one, without losing a request.

        The old actor takes no more requests and finishes those in flight; then `config_for` is
        called again on the node where Ray puts the new one. Resolves when that is READY. Raises
        ReplicaLost if the replica is not READY, and what `start` raises.
        """
        chosen = self._replica(replica)
        await chosen.replace()
        return chosen.status()

    @_in_loop
    async def get_fleet_status(self) -> FleetStatus:
        """The state of the fleet and of each replica."""
        ready = [each for each in self._replicas if each.state is ReplicaState.READY]
        return {
            "name": self._name,
            "slots_total": sum(replica.slots for replica in ready),
            "slots_used": sum(len(replica.requests) for replica in ready),
            "replicas": [replica.status() for replica in self._replicas],
        }

    @_in_loop
    async def get_worker_status(self, replica: int) -> WorkerStatus:
        """The status of the worker of replica 0, 1, ..., with the worker's own request ids. Raises
        ReplicaLost."""
        return await self._replica(replica).ask(RayWorker.get_worker_status)

    @_in_loop
    async def get_debug_info(self, replica: int) -> WorkerDebugInfo:
        """The debug info of the worker of replica 0, 1, ..., for a person. Raises ReplicaLost."""
        return await self._replica(replica).ask(RayWorker.get_debug_info)

    # ------------------------------------------------------------ requests

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

        If all refuse, the answer is NO_SLOT_AVAILABLE if one of them is merely busy. Raises
        NoLiveReplica if none could be asked. Resolves within milliseconds, or some seconds (15 at
        most for each replica) if the node that was asked has just gone out of reach.
        """
        self._check_open()
        future: WorkerFuture[SubmitResult] = WorkerFuture()
        try:
            valid = validate_submit(job_name, system_prompt, user_prompt, params, messages)
        except (TypeError, ValueError) as error:
            future.fail(error)
            return future
        return self._run(lambda: self._submit(valid), future)

    @_in_loop
    async def get_status(self, request_id: int) -> RequestStatus | NotFound:
        """The request's status, as its replica reported it last."""
        request = self._find(request_id)
        return request.status() if request is not None else NOT_FOUND.copy()

    @_in_loop
    async def get_result(self, request_id: int) -> RequestResult | NotReady | NotFound:
        """The result of a terminal request, which is then forgotten."""
        request = self._find(request_id)
        if request is None:
            return NOT_FOUND.copy()
        result = request.result()
        if result is not None:
            del self._requests[request_id]
        return result or NOT_READY.copy()

    def result(self, request_id: int) -> ResultFuture[RequestResult | NotFound]:
        """Resolves when the request is terminal; it is forgotten once a `get` has returned the
        value."""
        self._check_open()

        def release(value: RequestResult | NotFound) -> None:
            if value["ok"]:
                self._soon(lambda: self._requests.pop(request_id, None))

        future: ResultFuture[RequestResult | NotFound] = ResultFuture(release)
        self._futures.add(future)
        self._soon(lambda: self._answer_at_end(request_id, future))
        return future

    @_in_loop
    async def read_output(
        self, request_id: int, *, text_offset: int = 0, reasoning_offset: int = 0
    ) -> OutputChunk | NotFound:
        """The output after the offsets (in characters); does not release the request."""
        checked_int("text_offset", text_offset, at_least=0)
        checked_int("reasoning_offset", reasoning_offset, at_least=0)
        request = self._find(request_id)
        if request is None:
            return NOT_FOUND.copy()
        return request.read_output(text_offset, reasoning_offset)

    @_in_loop
    async def cancel(self, request_id: int) -> bool:
        """Cancel a running request. True once it is cancelled; False if it was not running, or was
        lost."""
        request = self._find(request_id)
        replica = next((each for each in self._replicas if request_id in each.requests), None)
        return request is not None and replica is not None and await replica.cancel(request)

    # ------------------------------------------------------------ any thread

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            forked = FleetClosed(self._name)
            forked.add_note(
                f"this process was forked; the fleet belongs to process {self._pid}: create "
                "a new one"
            )
            raise forked
        if self._is_closing:
            raise FleetClosed(self._name)

    def _run(self, question: Callable[[], Coroutine[Any, Any, Any]], future: F) -> F:
        """Run `question` in the loop; the future gets its answer or its exception."""
        self._check_open()
        self._futures.add(future)  # `close` fails the futures without an answer

        async def answer() -> None:
            try:
                future.answer(await question())
            except Exception as error:
                future.fail(error)

        def ask() -> None:
            if not self._is_closing:
                start_task(answer(), self._tasks)

        self._soon(ask)
        return future

    def _soon(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and so is the fleet
            self._loop.call_soon_threadsafe(call)

    # ------------------------------------------------------------ in the loop

    async def _close(self, timeout_s: float) -> None:
        """Stop every server, end every actor and every task."""
        closing = (replica.close(timeout_s) for replica in self._replicas)
        await asyncio.gather(*closing, return_exceptions=True)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _replica(self, number: int) -> Replica:
        checked_int("replica", number, at_least=0, at_most=len(self._replicas) - 1)
        return self._replicas[number]

    async def _submit(self, submission: Submission) -> SubmitResult:
        """Ask the emptiest replica, and the next ones if it refuses or dies."""
        refusals: list[SubmitErr] = []
        lost: ReplicaLost | None = None
        for replica in sorted(self._replicas, key=lambda each: each.load):
            if replica.state is not ReplicaState.READY:
                continue
            try:
                answer = await replica.admit(submission, self._ids)
            except ReplicaLost as error:
                lost = error
                continue
            if isinstance(answer, RequestCopy):
                self._requests[answer.request_id] = answer
                return {"ok": True, "request_id": answer.request_id}
            refusals.append(answer)
        if not refusals:
            raise NoLiveReplica(self._name, [each.describe() for each in self._replicas]) from lost
        return min(refusals, key=lambda refusal: refusal["error"] != "NO_SLOT_AVAILABLE")

    def _find(self, request_id: int) -> RequestCopy | None:
        checked_int("request_id", request_id, at_least=0)
        return self._requests.get(request_id)

    def _answer_at_end(
        self, request_id: int, waiter: WorkerFuture[RequestResult | NotFound]
    ) -> None:
        try:
            request = self._find(request_id)
        except (TypeError, ValueError) as error:
            waiter.fail(error)
            return
        if request is None:
            waiter.answer(NOT_FOUND.copy())
        else:
            request.answer_at_end(waiter)


def _check_picklable(config_for: object) -> None:
    if not callable(config_for):
        raise TypeError(
            "config_for must be a function that makes a WorkerConfig for a port, not "
            f"{type(config_for).__name__}"
        )
    try:
        cloudpickle.dumps(config_for)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigError(
            f"config_for cannot be sent to another machine: {error}; what cannot be pickled (a "
            "tool runner with a lock, a client, an open file) has to be made inside the function"
        ) from error
