"""The runtime's clocks."""

import time
from types import SimpleNamespace

import pytest

from llama_worker import WorkerConfig
from llama_worker.runtime import real
from llama_worker.runtime.host import threads

CONFIG = WorkerConfig(name="w", host="127.0.0.1", port=9, server_cmd=("llama-server",))


LOST_S = 30.0  # by which the clock of all limits is behind


class Clocks:
    """The machine's: they run on, are set, and one of them stands still while it is suspended."""

    def __init__(self) -> None:
        self.unix, self.boot, self.monotonic = 1_700_000_000.0, 5_000.0, 4_000.0

    def run(self, seconds: float) -> None:
        """Time passes."""
        self.unix, self.boot = self.unix + seconds, self.boot + seconds
        self.monotonic += seconds

    def suspend(self, seconds: float) -> None:
        """Time passes, and the machine sleeps."""
        self.unix, self.boot = self.unix + seconds, self.boot + seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    scripted = SimpleNamespace(
        CLOCK_BOOTTIME=time.CLOCK_BOOTTIME,
        clock_gettime=lambda _: clocks.boot,
        monotonic=lambda: clocks.monotonic,
        time=lambda: clocks.unix,
    )
    monkeypatch.setattr(real, "time", scripted)
    monkeypatch.setattr(threads, "lost_s", lambda: LOST_S)
    return clocks


def test_unix_instants_follow_suspend_and_no_other_clock(clocks: Clocks) -> None:
    runtime = real.RealRuntime(CONFIG)

    def unix() -> float:
        return runtime.unix(clocks.monotonic - LOST_S)

    clocks.run(10.0)
    assert unix() == clocks.unix
    clocks.suspend(8 * 3600.0)
    clocks.run(1.0)
    assert unix() == clocks.unix
    before = unix()
    clocks.unix -= 600.0  # it is set
    clocks.boot -= 0.001  # it is read a moment earlier than the other
    assert unix() == before
    clocks.unix += 1200.0
    assert unix() == before
