"""What errors of GPUs mean."""

from __future__ import annotations

import pytest

from llama_worker.server.gpu_faults import GpuFault, fault_of_xid


@pytest.mark.parametrize(
    ("xids", "fatal"),
    [
        pytest.param((46, 48, 62, 79, 95, 110, 119, 120, 140, 143, 158), True, id="takes a reset to mend"),
        pytest.param((8, 13, 31, 32, 94, 109, 9999), False, id="may be another process's, or is unknown"),
        pytest.param((43, 45, 63, 92, 154), None, id="is left behind by a kill, or mends itself: no fault"),
    ],
)
def test_what_an_error_means_for_the_server(xids: tuple[int, ...], fatal: bool | None) -> None:
    faults = {xid: fault_of_xid("GPU 0", xid) for xid in xids}
    assert {xid: fault.fatal if fault else None for xid, fault in faults.items()} == dict.fromkeys(xids, fatal)


def test_a_fault_names_the_gpu_the_number_and_the_meaning() -> None:
    assert fault_of_xid("GPU 3", 79) == GpuFault(fatal=True, detail="GPU 3: Xid 79, the GPU has fallen off the bus")
    assert fault_of_xid("GPU 3", 9999) == GpuFault(fatal=False, detail="GPU 3: Xid 9999, see NVIDIA's catalog")
