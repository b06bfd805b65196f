"""A LlamaWorker as a Ray actor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import ray

from llama_worker.config import WorkerConfig
from llama_worker.errors import ConfigError, WorkerStartError
from llama_worker.ray.types import ConfigFor, Place, Progress
from llama_worker.runtime.free_port import free_port
from llama_worker.runtime.futures import WorkerFuture
from llama_worker.types import (
    ChatMessage,
    NotFound,
    NotReady,
    OutputChunk,
    RequestResult,
    RequestStatus,
    StartFailReason,
    SubmitResult,
    WorkerDebugInfo,
    WorkerState,
    WorkerStatus,
)
from llama_worker.worker import LlamaWorker

_PORTS_TRIED = 10
_FOLLOW_INTERVAL_S = 0.05  # between two pieces
_STATUS_INTERVAL_S = 0.5  # between two looks at the status of a request that puts out nothing
_FAILED_INTERVAL_S = 1.0


class RayWorker:
    """One llama-server under supervision, on the node where Ray puts this actor.

    `ray.remote(RayWorker).options(num_gpus=1).remote(config_for)` creates one. The methods are
    those of LlamaWorker, with `.remote` they return object refs, and they raise what LlamaWorker's
    futures raise. It is an asynchronous actor: any number of calls wait side by side, and none
    holds up another.

    The server gets the environment of the actor's process, and with it the `CUDA_VISIBLE_DEVICES`
    that Ray sets. When the process dies, however it dies, its server is gone within 5 seconds.
    """

    def __init__(self, config_for: ConfigFor) -> None:
        """Start the worker's actors, no server yet. `config_for(port)` is called here, on the
        actor's node.

        Raises what `config_for` raises, and ConfigError where its config has another port.
        """
        self._config_for = config_for
        self._was_ready = False
        self._worker = self._new_worker()

    async def start(self) -> WorkerStatus:
        """Launch the server; READY when it returns. Raises WorkerStartError.

        Where somebody takes the port between the choice and the launch, another is chosen, up to 10
        in all. A worker that was READY once keeps its port.
        """
        for _ in range(_PORTS_TRIED - 1):
            worker = self._worker
            try:
                return await self._started(worker)
            except WorkerStartError as error:
                if error.reason is not StartFailReason.PORT_IN_USE or self._was_ready:
                    raise
            if self._worker is worker:  # no other call of `start` has replaced it yet
                self._worker = self._new_worker()
                await asyncio.to_thread(worker.close)
        return await self._started(self._worker)

    async def stop(self) -> None:
        """End requests and server; returns when no process of the server is left."""
        await self._worker.stop()

    async def close(self) -> None:
        """`stop()` and the end of the worker; the actor's process stays until Ray ends it."""
        await asyncio.to_thread(self._worker.close)

    async def submit(
        self,
        job_name: str,
        system_prompt: str,
        user_prompt: str,
        *,
        params: Mapping[str, Any] | None = None,
        messages: Iterable[ChatMessage] | None = None,
    ) -> SubmitResult:
        """Admit a request to a free slot, or refuse it, at once."""
        return await self._worker.submit(
            job_name, system_prompt, user_prompt, params=params, messages=messages
        )

    async def follow(self, request_id: int) -> AsyncGenerator[Progress, None]:
        """Yield what becomes of a request, as it comes; the last piece has its result, which is
        then forgotten.

        The first piece comes at once. Raises LookupError where there is no such request, or no
        more.
        """
        worker, wait_s = self._worker, 0.0
        text_offset = reasoning_offset = 0
        seen: RequestStatus | None = None
        while True:
            more = partial(
                worker.read_output,
                request_id,
                text_offset=text_offset,
                reasoning_offset=reasoning_offset,
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(_resolved(more(wait=True)), wait_s)
            output = await more()
            status = await worker.get_status(request_id)
            if not status["ok"] or not output["ok"]:
                raise LookupError(
                    f"there is no request {request_id}, or no more: its result was taken"
                )
            text_offset, reasoning_offset = output["text_offset"], output["reasoning_offset"]
            if output["done"]:
                result = await worker.result(request_id)
                if not result["ok"]:
                    raise LookupError(
                        f"the result of request {request_id} was taken by another call"
                    )
                yield {"status": status, "output": output, "result": result}
                return
            if status != seen or output["text"] or output["reasoning"]:
                yield {"status": status, "output": output}
            seen, wait_s = status, _STATUS_INTERVAL_S
            await asyncio.sleep(_FOLLOW_INTERVAL_S)

    async def get_status(self, request_id: int) -> RequestStatus | NotFound:
        """How far the request is."""
        return await self._worker.get_status(request_id)

    async def get_result(self, request_id: int) -> RequestResult | NotReady | NotFound:
        """The result of a terminal request, which is then forgotten."""
        return await self._worker.get_result(request_id)

    async def result(self, request_id: int) -> RequestResult | NotFound:
        """The result, once there is one. The request is forgotten when this returns, not when the
        ref is read."""
        return await self._worker.result(request_id)

    async def read_output(
        self, request_id: int, *, text_offset: int = 0, reasoning_offset: int = 0
    ) -> OutputChunk | NotFound:
        """What was added behind the offsets (in characters)."""
        return await self._worker.read_output(
            request_id, text_offset=text_offset, reasoning_offset=reasoning_offset
        )

    async def cancel(self, request_id: int) -> bool:
        """Cancel a running request. True once it is cancelled and its slot is free."""
        return await self._worker.cancel(request_id)

    async def get_worker_status(self) -> WorkerStatus:
        """How the worker is."""
        return await self._worker.get_worker_status()

    async def get_debug_info(self) -> WorkerDebugInfo:
        """What a person needs to see what happened."""
        return await self._worker.get_debug_info()

    async def get_place(self) -> Place:
        """Where this actor lives."""
        node_id = ray.get_runtime_context().get_node_id()
        node_ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return {"node_id": node_id, "node_ip": node_ip, "pid": os.getpid()}

    async def wait_failed(self) -> WorkerStatus:
        """Returns when the worker is FAILED: it is locked out, and no request runs on it any
        more."""
        while True:
            status = await self._worker.get_worker_status()
            if status["state"] is WorkerState.FAILED:
                return status
            await asyncio.sleep(_FAILED_INTERVAL_S)

    async def _started(self, worker: LlamaWorker) -> WorkerStatus:
        status = await worker.start()
        self._was_ready = True
        return status

    def _new_worker(self) -> LlamaWorker:
        port = free_port("0.0.0.0")  # whatever address the config names
        config = self._config_for(port)
        if not isinstance(config, WorkerConfig):
            raise TypeError(
                f"config_for({port}) must return a WorkerConfig, not {type(config).__name__}"
            )
        if config.port != port:
            raise ConfigError(
                f"config_for({port}) returned a config with port {config.port}: it must use "
                "its argument"
            )
        return LlamaWorker(config)


async def _resolved(future: WorkerFuture[Any]) -> None:
    await future
