"""What the real server needs here for a known piece of work, measured in the run whose bounds
depend on it."""

import functools
import os
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import requests

from llama_worker import LlamaWorker, llama_server_cmd
from tests.ports import LASTING_PORTS, held_ports
from tools.found import find_model, find_server

HOST = "127.0.0.1"
# Two computing threads wait for each other, which costs a multiple where other work shares the two
# cores.
SERVER_ARGS = ("--threads", "1", "--batch-size", "128", "--no-warmup")
HANG_GUARD_S = 1800  # ends what would never end, on any machine: every bound in a test comes first
_TIMES = 20  # other work may come after the measurement, or go


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds, of a server with SERVER_ARGS that has the machine to itself as much as the tests
    do."""

    start_s: float
    prompt_token_s: float
    token_s: float

    @property
    def patience_s(self) -> float:
        """More than any test's piece of work takes here: a start, 1500 tokens to read and 100 to
        say, many times."""
        return _TIMES * (self.start_s + 1500 * self.prompt_token_s + 100 * self.token_s)

    def patience_with(self, work_s: float) -> float:
        """The same, with so many seconds of other work besides."""
        return self.patience_s + _TIMES * work_s

    def prompt_tokens(self, seconds: float) -> int:
        """How many tokens of a prompt take so long to be read; one slot's worth of 7500 at most."""
        return round(min(7500, seconds / self.prompt_token_s))


@functools.cache
def pace() -> Pace:
    """Measured by the first who asks; takes some seconds."""
    return measured(find_server(), find_model(), read_tokens=256, made_tokens=16)


def measured(server: str, model: str, *, read_tokens: int, made_tokens: int) -> Pace:
    """Starts that server, has it read a prompt and go on, ends it; AssertionError where it ends by
    itself."""
    with held_ports(LASTING_PORTS) as take, requests.Session() as http:
        http.trust_env = False
        port = take()
        args = (*SERVER_ARGS, "--ctx-size", "1024")
        command = llama_server_cmd(
            model, host=HOST, port=port, slots=1, executable=server, extra_args=args
        )
        env = {
            name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")
        }
        began_at = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
        ) as one:
            try:
                while not _is_ready(http, port):
                    assert one.poll() is None, f"the server ended with {one.returncode}: {command}"
                    assert time.monotonic() - began_at < HANG_GUARD_S
                    time.sleep(0.01)  # between two probes of a server that tells nobody
                start_s = time.monotonic() - began_at
                body = {"prompt": [17] * read_tokens, "n_predict": made_tokens, "ignore_eos": True}
                timings = http.post(f"http://{HOST}:{port}/completion", json=body).json()["timings"]
            finally:
                one.kill()
    return Pace(
        start_s=start_s,
        prompt_token_s=timings["prompt_per_token_ms"] / 1000,
        token_s=timings["predicted_per_token_ms"] / 1000,
    )


def lean_server(folder: Path, *args: str) -> Path:
    """A `llama-server` in that folder that uses few of the machine's cores; `args` come last in its
    command."""
    server = folder / "llama-server"
    server.write_text(
        f'#!/bin/sh\nexec "{find_server()}" "$@" {shlex.join([*SERVER_ARGS, *args])}\n'
    )
    server.chmod(0o755)
    return server


def patience() -> float:
    """Seconds after which a wait for a test's piece of work has failed; a multiple of what it takes
    here."""
    return pace().patience_s


def round_trip(worker: LlamaWorker) -> float:
    """Seconds that the slowest of some questions to a worker took just now: what a message costs on
    this machine."""
    took_s = []
    for _ in range(10):
        began_at = time.monotonic()
        worker.get_worker_status().get(timeout=patience())
        took_s.append(time.monotonic() - began_at)
    return max(took_s)


def _is_ready(http: requests.Session, port: int) -> bool:
    try:
        return http.get(f"http://{HOST}:{port}/health").ok
    except requests.ConnectionError:
        return False
