"""Requests in flight all the while, and what became of each."""

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llama_worker import LlamaWorkerError
from llama_worker.ray import Fleet, NoLiveReplica
from llama_worker.testing import scripts

_TOKENS = 8
_RETRY_S = 0.25


@dataclass(frozen=True)
class Asked:
    """What one request asks for, and the answer to it; None: whatever a model says."""

    params: dict[str, Any]
    answer: str | None


def of_a_script(number: int) -> Asked:
    """Words over seconds, from a scripted server."""
    pause_s = random.Random(number).uniform(0.2, 0.8)
    words = [f"{number}: ", *(f"word{index} " for index in range(_TOKENS))]
    steps: list[Any] = [
        step for word in words for step in (scripts.Text(word), scripts.Sleep(pause_s))
    ]
    reply = scripts.steps_json(*scripts.plain_reply(*steps))
    return Asked({"scripted_reply": reply}, "".join(words))


def of_a_model(number: int) -> Asked:
    """A few tokens of a real server's."""
    return Asked({"max_tokens": _TOKENS}, None)


@dataclass
class Load:
    """`count` hosts, each with one request after the other, on a thread of their own.

    A request has a number, which stands in its prompt.
    """

    fleet: Fleet
    count: int
    asks: Callable[[int], Asked]
    ended: Counter[str] = field(default_factory=Counter)  # by state, and by reason where it failed
    wrong: list[str] = field(default_factory=list)
    last_completed_at: float = 0.0
    slowest_submit_s: float = 0.0

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Let the requests in flight end."""
        self._stopping.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.wrong.append(f"a request was still open after {timeout_s:g} s")

    def since(self, before: Counter[str]) -> str:
        """What ended since then, for the table."""
        ended = self.ended - before
        return ", ".join(f"{count} {what}" for what, count in sorted(ended.items())) or "none"

    async def _run(self) -> None:
        await asyncio.gather(*(self._host() for _ in range(self.count)))

    async def _host(self) -> None:
        while not self._stopping.is_set():
            number = next(self._numbers)
            try:
                await self._request(number)
            except LlamaWorkerError as error:
                self.wrong.append(f"request {number}: {type(error).__name__}: {error}")

    async def _request(self, number: int) -> None:
        asked = self.asks(number)
        request_id = await self._admitted(number, asked)
        if request_id is None:
            return
        result = await self.fleet.result(request_id)
        if not result["ok"]:
            self.wrong.append(f"request {number} has no result")
            return
        again = await self.fleet.get_result(request_id)
        if again["ok"]:
            self.wrong.append(f"request {number} was answered twice")
        if result["state"] == "completed":
            self.last_completed_at = time.monotonic()
            self.ended["completed"] += 1
            if asked.answer not in (None, result["text"]):
                self.wrong.append(f"request {number} was answered with {result['text']!r}")
            return
        reason, detail = result.get("fail_reason"), result.get("fail_detail")
        self.ended[f"failed ({reason})"] += 1
        if not reason or not detail:
            self.wrong.append(f"request {number} was lost without a reason: {result!r}")
        if asked.answer is not None and not asked.answer.startswith(result["text"]):
            self.wrong.append(f"request {number} kept what it never said: {result['text']!r}")

    async def _admitted(self, number: int, asked: Asked) -> int | None:
        while not self._stopping.is_set():
            asked_at = time.monotonic()
            try:
                answer = await self.fleet.submit(
                    f"job-{number}", "", f"request {number}.", params=asked.params
                )
            except NoLiveReplica:
                self.ended["asked again: no live replica"] += 1
            else:
                if answer["ok"]:
                    taken_s = time.monotonic() - asked_at
                    self.slowest_submit_s = max(self.slowest_submit_s, taken_s)
                    return answer["request_id"]
                self.ended[f"asked again: {answer['error']}"] += 1
            await asyncio.sleep(_RETRY_S)
        return None
