"""The real llama-server with a small real model, and what makes it say exactly what a test
wants."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_worker import (
    LlamaWorker,
    RequestResult,
    RequestStatus,
    RestartPolicy,
    TimeoutProfile,
    WorkerConfig,
    WorkerState,
    WorkerStatus,
    llama_server_cmd,
)
from tests.actors.conftest import eventually
from tests.ports import LASTING_PORTS, held_ports
from tests.server.pace import SERVER_ARGS, pace, patience

HOST = "127.0.0.1"
TEMPLATES = Path(__file__).parent / "templates"
Reached = Callable[[RequestStatus], bool]
ENDLESS: dict[str, Any] = {"grammar": 'root ::= "tick " root', "temperature": 0}


def forced(text: str) -> dict[str, Any]:
    """Params that make any model say `text`, all of it and nothing else."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return {"grammar": f'root ::= "{escaped}"', "temperature": 0}


TOKENS_PER_WORD = 8


def prompt_of(words: int, about: str) -> str:
    """A prompt of about `words` x TOKENS_PER_WORD tokens that has its first word in common with no
    other."""
    return f"{about}: " + " ".join(f"item {number:04d};" for number in range(words))


def submitted(worker: LlamaWorker, job_name: str, prompt: str, **params: Any) -> int:
    """The id of a request that was admitted."""
    answer = worker.submit(job_name, "", prompt, params=params).get(timeout=patience())
    assert answer["ok"], answer
    return answer["request_id"]


def ended(worker: LlamaWorker, request_id: int, *, work_s: float = 0.0) -> RequestResult:
    """The result, once there is one; `work_s` is what it takes beyond a start, a prompt and an
    answer, by the pace."""
    result = worker.result(request_id).get(timeout=pace().patience_with(work_s))
    assert result["ok"], result
    return result


def wait_status(worker: LlamaWorker, request_id: int, reached: Reached) -> RequestStatus:
    """The first status seen that has `reached`; AssertionError where the request ends before."""

    def status() -> RequestStatus | None:
        status = worker.get_status(request_id).get(timeout=patience())
        assert status["ok"], status
        if reached(status):
            return status
        assert not status["state"].is_terminal, status
        return None

    return eventually(status, "the phase", patience())


def wait_ready(worker: LlamaWorker, *, restarts: int) -> WorkerStatus:
    """READY again, by itself, after so many restarts in all."""

    def ready() -> WorkerStatus | None:
        status = worker.get_worker_status().get(timeout=patience())
        assert status["state"] is not WorkerState.FAILED, status
        return (
            status
            if status["state"] is WorkerState.READY and status["restart_count"] >= restarts
            else None
        )

    status = eventually(ready, "a restart", patience())
    assert status["restart_count"] == restarts
    return status


def pid_of(worker: LlamaWorker) -> int:
    return worker.get_worker_status().get(timeout=patience())["pid"]


Serve = Callable[..., WorkerConfig]


@pytest.fixture(scope="session")
def serve(
    llama_server: str, smollm2: str, thin_model: str, lasting_port: Callable[[], int]
) -> Serve:
    """A factory of configs; `whole`: with all of the model, where it chooses itself what it says or
    has to be slow."""

    def config(
        *,
        slots: int = 1,
        slot_tokens: int = 2048,
        template: str | None = None,
        args: tuple[str, ...] = SERVER_ARGS,
        whole: bool = False,
        port: int | None = None,
        **settings: Any,
    ) -> WorkerConfig:
        port = port or lasting_port()
        if template is not None:
            args = (*args, "--jinja", "--chat-template-file", str(TEMPLATES / template))
        command = llama_server_cmd(
            smollm2 if whole else thin_model,
            host=HOST,
            port=port,
            slots=slots,
            executable=llama_server,
            extra_args=("--ctx-size", str(slots * slot_tokens), *args),
        )
        # No BIOS: the prompts of most tests are short, since reading them is what takes the time.
        settings = {"name": "real", "bios_provider": None, "restart": EAGER, **settings}
        return WorkerConfig(host=HOST, port=port, slots=slots, server_cmd=command, **settings)

    return config


# Of workers that outlive a test: another test may make every watchdog die of its next message.
NO_PROBES = TimeoutProfile(health_probe_interval_s=None)
EAGER = RestartPolicy(restart_backoff_s=0.01, max_restarts_per_window=50)


@pytest.fixture(scope="session")
def lasting_port() -> Iterator[Callable[[], int]]:
    """Like `free_port`, for servers that outlive a test: of a range that `free_port` leaves
    alone."""
    with held_ports(LASTING_PORTS) as take:
        yield take


@pytest.fixture(scope="session")
def chat_config(serve: Serve) -> WorkerConfig:
    """Two slots on one server for all tests that leave it as they found it."""
    return serve(slots=2, timeouts=NO_PROBES)


@pytest.fixture(scope="session")
def chat_worker(chat_config: WorkerConfig) -> Iterator[LlamaWorker]:
    with LlamaWorker(chat_config) as worker:
        yield worker


@pytest.fixture
def chat(chat_worker: LlamaWorker) -> Iterator[LlamaWorker]:
    """The shared worker; it has to be READY with no request in flight, and the same server,
    afterwards."""
    before = chat_worker.get_worker_status().get(timeout=patience())
    assert before["state"] is WorkerState.READY, before
    yield chat_worker
    after = chat_worker.get_worker_status().get(timeout=patience())
    for request_id in after["active_request_ids"]:
        chat_worker.cancel(request_id).get(timeout=patience())  # for the tests that follow
    assert after["slots_used"] == 0, after
    assert (after["state"], after["restart_count"]) == (WorkerState.READY, 0)
    assert after.get("pid") == before.get("pid")


def is_generating(status: RequestStatus) -> bool:
    """Output has come."""
    return status["output_chars"] > 0


def is_reading(status: RequestStatus) -> bool:
    """The server has said that it is reading the prompt, and is not through."""
    progress = status.get("prompt_progress")
    return progress is not None and 0 < progress["processed"] < progress["total"]


def is_ticking(text: str) -> bool:
    """Something of what ENDLESS makes the model say."""
    return bool(text) and ("tick " * len(text)).startswith(text)
