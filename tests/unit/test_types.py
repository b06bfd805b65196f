"""The contract's field names and values, which hosts depend on, and the ready-made exit tools."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import pytest

from llama_worker.exit_tools import ALL_EXIT_TOOLS
from llama_worker.types import request
from llama_worker.types.chat import ToolDef
from llama_worker.types.worker import RestartRecord, WorkerDebugInfo, WorkerState, WorkerStatus


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (WorkerState, "stopped running ready failed"),
        (request.RequestState, "running tool_running completed failed canceled"),
        (request.RequestFinishReason, "stop max_tokens canceled failed"),
        (request.RequestPhase, "waiting prefill generating tool done"),
    ],
)
def test_the_values_of_an_enum(kind: type[StrEnum], values: str) -> None:
    assert {member.value for member in kind} == set(values.split())
    assert all(
        member == member.value == str(member) == json.loads(json.dumps(member)) for member in kind
    )


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (request.SubmitOk, "ok request_id"),
        *((kind, "ok error") for kind in (request.SubmitErr, request.NotFound, request.NotReady)),
        (
            request.RequestStatus,
            "ok request_id job_name state phase created_at output_chars reasoning_chars "
            "tool_iters_remaining tool_calls_count signals fail_reason dispatched_at? "
            "first_token_at? completed_at? last_progress_at? last_stream_byte_at? "
            "last_liveness_at? prompt_progress? tokens_received? tokens_per_second? tail? "
            "running_tool? fail_detail?",
        ),
        (request.PromptProgress, "processed total cached"),
        (request.TokenCount, "ok n_prompt_tokens n_ctx n_left"),
        (request.OutputChunk, "ok text reasoning text_offset reasoning_offset done"),
        (
            request.RequestResult,
            "ok request_id job_name state finish_reason text reasoning signals tool_trace "
            "fail_reason conversation usage? timings? fail_detail? context? loop?",
        ),
        (request.Usage, "prompt_tokens completion_tokens cached_tokens"),
        (request.OutputLoop, "repeats line? text?"),
        (request.Timings, "total_s ttft_s? tokens_per_second?"),
        (request.ExitSignal, "tool_name arguments emitted_at malformed?"),
        (
            request.ToolTraceEntry,
            "tool_call_id tool_name arguments iteration started_at duration_s ok error? result?",
        ),
        (
            WorkerStatus,
            "name state slots_total slots_used active_request_ids active_jobs "
            "finished_request_ids draining restart_count config_hash warnings pid? last_error? "
            "last_ready_at? next_restart_at? n_ctx? modalities? model?",
        ),
        (RestartRecord, "at reason detail"),
        (
            WorkerDebugInfo,
            "recent_logs recent_restarts recent_events events_dropped_count server_cmd "
            "evidence seconds_since_progress stuck_tool_threads_count totals",
        ),
    ],
)
def test_answers_have_these_keys_some_optional(kind: Any, keys: str) -> None:
    optional = {f"{key}?" for key in kind.__optional_keys__}
    assert kind.__required_keys__ | optional == set(keys.split())


def test_three_states_are_terminal() -> None:
    terminal = [state.value for state in request.RequestState if state.is_terminal]
    assert terminal == ["completed", "failed", "canceled"]


@pytest.mark.parametrize("tool", ALL_EXIT_TOOLS, ids=lambda tool: tool["function"]["name"])
def test_exit_tools_are_functions_with_closed_schemas(tool: ToolDef) -> None:
    assert json.loads(json.dumps(tool)) == tool
    assert tool["type"] == "function"
    assert tool["function"]["description"]
    schema = tool["function"]["parameters"]
    assert (schema["type"], schema["additionalProperties"]) == ("object", False)
    assert set(schema["required"]) <= set(schema["properties"])
    assert all(item["description"] and item["type"] for item in schema["properties"].values())
