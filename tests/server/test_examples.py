"""The examples do what they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.ray.cluster import cluster_environment, cluster_processes
from tests.server.conftest import ENDLESS, is_ticking
from tests.server.pace import SERVER_ARGS, lean_server, patience

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).parents[2] / "examples"
TICKING = (*SERVER_ARGS, "--grammar", ENDLESS["grammar"])  # every answer is ticks, up to its token limit


def test_quickstart_shows_two_jobs_live_a_refusal_and_a_clean_stop(
    tmp_path: Path, smollm2: str, free_port: Callable[[], int]
) -> None:
    server, port = str(lean_server(tmp_path)), str(free_port())
    script = str(EXAMPLES / "quickstart.py")
    command = [sys.executable, script, "--server", server, "--model", smollm2, "--port", port]
    run = subprocess.run(command, capture_output=True, text=True, timeout=patience(), check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert re.search(r"^ready, pid \d+, 2 slots$", run.stdout, re.M)
    assert "a third request: {'ok': False, 'error': 'NO_SLOT_AVAILABLE'}" in run.stdout
    assert re.search(r"^active: \{1: 'sky', 2: 'story'\}", run.stdout, re.M)
    for name in ("sky", "story"):
        assert re.search(rf"^ *{name} \| \S.{{,71}}$", run.stdout, re.M)  # its output, line by line
        assert re.search(rf"^{name}: [1-9]\d* tokens, \d+ tokens/s, ended by (stop|max_tokens)$", run.stdout, re.M)
    assert run.stdout.endswith("stopped.\n")


# ---------------------------------------------------------------- fleet.py


@pytest.fixture
def fleet_file(llama_server: str, thin_model: str, free_port: Callable[[], int], tmp_path: Path) -> Path:
    """Two workers, one of them with two slots."""
    path = tmp_path / "fleet.toml"
    path.write_text(
        f"""
[defaults]
host = "127.0.0.1"
model = {json.dumps(thin_model)}
executable = {json.dumps(llama_server)}
extra_args = {json.dumps(["--ctx-size", "2048", *TICKING])}
restart = {{ restart_backoff_s = 0.1 }}

[workers.one]
port = {free_port()}
slots = 2

[workers.two]
port = {free_port()}
"""
    )
    return path


@contextmanager
def running(*command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """An example under way; killed if it is still there at the end."""
    example = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1, env=env
    )
    try:
        yield example
    finally:
        example.kill()
        example.communicate()


def test_fleet_answers_every_prompt_though_a_server_is_killed(fleet_file: Path) -> None:
    prompts = [f"Count to {number} thousand." for number in range(1, 7)]
    with running(str(EXAMPLES / "fleet.py"), str(fleet_file), *prompts) as fleet:
        assert fleet.stdout is not None
        ready = [fleet.stdout.readline() for _ in range(2)]
        pid = int(re.findall(r"one: ready, pid (\d+), 2 slots", ready[0])[0])
        first = fleet.stdout.readline()  # by then all slots have been given a request
        os.kill(pid, signal.SIGKILL)
        rest, errors = fleet.communicate(timeout=patience())
    assert fleet.returncode == 0, errors
    assert "restart worker='one' reason='server_died'" in errors
    ended = re.findall(r"^(job-\d+) by \w+, max_tokens:", first + rest, re.M)
    assert Counter(ended) == Counter(f"job-{number}" for number in range(1, 7))


def test_fleet_gives_each_gpu_that_is_named_a_worker_and_one_named_twice_two(thin_model: str, tmp_path: Path) -> None:
    command = (str(EXAMPLES / "fleet.py"), thin_model, "--gpus", "0,GPU-5,GPU-5", "Two?", "Four?", "Six?")
    with running(*command, env={**os.environ, "LLAMA_SERVER": str(lean_server(tmp_path))}) as fleet:
        assert fleet.stdout is not None
        ready = [re.fullmatch(r"worker-\d: ready, pid (\d+), 2 slots\n", fleet.stdout.readline()) for _ in range(3)]
        environments = [psutil.Process(int(found[1])).environ() for found in ready if found]
        rest, errors = fleet.communicate(timeout=patience())
    assert (fleet.returncode, errors) == (0, "")
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["0", "GPU-5", "GPU-5"]
    assert {environment["CUDA_DEVICE_ORDER"] for environment in environments} == {"PCI_BUS_ID"}
    ended = re.findall(r"^(job-\d) by (worker-\d), ", rest, re.M)
    assert sorted(ended) == [("job-1", "worker-1"), ("job-2", "worker-2"), ("job-3", "worker-3")]


# ---------------------------------------------------------------- threaded_web_server.py


class Web:
    """The example, serving."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def post(self, **body: Any) -> requests.Response:
        return requests.post(f"{self.url}/chat", json=body, timeout=patience())

    def lines(self, prompt: str) -> Iterator[dict[str, Any]]:
        """The lines of a stream."""
        with requests.post(f"{self.url}/chat", json={"prompt": prompt, "stream": True}, stream=True) as reply:
            assert reply.status_code == 200
            yield from map(json.loads, reply.iter_lines(chunk_size=1))

    def polled(self, location: str, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first answer that is `until`."""
        deadline = time.monotonic() + patience()
        while True:
            told: dict[str, Any] = requests.get(f"{self.url}{location}", timeout=patience()).json()
            if until(told):
                return told
            assert time.monotonic() < deadline, told
            time.sleep(0.02)

    def server(self) -> psutil.Process:
        """Its llama-server."""
        (guard,) = psutil.Process(self.process.pid).children()
        (server,) = guard.children()
        return server


@pytest.fixture
def web(llama_server: str, thin_model: str, free_port: Callable[[], int], tmp_path: Path) -> Iterator[Web]:
    port = free_port()
    ticking = tmp_path / "llama-server"
    ticking.write_text(f'#!/bin/sh\nexec {shlex.join([llama_server])} "$@" {shlex.join(TICKING)}\n')
    ticking.chmod(0o755)
    options = ["--server", str(ticking), "--model", thin_model, "--port", str(port), "--server-port", str(free_port())]
    with running(str(EXAMPLES / "threaded_web_server.py"), *options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"listening on http://127.0.0.1:{port}\n"
        yield Web(process, f"http://127.0.0.1:{port}")


def test_the_web_server_answers_by_polling_and_by_streaming_and_refuses_when_busy(web: Web) -> None:
    assert web.post(question="?").status_code == 400
    accepted = web.post(prompt="Count to a thousand.")
    assert (accepted.status_code, accepted.headers["Location"]) == (202, "/chat/1")
    streamed = web.lines("Count to a thousand.")
    first = next(streamed)
    assert first["text"]

    refused = web.post(prompt="Hello?")
    assert (refused.status_code, refused.json()["error"]) == (429, "NO_SLOT_AVAILABLE")
    assert int(refused.headers["Retry-After"]) > 0

    *others, last = streamed
    assert is_ticking("".join(line["text"] for line in (first, *others)))
    assert last == {"state": "completed", "finish_reason": "max_tokens"}
    ended = web.polled("/chat/1", lambda told: told["status"]["phase"] == "done")
    assert ended["status"]["state"] == "completed"
    assert is_ticking(ended["text"])
    assert len(ended["text"]) == ended["offset"] == ended["status"]["output_chars"]
    assert requests.get(f"{web.url}/chat/1?offset={ended['offset']}", timeout=patience()).json()["text"] == ""
    assert requests.delete(f"{web.url}/chat/1", timeout=patience()).status_code == 204
    assert requests.get(f"{web.url}/chat/1", timeout=patience()).status_code == 404


def test_the_web_server_says_503_while_its_server_starts_again(web: Web) -> None:
    streamed = web.lines("Count to a thousand.")
    next(streamed)
    web.server().kill()
    *_, last = streamed
    assert (last["state"], last["fail_reason"]) == ("failed", "server_died")
    refused = web.post(prompt="Hello?")
    assert (refused.status_code, refused.json()["error"]) == (503, "WORKER_NOT_READY")
    assert int(refused.headers["Retry-After"]) > 0
    deadline = time.monotonic() + patience()
    while (answer := web.post(prompt="Hello?")).status_code == 503:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert answer.status_code == 202


def test_a_client_that_leaves_the_web_server_frees_its_slot(web: Web) -> None:
    streamed = web.lines("Count to a thousand.")
    next(streamed)
    streamed.close()  # type: ignore[attr-defined]  # a generator: the connection is closed with it
    web.polled("/chat/1", lambda told: "error" in told)  # given up, and forgotten
    assert [web.post(prompt="Hello?").status_code for _ in range(2)] == [202, 202]


def test_sigterm_ends_the_web_server_its_streams_and_its_llama_server(web: Web) -> None:
    streamed = web.lines("Count to a thousand.")
    next(streamed)
    server = web.server()
    web.process.send_signal(signal.SIGTERM)
    *_, last = streamed
    assert (last["state"], last["fail_reason"]) == ("failed", "worker_stopped")
    output, errors = web.process.communicate(timeout=patience())
    assert (web.process.returncode, output, errors) == (0, "stopped.\n", "")
    assert not server.is_running()


# ---------------------------------------------------------------- ray_fleet.py


def test_ray_fleet_streams_from_two_replicas_and_leaves_nothing(tmp_path: Path, thin_model: str) -> None:
    folder, server = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp")), str(lean_server(tmp_path))
    try:
        for _ in range(3):  # Ray gives its own start 30 s, which cannot be set
            run = subprocess.run(
                [sys.executable, str(EXAMPLES / "ray_fleet.py"), "--server", server, "--model", thin_model],
                env={**os.environ, **cluster_environment(folder)},
                capture_output=True,
                text=True,
                timeout=patience(),
                check=False,
            )
            if "node timed out during startup" not in run.stderr:
                break
        assert run.returncode == 0, run.stderr
        assert re.findall(r"^replica (\d): ready on 127\.0\.0\.1, 2 slots$", run.stdout, re.M) == ["0", "1"]
        for name in ("haiku", "sum", "rivers"):
            assert re.search(rf"^ *{name} \| '", run.stdout, re.M)
            assert re.search(rf"^{name}: completed, (stop|max_tokens)$", run.stdout, re.M)
        assert run.stdout.endswith("stopped.\n")
        deadline = time.monotonic() + patience()
        while left := cluster_processes(folder):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        for process in cluster_processes(folder):
            process.kill()
        shutil.rmtree(folder)
