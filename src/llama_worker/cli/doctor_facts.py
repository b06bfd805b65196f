"""Collects facts for `llama-worker doctor`, without judging them. A fact that cannot be read is
None, not an error."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
from msgspec import Struct

from llama_worker import LlamaWorker, WorkerConfig, free_port
from llama_worker.cli.servers import make_ready
from llama_worker.cli.terminal import Interrupts, Screen
from llama_worker.config.command_flags import KnownFlags, read_help
from llama_worker.config.server_program import CGROUP, FoundServer, memory_bytes, read_number
from llama_worker.config.settings import Endpoint
from llama_worker.config.validation import json_of
from llama_worker.runtime.http.session import ask
from llama_worker.runtime.probes.gpu_watch import gpus_in_use
from llama_worker.runtime.probes.liveness_probes import PROC, load_nvml
from llama_worker.runtime.process.guard import pidfd_open, pidfd_send_signal
from llama_worker.server.traits import build_number, server_traits

_ASK_S = 20.0  # the first call into a GPU driver may take seconds
_KILLED_S = 5.0  # a program that waits in the kernel, as for a lost GPU, does not end
T = TypeVar("T")


class ServerFacts(Struct, frozen=True, kw_only=True):
    """What the program reports. `version` is None if it reports none; `said` and `returncode` are
    the output and the exit code of `--version`."""

    path: str
    how: str
    version: str | None
    build: int | None
    devices: tuple[str, ...] | None
    said: str
    # negative: the signal's number; None: it did not end, or could not be run
    returncode: int | None


class MachineFacts(Struct, frozen=True, kw_only=True):
    """This machine's devices and limits. Sizes are in bytes; a limit that is not set is None."""

    free_port: int | None
    # name, memory, free memory and driver, by nvidia-smi; None: there is no working nvidia-smi
    gpus: tuple[str, ...] | None
    # whether the library can see what processes do on these GPUs; None: NVML does not answer
    nvml: bool | None
    proc_stat: bool
    proc_io: bool
    memory_bytes: int  # total, of the machine or the container
    available_bytes: int
    open_files: int | None
    threads_left: int | None
    pidfd: bool


class Trial(Struct, frozen=True, kw_only=True):
    """What was learned from a server that was started with the model."""

    started_in_s: float
    proc_stat: bool
    proc_io: bool
    n_ctx: int | None  # of a slot
    slots: int | None
    # where NVML sees the server; None: there is no GPU or no NVML, or it does not answer
    gpus: tuple[str, ...] | None
    tools: bool | None  # the chat template can offer tools and show calls


def look_at_server(
    found: FoundServer, interrupts: Interrupts, environment: Mapping[str, str]
) -> ServerFacts:
    """Run the program for its version and its devices, in the environment of a worker's server.
    Raises KeyboardInterrupt."""
    code, said = _run(interrupts, found.path, "--version", environment=environment)
    found_versions = re.findall("^version:(.*)", said, re.MULTILINE) if code == 0 else []
    return ServerFacts(
        path=found.path,
        how=found.how,
        version=found_versions[0].strip() if found_versions else None,
        build=build_number(said) if code == 0 else None,
        devices=_devices(found.path, interrupts, environment) if found_versions else None,
        said=said.strip(),
        returncode=code,
    )


def _devices(
    program: str, interrupts: Interrupts, environment: Mapping[str, str]
) -> tuple[str, ...] | None:
    """What the program lists, without what has no memory: a library for the CPU, such as BLAS."""
    code, listed = _run(interrupts, program, "--list-devices", environment=environment)
    if code != 0:
        return None
    lines = map(str.strip, listed.partition("Available devices:")[2].splitlines())
    return tuple(line for line in lines if line not in ("", "(none)") and "(0 MiB" not in line)


def known_flags(
    program: str, interrupts: Interrupts, environment: Mapping[str, str]
) -> KnownFlags | None:
    """The flags that the program's --help lists; None if it lists none, or cannot be run. Raises
    KeyboardInterrupt."""
    return read_help(_run(interrupts, program, "--help", environment=environment)[1])


def look_at_machine(interrupts: Interrupts) -> MachineFacts:
    """Read limits and /proc, run nvidia-smi, load NVML. Raises KeyboardInterrupt."""
    try:
        port = free_port()
    except OSError:
        port = None
    me = os.getpid()
    return MachineFacts(
        free_port=port,
        gpus=_gpus(interrupts),
        nvml=_within(interrupts, _has_nvml),
        proc_stat=bool(_read(f"{PROC}/{me}/stat")),
        proc_io=bool(_read(f"{PROC}/{me}/io")),
        memory_bytes=memory_bytes(),
        available_bytes=_available_bytes(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        threads_left=_threads_left(),
        pidfd=_has_pidfd(),
    )


def try_out(config: WorkerConfig, screen: Screen, interrupts: Interrupts) -> Trial:
    """Start a server, ask it, stop it. Raises Problem, KeyboardInterrupt."""
    with contextlib.closing(LlamaWorker(config)) as worker:
        began_at = time.monotonic()
        make_ready(worker, screen, interrupts)
        started_in_s = time.monotonic() - began_at
        pid = worker.get_worker_status().get().get("pid", os.getpid())
        props = _props(Endpoint.of(config))
        return trial_of(
            props,
            started_in_s=started_in_s,
            proc_stat=bool(_read(f"{PROC}/{pid}/stat")),
            proc_io=bool(_read(f"{PROC}/{pid}/io")),
            gpus=_within(interrupts, gpus_in_use, pid),
        )


def trial_of(props: Mapping[str, Any], **seen: Any) -> Trial:
    """Combine `seen` with the body of `/props`, whose content differs between builds. Pure."""
    traits = server_traits(props, {})
    return Trial(n_ctx=traits.n_ctx, slots=traits.slots, tools=traits.tools, **seen)


def _props(endpoint: Endpoint) -> dict[str, Any]:
    try:
        props = json_of(ask(endpoint, "GET", "/props", timeout_s=_ASK_S)[1])
    except (OSError, ValueError):
        return {}
    return props if isinstance(props, dict) else {}


def _run(
    interrupts: Interrupts, *command: str, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a program; returns its return code and output. The code is None if it could not be run,
    or was killed for taking too long. A signal kills it, too, and raises KeyboardInterrupt."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what a script has started is killed with it
        )
    except OSError as error:
        return None, str(error)
    try:
        with interrupts.raising():
            said, _ = process.communicate(timeout=_ASK_S)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_S)
        if isinstance(error, subprocess.TimeoutExpired):
            return None, f"it did not end within {_ASK_S:g} s"
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()
    return process.returncode, said.decode(errors="replace")


def _within(interrupts: Interrupts, ask: Callable[..., T], *arguments: Any) -> T | None:
    """What `ask` returns; None if it takes too long: NVML hangs if a GPU is lost, and its thread
    cannot be ended. `ask` must not raise. A signal raises KeyboardInterrupt."""
    answers: queue.SimpleQueue[T] = queue.SimpleQueue()
    asking = threading.Thread(target=lambda: answers.put(ask(*arguments)), daemon=True)
    with interrupts.raising():
        asking.start()
        try:
            return answers.get(timeout=_ASK_S)
        except queue.Empty:
            return None


def _gpus(interrupts: Interrupts) -> tuple[str, ...] | None:
    fields = "name,memory.total,memory.free,driver_version"
    code, said = _run(interrupts, "nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    return tuple(line.strip() for line in said.splitlines() if line.strip()) if code == 0 else None


def _has_nvml() -> bool:
    try:
        load_nvml()
    except Exception:  # whatever a missing package or driver raises
        return False
    return True


def _available_bytes() -> int:
    """Available memory of the machine, or of the container if that has less; all memory if /proc
    does not show how much is in use."""
    try:
        machine = int(psutil.virtual_memory().available)
    except FileNotFoundError:  # systemd hides it (ProcSubset=pid)
        machine = memory_bytes()
    limit, used = read_number(CGROUP / "memory.max"), read_number(CGROUP / "memory.current")
    if limit is None or used is None:
        return machine
    return max(0, min(machine, limit - used + _page_cache_bytes()))


def _page_cache_bytes() -> int:
    """How much of the container's memory caches files, such as a model: the kernel frees it on
    demand."""
    lines = (line.split() for line in _read(CGROUP / "memory.stat").splitlines())
    return sum(int(words[1]) for words in lines if words[0] in ("active_file", "inactive_file"))


def _threads_left() -> int | None:
    """How many threads this user, or this container, may still start."""
    left = []
    of_user = _limit(resource.RLIMIT_NPROC)
    if of_user is not None and os.geteuid() != 0:  # root may start any number
        left.append(of_user - _threads_of(os.getuid()))
    limit, used = read_number(CGROUP / "pids.max"), read_number(CGROUP / "pids.current")
    if limit is not None and used is not None:
        left.append(limit - used)
    return max(0, min(left)) if left else None


def _threads_of(uid: int) -> int:
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == uid:
                count += process.num_threads()
    return count


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _has_pidfd() -> bool:
    try:
        pidfd = pidfd_open(os.getpid())
    except OSError:
        return False
    try:
        pidfd_send_signal(pidfd, 0)  # 0: only checks that a signal can be sent
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def _read(path: str | Path) -> str:
    """ "" if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
