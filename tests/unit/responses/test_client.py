"""How long clients are waited for, and which of them first loses its place."""

from typing import Any

import pytest

from llama_worker.responses.http.client import Client, WaitingClients
from llama_worker.responses.http.request_reader import Phase, RequestReader


@pytest.mark.parametrize(
    ("phase", "allowed_s"),
    [(Phase.SILENT, 120.0), (Phase.HEAD, 20.0), (Phase.BODY, 30.0), (Phase.LINGER, 2.0)],
)
def test_nobody_waits_for_ever(phase: Phase, allowed_s: float) -> None:
    waiting: Any = WaitingClients()
    assert waiting.deadline() is None
    waiting.enter("a", phase, 10.0)
    assert waiting.deadline() == 10.0 + allowed_s
    assert waiting.expired(10.0 + allowed_s - 0.1) == []
    assert waiting.expired(10.0 + allowed_s) == ["a"]
    waiting.leave("a")
    waiting.leave("a")
    assert ([*waiting], waiting.deadline()) == ([], None)


def test_only_a_dripping_body_gets_more_time() -> None:
    waiting: Any = WaitingClients()
    waiting.enter("head", Phase.SILENT, -100.0)  # silence before it costs it no time
    for at in (0.0, 10.0):
        waiting.enter("head", Phase.HEAD, at)
        waiting.enter("body", Phase.BODY, at)
    assert waiting.expired(20.0) == ["head"]
    assert waiting.expired(40.0) == ["head", "body"]
    waiting.leave("head")
    waiting.leave("body")
    waiting.enter("head", Phase.HEAD, 200.0)
    assert waiting.deadline() == 220.0


def test_whoever_waits_longest_makes_room_the_silent_first() -> None:
    waiting: Any = WaitingClients()
    phases = {
        "body": Phase.BODY,
        "head": Phase.HEAD,
        "s1": Phase.SILENT,
        "s2": Phase.SILENT,
        "end": Phase.LINGER,
    }
    for number, (client, phase) in enumerate(phases.items()):
        waiting.enter(client, phase, float(number))
    gone = []
    while (client_to_go := waiting.next_to_evict()) is not None:
        gone.append(client_to_go)
        waiting.leave(client_to_go)
    assert gone == ["end", "s1", "s2", "head", "body"]


class SteadyClient:
    """A socket whose client takes ten bytes a second."""

    taken, timeout_s = b"", 0.0

    def setblocking(self, flag: bool) -> None:
        self.timeout_s = 0.0

    def settimeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def send(self, data: Any, flags: int) -> int:
        if self.timeout_s < 1.0:
            raise BlockingIOError
        self.taken += data[:10]
        return min(len(data), 10)


def test_a_slow_client_gets_a_long_reply() -> None:
    steady: Any = SteadyClient()
    reader = RequestReader(max_body_bytes=100, allowed_origin=lambda _: None)
    Client(steady, reader, write_timeout_s=2.0).send_raw(b"x" * 95)
    assert (steady.taken, steady.timeout_s) == (b"x" * 95, 0.0)
