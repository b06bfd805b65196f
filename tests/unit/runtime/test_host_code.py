"""The threads that run a host's code: whatever it raises, an answer is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from llama_worker.runtime.host import host_code
from llama_worker.runtime.host.host_code import OneAtATime, look
from llama_worker.server.messages import Look
from llama_worker.types.hooks import LivenessEvidence


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
def test_a_probe_that_raises_brings_no_news_and_is_asked_again(
    error: BaseException, logging_raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: logging.LogRecord) -> bool:
        raise SystemExit(4)

    logger = logging.getLogger("llama_worker")
    order = Look(epoch=1, probe=0, round=1, fresh=False)
    told, probe = Told(), Probe(error)
    if logging_raises:
        logger.addFilter(refuse)
    try:
        look(probe, order, 1, told)
        probe.error = None
        look(probe, order, 1, told)
    finally:
        logger.removeFilter(refuse)
    assert [(evidence.alive, evidence.detail) for evidence in told] == [(False, ""), (True, "work")]
    assert not told[0].blind
    assert logging_raises or "a liveness probe failed" in caplog.text


def test_the_next_launch_waits_for_a_probe_that_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    told, seen = Told(), list[str]()

    def run_probe(call: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=call))
        threads[-1].start()

    class Slow(Probe):
        def probe(self, root_pid: int, now: float) -> LivenessEvidence:
            seen.append(f"into {root_pid}")
            if root_pid == 1:  # meanwhile the server is started anew
                looks.look(Look(epoch=2, probe=0, round=1, fresh=True), 2, told)
                threads[-1].join(0.05)
            seen.append(f"out of {root_pid}")
            return super().probe(root_pid, now)

    monkeypatch.setattr(host_code, "run_probe", run_probe)
    looks = OneAtATime(Slow(None))
    looks.look(Look(epoch=1, probe=0, round=1, fresh=False), 1, told)
    for thread in threads:  # the first starts the second
        thread.join(10)
    assert seen == ["into 1", "out of 1", "into 2", "out of 2"]
    assert [evidence.look.epoch for evidence in told] == [1, 2]
