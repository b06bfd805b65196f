"""Chat requests on the real server, from prompt to result."""

import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
import requests

from llama_worker import (
    ConfigError,
    LlamaWorker,
    RequestFailReason,
    RequestFinishReason,
    RequestPhase,
    RequestState,
    TimeoutProfile,
    WorkerConfig,
)
from llama_worker.server import termination
from llama_worker.server.traits import build_number, known_flaws, visibility_warnings
from tests.server.conftest import (
    ENDLESS,
    Reached,
    Serve,
    ended,
    forced,
    is_generating,
    is_reading,
    is_ticking,
    prompt_of,
    submitted,
    wait_status,
)
from tests.server.pace import SERVER_ARGS, patience

pytestmark = pytest.mark.server


def test_request_streams_to_end_with_usage_and_timings(chat: LlamaWorker) -> None:
    text = "Grüße, 世界: 🦙 ≠ 🐑"  # characters of several tokens arrive whole
    result = ended(chat, submitted(chat, "greeting", "What do you say?", **forced(text)))
    assert (result["text"], result["reasoning"]) == (text, "")
    assert result["finish_reason"] is RequestFinishReason.STOP
    assert result["usage"]["prompt_tokens"] > 10
    assert 5 <= result["usage"]["completion_tokens"] <= len(text.encode())
    timings = result["timings"]
    assert 0 <= timings["ttft_s"] <= timings["total_s"]
    assert timings["tokens_per_second"] > 0


def test_default_bios_costs_under_a_hundred_tokens(
    thin_model: str, llama_server: str, free_port: Callable[[], int]
) -> None:
    def prompt_tokens(**bios: Any) -> int:
        worker = LlamaWorker.from_model(
            thin_model,
            name="model",
            port=free_port(),
            executable=llama_server,
            extra_args=("--ctx-size", "2048", *SERVER_ARGS),
            **bios,
        )
        with worker:
            asked = worker.ask("Name 4 animals.", params={"max_tokens": 1})
            return asked.get(timeout=patience())["usage"]["prompt_tokens"]

    without = prompt_tokens(bios_provider=None)
    assert without == 35
    assert without < prompt_tokens() < without + 100


def test_what_server_says_is_told_and_kept_to(chat: LlamaWorker, llama_server: str) -> None:
    status = chat.get_worker_status().get(timeout=patience())
    version = subprocess.run(
        [llama_server, "--version"], capture_output=True, text=True, check=True
    )
    build = build_number(version.stdout + version.stderr)
    assert status["warnings"] == known_flaws(build, ()) + visibility_warnings(build)
    assert status["n_ctx"] == 2048
    assert not any(status["modalities"].values())
    assert status["model"].endswith(".gguf")
    with pytest.raises(ConfigError, match=r"image_url parts need a model with vision"):
        chat.ask([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]).get(
            timeout=patience()
        )
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]
    answer = chat.ask(parts, params={"max_tokens": 8}).get(timeout=patience())
    assert (answer["state"], "context" in answer) == (RequestState.COMPLETED, False)


def test_prompt_beyond_context_fails_with_servers_words(chat: LlamaWorker) -> None:
    result = ended(chat, submitted(chat, "long", "x " * 3000))
    assert result["fail_reason"] is RequestFailReason.CONTEXT_EXCEEDED
    for words in (
        "400",
        "exceed_context_size_error",
        "exceeds the available context size (2048 tokens)",
    ):
        assert words in result["fail_detail"]
    assert result["text"] == ""
    assert result["context"]["n_prompt_tokens"] > result["context"]["n_ctx"] == 2048


@pytest.mark.parametrize(
    ("words", "reached", "phase"),
    [
        pytest.param(230, is_reading, RequestPhase.PREFILL, id="in prefill"),
        pytest.param(1, is_generating, RequestPhase.GENERATING, id="in generation"),
    ],
)
def test_cancel_frees_server_slots_and_keeps_output(
    chat: LlamaWorker, chat_config: WorkerConfig, words: int, reached: Reached, phase: RequestPhase
) -> None:
    for name in ("Alpha", "Omega"):  # one after the other: meanwhile the second would go on
        request_id = submitted(chat, "endless", prompt_of(words, name), **ENDLESS)
        assert wait_status(chat, request_id, reached)["phase"] is phase
        assert [chat.cancel(request_id).get(timeout=patience()) for _ in range(2)] == [True, False]
        result = ended(chat, request_id)
        assert result["finish_reason"] is RequestFinishReason.CANCELED
        assert result["text"] == "" if reached is is_reading else is_ticking(result["text"])
        if reached is is_generating:
            assert 0 <= result["timings"]["ttft_s"] <= result["timings"]["total_s"]
    ids = [submitted(chat, f"after-{slot}", f"{slot}", **forced("Served.")) for slot in range(2)]
    assert [ended(chat, request_id)["text"] for request_id in ids] == ["Served."] * 2
    # Once only: what asks for the slots puts off the server's look for closed connections (b11434).
    slots = requests.get(
        f"http://{chat_config.host}:{chat_config.port}/slots", timeout=patience()
    ).json()
    assert not any(slot["is_processing"] for slot in slots)


def test_stop_in_generation_closes_connection_first_skipping_grace(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server exits with 0 once its connections are closed; with 1 on the second SIGTERM, stuck in
    its handler."""
    # a busy machine's server may take longer than 2 s
    monkeypatch.setattr(termination, "REPEAT_S", patience() / 4)

    def stop_in_generation() -> int:
        with LlamaWorker(serve(timeouts=TimeoutProfile(stop_grace_s=2 * patience()))) as worker:
            request_id = submitted(worker, "endless", "Count.", **ENDLESS)
            wait_status(worker, request_id, is_generating)
            begun_at = time.monotonic()
            worker.stop().get(timeout=patience())
            assert time.monotonic() - begun_at < patience()  # half of the grace
            events = worker.get_debug_info().get(timeout=patience())["recent_events"]
            result = ended(worker, request_id)
        assert result["fail_reason"] is RequestFailReason.WORKER_STOPPED
        assert is_ticking(result["text"])
        (returncode,) = (event["returncode"] for event in events if event["event"] == "exited")
        assert returncode in (0, 1)
        return int(returncode)

    assert 0 in (stop_in_generation() for _ in range(5))
