"""Chat requests on the real server, from prompt to result."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from llama_worker import (
    ChatMessage,
    LlamaWorker,
    RequestFailReason,
    RequestFinishReason,
    RequestPhase,
    RequestState,
    TimeoutProfile,
)
from tests.server.conftest import (
    ENDLESS,
    Serve,
    assert_all_slots_serve,
    ended,
    forced,
    is_generating,
    is_reading,
    is_ticking,
    prompt_of,
    submitted,
    wait_status,
)
from tests.server.pace import patience

pytestmark = pytest.mark.server


def test_a_request_streams_to_its_end_with_usage_and_timings(chat: LlamaWorker) -> None:
    request_id = submitted(chat, "sum", "What is 2 + 2?", **forced("The answer is 4."))
    result = ended(chat, request_id)
    assert (result["text"], result["reasoning"]) == ("The answer is 4.", "")
    assert (result["state"], result["finish_reason"]) == (RequestState.COMPLETED, RequestFinishReason.STOP)
    assert result["usage"]["prompt_tokens"] > 10
    assert 5 <= result["usage"]["completion_tokens"] <= len("The answer is 4.")
    timings = result["timings"]
    assert 0 < timings["ttft_s"] < timings["total_s"]
    assert timings["tokens_per_second"] > 0


def test_characters_of_several_tokens_arrive_whole(chat: LlamaWorker) -> None:
    text = "Grüße, 世界: 🦙 ≠ 🐑"
    assert ended(chat, submitted(chat, "unicode", "Hi", **forced(text)))["text"] == text


def test_two_requests_run_side_by_side_and_a_third_is_refused(chat: LlamaWorker) -> None:
    ids = [submitted(chat, name, name, **ENDLESS) for name in ("one", "two")]
    before = [wait_status(chat, request_id, is_generating)["output_chars"] for request_id in ids]
    for request_id, chars in zip(ids, before, strict=True):  # the first one goes on while the second does
        wait_status(chat, request_id, lambda status, chars=chars: status["output_chars"] > chars + 20)  # type: ignore[misc]
    worker_status = chat.get_worker_status().get(timeout=patience())
    assert worker_status["active_jobs"] == {ids[0]: "one", ids[1]: "two"}
    assert worker_status["slots_used"] == 2
    third = chat.submit("three", "", "three").get(timeout=patience())
    assert third == {"ok": False, "error": "NO_SLOT_AVAILABLE"}
    for request_id in ids:
        assert chat.cancel(request_id).get(timeout=patience()) is True


def test_the_token_limit_ends_a_request_with_max_tokens(chat: LlamaWorker) -> None:
    result = ended(chat, submitted(chat, "short", "Count.", **ENDLESS, max_tokens=8))
    assert (result["state"], result["finish_reason"]) == (RequestState.COMPLETED, RequestFinishReason.MAX_TOKENS)
    assert result["usage"]["completion_tokens"] == 8
    assert is_ticking(result["text"])


def test_a_prompt_beyond_the_context_fails_with_the_servers_own_words(chat: LlamaWorker) -> None:
    result = ended(chat, submitted(chat, "long", "x " * 3000))
    assert (result["state"], result.get("fail_reason")) == (RequestState.FAILED, RequestFailReason.CONTEXT_EXCEEDED)
    detail = result["fail_detail"]
    assert "400" in detail
    assert "exceed_context_size_error" in detail
    assert "exceeds the available context size (2048 tokens)" in detail
    assert result["text"] == ""
    assert result["context"]["n_ctx"] == 2048
    assert result["context"]["n_prompt_tokens"] > 2048


def test_a_cancel_in_prefill_frees_the_servers_slots(chat: LlamaWorker, chat_url: str) -> None:
    prompts = [prompt_of(150, "Alpha"), prompt_of(150, "Omega")]
    ids = [submitted(chat, "long", prompt, **ENDLESS) for prompt in prompts]
    for request_id in ids:
        assert wait_status(chat, request_id, is_reading)["phase"] is RequestPhase.PREFILL
        assert chat.cancel(request_id).get(timeout=patience()) is True
        result = ended(chat, request_id)
        assert (result["state"], result["finish_reason"]) == (RequestState.CANCELED, RequestFinishReason.CANCELED)
        assert result["text"] == ""
    assert_all_slots_serve(chat, chat_url)


def test_a_cancel_in_generation_frees_the_servers_slots_and_keeps_the_output(chat: LlamaWorker, chat_url: str) -> None:
    ids = [submitted(chat, "endless", name, **ENDLESS) for name in ("one", "two")]
    for request_id in ids:
        wait_status(chat, request_id, is_generating)
        assert chat.cancel(request_id).get(timeout=patience()) is True
        assert chat.cancel(request_id).get(timeout=patience()) is False
        result = ended(chat, request_id)
        assert result["state"] is RequestState.CANCELED
        assert is_ticking(result["text"])
    assert_all_slots_serve(chat, chat_url)


def test_prior_messages_are_what_the_model_goes_on_from(serve: Serve, free_port: Callable[[], int]) -> None:
    said: list[ChatMessage] = [
        {"role": "user", "content": "Say the word."},
        {"role": "assistant", "content": "zebra"},
    ]
    with LlamaWorker(serve(port=free_port())) as worker:
        answer = worker.submit(
            "word", "", "Say the word.", messages=said * 3, params={"temperature": 0, "max_tokens": 8}
        )
        admitted = answer.get(timeout=patience())
        assert admitted["ok"], admitted
        assert ended(worker, admitted["request_id"])["text"] == "zebra"


def test_stop_in_generation_closes_the_connection_first_and_does_not_wait_for_the_grace(
    serve: Serve, free_port: Callable[[], int]
) -> None:
    worker = LlamaWorker(serve(port=free_port(), timeouts=TimeoutProfile(stop_grace_s=2 * patience())))
    try:
        worker.start().get(timeout=patience())
        request_id = submitted(worker, "endless", "Count.", **ENDLESS)
        wait_status(worker, request_id, is_generating)
        begun_at = time.monotonic()
        worker.stop().get(timeout=patience())
        took_s = time.monotonic() - begun_at
        exits = [e for e in worker.get_debug_info().get(timeout=patience())["recent_events"] if e["event"] == "exited"]
        result = ended(worker, request_id)
    finally:
        worker.close()
    assert took_s < patience()  # half of the grace
    assert [event["returncode"] for event in exits] == [0]
    assert (result["state"], result["fail_reason"]) == (RequestState.FAILED, RequestFailReason.WORKER_STOPPED)
    assert is_ticking(result["text"])
