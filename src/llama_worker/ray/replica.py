"""One replica of a fleet: keeps an actor alive, and copies the progress of its requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from llama_worker.errors import ConfigError, WorkerStartError, described_error
from llama_worker.ray.calls import SHUT_DOWN, answer_of, call, kill, one_line, session
from llama_worker.ray.request_copy import RequestCopy
from llama_worker.ray.types import Place, ReplicaLost, ReplicaState, ReplicaStatus, RequestUpdate
from llama_worker.ray.worker import RayWorker
from llama_worker.request.submission import Submission
from llama_worker.runtime.host.futures import WorkerFuture
from llama_worker.types.request import (
    NotFound,
    RequestResult,
    RequestState,
    SubmitErr,
    SubmitResult,
)
from llama_worker.types.worker import WorkerStatus

_SETTLE_S = 5.0  # for receiving what an actor sent before its end
# An actor answers in milliseconds. Ray 2.60 takes a minute to see that a machine has vanished.
_RENEW_S = 1.0  # from an answer to the next renewal
_SILENT_S = 3.0
_CANCEL_S = 0.1  # until a task that still runs is cancelled again
_MARGIN_S = 2.0  # on top of a lease: the last renewal may have arrived, and its answer been lost
_ANSWER_S = 15.0  # to a submit
T = TypeVar("T")
_logger = logging.getLogger("llama_worker.ray")


class Replica:
    """Keeps one actor alive: when it ends, creates the next one, on the node that Ray chooses. Runs
    in the fleet's event loop.

    | state | what happens | next |
    | --- | --- | --- |
    | STARTING | the actor's server is READY | READY |
    | READY | no answer for 3 s | SILENT |
    | SILENT | an answer | READY |
    | READY | `replace` | DRAINING, and LOST once its requests have ended |
    | any | the actor dies, its worker fails, or its lease is over | LOST |
    | LOST | at once, or after `retry_s` where it was STARTING | STARTING |
    | LOST, since Ray was shut down | `start`, after another `ray.init()` | STARTING |

    An actor that died is not restarted by Ray (`max_restarts` is 0): a new one is created, so that
    a call meant for the old one can never reach the new one, where the same request id is another
    request.

    The actor has a lease, which is renewed every second. An actor that is out of reach for
    `lease_s` ends itself, is given up here and replaced: Ray may leave it running for as long as
    the machine is cut off.
    """

    def __init__(
        self,
        fleet: str,
        number: int,
        create: Callable[[], ActorHandle[Any]],
        retry_s: float,
        lease_s: float,
    ) -> None:
        self.number = number
        self.slots = 0
        self.requests: dict[int, RequestCopy] = {}  # the running ones
        self._keeper: asyncio.Task[None] | None = None
        self._session: tuple[str, str] | None = None  # Ray's, to which `_keeper` belongs
        self._started: WorkerFuture[None] = WorkerFuture()  # resolves at READY, or fails
        self._state = ReplicaState.STARTING
        self._name = f"fleet={fleet!r} replica={number}"
        self._create = create
        self._retry_s = retry_s
        self._lease_s = lease_s
        self._actor: Any = None  # Any: mypy does not know an actor's methods
        self._launches = 0
        self._place: Place | None = None
        self._last_error: str | None = None
        self._why_killed: str | None = None  # the reason of our own kill, unknown to Ray
        self._admitting = 0
        self._silent = asyncio.Event()
        self._follows: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> ReplicaState:
        is_silent = self._state is ReplicaState.READY and self._silent.is_set()
        return ReplicaState.SILENT if is_silent else self._state

    @property
    def load(self) -> float:
        """The share of its slots in use; 1.0 or more if no slot should be free."""
        return (len(self.requests) + self._admitting) / max(1, self.slots)

    @property
    def _node(self) -> str:
        """The node, for log lines and errors; "" if Ray has found none yet."""
        return f"{self._place['node_id']} ({self._place['node_ip']})" if self._place else ""

    def status(self) -> ReplicaStatus:
        status: ReplicaStatus = {
            "replica": self.number,
            "state": self.state,
            "launches": self._launches,
            "slots_total": self.slots,
            "active_request_ids": sorted(self.requests),
        }
        if self._place is not None:
            status["place"] = self._place.copy()
        if self._last_error is not None:
            status["last_error"] = self._last_error
        return status

    def describe(self) -> str:
        """The state and the last error, as a line for the user."""
        error = f"; last error: {self._last_error}" if self._last_error else ""
        return f"replica {self.number}: {self.state}{error}"

    # ------------------------------------------------------------ the actor's life

    async def start(self) -> None:
        """Keep an actor alive from now on, until Ray is shut down. Returns when it has been READY;
        raises ReplicaLost or WorkerStartError if it does not start."""
        if self._keeper is not None and self._session != session():
            await asyncio.wait({self._keeper})  # it ends by itself
        if self._keeper is None or self._keeper.done():
            self._session, self._started = session(), WorkerFuture()
            self._keeper = asyncio.create_task(self._keep_alive())
        await self._started

    async def _keep_alive(self) -> None:
        """Run one actor after the other, until cancelled or Ray is shut down."""
        while self._session is not None and self._session == session():
            try:
                await self._run_actor()
            except (ReplicaLost, WorkerStartError) as error:
                _logger.warning("replica lost %s node=%s: %s", self._name, self._node, error.detail)
                self._last_error = str(error)
                if self._state is ReplicaState.STARTING and not self._started.done():
                    failed, self._started = self._started, WorkerFuture()
                    failed.fail(error)
            was_ready = self._state is not ReplicaState.STARTING
            self._state = ReplicaState.LOST
            await self._settle()
            self._end_actor()
            if not was_ready:
                await asyncio.sleep(self._retry_s)
        if not self._started.done():
            self._started.fail(self._lost(SHUT_DOWN))

    async def close(self, timeout_s: float) -> None:
        """Stop the server and end the actor; what has not stopped after `timeout_s` is killed."""
        while self._keeper is not None and not self._keeper.done():
            # more than once: a task group that is about to end drops it (Python 3.11, 3.12)
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=_CANCEL_S)
        can_answer = self._place is not None and self.state is not ReplicaState.SILENT
        if self._actor is not None and can_answer:
            renewing = asyncio.create_task(self._renew(self._actor))
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(call(self._actor.stop), timeout_s)
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        await self._settle()
        self._state = ReplicaState.LOST
        self._end_actor()

    async def _run_actor(self) -> None:
        """Run one actor until it ends. Always raises: WorkerStartError, or ReplicaLost."""
        self._state, self._place, self._why_killed = ReplicaState.STARTING, None, None
        self._launches += 1
        self._silent.clear()
        try:
            self._actor = actor = self._create()
        except Exception as error:  # Ray checks some options only now
            raise self._lost(f"Ray cannot create it: {described_error(error)}") from error
        try:
            self._place = await answer_of(actor.get_place)
            _logger.info("replica placed %s node=%s", self._name, self._node)
            try:
                async with asyncio.TaskGroup() as life:
                    life.create_task(self._serve(actor))
                    life.create_task(self._renew(actor))
            except ExceptionGroup as ends:
                raise ends.exceptions[0] from None
        except RayTaskError as error:
            if isinstance(error.cause, WorkerStartError):
                raise error.cause from error
            raise self._lost(one_line(error)) from error
        except RayError as error:
            raise self._lost(self._why_killed or one_line(error)) from error
        except (ReplicaLost, WorkerStartError):
            raise
        except Exception as error:  # Ray's, where it is shut down meanwhile
            raise self._lost(described_error(error)) from error

    async def _serve(self, actor: Any) -> None:
        """Start the worker and wait for its failure. Raises ReplicaLost when it has failed."""
        status: WorkerStatus = await call(actor.start)
        self.slots = status["slots_total"]
        self._state = ReplicaState.READY
        _logger.info("replica ready %s node=%s slots=%d", self._name, self._node, self.slots)
        self._started.answer(None)
        status = await call(actor.wait_failed)
        raise self._lost(f"its worker failed: {status.get('last_error', 'no reason given')}")

    async def _renew(self, actor: Any) -> None:
        """Renew the actor's lease. When it is over, kill the actor and raise ReplicaLost.
        Raises RayError when Ray is shut down."""
        now = asyncio.get_running_loop().time
        answered_at = now()  # when the last answered renewal was sent
        while session() == self._session:
            sent_at, over_at = now(), answered_at + self._lease_s + _MARGIN_S
            renewal = asyncio.wrap_future(call(actor.renew, self._lease_s).future())
            try:
                await asyncio.wait({renewal}, timeout=_SILENT_S)
                while not renewal.done() and now() < over_at and session() == self._session:
                    self._set_silent(True)
                    await asyncio.wait({renewal}, timeout=min(_RENEW_S, over_at - now()))
            finally:
                renewal.cancel()
            if not renewal.cancelled() and renewal.exception() is None:
                answered_at = sent_at
                self._set_silent(False)
            elif now() >= over_at:
                self._why_killed = f"no answer for {self._lease_s:g} s (lease_s)"
                kill(actor)
                raise self._lost(self._why_killed)
            elif now() > answered_at + _SILENT_S:
                self._set_silent(True)
            await asyncio.sleep(_RENEW_S)
        raise RayError(SHUT_DOWN)

    def _set_silent(self, is_silent: bool) -> None:
        if is_silent is not self._silent.is_set():
            _logger.warning("replica %s %s", "silent" if is_silent else "answers again", self._name)
            (self._silent.set if is_silent else self._silent.clear)()

    async def replace(self) -> None:
        """Drain the worker, end its actor, and return once the next one is READY. Raises
        ReplicaLost if the replica is not READY when called."""
        if self.state is not ReplicaState.READY:  # one that is SILENT would not hear of it
            raise self._lost(f"it cannot be replaced while it is {self.state}")
        actor = self._actor
        self._state, self._started = ReplicaState.DRAINING, WorkerFuture()
        with suppress(RayError):  # it died meanwhile, and is replaced anyway
            await answer_of(actor.drain)
            while self._admitting:  # those are not followed yet; `_ANSWER_S` at most
                await asyncio.sleep(_CANCEL_S)
            await self._settle()
            if self._actor is actor:  # it has not died meanwhile
                self._why_killed = "it was drained and is being replaced"
                kill(actor)
        await self._started

    @property
    def _lost(self) -> Callable[..., ReplicaLost]:
        """Makes errors about the current actor, also after another one has taken its place."""
        return partial(ReplicaLost, self.number, self._node)

    async def _settle(self) -> None:
        """Wait, for `_SETTLE_S` at most, until what the actor sent before its end is received;
        requests that are still open then are lost."""
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

    async def admit(self, submission: Submission, ids: Iterator[int]) -> RequestCopy | SubmitErr:
        """Submit a request to the replica, which must be READY. The copy that is returned is
        updated until the request is over.

        An admitted request gets the next of `ids`. Raises ConfigError if the model cannot take its
        content; ReplicaLost if the replica dies meanwhile, or does not answer: if it admits the
        request anyway, that is cancelled as soon as it answers again.
        """
        actor, lost = self._actor, self._lost
        self._admitting += 1
        try:
            admission = asyncio.create_task(_admission(actor, submission))
            silent = asyncio.create_task(self._silent.wait())
            await asyncio.wait(
                {admission, silent}, timeout=_ANSWER_S, return_when=asyncio.FIRST_COMPLETED
            )
            silent.cancel()
            if not admission.done():
                start_task(_cancel_once_admitted(actor, admission), self._follows)
                raise lost("its actor does not answer")
            answer, pieces, first = admission.result()
        except RayError as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, ConfigError):
                raise error.cause from error  # the request's fault, at every replica
            raise lost(one_line(error)) from error
        finally:
            self._admitting -= 1
        if not answer["ok"]:
            return answer
        copy = RequestCopy(next(ids), first)
        self.requests[copy.request_id] = copy
        start_task(self._follow(actor, lost, copy, pieces), self._follows)
        return copy

    async def cancel(self, copy: RequestCopy) -> bool:
        """Cancel one of `requests`. True once it is cancelled; False if it ends otherwise."""
        with suppress(RayError):
            if await answer_of(self._actor.cancel, copy.remote_id):
                ended = WorkerFuture[RequestResult | NotFound]()
                copy.answer_at_end(ended)
                result = await ended
                return result["ok"] and result["state"] is RequestState.CANCELED
        return False

    async def ask(self, method: Callable[[RayWorker], Coroutine[Any, Any, T]]) -> T:
        """Call a method of the actor. Raises ReplicaLost if no actor runs, because Ray has found no
        place for it yet or it died."""
        lost = self._lost
        if self._actor is None or self._place is None:  # a call would wait for a place
            raise lost(self._last_error or "Ray has found no place for it yet")
        try:
            answer: T = await answer_of(getattr(self._actor, method.__name__))
            return answer
        except RayError as error:
            raise lost(one_line(error)) from error

    async def _follow(
        self, actor: Any, lost: Callable[..., ReplicaLost], copy: RequestCopy, pieces: Any
    ) -> None:
        """Update the copy until its request is over. In any case the copy ends and leaves
        `requests` in one step of the loop, and before there is another actor."""
        why = "its actor sent no result"
        try:
            while not copy.is_over:
                copy.update(await (await anext(pieces)))
        except StopAsyncIteration:
            pass  # no result came: the request is lost
        except RayError as error:
            why = one_line(error)
            if isinstance(error, ActorUnavailableError):  # it may live, and still run the request
                with suppress(RayError):
                    call(actor.cancel, copy.remote_id)
        finally:
            copy.lose(str(lost(self._why_killed or why, copy.request_id)), time.time())
            del self.requests[copy.request_id]


async def _admission(actor: Any, submission: Submission) -> tuple[SubmitResult, Any, Any]:
    """The answer to a submit and, if it was admitted, the stream of updates and the first one."""
    answer: SubmitResult = await call(
        actor.submit,
        submission.job_name,
        submission.system_prompt,
        submission.user_prompt,
        params=submission.params,
        messages=submission.messages,
    )
    if not answer["ok"]:
        return answer, None, None
    pieces = call(actor.follow, answer["request_id"])
    try:
        first: RequestUpdate = await (await anext(pieces))
    except ActorUnavailableError:  # it may live, and run the request
        call(actor.cancel, answer["request_id"])
        raise
    return answer, pieces, first


async def _cancel_once_admitted(
    actor: Any, admission: asyncio.Task[tuple[SubmitResult, Any, Any]]
) -> None:
    """Cancel the request once the actor admits it: by now it went elsewhere, or was refused."""
    with suppress(RayError):
        answer, _, _ = await admission
        if answer["ok"]:
            await call(actor.cancel, answer["request_id"])


def start_task(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Run `work` in a task, kept in `tasks` until it is over: the loop holds it only weakly."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
