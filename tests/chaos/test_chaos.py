"""About a minute of the campaign that `make chaos` runs at length."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.chaos.campaign import Campaign

SECONDS = 60.0


@pytest.mark.timeout(300)
def test_whatever_happens_every_request_ends_once_and_nothing_is_left(free_port: Callable[[], int]) -> None:
    """A failure prints the seed: `make chaos SEED=...` runs the same plan again."""
    campaign = Campaign(seed=time.time_ns() % (1 << 32), seconds=SECONDS, take_port=free_port, say=print)
    campaign.run()
    print(campaign.report())
    assert campaign.endings["completed"]
