"""One replica of a fleet: keeps an actor alive, and copies what becomes of its requests."""

from __future__ import annotations

import asyncio
import logging
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from llama_worker.errors import WorkerStartError
from llama_worker.ray.errors import ReplicaLost
from llama_worker.ray.request_copy import RequestCopy
from llama_worker.ray.types import Place, Progress, ReplicaState, ReplicaStatus
from llama_worker.request.submission import Submission
from llama_worker.types import SubmitErr, SubmitResult, WorkerStatus

_SETTLE_S = 5.0  # for what an actor sent before its end to be taken over
# an actor answers in milliseconds; Ray itself may take a minute to see that a machine has vanished
_ANSWER_S = 15.0
_SHOWN_CHARS = 400
_RAYS_FIELDS = re.compile("(class_name|actor_id|pid|name|namespace|ip): ")
_logger = logging.getLogger("llama_worker.ray")


class Replica:
    """Belongs to the fleet's event loop. One actor after the other stands for it, each on the node
    that Ray chooses.

    An actor that died is not restarted by Ray (`max_restarts` is 0): a new one is created, so that
    a call meant for the old one can never reach the new one, where the same request id is another
    request.
    """

    def __init__(
        self, fleet: str, number: int, create: Callable[[], ActorHandle[Any]], retry_s: float
    ) -> None:
        self.number = number
        self.state = ReplicaState.STARTING
        self.slots = 0
        self.requests: dict[int, RequestCopy] = {}  # those that run, by the fleet's id
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._name = f"fleet={fleet!r} replica={number}"
        self._create = create
        self._retry_s = retry_s
        self._actor: Any = None  # mypy knows no actor's methods
        self._launches = 0
        self._place: Place | None = None
        self._last_error: str | None = None
        self._why_killed: str | None = None  # what Ray could not tell
        self._remote_ids: dict[int, int] = {}  # by the fleet's id
        self._admitting = 0
        self._follows: set[asyncio.Task[None]] = set()

    @property
    def load(self) -> float:
        """How full it is; 1.0 or more where no slot should be free."""
        return (len(self.requests) + self._admitting) / max(1, self.slots)

    def status(self) -> ReplicaStatus:
        status: ReplicaStatus = {
            "replica": self.number,
            "state": self.state,
            "launches": self._launches,
            "slots_total": self.slots,
            "active_request_ids": sorted(self.requests),
        }
        if self._place is not None:
            status["place"] = self._place
        if self._last_error is not None:
            status["last_error"] = self._last_error
        return status

    def describe(self) -> str:
        """A line for a person."""
        error = f"; last error: {self._last_error}" if self._last_error else ""
        return f"replica {self.number}: {self.state}{error}"

    # ------------------------------------------------------------ the actor's life

    async def keep_alive(self) -> None:
        """One actor after the other, until cancelled. One that did not become READY is followed
        after `retry_s`."""
        while ray.is_initialized():  # else a call would start a cluster of its own
            try:
                await self._live()
            except (ReplicaLost, WorkerStartError) as error:
                self._lost(error)
            was_ready, self.state = self.state is ReplicaState.READY, ReplicaState.LOST
            await self._settle()
            self._end_actor()
            if not was_ready:
                await asyncio.sleep(self._retry_s)

    async def close(self, timeout_s: float) -> None:
        """Stop the server and end the actor; what has not stopped when the time is up is killed."""
        if self._actor is not None and self._place is not None and ray.is_initialized():
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._actor.stop.remote(), timeout_s)
        await self._settle()
        self.state = ReplicaState.LOST
        self._end_actor()

    async def _live(self) -> None:
        """Raises when the actor's life is over: WorkerStartError, or ReplicaLost."""
        self.state, self._place, self._why_killed = ReplicaState.STARTING, None, None
        self._launches += 1
        if self.started.done() and self.started.exception() is not None:
            self.started = asyncio.get_running_loop().create_future()
        try:
            self._actor = actor = self._create()
            self._place = await actor.get_place.remote()
            _logger.info("replica placed %s node=%s", self._name, self._node)
            status: WorkerStatus = await actor.start.remote()
            self.slots = status["slots_total"]
            self.state = ReplicaState.READY
            _logger.info("replica ready %s node=%s slots=%d", self._name, self._node, self.slots)
            if not self.started.done():
                self.started.set_result(None)
            status = await actor.wait_failed.remote()
        except RayTaskError as error:
            if isinstance(error.cause, WorkerStartError):
                raise error.cause from error
            raise ReplicaLost(self.number, self._node, told(error)) from error
        except RayError as error:
            raise ReplicaLost(self.number, self._node, self._why_killed or told(error)) from error
        raise ReplicaLost(
            self.number,
            self._node,
            f"its worker failed: {status.get('last_error', 'no reason told')}",
        )

    def _lost(self, error: ReplicaLost | WorkerStartError) -> None:
        _logger.warning("replica lost %s node=%s: %s", self._name, self._node, error.detail)
        self._last_error = str(error)
        if not self.started.done():
            self.started.set_exception(error)
            self.started.exception()  # asyncio complains of one that nobody looked at

    async def _settle(self) -> None:
        """Let what had come before the end be taken over; requests that are still open then are
        lost."""
        if self._follows:
            _, late = await asyncio.wait(self._follows, timeout=_SETTLE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _end_actor(self) -> None:
        if self._actor is not None:
            kill(self._actor)
        self._actor = None

    # ------------------------------------------------------------ requests

    async def admit(
        self, submission: Submission, ids: Iterator[int], on_end: Callable[[RequestCopy], object]
    ) -> RequestCopy | SubmitErr:
        """Give it a request; the copy grows from now on, and `on_end` is called once it is over.

        An admitted request gets the next of `ids`. Raises ReplicaLost where the replica dies
        meanwhile, or is killed because it does not answer: then none was admitted.
        """
        actor, node = self._living(), self._node
        self._admitting += 1
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer: SubmitResult = await actor.submit.remote(
                    submission.job_name,
                    submission.system_prompt,
                    submission.user_prompt,
                    params=submission.params,
                    messages=submission.messages,
                )
                if not answer["ok"]:
                    return answer
                pieces = actor.follow.remote(answer["request_id"])
                first: Progress = await (await anext(pieces))
        except RayError as error:
            raise ReplicaLost(self.number, node, told(error)) from error
        except TimeoutError as error:
            self._why_killed = f"its actor did not answer for {_ANSWER_S:g} s"
            kill(actor)
            raise ReplicaLost(self.number, node, self._why_killed) from error
        finally:
            self._admitting -= 1
        copy = RequestCopy(next(ids), first)
        self.requests[copy.request_id] = copy
        self._remote_ids[copy.request_id] = answer["request_id"]
        task = asyncio.create_task(self._follow(copy, pieces, node, on_end))
        self._follows.add(task)
        task.add_done_callback(self._follows.discard)
        return copy

    async def cancel(self, request_id: int) -> bool:
        """True once the request is cancelled; False where it has ended, or its replica has."""
        if request_id not in self._remote_ids or self._actor is None:
            return False
        try:
            return bool(await self._actor.cancel.remote(self._remote_ids[request_id]))
        except RayError:
            return False

    async def ask(self, method: str) -> Any:
        """What the worker answers. Raises ReplicaLost where there is none."""
        actor, node = self._living(), self._node
        try:
            return await getattr(actor, method).remote()
        except RayError as error:
            raise ReplicaLost(self.number, node, told(error)) from error

    async def _follow(
        self, copy: RequestCopy, pieces: Any, node: str, on_end: Callable[[RequestCopy], object]
    ) -> None:
        """Ends the copy in any case, and in the same step in which it is over."""
        why = "its actor sent no result"
        try:
            while not copy.is_over:
                copy.update(await (await anext(pieces)))
        except StopAsyncIteration:
            pass  # the copy is not over, and is lost
        except RayError as error:
            why = self._why_killed or told(error)
        finally:
            copy.lose(str(ReplicaLost(self.number, node, why, copy.request_id)), time.time())
            del self.requests[copy.request_id], self._remote_ids[copy.request_id]
            on_end(copy)

    def _living(self) -> Any:
        """The actor. Raises ReplicaLost where there is none."""
        if self._actor is None:
            raise ReplicaLost(
                self.number, self._node, self._last_error or "no actor was created yet"
            )
        return self._actor

    @property
    def _node(self) -> str:
        return (
            f"{self._place['node_id']} ({self._place['node_ip']})"
            if self._place is not None
            else ""
        )


def kill(actor: Any) -> None:
    """End an actor's process; its guard sees to its server."""
    if ray.is_initialized():
        ray.kill(actor)


def told(error: RayError) -> str:
    """What Ray says of a death or a failed call, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayTaskError) or (
        isinstance(error, ActorDiedError) and error.actor_init_failed
    ):
        lines = lines[-1:]  # the exception; above it stands its traceback
    words = " ".join(line for line in lines if not _RAYS_FIELDS.match(line))
    return textwrap.shorten(words, _SHOWN_CHARS, placeholder=" ...")
