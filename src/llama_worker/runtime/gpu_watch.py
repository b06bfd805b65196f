"""The thread that waits for errors of the GPUs that one launch of the server uses.

NVML may hang with a lost GPU: nobody waits for this thread.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from llama_worker.runtime.liveness_probes import tree_pids
from llama_worker.server.gpu_faults import GpuFault, fault_of_xid, gpu_lost, uncorrectable_memory_error

WAIT_S: Final = 10.0  # nothing wakes a thread that waits in NVML: a closed watch ends at most this much later
_logger = logging.getLogger("llama_worker.gpu")


class GpuWatch:
    """Watches from construction on, on a daemon thread, until `close`; any thread may call that, it returns at once.

    Every kind of fault is told once. Nothing is, and the thread ends, where NVML cannot be loaded or sees no process
    of the tree on any GPU: a server on the CPU, or a container with a pid namespace that the driver does not know.
    """

    def __init__(self, root_pid: int, tell: Callable[[GpuFault], object], *, name: str) -> None:
        self._root_pid = root_pid
        self._tell = tell
        self._told: set[GpuFault] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"llama_worker-{name}-gpus", daemon=True).start()

    def close(self) -> None:
        """Tell nothing more."""
        self._closed.set()

    def _run(self) -> None:
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception:  # a missing package or driver, or one that is broken: there is nothing to watch
            return
        try:
            self._watch(nvml)
        except Exception:
            _logger.exception("errors of GPUs are not seen any more")

    def _watch(self, nvml: Any) -> None:
        gpus = _gpus_of(nvml, frozenset(tree_pids(self._root_pid)))
        events = _events_of(nvml, gpus)
        if events is None:
            return
        try:
            while not self._closed.is_set():
                try:
                    event = nvml.nvmlEventSetWait_v2(events, int(WAIT_S * 1000))
                except nvml.NVMLError as error:
                    if error.value == nvml.NVML_ERROR_TIMEOUT:
                        continue
                    for gpu in _lost(nvml, gpus):
                        self._report(gpu_lost(gpu))
                    self._closed.wait(WAIT_S)  # such an error comes back at once, for as long as its cause is there
                else:
                    self._report(_fault_of(nvml, event))
        finally:
            nvml.nvmlEventSetFree(events)

    def _report(self, fault: GpuFault | None) -> None:
        if fault is not None and fault not in self._told and not self._closed.is_set():
            self._told.add(fault)
            self._tell(fault)


def _gpus_of(nvml: Any, pids: frozenset[int]) -> dict[str, Any]:
    """The handles of the GPUs that these processes use, by name."""
    found = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            users = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        except nvml.NVMLError:
            continue  # one that is lost already, or tells no processes, is not known to be ours
        if users & pids:
            found[f"GPU {index}"] = handle
    return found


def _events_of(nvml: Any, gpus: dict[str, Any]) -> Any:
    """A set in which the errors of these GPUs arrive; None where none of them reports any."""
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
    except nvml.NVMLError:  # a lost one may not tell
        gpu = "a GPU"
    if event.eventType == nvml.nvmlEventTypeXidCriticalError:
        return fault_of_xid(gpu, int(event.eventData))
    return uncorrectable_memory_error(gpu)


def _lost(nvml: Any, gpus: dict[str, Any]) -> list[str]:
    """Those that cannot be reached; another GPU of the machine may be the one that the error is about."""
    found = []
    for gpu, handle in gpus.items():
        try:
            nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                found.append(gpu)
    return found
