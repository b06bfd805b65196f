"""What the real llama-server says of itself is told by the worker as it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from llama_worker import Canary, ConfigError, LlamaWorker, Recycle, WorkerConfig, WorkerStartError
from tests.server.conftest import (
    EAGER,
    ENDLESS,
    Serve,
    ended,
    forced,
    is_generating,
    submitted,
    wait_ready,
    wait_status,
)
from tests.server.pace import patience

pytestmark = pytest.mark.server


def test_context_modalities_and_a_prompt_that_does_not_fit(serve: Serve, free_port: Callable[[], int]) -> None:
    with LlamaWorker(serve(port=free_port(), slots=2, slot_tokens=256)) as worker:
        status = worker.get_worker_status().get()
        assert (status["n_ctx"], status["warnings"]) == (256, [])
        assert not any(status["modalities"].values())
        assert status["model"].endswith(".gguf")
        with pytest.raises(ConfigError, match=r"image_url parts need a model with vision"):
            worker.ask([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]).get()
        result = worker.ask("word " * 1000, params={"max_tokens": 1}).get(timeout=patience())
        assert result.get("fail_reason") == "context_exceeded"
        context = result["context"]
        assert context["n_prompt_tokens"] > context["n_ctx"] == 256
        parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]
        answer = worker.ask(parts, params={"max_tokens": 8}).get(timeout=patience())
        assert (answer["state"], "context" in answer) == ("completed", False)


def test_a_flag_that_the_server_does_not_know_is_named_at_the_start(
    llama_server: str, smollm2: str, free_port: Callable[[], int]
) -> None:
    worker = LlamaWorker.from_model(
        smollm2, executable=llama_server, port=free_port(), extra_args=["--ctx-sise", "512"]
    )
    try:
        with pytest.raises(WorkerStartError, match="--ctx-sise") as caught:
            worker.start().get(timeout=patience())
        assert caught.value.reason == "exited"
        assert "--help" in (caught.value.advice or "")
    finally:
        worker.close()


def test_a_canary_that_is_refused_fails_the_start_and_one_that_is_accepted_does_not(
    serve: Serve, free_port: Callable[[], int]
) -> None:
    heard: list[str] = []

    def refuses_the_first(text: str) -> bool:
        heard.append(text)
        return len(heard) > 1

    canary = Canary(prompt="Count to three.", check=refuses_the_first, max_tokens=4)
    worker = LlamaWorker(serve(port=free_port(), canary=canary))
    try:
        with pytest.raises(WorkerStartError, match="the canary's check refused the answer") as caught:
            worker.start().get(timeout=patience())
        assert caught.value.reason == "canary_failed"
        assert worker.get_worker_status().get(timeout=patience())["state"] == "failed"
        worker.start().get(timeout=patience())
        assert ended(worker, submitted(worker, "after", "Say it.", **forced("Here.")))["text"] == "Here."
    finally:
        worker.close()
    assert heard[0]
    assert heard == [heard[0]] * 2  # greedy


def recycling(config: WorkerConfig, limits: Recycle) -> WorkerConfig:
    return replace(config, restart=replace(EAGER, recycle=limits))


def recycled(worker: LlamaWorker) -> list[str]:
    debug = worker.get_debug_info().get(timeout=patience())
    assert {restart["reason"] for restart in debug["recent_restarts"]} <= {"recycled"}
    return [restart["detail"] for restart in debug["recent_restarts"]]


def test_a_server_is_recycled_after_its_requests_and_not_under_one(serve: Serve, free_port: Callable[[], int]) -> None:
    config = recycling(serve(port=free_port(), slots=2), Recycle(max_requests=1))
    with LlamaWorker(config) as worker:
        pid = worker.get_worker_status().get(timeout=patience())["pid"]
        endless = submitted(worker, "endless", "Count.", max_tokens=100_000, **ENDLESS)
        wait_status(worker, endless, is_generating)
        assert ended(worker, submitted(worker, "one", "Say it.", **forced("Once.")))["text"] == "Once."
        status = worker.get_worker_status().get(timeout=patience())
        assert (status["state"], status["pid"], recycled(worker)) == ("ready", pid, [])
        worker.cancel(endless).get(timeout=patience())
        fresh = wait_ready(worker, restarts=1)
        assert fresh["pid"] != pid
        assert len(recycled(worker)) == 1
        assert ended(worker, submitted(worker, "two", "Say it.", **forced("Twice.")))["text"] == "Twice."


def test_a_server_is_recycled_for_its_age_without_anybody_asking(serve: Serve, free_port: Callable[[], int]) -> None:
    config = recycling(serve(port=free_port()), Recycle(max_age_s=0.01))
    with LlamaWorker(config) as worker:
        deadline = time.monotonic() + patience()
        while len(recycled(worker)) < 2:  # those are recycled, too
            assert time.monotonic() < deadline, worker.get_worker_status().get(timeout=patience())
            time.sleep(0.01)
