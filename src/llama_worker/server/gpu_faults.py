"""What an error that a GPU reports means for the servers that use it. Pure.

NVIDIA's driver numbers its errors (Xid) and tells neither the process nor the severity:
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
"""

from __future__ import annotations

from msgspec import Struct

# The catalog's remedy is to reset the GPU or to restart the machine: nothing computes on it any
# more.
_FATAL_XIDS = {
    46: "the GPU stopped processing",
    48: "a double-bit ECC error",
    62: "an internal micro-controller halted",
    79: "the GPU has fallen off the bus",
    95: "an uncontained ECC error",
    110: "a security fault",
    119: "a timeout of the GPU's system processor",
    120: "an error of the GPU's system processor",
    140: "an unrecovered ECC error",
    143: "the GPU could not be initialised",
    158: "a fatal timeout",
}
# Errors of one process, whichever it is. llama-server aborts when it is its own (b11434); 109 also
# comes of mere load.
_PROCESS_XIDS = {
    8: "the GPU stopped processing",
    13: "an exception of the graphics engine",
    31: "a memory page fault",
    32: "a corrupted push buffer",
    94: "a contained ECC error",
    109: "a context switch timeout",
}
# The catalog says to ignore them; 43 and 45 also follow the kill of a process that was computing.
_HARMLESS_XIDS = frozenset(
    {14, 37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 154, 157, 160, 161}
)


class GpuFault(Struct, frozen=True, kw_only=True):
    """An error of a GPU that the server uses. `fatal`: the GPU computes nothing more, for any
    process."""

    fatal: bool
    detail: str


def fault_of_xid(gpu: str, xid: int) -> GpuFault | None:
    """None for what is no reason to worry; an unknown number is one, but not fatal."""
    if xid in _HARMLESS_XIDS:
        return None
    meaning = _FATAL_XIDS.get(xid) or _PROCESS_XIDS.get(xid) or "see NVIDIA's catalog"
    return GpuFault(fatal=xid in _FATAL_XIDS, detail=f"{gpu}: Xid {xid}, {meaning}")


def uncorrectable_memory_error(gpu: str) -> GpuFault:
    """The event of a double-bit ECC error."""
    return GpuFault(fatal=True, detail=f"{gpu}: a double-bit ECC error")


def gpu_lost(gpu: str) -> GpuFault:
    """The driver cannot reach it any more."""
    return GpuFault(fatal=True, detail=f"{gpu}: the GPU is lost")
