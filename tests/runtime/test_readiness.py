"""What a readiness probe without an answer says: something about the server, or about this machine."""

from __future__ import annotations

import errno
import os
import queue
from typing import Any

import pytest

from llama_worker.config import WorkerConfig
from llama_worker.messages import Probed, ProbeOutcome
from llama_worker.runtime import readiness
from llama_worker.runtime.chat_exchange import Endpoint
from llama_worker.runtime.readiness import ReadinessProbe
from llama_worker.server.gaps import LATE_S
from llama_worker.server.health import probe_timeout_s
from tests.actors.conftest import WAIT_S

CONFIG = WorkerConfig(name="w", host="127.0.0.1", port=9, server_cmd=("llama-server",))


class Box(queue.SimpleQueue[Probed]):
    def tell(self, message: Probed) -> bool:
        self.put(message)
        return True


class Clock:
    """The probe's, in the test's hands."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("error", "took_s", "outcome"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), 0.0, ProbeOutcome.FAILED),
        (TimeoutError("the time for the reply is up"), probe_timeout_s(CONFIG.timeouts), ProbeOutcome.FAILED),
        (TimeoutError(), probe_timeout_s(CONFIG.timeouts) + LATE_S + 0.1, ProbeOutcome.NO_NEWS),
        *((OSError(lack, os.strerror(lack)), 0.0, ProbeOutcome.NO_NEWS) for lack in (errno.EMFILE, errno.ENFILE)),
        (OSError(errno.ENOMEM, "no memory"), 0.0, ProbeOutcome.NO_NEWS),
        (MemoryError(), 0.0, ProbeOutcome.NO_NEWS),
        (RuntimeError("can't start new thread"), 0.0, ProbeOutcome.NO_NEWS),
        (RuntimeError("a mistake"), 0.0, ProbeOutcome.FAILED),
    ],
)
def test_a_probe_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, error: Exception, took_s: float, outcome: ProbeOutcome
) -> None:
    clock, box = Clock(), Box()

    def ask(*args: Any, **kwargs: Any) -> Any:
        clock.now += took_s
        raise error

    monkeypatch.setattr(readiness, "ask", ask)
    monkeypatch.setattr(readiness, "time", clock)
    ReadinessProbe(CONFIG, Endpoint.of(CONFIG), epoch=3, root_pid=1, first=True, reply_to=box)
    probed = box.get(timeout=WAIT_S)
    assert (probed.epoch, probed.outcome) == (3, outcome)
