"""Waits for errors of the GPUs that one launch of the server uses.

NVML may hang if a GPU is lost, so it runs on a thread that nobody waits for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, Final

import psutil

from llama_worker.mailbox import Mailbox
from llama_worker.runtime.host.threads import log_exception
from llama_worker.runtime.probes.liveness_probes import load_nvml, tree_pids
from llama_worker.server.blame import GpuFault, fault_of_xid, gpu_lost, uncorrectable_memory_error
from llama_worker.server.messages import GpuFaulted

# a thread that waits in NVML cannot be woken: it ends at most this much later than the server
WAIT_S: Final = 10.0
_logger = logging.getLogger("llama_worker")


def watch_gpus(root_pid: int, epoch: int, reply_to: Mailbox[GpuFaulted]) -> None:
    """Send every kind of fault once to `reply_to`, until the process is gone. Blocks.

    Returns at once if NVML cannot be loaded, or sees no process of the tree on any GPU: a server on
    the CPU, or a container with a pid namespace that the driver does not know.
    """
    # The package or the driver is missing or broken: there is nothing to watch.
    try:
        nvml = load_nvml()
    except Exception:
        return
    try:
        _watch(nvml, psutil.Process(root_pid), epoch, reply_to)
    except psutil.NoSuchProcess:
        return
    except Exception:
        log_exception(_logger, "GPU errors are no longer watched")


def gpus_in_use(root_pid: int) -> tuple[str, ...] | None:
    """The GPUs on which the driver sees the process tree; None if there is no NVML or no GPU. May
    hang if a GPU is lost."""
    try:
        nvml = load_nvml()
        gpus = _gpus_of(nvml, frozenset(tree_pids(root_pid)))
        return tuple(gpus) if nvml.nvmlDeviceGetCount() else None
    except Exception:  # as above
        return None


def _watch(nvml: Any, server: psutil.Process, epoch: int, reply_to: Mailbox[GpuFaulted]) -> None:
    gpus = _gpus_of(nvml, frozenset(tree_pids(server.pid)))
    events = _events_of(nvml, gpus)
    if events is None:
        return
    reported: set[GpuFault] = set()
    try:
        while server.is_running():
            for fault in _next_faults(nvml, events, gpus):
                if fault not in reported:
                    reported.add(fault)
                    reply_to.tell(GpuFaulted(epoch=epoch, fault=fault))
    finally:
        nvml.nvmlEventSetFree(events)


def _next_faults(nvml: Any, events: Any, gpus: dict[str, Any]) -> Iterator[GpuFault]:
    try:
        event = nvml.nvmlEventSetWait_v2(events, int(WAIT_S * 1000))
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_TIMEOUT:
            yield from (gpu_lost(gpu) for gpu in _lost(nvml, gpus))
            # NVML returns such an error again at once, for as long as its cause persists
            time.sleep(WAIT_S)
    else:
        fault = _fault_of(nvml, event)
        if fault is not None:
            yield fault


def _gpus_of(nvml: Any, pids: frozenset[int]) -> dict[str, Any]:
    """The handles of the GPUs that these processes use, by name."""
    handles = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            users = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        except nvml.NVMLError:
            continue  # it is lost already, or lists no processes: it is not known to be ours
        if users & pids:
            handles[f"GPU {index}"] = handle
    return handles


def _events_of(nvml: Any, gpus: dict[str, Any]) -> Any:
    """An event set for the errors of these GPUs; None if none of them reports errors."""
    events, wanted = None, nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
    for handle in gpus.values():
        try:
            kinds = wanted & nvml.nvmlDeviceGetSupportedEventTypes(handle)
            if kinds:
                events = nvml.nvmlEventSetCreate() if events is None else events
                nvml.nvmlDeviceRegisterEvents(handle, kinds, events)
        except nvml.NVMLError as error:
            _logger.info("a GPU does not report errors: %s", error)
    return events


def _fault_of(nvml: Any, event: Any) -> GpuFault | None:
    try:
        gpu = f"GPU {nvml.nvmlDeviceGetIndex(event.device)}"
    except nvml.NVMLError:  # a lost GPU may not tell its index
        gpu = "a GPU"
    if event.eventType == nvml.nvmlEventTypeXidCriticalError:
        return fault_of_xid(gpu, int(event.eventData))
    return uncorrectable_memory_error(gpu)


def _lost(nvml: Any, gpus: dict[str, Any]) -> list[str]:
    """The GPUs that cannot be reached; none if the error is about another GPU of the machine."""
    lost = []
    for gpu, handle in gpus.items():
        try:
            nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                lost.append(gpu)
    return lost
