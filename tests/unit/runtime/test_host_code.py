"""The threads that run a host's code: whatever it raises, who waits for an answer is told."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from llama_worker.request.messages import RunTool, StuckToolThreads
from llama_worker.runtime.host import host_code
from llama_worker.runtime.host.host_code import SerializedProbe, ToolCallThread, look
from llama_worker.server.messages import Look
from llama_worker.stream.calls import ParsedCall
from llama_worker.types.hooks import LivenessEvidence, RunningCall
from tests.conftest import Speechless
from tests.tables import cases
from tests.unit.config.cases import config, tool

TOOL = tool("search", parameters={"type": "object"})


class Probe:
    """A liveness probe that raises, or sees work."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def reset(self) -> None:
        """Nothing was kept."""

    def probe(self, root_pid: int, now: float) -> LivenessEvidence:
        """A look."""
        if self.error is not None:
            raise self.error
        return LivenessEvidence(alive=True, detail="work")


class Told(list[Any]):
    """A mailbox."""

    def tell(self, message: Any) -> bool:
        """Keep it."""
        self.append(message)
        return True


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("logging_raises", [False, True])
def test_raising_probe_brings_no_news_and_is_reasked(
    error: BaseException, logging_raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: logging.LogRecord) -> bool:
        raise SystemExit(4)

    logger = logging.getLogger("llama_worker")
    order = Look(probe=0, round=1, fresh=False)
    mailbox, probe = Told(), Probe(error)
    if logging_raises:
        logger.addFilter(refuse)
    try:
        look(probe, order, 1, mailbox)
        probe.error = None
        look(probe, order, 1, mailbox)
    finally:
        logger.removeFilter(refuse)
    assert [(evidence.alive, evidence.detail) for evidence in mailbox] == [
        (False, ""),
        (True, "work"),
    ]
    assert not mailbox[0].by_shortage
    assert logging_raises or "a liveness probe failed" in caplog.text


def test_next_launch_waits_for_a_probe_still_out(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Callable[[], object]] = []
    monkeypatch.setattr(host_code, "run_probe", lambda call, _: begun.append(call))
    mailbox, seen = Told(), list[str]()

    class Slow(Probe):
        def reset(self) -> None:
            seen.append("reset")

        def probe(self, root_pid: int, now: float) -> LivenessEvidence:
            seen.append(f"into {root_pid}")
            if root_pid == 1:  # meanwhile the server is started anew, twice
                for pid in (2, 3):
                    looks.look(Look(probe=0, round=pid, fresh=True), pid, mailbox)
            seen.append(f"out of {root_pid}")
            return super().probe(root_pid, now)

    looks = SerializedProbe(Slow(None))
    looks.look(Look(probe=0, round=1, fresh=False), 1, mailbox)
    (call,) = begun
    call()
    assert seen == ["into 1", "out of 1", "reset", "into 3", "out of 3"]
    assert [evidence.look.round for evidence in mailbox] == [1, 3]
    assert len(begun) == 1
    looks.look(Look(probe=0, round=4, fresh=False), 3, mailbox)
    assert len(begun) == 2


def test_look_without_a_thread_is_not_counted_running(monkeypatch: pytest.MonkeyPatch) -> None:
    lack = RuntimeError("can't start new thread")
    looks, mailbox = SerializedProbe(Probe(None)), Told()
    order = Look(probe=0, round=1, fresh=True)
    monkeypatch.setattr(host_code, "run_probe", lambda _, refuse: refuse(lack))
    looks.look(order, 1, mailbox)
    monkeypatch.setattr(host_code, "run_probe", lambda call, _: call())
    looks.look(order, 1, mailbox)
    seen = [(evidence.alive, evidence.by_shortage) for evidence in mailbox]
    assert seen == [(False, True), (True, False)]


def test_refused_looks_are_shortages(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[Callable[[RuntimeError], object]] = []
    monkeypatch.setattr(host_code, "run_probe", lambda _, refuse: refusals.append(refuse))
    looks, mailbox = SerializedProbe(Probe(None)), Told()
    for launch in (1, 2):
        looks.look(Look(probe=0, round=launch, fresh=True), launch, mailbox)
    (refuse,) = refusals
    refuse(RuntimeError("can't start new thread"))
    assert [(each.look.round, each.by_shortage) for each in mailbox] == [(1, True), (2, True)]
    looks.look(Look(probe=0, round=3, fresh=False), 2, mailbox)
    assert len(refusals) == 2


class Awaited(SimpleQueue[Any]):
    """A mailbox that another thread writes to."""

    def tell(self, message: Any) -> bool:
        """Keep it."""
        self.put(message)
        return True


def run_tool(
    runner: Any, reply_to: Any, happens: Callable[[], object] = lambda: None
) -> ToolCallThread:
    """Its only tool is called; something may happen to a runner that was well when it was named."""
    configured = config(normal_tools=(TOOL,), tool_runner=runner)
    happens()
    call = ParsedCall("c00000001", "search", {}, "{}")
    order = RunTool(turn_id=(1, 1), job_name="job", call=call, reply_to=reply_to)
    return ToolCallThread(order, configured, "test")


def raises(error: BaseException) -> Mock:
    return Mock(**{"run_tool.side_effect": error})


def gives(value: object) -> Mock:
    return Mock(**{"run_tool.return_value": value})


def parts() -> Iterator[str]:
    yield "a part"


@cases(
    "runner, says",
    {
        "an error": (raises(RuntimeError("no lever")), "RuntimeError: no lever"),
        "an exit": (raises(SystemExit(3)), "SystemExit"),
        "Ctrl-C": (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
        "an error without words": (raises(Speechless()), "Speechless"),
        "an object": (gives(object()), "returned a value that JSON cannot represent: a object"),
        "a generator": (gives(parts()), "cannot represent: a generator"),
    },
)
def test_tool_that_raises_or_returns_anything_has_failed(runner: Mock, says: str) -> None:
    asker = Awaited()
    run_tool(runner, asker)
    ended = asker.get(timeout=60.0)
    assert (ended.ok, says in ended.text) == (False, True), ended.text


def test_a_runner_that_is_lost_has_failed() -> None:
    """As one elsewhere: each look at it may fail."""
    asker, remote = Awaited(), gives("well")
    run_tool(remote, asker, lambda: delattr(remote, "run_tool"))
    ended = asker.get(timeout=60.0)
    assert (ended.ok, "AttributeError: run_tool" in ended.text) == (False, True), ended.text


def test_a_tool_is_told_when_its_time_is_up() -> None:
    class Tells:
        def run_tool(self, *, call: RunningCall, **about: Any) -> float:
            return call.deadline

    asker, before = Awaited(), time.monotonic()
    run_tool(Tells(), asker)
    assert float(asker.get(timeout=60.0).text) > before


def test_an_async_tools_threads_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_code, "_MAX_EXECUTOR_THREADS", 2)
    both = threading.Barrier(2)

    class Many:
        async def run_tool(self, **about: Any) -> int:
            await asyncio.gather(*(asyncio.to_thread(both.wait, 60.0) for _ in range(6)))
            return sum(each.name == "test-executor" for each in threading.enumerate())

    asker = Awaited()
    run_tool(Many(), asker)
    assert asker.get(timeout=60.0).text == "2"


def test_a_tool_that_obeys_cancellation_has_not_failed() -> None:
    class Obedient:
        def run_tool(self, *, call: RunningCall, **about: Any) -> str:
            assert call.cancelled.wait(60.0)
            raise ValueError("nobody waits")

    asker, parent = Told(), Awaited()
    thread = run_tool(Obedient(), asker)
    assert thread.is_alive()
    thread.give_up(parent)
    told = [parent.get(timeout=60.0) for _ in range(2)]
    assert told == [StuckToolThreads(change=1), StuckToolThreads(change=-1)]
    assert asker == []


def test_call_given_up_early_cancels_its_coroutine() -> None:
    given_up, went_on = threading.Event(), list[str]()

    class Late:
        def run_tool(self, **about: Any) -> Coroutine[Any, Any, None]:
            assert given_up.wait(60.0)
            return self.work()

        async def work(self) -> None:
            await asyncio.sleep(0)
            went_on.append("behind its first wait")

    parent = Awaited()
    run_tool(Late(), Told()).give_up(parent)
    given_up.set()
    told = [parent.get(timeout=60.0) for _ in range(2)]
    assert told == [StuckToolThreads(change=1), StuckToolThreads(change=-1)]
    assert went_on == []
