"""The examples do what they say."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from llama_worker.bios import tagged_call
from llama_worker.testing.scripts import (
    Headers,
    Script,
    ScriptedReply,
    Text,
    WaitClose,
    plain_reply,
)
from tests.actors.conftest import eventually, server_program
from tests.conftest import Running, running
from tests.ray.cluster import cluster_environment, cluster_processes
from tests.server.conftest import ENDLESS, is_ticking
from tests.server.pace import lean_server, patience

pytestmark = pytest.mark.server


@pytest.fixture
def server(tmp_path: Path) -> str:
    """One whose every answer is ticks, up to its token limit, where the example asks for nothing
    else."""
    return str(lean_server(tmp_path, "--grammar", ENDLESS["grammar"]))


def run_example(name: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """An example that has come to its end."""
    with example(name, *options, **env) as (process, _):
        output, errors = process.communicate(timeout=2 * patience())
    return subprocess.CompletedProcess(options, process.returncode, output, errors)


def example(name: str, *options: str, **env: str) -> Running:
    """An example under way."""
    program = Path(__file__).parents[2] / "examples" / name
    return running(sys.executable, str(program), *options, env={**os.environ, **env})


def test_quickstart_shows_two_jobs_refusal_and_clean_stop(
    server: str, thin_model: str, free_port: Callable[[], int]
) -> None:
    run = run_example(
        "quickstart.py", "--server", server, "--model", thin_model, "--port", str(free_port())
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert re.search(r"^ready, pid \d+, 2 slots$", run.stdout, re.M)
    assert "a third request: {'ok': False, 'error': 'NO_SLOT_AVAILABLE'}" in run.stdout
    assert re.search(r"^active: \{1: 'sky', 2: 'story'\}", run.stdout, re.M)
    for name in ("sky", "story"):
        assert re.search(rf"^ *{name} \| \S.{{,71}}$", run.stdout, re.M)  # its output, line by line
        assert re.search(
            rf"^{name}: [1-9]\d* tokens, \d+ tokens/s, ended by max_tokens$", run.stdout, re.M
        )
    assert run.stdout.endswith("stopped.\n")


# asyncio's debug mode, on a machine that is busy
SLOW_STEP = re.compile(r"Executing <.*> took \d+\.\d+ seconds")


def test_asyncio_streams_side_by_side_and_obeys_deadline(
    server: str, thin_model: str, free_port: Callable[[], int]
) -> None:
    options = ["--server", server, "--model", thin_model, "--port", str(free_port())]
    strict = {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": "1"}
    run = run_example("async_host.py", *options, **strict)
    said = [line for line in run.stderr.splitlines() if not SLOW_STEP.fullmatch(line)]
    assert (run.returncode, said) == (0, [])  # nothing that was never awaited, closed or retrieved
    assert run.stdout.endswith("stopped.\n")
    for name in ("haiku", "sum"):
        (characters,) = re.findall(rf"^ *{name} : completed, (\d+) characters$", run.stdout, re.M)
        pieces = re.findall(rf"^ *{name} \| (.*)$", run.stdout, re.M)
        assert sum(len(ast.literal_eval(piece)) for piece in pieces) == int(characters) > 0
    assert re.search(r"endless : canceled, \d+ characters", run.stdout)
    assert run.stdout.count("the event loop goes on") > 1


def test_decision_is_taken_by_another_worker_and_returned(server: str, thin_model: str) -> None:
    run = run_example("hivemind.py", "--server", server, "--model", thin_model)
    assert run.returncode == 0, run.stderr
    # ... one of what was asked about:
    decided = r"planner asks: .+\? \['(.+)', '(.+)'\], else '.+'(?s:.*)judge decides: (\1|\2) \("
    assert re.search(decided, run.stdout), run.stdout
    # A fast machine may have written the draft before the judge has decided.
    assert re.search(
        r"^planner's draft: (canceled|completed)\nplanner: \w.+\nstopped\.", run.stdout, re.M
    ), run.stdout


ASKS = '{"question": "Should we go?", "options": ["stay", "go"], "default": "stay"}'
PICNIC = (
    ScriptedReply(plain_reply(Text("Come, all.")), marker="It was decided to go."),
    ScriptedReply(plain_reply(Text("go")), marker="Choose one"),
    ScriptedReply(  # the draft, which goes on until it is cancelled
        [Headers(), Text(tagged_call("request_decision", ASKS)), Text(" Dear all"), WaitClose()],
        marker="picnic",
    ),
)


def test_decision_is_taken_while_asking_model_goes_on(thin_model: str, tmp_path: Path) -> None:
    server = server_program(tmp_path, Script(replies=PICNIC))
    run = run_example("hivemind.py", "--server", server, "--model", thin_model)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[1:] == [
        "planner asks: Should we go? ['stay', 'go'], else 'stay'",
        "judge decides: go (the planner's draft: running)",
        "planner's draft: canceled",
        "planner: Come, all.",
        "stopped.",
    ]


# ---------------------------------------------------------------- fleet.py


def test_fleet_answers_every_prompt_despite_a_killed_server(
    server: str, thin_model: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    fleet_file = tmp_path / "fleet.toml"
    fleet_file.write_text(
        f'[defaults]\nhost = "127.0.0.1"\nmodel = "{thin_model}"\nexecutable = "{server}"\n'
        'extra_args = ["--ctx-size", "2048"]\nrestart = { restart_backoff_s = 0.1 }\n'
        f"[workers.one]\nport = {free_port()}\nslots = 2\n[workers.two]\nport = {free_port()}\n"
    )
    prompts = [f"Count to {number} thousand." for number in range(1, 7)]
    with example("fleet.py", str(fleet_file), *prompts) as (fleet, output):
        ready = [output.readline() for _ in range(2)]
        pid = int(re.findall(r"one: ready, pid (\d+), 2 slots", ready[0])[0])
        first = output.readline()  # by then all slots have been given a request
        os.kill(pid, signal.SIGKILL)
        rest, errors = fleet.communicate(timeout=patience())
    assert fleet.returncode == 0, errors
    assert "restart worker='one' reason='server_died'" in errors
    ended = re.findall(r"^(job-\d+) by \w+, max_tokens:", first + rest, re.M)
    assert Counter(ended) == Counter(f"job-{number}" for number in range(1, 7))


def test_fleet_gives_each_gpu_one_worker_per_mention(server: str, thin_model: str) -> None:
    options = (thin_model, "--gpus", "0,GPU-5,GPU-5", "Two?", "Four?", "Six?")
    with example("fleet.py", *options, LLAMA_SERVER=server) as (fleet, output):
        ready = [
            re.fullmatch(r"worker-\d: ready, pid (\d+), 2 slots\n", output.readline())
            for _ in range(3)
        ]
        environments = [psutil.Process(int(found[1])).environ() for found in ready if found]
        rest, errors = fleet.communicate(timeout=patience())
    assert (fleet.returncode, errors) == (0, "")
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == [
        "0",
        "GPU-5",
        "GPU-5",
    ]
    assert {environment["CUDA_DEVICE_ORDER"] for environment in environments} == {"PCI_BUS_ID"}
    ended = re.findall(r"^(job-\d) by (worker-\d), ", rest, re.M)
    assert sorted(ended) == [("job-1", "worker-1"), ("job-2", "worker-2"), ("job-3", "worker-3")]


# ---------------------------------------------------------------- threaded_web_server.py


@dataclass
class Web:
    """The example, serving."""

    process: subprocess.Popen[str]
    url: str

    def post(self, **body: Any) -> requests.Response:
        return requests.post(f"{self.url}/chat", json=body, timeout=patience())

    def get(self, location: str) -> requests.Response:
        return requests.get(f"{self.url}{location}", timeout=patience())

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines of a stream."""
        body = {"prompt": "Count to a thousand.", "stream": True}
        with requests.post(f"{self.url}/chat", json=body, stream=True) as reply:
            assert reply.status_code == 200
            yield from map(json.loads, filter(None, reply.iter_lines(chunk_size=1)))

    def server(self) -> psutil.Process:
        """Its llama-server."""
        (guard,) = psutil.Process(self.process.pid).children()
        (server,) = guard.children()
        return server


@pytest.fixture
def web(server: str, thin_model: str, free_port: Callable[[], int]) -> Iterator[Web]:
    port = free_port()
    options = [
        "--server",
        server,
        "--model",
        thin_model,
        "--port",
        str(port),
        "--server-port",
        str(free_port()),
    ]
    with example("threaded_web_server.py", *options) as (process, output):
        assert output.readline() == f"listening on http://127.0.0.1:{port}\n"
        yield Web(process, f"http://127.0.0.1:{port}")


def assert_refused(refused: requests.Response, status: int, error: str) -> None:
    assert (refused.status_code, refused.json()["error"]) == (status, error)
    assert int(refused.headers["Retry-After"]) > 0


def until(what: Callable[[], bool]) -> None:
    eventually(what, "it", patience())


def test_web_server_polls_streams_and_refuses_when_busy(web: Web) -> None:
    assert web.post(question="?").status_code == 400
    accepted = web.post(prompt="Count to a thousand.")
    assert (accepted.status_code, accepted.headers["Location"]) == (202, "/chat/1")
    streamed = web.lines()
    first = next(streamed)
    assert first["text"]
    assert_refused(web.post(prompt="Hello?"), 429, "NO_SLOT_AVAILABLE")

    *others, last = streamed
    assert is_ticking("".join(line["text"] for line in (first, *others)))
    assert last == {"state": "completed", "finish_reason": "max_tokens", "fail_reason": None}
    until(lambda: web.get("/chat/1").json()["status"]["phase"] == "done")
    ended = web.get("/chat/1").json()
    assert ended["status"]["state"] == "completed"
    assert is_ticking(ended["text"])
    assert len(ended["text"]) == ended["offset"] == ended["status"]["output_chars"]
    assert web.get(f"/chat/1?offset={ended['offset']}").json()["text"] == ""
    assert requests.delete(f"{web.url}/chat/1", timeout=patience()).status_code == 204
    assert web.get("/chat/1").status_code == 404


def test_web_server_outlives_client_and_llama_until_sigterm(web: Web) -> None:
    streamed = web.lines()
    next(streamed)
    streamed.close()  # type: ignore[attr-defined]  # a generator: the connection is closed with it
    until(lambda: web.get("/chat/1").status_code == 404)  # given up, and forgotten
    streamed = web.lines()
    next(streamed)
    assert web.post(prompt="Hello?").status_code == 202  # both slots are free again

    web.server().kill()
    *_, last = streamed
    assert (last["state"], last["fail_reason"]) == ("failed", "server_died")
    assert_refused(web.post(prompt="Hello?"), 503, "WORKER_NOT_READY")
    until(lambda: web.post(prompt="Hello?").status_code == 202)

    streamed, server = web.lines(), web.server()
    next(streamed)
    web.process.send_signal(signal.SIGTERM)
    *_, last = streamed
    assert (last["state"], last["fail_reason"]) == ("failed", "worker_stopped")
    output, errors = web.process.communicate(timeout=patience())
    assert (web.process.returncode, output) == (0, "stopped.\n")
    assert [line for line in errors.splitlines() if "server_died" not in line] == []
    assert not server.is_running()


# ---------------------------------------------------------------- ray_fleet.py


def test_ray_fleet_streams_from_two_replicas_leaving_nothing(server: str, thin_model: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    try:
        for _ in range(3):  # Ray gives its own start 30 s, which cannot be set
            run = run_example(
                "ray_fleet.py",
                "--server",
                server,
                "--model",
                thin_model,
                **cluster_environment(folder),
            )
            if "node timed out during startup" not in run.stderr:
                break
        assert run.returncode == 0, run.stderr
        assert re.findall(r"^replica (\d): ready on 127\.0\.0\.1, 2 slots$", run.stdout, re.M) == [
            "0",
            "1",
        ]
        for name in ("haiku", "sum", "rivers"):
            assert re.search(rf"^ *{name} \| '", run.stdout, re.M)
            assert re.search(rf"^{name}: completed, max_tokens$", run.stdout, re.M)
        assert run.stdout.endswith("stopped.\n")
        until(lambda: not cluster_processes(folder))
    finally:
        for process in cluster_processes(folder):
            process.kill()
        shutil.rmtree(folder)
