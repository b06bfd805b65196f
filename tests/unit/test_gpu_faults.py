"""What errors of GPUs mean."""

from __future__ import annotations

import pytest

from llama_worker.server.gpu_faults import GpuFault, fault_of_xid, gpu_lost, uncorrectable_memory_error


@pytest.mark.parametrize("xid", [46, 48, 62, 79, 95, 110, 119, 120, 140, 143, 158])
def test_an_error_that_takes_a_reset_to_mend_is_fatal(xid: int) -> None:
    fault = fault_of_xid("GPU 0", xid)
    assert fault is not None
    assert fault.fatal


@pytest.mark.parametrize("xid", [8, 13, 31, 32, 94, 109, 9999])
def test_an_error_that_may_be_another_process_s_or_is_unknown_is_not_fatal(xid: int) -> None:
    fault = fault_of_xid("GPU 0", xid)
    assert fault is not None
    assert not fault.fatal


@pytest.mark.parametrize("xid", [43, 45, 63, 92, 154])
def test_what_a_kill_leaves_behind_or_what_mends_itself_is_no_fault(xid: int) -> None:
    assert fault_of_xid("GPU 0", xid) is None


def test_a_fault_names_the_gpu_the_number_and_the_meaning() -> None:
    assert fault_of_xid("GPU 3", 79) == GpuFault(fatal=True, detail="GPU 3: Xid 79, the GPU has fallen off the bus")
    assert fault_of_xid("GPU 3", 9999) == GpuFault(fatal=False, detail="GPU 3: Xid 9999, see NVIDIA's catalog")
    assert uncorrectable_memory_error("GPU 3") == GpuFault(fatal=True, detail="GPU 3: a double-bit ECC error")
    assert gpu_lost("GPU 3") == GpuFault(fatal=True, detail="GPU 3: the GPU is lost")
