"""The part of `pynvml` that waits for errors of GPUs, played by a script."""

import itertools
import queue
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml

NVMLError = pynvml.NVMLError


@dataclass(eq=False)
class Gpu:
    """A device, and the handle to it."""

    # who uses it; None: every process of the machine
    pids: set[int] | None = field(default_factory=set)
    event_types: int = 0x1FF  # what it can report
    lost: bool = False  # every question about it fails


class ScriptedNvml:
    """A module like `pynvml`: `report` and `lose` make a wait return, `hang` makes the next one
    never return."""

    def __getattr__(self, name: str) -> Any:
        """What is not played here, above all the numbers, is the real one's."""
        return getattr(pynvml, name)

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = gpus
        # every event set, with what is registered in it
        self.sets: dict[int, list[tuple[Gpu, int]]] = {}
        self.freed: set[int] = set()
        self._arrivals: dict[int, queue.SimpleQueue[SimpleNamespace | Exception]] = {}
        self.waits = threading.Semaphore(0)  # released as often as a wait begins
        self._numbers = itertools.count(1)
        self._released = threading.Event()
        self._released.set()

    # -- the script --

    def report(self, gpu: Gpu, xid: int) -> None:
        """An Xid error."""
        self._arrive(gpu, self.nvmlEventTypeXidCriticalError, xid)

    def report_ecc(self, gpu: Gpu) -> None:
        """A double-bit ECC error."""
        self._arrive(gpu, self.nvmlEventTypeDoubleBitEccError)

    def lose(self, gpu: Gpu) -> None:
        """The GPU falls off the bus: questions about it, and from now on every wait, end with an
        error at once."""
        gpu.lost = True
        self._end_waits(self.NVML_ERROR_GPU_IS_LOST)

    def hang(self) -> None:
        """From its next wait on, until `release`."""
        self._released.clear()

    def release(self) -> None:
        """What hangs goes on; waits that are under way end."""
        self._released.set()
        self._end_waits(self.NVML_ERROR_TIMEOUT)

    def _arrive(self, gpu: Gpu, event_type: int, data: int = 0) -> None:
        for events, entries in self.sets.items():
            if any(registered is gpu and types & event_type for registered, types in entries):
                self._arrivals[events].put(
                    SimpleNamespace(device=gpu, eventType=event_type, eventData=data)
                )

    def _end_waits(self, error: int) -> None:
        for arrivals in self._arrivals.values():
            arrivals.put(NVMLError(error))

    # -- as in pynvml --

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self._asked(self.gpus[index])

    def nvmlDeviceGetIndex(self, gpu: Gpu) -> int:
        return self.gpus.index(self._asked(gpu))

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> object:
        return self._asked(gpu)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[SimpleNamespace]:
        pids = self._asked(gpu).pids
        return [SimpleNamespace(pid=pid) for pid in (psutil.pids() if pids is None else pids)]

    def nvmlDeviceGetProcessUtilization(self, gpu: Gpu, since: int) -> list[Any]:
        raise NVMLError(self.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetSupportedEventTypes(self, gpu: Gpu) -> int:
        return self._asked(gpu).event_types

    def nvmlEventSetCreate(self) -> int:
        number = next(self._numbers)
        self.sets[number], self._arrivals[number] = [], queue.SimpleQueue()
        return number

    def nvmlDeviceRegisterEvents(self, gpu: Gpu, event_types: int, events: int) -> None:
        self.sets[events].append((self._asked(gpu), event_types))

    def nvmlEventSetWait_v2(self, events: int, timeout_ms: int) -> SimpleNamespace:
        self.waits.release()
        self._released.wait()
        is_one_lost = any(gpu.lost for gpu in self.gpus)
        try:
            arrival = self._arrivals[events].get(timeout=0 if is_one_lost else timeout_ms / 1000)
        except queue.Empty:
            raise NVMLError(
                self.NVML_ERROR_GPU_IS_LOST if is_one_lost else self.NVML_ERROR_TIMEOUT
            ) from None
        if isinstance(arrival, Exception):
            raise arrival
        return arrival

    def nvmlEventSetFree(self, events: int) -> None:
        self.freed.add(events)

    def _asked(self, gpu: Gpu) -> Gpu:
        if gpu.lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return gpu
