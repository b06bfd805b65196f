"""The fleet's side in its event loop: its replicas, and the copies of its requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from msgspec import Struct, field
from ray.actor import ActorHandle

from llama_worker.ray.errors import NoLiveReplica, ReplicaLost
from llama_worker.ray.replica import Replica
from llama_worker.ray.request_copy import RequestCopy
from llama_worker.ray.types import FleetStatus, ReplicaState, ReplicaStatus
from llama_worker.request.submission import Submission
from llama_worker.runtime.futures import ResultFuture, WeakList
from llama_worker.types import (
    NotFound,
    NotReady,
    OutputChunk,
    RequestResult,
    RequestStatus,
    SubmitErr,
    SubmitErrorCode,
    SubmitResult,
)
from llama_worker.validation import checked_int

_NOT_FOUND: NotFound = {"ok": False, "error": "NOT_FOUND"}
_NOT_READY: NotReady = {"ok": False, "error": "NOT_READY"}
# The fleet's own refusal is the first of these that a replica gave.
_REFUSALS: tuple[SubmitErrorCode, ...] = (
    "NO_SLOT_AVAILABLE",
    "WORKER_NOT_READY",
    "WORKER_DRAINING",
    "WORKER_FAILED",
)
ResultWaiter = ResultFuture[RequestResult | NotFound]


class _Request(Struct):
    """An admitted request, until its result was taken."""

    copy: RequestCopy
    replica: Replica
    waiters: WeakList[ResultWaiter] = field(default_factory=WeakList)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Dispatcher:
    """Everything is called in the fleet's event loop, and by one call at a time between two
    `await`s."""

    def __init__(
        self,
        name: str,
        replicas: int,
        create: Callable[[], ActorHandle[Any]],
        retry_s: float,
        lease_s: float,
    ) -> None:
        self._name = name
        self._replicas = [
            Replica(name, number, create, retry_s, lease_s) for number in range(replicas)
        ]
        self._keepers: list[asyncio.Task[None]] = []
        self._ids = itertools.count(1)
        self._requests: dict[int, _Request] = {}

    # ------------------------------------------------------------ life

    async def start(self) -> FleetStatus:
        """Returns when every replica has been READY; raises what the first one says that did not
        start."""
        if not self._keepers:
            self._keepers = [
                asyncio.create_task(replica.keep_alive()) for replica in self._replicas
            ]
        await asyncio.gather(*(asyncio.shield(replica.started) for replica in self._replicas))
        return await self.status()

    async def close(self, timeout_s: float) -> None:
        """Stop every server, end every actor and every task."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(replica.close(timeout_s) for replica in self._replicas))
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def status(self) -> FleetStatus:
        ready = [replica for replica in self._replicas if replica.state is ReplicaState.READY]
        return {
            "name": self._name,
            "slots_total": sum(replica.slots for replica in ready),
            "slots_used": sum(len(replica.requests) for replica in ready),
            "replicas": [replica.status() for replica in self._replicas],
        }

    async def ask(self, replica: int, method: str) -> Any:
        """What one replica's worker answers."""
        return await self._replica(replica).ask(method)

    async def replace(self, replica: int) -> ReplicaStatus:
        """Returns when the replica is READY again."""
        found = self._replica(replica)
        await found.replace()
        return found.status()

    def _replica(self, number: int) -> Replica:
        checked_int("replica", number, at_least=0, at_most=len(self._replicas) - 1)
        return self._replicas[number]

    # ------------------------------------------------------------ requests

    async def submit(self, submission: Submission) -> SubmitResult:
        """Ask the emptiest replica, and the others where it refuses or dies. Raises NoLiveReplica
        if none answers."""
        refusals: list[SubmitErr] = []
        lost: ReplicaLost | None = None
        asked: set[int] = set()
        while ready := [
            r for r in self._replicas if r.state is ReplicaState.READY and r.number not in asked
        ]:
            replica = min(ready, key=lambda each: each.load)
            asked.add(replica.number)
            try:
                answer = await replica.admit(submission, self._ids, self._ended)
            except ReplicaLost as error:
                lost = error
                continue
            if isinstance(answer, RequestCopy):
                self._requests[answer.request_id] = _Request(answer, replica)
                return {"ok": True, "request_id": answer.request_id}
            refusals.append(answer)
        if not refusals:
            raise NoLiveReplica(
                self._name, [replica.describe() for replica in self._replicas]
            ) from lost
        return min(refusals, key=lambda refusal: _REFUSALS.index(refusal["error"]))

    async def get_status(self, request_id: int) -> RequestStatus | NotFound:
        request = self._find(request_id)
        return request.copy.status() if request is not None else _NOT_FOUND

    async def read_output(
        self, request_id: int, text_offset: int, reasoning_offset: int
    ) -> OutputChunk | NotFound:
        checked_int("text_offset", text_offset, at_least=0)
        checked_int("reasoning_offset", reasoning_offset, at_least=0)
        request = self._find(request_id)
        return (
            request.copy.read_output(text_offset, reasoning_offset)
            if request is not None
            else _NOT_FOUND
        )

    async def get_result(self, request_id: int) -> RequestResult | NotReady | NotFound:
        """From the copy, which is then forgotten."""
        request = self._find(request_id)
        if request is None:
            return _NOT_FOUND
        result = request.copy.result()
        if result is None:
            return _NOT_READY
        self.release(request_id)
        return result

    async def await_result(self, request_id: int, waiter: ResultWaiter) -> None:
        """Answer the waiter at once, or once the request is over. A waiter that nobody holds is
        forgotten."""
        request = self._find(request_id)
        if request is None:
            waiter.answer(_NOT_FOUND)
        elif (result := request.copy.result()) is not None:
            waiter.answer(result)
        else:
            request.waiters.add(waiter)

    async def cancel(self, request_id: int) -> bool:
        """True once the request is cancelled, and the copy says so."""
        request = self._find(request_id)
        if request is None or not await request.replica.cancel(request_id):
            return False
        await request.over.wait()
        return True

    def release(self, request_id: int) -> None:
        """Forget a request whose result was taken."""
        self._requests.pop(request_id, None)

    def _find(self, request_id: int) -> _Request | None:
        checked_int("request_id", request_id, at_least=0)
        return self._requests.get(request_id)

    def _ended(self, copy: RequestCopy) -> None:
        request = self._requests.get(copy.request_id)
        if request is None:
            return  # its first piece was its last, and the result is taken already
        request.over.set()
        for waiter in request.waiters.alive():
            result = copy.result()
            assert result is not None
            waiter.answer(result)
