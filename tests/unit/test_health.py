"""The counter of failed health probes, with a literal clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from llama_worker.profiles import TimeoutProfile
from llama_worker.server.health import HealthCounter, probe_timeout_s

PROFILE = TimeoutProfile(health_failures_before_restart=3)


@pytest.mark.parametrize(
    ("probes", "data", "lost"),
    [
        pytest.param("---", [], 90, id="three in a row"),
        pytest.param("-+--", [], None, id="a success between"),
        pytest.param("---", [89], None, id="data since the probe before"),
        pytest.param("------", [89], 180, id="data ends the row, and it begins anew"),
        pytest.param("---", [-5], 90, id="data from before READY"),
        pytest.param("---", [0], 90, id="data at the probe before is old"),
        pytest.param("---", [10], None, id="data before the first probe"),
        pytest.param("-" * 100, range(29, 3000, 30), None, id="a stream that moves outdoes any number of failures"),
    ],
)
def test_failures_count_in_a_row_and_without_data(probes: str, data: Sequence[int], lost: float | None) -> None:
    """READY since 0.0; a probe every 30 s, and the instants at which any request received data."""
    counter, lost_at = HealthCounter(since=0.0), None
    for now, outcome in zip(range(30, 3030, 30), probes, strict=False):
        data_at = max((at for at in data if at <= now), default=None)
        ok = outcome == "+"
        counter, why = counter.probed(ok=ok, detail="refused", data_at=data_at, profile=PROFILE, now=now)
        lost_at = lost_at or (why and now)
    assert lost_at == lost


def test_one_failure_is_enough_where_so_configured() -> None:
    profile = replace(PROFILE, health_failures_before_restart=1)
    assert HealthCounter(since=0.0).probed(ok=False, detail="refused", data_at=None, profile=profile, now=30.0)[1]


def test_the_reason_names_count_limit_and_last_failure() -> None:
    counter = HealthCounter(since=60.0, failures_count=2)
    _, lost = counter.probed(ok=False, detail="connection refused", data_at=None, profile=PROFILE, now=90.0)
    assert lost == ("3 health probes in a row failed (limit: health_failures_before_restart 3): connection refused")


@pytest.mark.parametrize(
    ("interval_s", "timeout_s"),
    [(30.0, 10.0), (10.0, 10.0), (4.0, 4.0), (0.2, 1.0), (None, 10.0)],
)
def test_a_probe_is_given_up_when_the_next_is_due_within_bounds(interval_s: float | None, timeout_s: float) -> None:
    assert probe_timeout_s(replace(PROFILE, health_probe_interval_s=interval_s)) == timeout_s
