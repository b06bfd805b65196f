"""A moment of the campaign that `make chaos` runs at length."""

import time
from collections.abc import Callable

from tests.chaos.campaign import STEPS_PER_EPISODE, run_campaign


def test_every_request_ends_once_and_nothing_is_left(free_port: Callable[[], int]) -> None:
    """A failure prints the seed: `make chaos SEED=...` runs the same plan again."""
    happened = run_campaign(time.time_ns() % (1 << 32), 4 * STEPS_PER_EPISODE, free_port)
    assert happened["ended", "completed"]
