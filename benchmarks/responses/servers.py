"""The real llama-server of the scenarios, and proxies in processes of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import HOST, take_port
from llama_worker import llama_server_cmd
from tests.responses.scenarios import PARROT_ARGS
from tools.found import find_model, find_server

# Both name their upstream and their address by the same variables.
OURS = (str(Path(sys.executable).with_name("llama-worker")), "responses-proxy")
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """One that runs."""

    pid: int
    base_url: str

    def peak_rss_bytes(self) -> int:
        """The most memory that it has held."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
        return int(peak) * 1024


@contextlib.contextmanager
def llama_server() -> Iterator[int]:
    """The port of one with the small model, as the scenarios need it."""
    port = take_port()
    args = ("--ctx-size", "4096", "--threads", "1", "--no-ui", *PARROT_ARGS)
    command = llama_server_cmd(
        find_model(), host=HOST, port=port, slots=2, executable=find_server(), extra_args=args
    )
    with _running(command, {}):
        _wait(lambda: urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=1).close())
        yield port


@contextlib.contextmanager
def proxy(command: Sequence[str], upstream: str) -> Iterator[Proxy]:
    """A proxy that listens."""
    port = take_port()
    env = {"LLAMA_CPP_URL": upstream, "PROXY_HOST": HOST, "PROXY_PORT": str(port)}
    with _running(command, env) as process:
        _wait(lambda: socket.create_connection((HOST, port), timeout=1).close())
        yield Proxy(process.pid, f"http://{HOST}:{port}/v1")


@contextlib.contextmanager
def _running(command: Sequence[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(attempt: Callable[[], object]) -> None:
    """Until it raises no more."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            attempt()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
