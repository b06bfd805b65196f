"""Reads what the system knows about a server's processes: evidence of work, and a snapshot before a
kill.

A new probe has the methods of `types.hooks.LivenessProbe`, and is made in `default_probes`. It
keeps what it saw before, so it belongs to one worker and is called by one thread at a time. What
cannot be read counts as no news; nothing here raises because a process ended or may not be read. A
shortage of this machine, such as of descriptors, is raised: half a look would mislead.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import psutil

from llama_worker.errors import is_shortage
from llama_worker.runtime.host import threads
from llama_worker.runtime.process.guard import proc_is_ours
from llama_worker.server import liveness
from llama_worker.types.hooks import LivenessEvidence, LivenessProbe

# a walk over the tree takes longer with each thread, a look at one process does not
CHILDREN_REFRESH_S: Final = 5.0
MAX_THREADS: Final = 64
MAX_PROCESSES: Final = 16
PROC: Final = "/proc" if proc_is_ours() else "/nonexistent"
# the server reads all frames of a video from one, before it takes a slot for the request (b11434)
_VIDEO_DECODERS: Final = frozenset({"ffmpeg", "ffprobe"})
# whether the kernel has CONFIG_PROC_CHILDREN
_LISTS_CHILDREN: Final = os.path.exists(f"{PROC}/thread-self/children")


def default_probes() -> tuple[LivenessProbe, ...]:
    """New probes for one worker: of its processes, and of NVIDIA GPUs if the extra is installed."""
    probes: list[LivenessProbe] = [ProcessProbe()]
    with suppress(Exception):  # the package is missing or broken
        importlib.import_module("pynvml")
        probes.append(NvidiaProbe())
    return tuple(probes)


def load_nvml() -> Any:
    """The module pynvml, initialised. Raises what the import or NVML raises."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return nvml


class ProcessProbe:
    """Evidence from the rates of CPU time, waiting for a core, disk use and major faults of the
    serving processes."""

    def __init__(self) -> None:
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")
        self.reset()

    def reset(self) -> None:
        self._tree = _Tree()
        self._root: liveness.ProcessKey | None = None
        self._activity = liveness.ProcessActivity(self._ticks_per_second)

    def probe(self, root_pid: int, now: float) -> LivenessEvidence | None:
        """What the server did lately; None at the first look, and if the root is gone or cannot be
        read."""
        lost_s = time.monotonic() - threads.now()  # as of `now`: reading takes a while
        root = _read_stat(f"{PROC}/{root_pid}/stat")
        if root is None or root.dead:
            return None
        if self._root != root.key(root_pid):  # another process, perhaps with the same pid
            self.reset()
            self._root = root.key(root_pid)
        processes = {}
        for pid in self._tree.serving_pids(root_pid, now):
            stat = root if pid == root_pid else _read_stat(f"{PROC}/{pid}/stat")
            if stat is not None:
                processes[stat.key(pid)] = liveness.Counters(
                    cpu_ticks=stat.cpu_ticks,
                    major_faults=stat.major_faults,
                    waited_ns=liveness.parse_schedstat(_read(f"{PROC}/{pid}/schedstat") or ""),
                    **liveness.parse_io(_read(f"{PROC}/{pid}/io") or ""),
                )
        self._activity, evidence = self._activity.observe(
            liveness.ProcessSample(at=now, lost_s=lost_s, processes=processes)
        )
        return evidence


class NvidiaProbe:
    """Evidence from the use of NVIDIA GPUs by the serving processes, over all devices.

    Needs the package nvidia-ml-py (`pynvml`). NVML stays initialised for the life of the host
    process. In a container with its own pid namespace NVML may report pids of another namespace:
    then there is never any news.
    """

    def __init__(self, nvml: Any = None) -> None:
        """`nvml`: a module like pynvml, initialised; None: it is loaded at the first look, since
        that may hang if a GPU is lost."""
        self._nvml = nvml
        self.reset()

    def reset(self) -> None:
        self._tree = _Tree()
        self._seen_until: dict[int, int] = {}  # device -> newest sample, in NVML's own microseconds

    def probe(self, root_pid: int, now: float) -> LivenessEvidence | None:
        """What the server did on the GPUs since the last look; None if NVML has no sample of it.

        The first look at a device only sets the starting point: NVML's buffer holds samples from
        before watching began.
        """
        try:
            self._nvml = self._nvml or load_nvml()
        except Exception:  # the driver is missing or broken: there is nothing to see
            return None
        pids = frozenset(self._tree.serving_pids(root_pid, now))
        used = [(device, sample) for device, sample in self._new_samples() if sample.pid in pids]
        if not used:
            return None
        device, busiest = max(used, key=lambda entry: max(entry[1].smUtil, entry[1].memUtil))
        use = f"{busiest.smUtil} % compute, {busiest.memUtil} % memory"
        return LivenessEvidence(
            alive=busiest.smUtil > 0 or busiest.memUtil > 0,
            detail=f"GPU {device}: process {busiest.pid} used {use}",
        )

    def _new_samples(self) -> Iterator[tuple[int, Any]]:
        try:
            devices_count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError:
            return
        for device in range(devices_count):
            since = self._seen_until.get(device)
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(device)
                samples = list(self._nvml.nvmlDeviceGetProcessUtilization(handle, since or 0))
            except self._nvml.NVMLError as error:
                # Not found: no sample since then, the normal answer of an idle GPU. Any other error
                # (MIG, a lost device) says nothing, and the buffer's samples may be old once the
                # device works again.
                if getattr(error, "value", None) != self._nvml.NVML_ERROR_NOT_FOUND:
                    continue
                samples = []
            self._seen_until[device] = max([since or 0, *(sample.timeStamp for sample in samples)])
            if since is not None:
                # Only newer samples count, whatever the driver was asked for: old use would pass
                # for work.
                yield from ((device, sample) for sample in samples if sample.timeStamp > since)


def anon_bytes(root_pid: int) -> int | None:
    """RssAnon and VmSwap of the tree, which grow with a leak but not with mapped model files. None
    if they cannot be read. Never raises."""
    with suppress(OSError):
        pids = tree_pids(root_pid)
        return liveness.parse_anon("\n".join(_read(f"{PROC}/{pid}/status") or "" for pid in pids))
    return None


def process_evidence(root_pid: int) -> dict[str, Any]:
    """A snapshot of the tree, as JSON values, for a person to read. Never raises.

    At most 16 processes with 64 threads each. Command lines are left out: they may hold secrets,
    and reading them can hang with the process.
    """
    processes: list[dict[str, Any]] = []
    pids: tuple[int, ...] = (root_pid,)
    with suppress(OSError):
        pids = tree_pids(root_pid)
        processes += filter(None, map(_process_state, pids[:MAX_PROCESSES]))
    return {"root_pid": root_pid, "processes_count": len(pids), "processes": processes}


def _process_state(pid: int) -> dict[str, Any] | None:
    """None if the process is gone."""
    stat = _read_stat(f"{PROC}/{pid}/stat")
    if stat is None:
        return None
    return {
        "pid": pid,
        "name": stat.name,
        "state": stat.state,
        "uid": liveness.parse_uid(_read(f"{PROC}/{pid}/status") or ""),
        "cpu_ticks": stat.cpu_ticks,
        "major_faults": stat.major_faults,
        **liveness.parse_io(_read(f"{PROC}/{pid}/io") or ""),
        "rss_bytes": stat.rss_pages * os.sysconf("SC_PAGE_SIZE"),
        "wchan": _read(f"{PROC}/{pid}/wchan") or "",
        # only root may read it
        "stack": (_read(f"{PROC}/{pid}/stack") or "").partition("\n")[0],
        "threads_count": stat.threads_count,
        "threads": thread_states(pid),
    }


def thread_states(pid: int) -> list[dict[str, Any]]:
    """`{tid, name, state, cpu_ticks}` of the first 64 threads, with `wchan` if the kernel tells it.

    Empty if the process is gone.
    """
    threads = []
    for tid in sorted(_tids(pid))[:MAX_THREADS]:
        stat = _read_stat(f"{PROC}/{pid}/task/{tid}/stat")
        if stat is None:
            continue
        thread: dict[str, Any] = {"tid": tid, "name": stat.name, "state": stat.state}
        thread["cpu_ticks"] = stat.cpu_ticks
        wchan = _read(f"{PROC}/{pid}/task/{tid}/wchan")
        if wchan not in (None, "", "0"):
            thread["wchan"] = wchan
        threads.append(thread)
    return threads


class _Tree:
    """Caches the serving processes of one server for `CHILDREN_REFRESH_S`."""

    def __init__(self) -> None:
        self._pids: tuple[int, ...] = ()  # the root first
        self._refresh_at = -math.inf

    def serving_pids(self, root_pid: int, now: float) -> tuple[int, ...]:
        """The root first."""
        if now >= self._refresh_at:
            self._pids = serving_pids(tree_pids(root_pid))
            self._refresh_at = now + CHILDREN_REFRESH_S
        return self._pids


def serving_pids(pids: tuple[int, ...]) -> tuple[int, ...]:
    """The processes of a tree, root first, whose work counts as the server's: the root, the
    children that listen, and those that decode a video.

    Any other child (a tool, a log shipper) works for itself. All count while none listens, as when
    a script starts the server, or if that is unknown.
    """
    root_pid, *children = pids
    if not children:
        return pids
    listening = [pid for pid in pids if _listens(pid)]
    if not listening:
        return pids
    return (root_pid, *(pid for pid in children if pid in listening or _decodes_video(pid)))


def _decodes_video(pid: int) -> bool:
    stat = _read_stat(f"{PROC}/{pid}/stat")
    return stat is not None and stat.name in _VIDEO_DECODERS


def _listens(pid: int) -> bool:
    try:
        return bool(listening_addresses(psutil.Process(pid)))
    except (psutil.Error, OSError, ValueError) as error:
        _raise_if_shortage(error)
        return False


def listening_addresses(process: psutil.Process) -> set[tuple[str, int]]:
    """The IP addresses and TCP ports on which the process listens. Raises psutil.Error."""
    sockets = process.net_connections(kind="tcp")
    listening = (each.laddr for each in sockets if each.status == psutil.CONN_LISTEN)
    return {(address.ip, address.port) for address in listening}


def tree_pids(root_pid: int) -> tuple[int, ...]:
    """The processes of a tree, the root first, even if nothing is known about it."""
    if not _LISTS_CHILDREN:
        return (root_pid, *_children_by_psutil(root_pid))
    pids = [root_pid]
    for pid in pids:  # the list grows meanwhile
        pids += _children(pid)
    return tuple(pids)


def _children(pid: int) -> list[int]:
    """The children from the kernel's list: psutil would read every process of the machine."""
    pids: list[int] = []
    for tid in _tids(pid):
        pids += map(int, (_read(f"{PROC}/{pid}/task/{tid}/children") or "").split())
    return pids


def _tids(pid: int) -> list[int]:
    """The ids of the process's threads; none if it is gone."""
    try:
        return [int(name) for name in os.listdir(f"{PROC}/{pid}/task")]
    except OSError as error:
        _raise_if_shortage(error)
        return []


def _children_by_psutil(root_pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(root_pid).children(recursive=True)]
    except (psutil.Error, OSError, ValueError) as error:
        _raise_if_shortage(error)
        return []


def _read_stat(path: str) -> liveness.ProcessStat | None:
    return liveness.parse_stat(_read(path) or "")


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError as error:
        _raise_if_shortage(error)
        return None


def _raise_if_shortage(error: Exception) -> None:
    if is_shortage(error):
        raise error
