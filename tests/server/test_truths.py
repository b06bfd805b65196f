"""What the real llama-server says of itself is told by the worker as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llama_worker import ConfigError, LlamaWorker, WorkerStartError
from tests.server.conftest import Serve
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
