"""What a host does about a guard that does not tell of its server's end."""

from __future__ import annotations

from signal import SIGCONT, SIGKILL

import pytest

from llama_worker.runtime.server_process import Owing


@pytest.mark.parametrize(
    ("looks", "sent"),
    [
        ([(0.0, False), (100.0, False)], [None, None]),
        ([(0.0, True), (0.9, True), (1.0, True)], [None, None, SIGCONT]),
        ([(0.0, True), (0.1, False), (50.0, True)], [None, None, None]),
        (
            [(0.0, True), (1.0, True), (600.0, True), (600.5, True), (601.0, True), (602.0, True)],
            [None, SIGCONT, SIGCONT, None, SIGCONT, SIGCONT],
        ),
        (
            [(float(second), True) for second in range(8)],
            [None, SIGCONT, SIGCONT, SIGCONT, SIGCONT, SIGKILL, SIGKILL, SIGKILL],
        ),
    ],
    ids=["owes nothing", "a second", "in time", "a gap is one look", "too long"],
)
def test_a_guard_that_owes_news_goes_on_or_is_killed(
    looks: list[tuple[float, bool]], sent: list[object]
) -> None:
    owing = Owing()
    assert [owing.step(now, owes=owes) for now, owes in looks] == sent


def test_nobody_is_woken_for_a_guard_that_owes_nothing() -> None:
    owing = Owing()
    assert owing.wait_ms(5.0) is None
    owing.step(5.0, owes=True)
    assert owing.wait_ms(5.25) == 750.0
    assert owing.wait_ms(7.0) == 0.0
    owing.step(7.0, owes=False)
    assert owing.wait_ms(7.0) is None
