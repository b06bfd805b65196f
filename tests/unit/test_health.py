"""The counter of failed health probes, with a literal clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llama_worker.profiles import TimeoutProfile
from llama_worker.server.health import HealthCounter, probe_timeout_s

PROFILE = TimeoutProfile(health_failures_before_restart=3)


def lost_at(
    probes: list[tuple[float, bool]], *, data: tuple[float, ...] = (), profile: TimeoutProfile = PROFILE
) -> float | None:
    """When the server is lost, READY since 0.0; `data` are instants at which any request received data."""
    counter = HealthCounter(since=0.0)
    for now, ok in probes:
        data_at = max((at for at in data if at <= now), default=None)
        counter, lost = counter.probed(ok=ok, detail="refused", data_at=data_at, profile=profile, now=now)
        if lost is not None:
            return now
    return None


@pytest.mark.parametrize(
    ("probes", "data", "lost"),
    [
        pytest.param([(30, False), (60, False), (90, False)], (), 90, id="three in a row"),
        pytest.param([(30, False), (60, True), (90, False), (120, False)], (), None, id="a success between"),
        pytest.param([(30, False), (60, False), (90, False)], (89,), None, id="data since the probe before"),
        pytest.param(
            [(30, False), (60, False), (90, False), (120, False), (150, False), (180, False)],
            (89,),
            180,
            id="data ends the row, and it begins anew",
        ),
        pytest.param([(30, False), (60, False), (90, False)], (-5,), 90, id="data from before READY"),
        pytest.param([(30, False), (60, False), (90, False)], (0,), 90, id="data at the probe before is old"),
        pytest.param([(30, False), (60, False), (90, False)], (10,), None, id="data before the first probe"),
    ],
)
def test_failures_count_in_a_row_and_without_data(
    probes: list[tuple[float, bool]], data: tuple[float, ...], lost: float | None
) -> None:
    assert lost_at(probes, data=data) == lost


def test_one_failure_is_enough_where_so_configured() -> None:
    assert lost_at([(30, False)], profile=replace(PROFILE, health_failures_before_restart=1)) == 30


def test_a_stream_that_moves_outdoes_any_number_of_failures() -> None:
    probes = [(float(now), False) for now in range(30, 3000, 30)]
    assert lost_at(probes, data=tuple(now - 1.0 for now, _ in probes)) is None


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
