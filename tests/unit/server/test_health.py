"""What tells that a server is lost: failed probes, errors of its GPU; with literal numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from llama_worker import TimeoutProfile
from llama_worker.server.gpu_faults import GpuFault, fault_of_xid
from llama_worker.server.health import HealthCounter, probe_timeout_s

PROFILE = TimeoutProfile(health_failures_before_restart=2)


@pytest.mark.parametrize(
    ("probes", "data", "lost"),
    [
        pytest.param("--", [], 60, id="two in a row"),
        pytest.param("-+-", [], None, id="a success between"),
        pytest.param("--", [59], None, id="data since the probe before"),
        pytest.param("----", [59], 120, id="data ends the row, and it begins anew"),
        pytest.param("--", [-5], 60, id="data from before READY"),
        pytest.param("--", [0], 60, id="data at the probe before is old"),
        pytest.param("--", [10], None, id="data before the first probe"),
        pytest.param(
            "-" * 100,
            range(29, 3000, 30),
            None,
            id="a stream that moves outdoes any number of failures",
        ),
    ],
)
def test_failures_count_in_a_row_and_without_data(
    probes: str, data: Sequence[int], lost: float | None
) -> None:
    """READY since 0.0; a probe every 30 s, and the instants at which any request received data."""
    counter, lost_at = HealthCounter(since=0.0), None
    for now, outcome in zip(range(30, 3030, 30), probes, strict=False):
        data_at = max((at for at in data if at <= now), default=None)
        ok = outcome == "+"
        counter, why = counter.probed(
            ok=ok, detail="refused", data_at=data_at, profile=PROFILE, now=now
        )
        lost_at = lost_at or (why and now)
    assert lost_at == lost


def test_the_reason_names_count_limit_and_last_failure() -> None:
    counter, profile = HealthCounter(since=60.0, failures_count=2), TimeoutProfile()
    _, lost = counter.probed(
        ok=False, detail="connection refused", data_at=None, profile=profile, now=90.0
    )
    assert lost == (
        "3 health probes in a row failed (limit: health_failures_before_restart 3): "
        "connection refused"
    )


@pytest.mark.parametrize(
    ("interval_s", "timeout_s"), [(30.0, 10.0), (4.0, 4.0), (0.2, 1.0), (None, 10.0)]
)
def test_a_probe_is_given_up_when_the_next_is_due_within_bounds(
    interval_s: float | None, timeout_s: float
) -> None:
    assert probe_timeout_s(replace(PROFILE, health_probe_interval_s=interval_s)) == timeout_s


# ---------------------------------------------------------------- errors of GPUs


@pytest.mark.parametrize(
    ("xids", "fatal"),
    [
        pytest.param(
            (46, 48, 62, 79, 95, 110, 119, 120, 140, 143, 158), True, id="takes a reset to mend"
        ),
        pytest.param(
            (8, 13, 31, 32, 94, 109, 9999), False, id="may be another process's, or is unknown"
        ),
        pytest.param(
            (43, 45, 63, 92, 154), None, id="is left behind by a kill, or mends itself: no fault"
        ),
    ],
)
def test_what_an_error_means_for_the_server(xids: tuple[int, ...], fatal: bool | None) -> None:
    faults = {xid: fault_of_xid("GPU 0", xid) for xid in xids}
    assert {xid: fault.fatal if fault else None for xid, fault in faults.items()} == dict.fromkeys(
        xids, fatal
    )


def test_a_fault_names_the_gpu_the_number_and_the_meaning() -> None:
    assert fault_of_xid("GPU 3", 79) == GpuFault(
        fatal=True, detail="GPU 3: Xid 79, the GPU has fallen off the bus"
    )
    assert fault_of_xid("GPU 3", 9999) == GpuFault(
        fatal=False, detail="GPU 3: Xid 9999, see NVIDIA's catalog"
    )
