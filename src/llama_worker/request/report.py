"""Builds the reports on a request: progress, status and record. Pure.

Instants (`*_at`, `now`) are monotonic seconds.
"""

from __future__ import annotations

import copy
import math
from typing import Any, cast

from msgspec import Struct, field

from llama_worker.clock import ToUnix, earliest, latest
from llama_worker.request.ending import Outcome, failed
from llama_worker.request.output import Output
from llama_worker.request.progress import Progress, TurnProgress
from llama_worker.request.table import Admitted, RequestRecord
from llama_worker.types.chat import ChatMessage
from llama_worker.types.request import (
    ExitSignal,
    RequestFailReason,
    RequestPhase,
    RequestResult,
    RequestState,
    RequestStatus,
    ToolTraceEntry,
    Usage,
)

_TAIL_CHARS = 200


class RequestTotals(Struct, kw_only=True):
    """A request's identity, and what its turns have brought so far. Not thread-safe."""

    request_id: int
    job_name: str
    created_at: float
    unix: ToUnix
    output: Output
    iterations_left: int
    job_key: str = ""
    has_media: bool = False
    links_media: bool = False
    needs_specific_slots: bool = False
    is_leased: bool = False
    in_one_piece: bool = False  # its reply is not a stream
    calls_count: int = 0
    signals: list[ExitSignal] = field(default_factory=list)
    trace: list[ToolTraceEntry] = field(default_factory=list)
    liveness_at: float | None = None
    # Totals of the turns that are over, without the one under way:
    tokens: int = 0
    usage: Usage | None = None
    first_token_at: float | None = None
    data_at: float | None = None
    stream_byte_at: float | None = None
    created_offset: float = math.nan  # Unix seconds minus monotonic seconds, at its creation

    def __post_init__(self) -> None:
        self.created_offset = self.unix(0.0)

    def add_turn(self, turn: TurnProgress) -> None:
        turn.is_over = True
        if self.first_token_at is None:
            self.first_token_at = turn.first_token_at
        self.data_at = latest(self.data_at, turn.last_data_at)
        self.stream_byte_at = latest(self.stream_byte_at, turn.last_stream_byte_at)
        self.tokens += turn.tokens
        if turn.usage is not None:
            before = self.usage or Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
            self.usage = {
                "prompt_tokens": before["prompt_tokens"] + turn.usage.prompt_tokens,
                "completion_tokens": before["completion_tokens"] + turn.usage.completion_tokens,
                "cached_tokens": before["cached_tokens"] + (turn.usage.cached_tokens or 0),
            }

    @property
    def work_seen_at(self) -> float | None:
        """The newest evidence of work by the server since the request was admitted."""
        at = self.liveness_at
        return at if at is not None and at > self.created_at else None


def build_progress(
    totals: RequestTotals, turn: TurnProgress, phase: RequestPhase, *, concluding: bool
) -> Progress:
    return Progress(
        request_id=totals.request_id,
        phase=phase,
        dispatched_at=totals.created_at,
        turn_started_at=turn.started_at,
        headers_at=turn.headers_at,
        first_token_at=turn.first_token_at,
        prompt_progress_at=turn.prompt_progress_at,
        last_data_at=turn.last_data_at,
        last_stream_byte_at=turn.last_stream_byte_at,
        batches=turn.batches,
        has_media=totals.has_media,
        links_media=totals.links_media,
        needs_specific_slots=totals.needs_specific_slots,
        tokens=turn.tokens,
        longest_gap_s=turn.longest_gap_s,
        repeated_at=turn.repeated_at,
        concluding=concluding,
        in_one_piece=totals.in_one_piece,
    )


def build_status(
    totals: RequestTotals, turn: TurnProgress, progress: Progress, running_tool: str | None = None
) -> RequestStatus:
    """A snapshot of a request that has not ended; shares nothing with it."""
    status: RequestStatus = {
        "ok": True,
        "request_id": totals.request_id,
        "job_name": totals.job_name,
        "state": RequestState.TOOL_RUNNING
        if progress.phase is RequestPhase.TOOL
        else RequestState.RUNNING,
        "phase": progress.phase,
        "created_at": totals.created_at + totals.created_offset,
        "dispatched_at": totals.created_at + totals.created_offset,
        "output_chars": totals.output.text.chars,
        "reasoning_chars": totals.output.reasoning.chars,
        "tool_iters_remaining": totals.iterations_left,
        "tool_calls_count": totals.calls_count,
        "signals": copy.deepcopy(totals.signals),
        "fail_reason": None,
        "tokens_received": totals.tokens + (0 if turn.is_over else turn.tokens),
    }
    first_token_at = earliest(totals.first_token_at, turn.first_token_at)
    if first_token_at is not None:
        status["first_token_at"] = first_token_at + totals.created_offset
    instants = {
        "last_progress_at": latest(totals.data_at, progress.data_at, totals.work_seen_at),
        "last_stream_byte_at": latest(turn.last_stream_byte_at, totals.stream_byte_at),
        "last_liveness_at": totals.liveness_at,
    }
    status.update(
        cast("Any", {key: totals.unix(at) for key, at in instants.items() if at is not None})
    )
    if turn.prompt_progress is not None:
        prompt = turn.prompt_progress
        status["prompt_progress"] = {
            "processed": prompt.processed,
            "total": prompt.total,
            "cached": prompt.cached,
        }
    speed = turn.tokens_per_second()
    if speed is not None:
        status["tokens_per_second"] = speed
    if running_tool is not None:
        status["running_tool"] = running_tool
    if totals.output.text.chars:
        status["tail"] = totals.output.text.read()[-_TAIL_CHARS:]
    return status


def build_record(
    totals: RequestTotals,
    turn: TurnProgress,
    progress: Progress,
    outcome: Outcome,
    conversation: list[ChatMessage],
    now: float,
    *,
    was_sent: bool = True,
) -> RequestRecord:
    """The record of a request that ends now; `progress` is its last."""
    status = build_status(totals, turn, progress)
    status["state"], status["phase"] = outcome.state, RequestPhase.DONE
    status["completed_at"] = totals.unix(now)
    status["fail_reason"] = outcome.fail_reason
    result: RequestResult = {
        "ok": True,
        "request_id": totals.request_id,
        "job_name": totals.job_name,
        "state": outcome.state,
        "finish_reason": outcome.finish_reason,
        "text": totals.output.text.read(),
        "reasoning": totals.output.reasoning.read(),
        "signals": status["signals"],
        "tool_trace": totals.trace,
        "fail_reason": outcome.fail_reason,
        "conversation": conversation,
        "timings": {"total_s": now - totals.created_at},
    }
    if totals.first_token_at is not None:
        result["timings"]["ttft_s"] = totals.first_token_at - totals.created_at
    if "tokens_per_second" in status:
        result["timings"]["tokens_per_second"] = status["tokens_per_second"]
    if totals.usage is not None:
        result["usage"] = totals.usage
    if outcome.fail_detail is not None:
        status["fail_detail"] = result["fail_detail"] = outcome.fail_detail
    if outcome.context is not None:
        result["context"] = outcome.context
    if outcome.loop is not None:
        result["loop"] = outcome.loop
    return RequestRecord(
        request_id=totals.request_id,
        job_name=totals.job_name,
        status=status,
        result=result,
        last_data_at=turn.last_data_at,
        batches=turn.batches,
        http_status=outcome.http_status,
        ended_in=RequestPhase.DONE if progress.concluding else progress.phase,
        was_sent=was_sent and not outcome.is_unsent,
        has_media=totals.has_media,
        is_leased=totals.is_leased,
        job_key=totals.job_key,
    )


def lost_record(
    admitted: Admitted, detail: str, now: float, *, unix: ToUnix, secret: str | None
) -> RequestRecord:
    """The record of a request whose actor died: failed, and nothing else is known."""
    totals = RequestTotals(
        request_id=admitted.request_id,
        job_name=admitted.job_name,
        created_at=admitted.created_at,
        unix=unix,
        output=Output(None),
        iterations_left=0,
        is_leased=admitted.is_leased,
    )
    turn = TurnProgress(admitted.created_at)
    progress = build_progress(totals, turn, RequestPhase.DONE, concluding=True)
    lost = failed(RequestFailReason.UNKNOWN_ERROR, detail).for_host(secret)
    return build_record(totals, turn, progress, lost, [], now)
