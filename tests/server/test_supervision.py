"""A real server that dies, hangs, works in silence or does not start."""

import os
import queue
import select
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from llama_worker import (
    Canary,
    LlamaWorker,
    RequestFailReason,
    RequestPhase,
    RequestResult,
    StartFailReason,
    TimeoutProfile,
    WorkerStartError,
    WorkerState,
    llama_server_cmd,
)
from tests.conftest import shell_program
from tests.server.conftest import (
    ENDLESS,
    Reached,
    Serve,
    ended,
    forced,
    is_generating,
    is_reading,
    is_ticking,
    pid_of,
    prompt_of,
    submitted,
    wait_ready,
    wait_status,
)
from tests.server.pace import HOST, SERVER_ARGS, patience, round_trip

pytestmark = pytest.mark.server


class Fall:
    """Hits a request's server with a signal, and takes the time until the result is there.

    Of a signal that ends it, the time counts from when the kernel has done so: that takes long on a
    busy machine.
    """

    def __init__(self, worker: LlamaWorker, request_id: int, hit: signal.Signals) -> None:
        self._future, self._ends = worker.result(request_id), queue.SimpleQueue[float]()
        self._future.add_done_callback(lambda _: self._ends.put(time.monotonic()))
        pid = pid_of(worker)
        process = os.pidfd_open(pid)  # the server is not ours to reap
        self._hit_at = time.monotonic()
        os.kill(pid, hit)
        if hit is signal.SIGKILL:
            assert select.select([process], (), (), patience())[0]
            self._hit_at = time.monotonic()
        os.close(process)

    def result(self) -> tuple[RequestResult, float]:
        """The result, and the seconds that it took."""
        result = self._future.get(timeout=patience())
        assert result["ok"]
        return result, self._ends.get(timeout=patience()) - self._hit_at


def assert_serves(worker: LlamaWorker) -> None:
    assert ended(worker, submitted(worker, "next", "Hi", **forced("Served.")))["text"] == "Served."


# ---------------------------------------------------------------- death


def test_killed_server_fails_its_request_and_comes_back(serve: Serve) -> None:
    # long, since the thin model reads in no time
    phases: list[tuple[int, Reached]] = [(900, is_reading), (1, is_generating), (1, is_generating)]
    # so it is the death itself that is told
    nobody_looks = TimeoutProfile(liveness_probe_interval_s=3600.0, health_probe_interval_s=None)
    with LlamaWorker(serve(slot_tokens=32_768, timeouts=nobody_looks)) as worker:
        for restarts, (words, reached) in enumerate(phases, start=1):
            pid = pid_of(worker)
            request_id = submitted(
                worker, "doomed", prompt_of(words, "Count"), max_tokens=100_000, **ENDLESS
            )
            seen = wait_status(worker, request_id, reached)
            result, _ = Fall(worker, request_id, signal.SIGKILL).result()
            assert result["fail_reason"] is RequestFailReason.SERVER_DIED
            assert len(result["text"]) >= seen["output_chars"]
            assert result["text"] == "" or is_ticking(result["text"])
            assert wait_ready(worker, restarts=restarts)["pid"] != pid
        assert_serves(worker)


# ---------------------------------------------------------------- a server that does nothing

IMPATIENT = TimeoutProfile(
    headers_timeout_s=1.0,
    prefill_liveness_timeout_s=1.0,
    idle_stream_timeout_s=1.0,
    # longer than the window of CPU evidence, so that one look after the halt is enough
    liveness_probe_interval_s=3.5,
)


def test_halted_server_is_replaced_timely_in_every_phase(serve: Serve) -> None:
    """Before the headers, in prefill without and with progress, in generation: all at once, a
    worker each."""
    stall = RequestFailReason.STALL_TIMEOUT
    halts: list[tuple[RequestFailReason, Reached | None, int, dict[str, Any]]] = [
        (RequestFailReason.HEADERS_TIMEOUT, None, 150, {}),
        (
            stall,
            lambda status: status["phase"] is RequestPhase.PREFILL,
            150,
            {"return_progress": False},
        ),
        (stall, is_reading, 150, {}),
        (stall, is_generating, 1, {}),
    ]
    with ExitStack() as stack:
        workers = [
            # the whole model: a thin one is through with a prompt before anybody looks
            LlamaWorker(serve(name=f"worker-{number}", timeouts=IMPATIENT, whole=True))
            for number in range(len(halts))
        ]
        for worker in workers:
            stack.callback(worker.close)
        for starting in [worker.start() for worker in workers]:
            starting.get(timeout=patience())
        limit_s = 1.0 + 2 * IMPATIENT.liveness_probe_interval_s + 50 * max(map(round_trip, workers))
        falls = []
        for worker, (_, reached, words, params) in zip(workers, halts, strict=True):
            if reached is None:
                os.kill(pid_of(worker), signal.SIGSTOP)
            request_id = submitted(worker, "halted", prompt_of(words, "Count"), **ENDLESS, **params)
            if reached is not None:
                wait_status(worker, request_id, reached)
            falls.append(Fall(worker, request_id, signal.SIGSTOP))
        for worker, (reason, reached, *_), fall in zip(workers, halts, falls, strict=True):
            result, took_s = fall.result()
            assert result["fail_reason"] is reason, result
            assert took_s <= limit_s, result
            assert bool(result["text"]) == (reached is is_generating), result
            wait_ready(worker, restarts=1)
            evidence = worker.get_debug_info().get(timeout=patience())["evidence"]
            assert evidence["processes"]["processes"][0]["state"] == "T"
            assert evidence["log_tail"]
            assert "CPU" in evidence["activity"]
            assert [each["request_id"] for each in evidence["requests"]] == [result["request_id"]]
            assert_serves(worker)


# ---------------------------------------------------------------- a server that does not start


def test_only_a_refused_canary_fails_the_start(serve: Serve) -> None:
    heard: list[str] = []

    def refuses_the_first(text: str) -> bool:
        heard.append(text)
        return len(heard) > 1

    canary = Canary(prompt="Count to three.", check=refuses_the_first, max_tokens=4)
    with closing(LlamaWorker(serve(whole=True, canary=canary))) as worker:
        with pytest.raises(
            WorkerStartError, match="the canary check rejected the answer"
        ) as caught:
            worker.start().get(timeout=patience())
        assert caught.value.reason is StartFailReason.CANARY_FAILED
        assert worker.get_worker_status().get(timeout=patience())["state"] is WorkerState.FAILED
        worker.start().get(timeout=patience())
        assert_serves(worker)
    assert heard[0]
    assert heard == [heard[0]] * 2  # greedy


# Mistakes of somebody who starts their first server: the first line of the error says what to do.

StartError = Callable[..., list[str]]


@pytest.fixture
def start_error(llama_server: str, thin_model: str, free_port: Callable[[], int]) -> StartError:
    """The lines of the error of a start that fails."""

    def start_error(*args: str, model: str | Path = thin_model, **config: Any) -> list[str]:
        config = {
            "executable": llama_server,
            "port": free_port(),
            "extra_args": (*SERVER_ARGS, *args),
            **config,
        }
        with (
            closing(LlamaWorker.from_model(model, **config)) as worker,
            pytest.raises(WorkerStartError) as caught,
        ):
            worker.start().get(timeout=patience())
        return str(caught.value).splitlines()

    return start_error


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there is no model file {path}: check the path"),
        ("folder", "name the .gguf file itself"),
        (b"hello, I am a text", "the file is not a GGUF model"),
        (0, "a folder or an empty file"),  # so many bytes of a model
        (40, "the model file is incomplete: download it again"),
        (4_000_000, "the model file is incomplete: download it again"),
    ],
)
def test_a_model_that_is_none(
    start_error: StartError,
    thin_model: str,
    tmp_path: Path,
    content: str | bytes | int | None,
    told: str,
) -> None:
    model = tmp_path / "model.gguf"
    if isinstance(content, str):
        model.mkdir()
    elif content is not None:
        model.write_bytes(
            content if isinstance(content, bytes) else Path(thin_model).read_bytes()[:content]
        )
    assert told.replace("{path}", str(model)) in start_error(model=model)[0]


def test_a_flag_that_the_server_does_not_know(start_error: StartError) -> None:
    first, *log = start_error("--ctx-sise", "512")
    assert "rejects --ctx-sise as it was given: compare it with" in first
    assert any("--ctx-sise" in line for line in log)


def test_a_host_that_is_another_machines(start_error: StartError) -> None:
    assert "the host must be an address of this machine" in start_error(host="192.0.2.1")[0]


def test_a_script_that_passes_no_arguments_on(
    start_error: StartError,
    llama_server: str,
    thin_model: str,
    tmp_path: Path,
    free_port: Callable[[], int],
) -> None:
    elsewhere, timeouts = free_port(), TimeoutProfile(startup_timeout_s=3.0)
    command = llama_server_cmd(
        thin_model, host=HOST, port=elsewhere, slots=1, executable=llama_server
    )
    script = shell_program(tmp_path / "server", " ".join(("exec", *command, *SERVER_ARGS)))
    line, *_ = start_error(executable=script, timeouts=timeouts)
    assert f"it listens on http://{HOST}:{elsewhere}: pass it the worker's host and port" in line


def test_server_with_key_that_worker_lacks(start_error: StartError) -> None:
    line, *_ = start_error("--api-key", "secret", timeouts=TimeoutProfile.debug())
    assert "unauthorized: GET /v1/models: 401; give the worker the server's --api-key" in line
