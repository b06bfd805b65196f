"""A LlamaWorker as a Ray actor."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from llama_worker.config.settings import WorkerConfig
from llama_worker.config.validation import checked_seconds
from llama_worker.errors import ConfigError, WorkerClosed, WorkerStartError
from llama_worker.ray.types import ConfigFor, Place, RequestUpdate
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.runtime.host.threads import run_callback
from llama_worker.runtime.process.free_port import free_port
from llama_worker.types.request import RequestPhase, RequestStatus
from llama_worker.types.worker import StartFailReason, WorkerState, WorkerStatus
from llama_worker.worker import LlamaWorker, no_such_request

_PORTS_TRIED = 10
_RENEWAL_GRACE_S = 1.0  # after the end of a lease: for handling a renewal that has already arrived
_FOLLOW_INTERVAL_S = 0.05  # between two updates
_STATUS_INTERVAL_S = 0.5  # between two checks of a request without new output
_LOOK_INTERVAL_S = 5.0  # between two checks of a worker without events
_logger = logging.getLogger("llama_worker.ray")
P = ParamSpec("P")
T = TypeVar("T")
_Event = dict[str, Any]
_CLOSED: _Event = {"event": "closed"}  # internal: ends `events`, which does not yield it


def _of_handle(
    method: Callable[Concatenate[LlamaWorker, P], WorkerFuture[T]],
) -> Callable[Concatenate[RayWorker, P], Coroutine[Any, Any, T]]:
    """The actor's version of a LlamaWorker method; returns what the method's future resolves to."""

    @wraps(method)
    async def call(self: RayWorker, /, *args: P.args, **named: P.kwargs) -> T:
        return await method(self._worker, *args, **named)

    # Ray sets the signature of the function behind `__wrapped__`: it must not set LlamaWorker's
    call.__dict__.update(__signature__=inspect.signature(method))
    del call.__dict__["__wrapped__"]
    return call


class RayWorker:
    """One llama-server under supervision, on the node where Ray puts this actor.

    `ray.remote(RayWorker).options(num_gpus=1).remote(config_for)` creates one. The methods are
    those of LlamaWorker; with `.remote` they return object refs, and they raise what LlamaWorker's
    futures raise; `follow` replaces `iter_output`. It is an asynchronous actor: so many calls as
    its `max_concurrency` says (1000) may wait at the same time, and none blocks another.

    The server gets the environment of the actor's process, including the `CUDA_VISIBLE_DEVICES`
    that Ray sets. When the process dies, however it dies, its server is gone within 5 seconds.
    """

    def __init__(self, config_for: ConfigFor) -> None:
        """Start the worker's actors, no server yet. `config_for(port)` is called here, on the
        actor's node.

        Raises what `config_for` raises, TypeError if it returns no config, and ConfigError if the
        config has another port.
        """
        self._config_for = config_for
        self._was_ready = False
        self._is_closed = False
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[_Event]]] = []
        self._lease_s: float | None = None
        self._renewed = threading.Event()
        self._worker = self._new_worker()

    async def start(self) -> WorkerStatus:
        """Launch the server; READY when it returns. Raises WorkerStartError.

        If another program takes the port between the choice and the launch, another port is chosen,
        up to 10 in all. A worker that was READY once keeps its port.
        """
        tries_left = _PORTS_TRIED
        while True:
            worker = self._worker
            try:
                status = await worker.start()
            except (WorkerStartError, WorkerClosed) as error:
                if self._worker is not worker:
                    continue  # another call of `start` has replaced it, and closed it
                tries_left -= 1
                is_taken = getattr(error, "reason", None) is StartFailReason.PORT_IN_USE
                if tries_left == 0 or self._was_ready or self._is_closed or not is_taken:
                    raise
                self._worker = self._new_worker()
                # not awaited: a `stop` before the new worker's start would be overtaken by it
                asyncio.get_running_loop().run_in_executor(None, worker.close)
            else:
                self._was_ready = True
                return status

    stop = _of_handle(LlamaWorker.stop)
    drain = _of_handle(LlamaWorker.drain)
    restart = _of_handle(LlamaWorker.restart)
    submit = _of_handle(LlamaWorker.submit)
    ask = _of_handle(LlamaWorker.ask)
    count_tokens = _of_handle(LlamaWorker.count_tokens)
    wait_slot = _of_handle(LlamaWorker.wait_slot)
    get_status = _of_handle(LlamaWorker.get_status)
    get_result = _of_handle(LlamaWorker.get_result)
    result = _of_handle(LlamaWorker.result)
    release = _of_handle(LlamaWorker.release)
    read_output = _of_handle(LlamaWorker.read_output)
    cancel = _of_handle(LlamaWorker.cancel)
    get_worker_status = _of_handle(LlamaWorker.get_worker_status)
    get_debug_info = _of_handle(LlamaWorker.get_debug_info)

    async def close(self) -> None:
        """Stop the server and close the worker; the actor's process stays until Ray ends it."""
        self._is_closed = True  # first: a running `start` must make no other worker
        await asyncio.to_thread(self._worker.close)
        run_callback(lambda: self._publish(_CLOSED))  # behind the events, which come from there

    async def renew(self, lease_s: float) -> None:
        """Extend the lease of this process: it ends, and its server with it, in `lease_s` seconds
        unless this is called again.

        So no server is left on a machine that the fleet cannot reach any more. Before the first
        call there is no lease.
        """
        checked_seconds("lease_s", lease_s, above=0)
        is_first, self._lease_s = self._lease_s is None, lease_s
        self._renewed.set()
        if is_first:
            threading.Thread(target=self._end_without_renewal, daemon=True).start()

    async def follow(self, request_id: int) -> AsyncGenerator[RequestUpdate, None]:
        """Yield updates of a request as they come. The last one has its result; the request is then
        forgotten.

        The first update comes at once. Raises LookupError if the request is unknown or forgotten.
        """
        worker, wait_s = self._worker, 0.0
        offsets: dict[str, Any] = {}
        seen: RequestStatus | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await worker.read_output(request_id, **offsets, wait=True)
            output = await worker.read_output(request_id, **offsets)
            status = await worker.get_status(request_id)
            if not status["ok"] or not output["ok"]:
                raise LookupError(no_such_request(request_id))
            if status["phase"] is RequestPhase.DONE and not output["done"]:
                continue  # it ended between the two answers
            if output["done"]:
                result = await worker.result(request_id)
                if not result["ok"]:
                    raise LookupError(no_such_request(request_id))
                yield {"status": status, "output": output, "result": result}
                return
            if status != seen or output["text"] or output["reasoning"]:
                yield {"status": status, "output": output}
            offsets = {key: output[key] for key in ("text_offset", "reasoning_offset")}
            seen, wait_s = status, _STATUS_INTERVAL_S
            await asyncio.sleep(_FOLLOW_INTERVAL_S)

    async def get_place(self) -> Place:
        """The node, address and process id of this actor."""
        node_id = ray.get_runtime_context().get_node_id()
        node_ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return {"node_id": node_id, "node_ip": node_ip, "pid": os.getpid()}

    async def events(self) -> AsyncGenerator[_Event, None]:
        """Yield each lifecycle event from now on, as the config's `on_event` gets it; ends when the
        worker is closed, or by `ray.cancel`: Ray does not tell an actor that its caller has gone.
        """
        with self._listening() as queue:
            while (event := await queue.get()) is not _CLOSED:
                yield event

    async def wait_failed(self) -> WorkerStatus:
        """Return when the worker is FAILED, for whatever reason."""
        with self._listening() as queue:
            while True:
                status = await self._worker.get_worker_status()
                if status["state"] is WorkerState.FAILED:
                    return status
                with suppress(TimeoutError):  # no event tells that the worker itself has failed
                    async with asyncio.timeout(_LOOK_INTERVAL_S):
                        await queue.get()

    @contextmanager
    def _listening(self) -> Iterator[asyncio.Queue[_Event]]:
        """A queue of the events from now on."""
        queue: asyncio.Queue[_Event] = asyncio.Queue()
        if self._is_closed:
            queue.put_nowait(_CLOSED)
        listener = asyncio.get_running_loop(), queue
        self._listeners.append(listener)
        try:
            yield queue
        finally:
            self._listeners.remove(listener)

    def _publish(self, event: _Event) -> None:
        """Any thread."""
        for loop, queue in tuple(self._listeners):
            loop.call_soon_threadsafe(queue.put_nowait, event)

    def _end_without_renewal(self) -> None:
        """End the process when the lease is over. Runs on its own thread: while the fleet is out of
        reach, Ray's report of a streamed update blocks the event loop (Ray 2.60)."""
        # If this process was suspended, a renewal may have arrived that is not handled yet.
        while self._renewed.wait(self._lease_s) or self._renewed.wait(_RENEWAL_GRACE_S):
            self._renewed.clear()
        _logger.error(
            "no lease renewal for %g s: the fleet cannot be reached; exiting", self._lease_s
        )
        os._exit(1)  # Ray's own exit calls the head node, which may be out of reach too

    def _new_worker(self) -> LlamaWorker:
        port = free_port("0.0.0.0")  # free on every address: the config may name any
        config = self._config_for(port)
        called = f"config_for({port})"
        if not isinstance(config, WorkerConfig):
            raise TypeError(f"{called} must return a WorkerConfig, not {type(config).__name__}")
        if config.port != port:
            raise ConfigError(
                f"{called} returned a config with port {config.port}: it must use the port given"
            )
        own = config.on_event

        def publish(event: _Event) -> None:
            self._publish(event.copy())  # first, a copy: `own` may block, and change the event
            if own is not None:
                own(event)

        return LlamaWorker(replace(config, on_event=publish))
