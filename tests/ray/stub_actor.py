"""Stands for a Ray actor in a process without Ray: it answers at once, unless it is held."""

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from llama_worker.ray import replica

SLOTS = 16


class Ref:
    """An object ref."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    def future(self) -> concurrent.futures.Future[Any]:
        answer = self._answer

        async def run() -> Any:
            return await answer()

        return asyncio.run_coroutine_threadsafe(run(), asyncio.get_running_loop())


def set_session(patch: pytest.MonkeyPatch, job_id: str | None) -> None:
    """Ray seems to be initialised, as this job; None: it seems to be shut down."""
    context = SimpleNamespace(get_node_id=lambda: "stub", get_job_id=lambda: job_id)
    patch.setattr(ray, "is_initialized", lambda: job_id is not None)
    patch.setattr(ray, "get_runtime_context", lambda: context)


class StubActor:
    """Its requests end with their first piece, or else `breaks`: then their connection does, after
    that or (`breaks_first`) before. `calls` are the methods that were called. Made in the fleet's
    event loop."""

    unanswered = frozenset({"wait_failed"})  # methods

    def __init__(self) -> None:
        self.breaks = False
        self.breaks_first = False
        self.stops_slowly = False  # not before its lease was renewed once more
        self._loop = asyncio.get_running_loop()
        self._reachable = asyncio.Event()
        self._reachable.set()
        self.sends_pieces = asyncio.Event()
        self.sends_pieces.set()
        self.calls: list[str] = []
        self._values: dict[str, Any] = {
            "get_place": {"node_id": "stub", "node_ip": "10.0.0.2", "pid": 1},
            "start": {"slots_total": SLOTS},
            "submit": {"ok": True, "request_id": 1},
        }

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_, **__: self.call(method))

    def set_reachable(self, reachable: bool) -> None:
        """Whether its answers arrive. Any thread."""
        self._set(self._reachable, reachable)

    def set_sends_pieces(self, sends: bool) -> None:
        """Whether the pieces of its requests arrive. Any thread."""
        self._set(self.sends_pieces, sends)

    def _set(self, event: asyncio.Event, value: bool) -> None:
        self._loop.call_soon_threadsafe(event.set if value else event.clear)

    def call(self, method: str) -> Any:
        self.calls.append(method)
        if method == "follow":
            return _pieces(self)
        return Ref(lambda: self._answer(method))

    async def _answer(self, method: str) -> Any:
        if method in self.unanswered:
            await asyncio.get_running_loop().create_future()
        await self._reachable.wait()
        renewals = self.calls.count("renew")
        while method == "stop" and self.stops_slowly and self.calls.count("renew") == renewals:
            await asyncio.sleep(0.001)
        return self._values.get(method)


async def _pieces(actor: StubActor) -> AsyncIterator[Ref]:
    status = {"request_id": 1, "job_name": "job", "state": "completed", "signals": []}
    status |= {"ok": True, "created_at": 1.0}
    output = {"ok": True, "text": "yes", "reasoning": ""}
    result = {} if actor.breaks else {"result": {**status, "text": "yes"}}

    async def piece() -> Any:
        return {"status": status, "output": output, **result}

    await actor.sends_pieces.wait()
    if not actor.breaks_first:
        yield Ref(piece)
    raise ActorUnavailableError("the connection broke", b"\1" * 16)


def without_ray(patch: pytest.MonkeyPatch) -> tuple[list[StubActor], list[StubActor]]:
    """Fleets create stubs from now on: (those that were created, those that were killed)."""
    created: list[StubActor] = []
    killed: list[StubActor] = []

    def create(config_for: object) -> StubActor:
        created.append(StubActor())
        return created[-1]

    actor_class = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=create))
    patch.setattr(ray, "remote", lambda _: actor_class)
    set_session(patch, "first")
    patch.setattr(replica, "kill", killed.append)
    return created, killed
