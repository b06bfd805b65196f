"""Every state in which a request can be, and the verdict on it under one limit alone."""

from __future__ import annotations

from dataclasses import replace

from llama_worker import RequestPhase, TimeoutProfile
from llama_worker.request.progress import Progress
from llama_worker.server.timeouts import Verdict, verdict

WAITING = Progress(request_id=1, phase=RequestPhase.WAITING, dispatched_at=0.0, turn_started_at=0.0)
PREFILL = replace(WAITING, phase=RequestPhase.PREFILL, headers_at=0.0)
STATES = {
    "waiting": WAITING,
    "silent prefill": PREFILL,
    "reporting prefill": replace(PREFILL, prompt_progress_at=0.0),
    "generating": replace(PREFILL, phase=RequestPhase.GENERATING, first_token_at=0.0, last_data_at=0.0),
    "in a tool": replace(WAITING, phase=RequestPhase.TOOL),
}
LIMITS = (
    *("headers_timeout_s", "prefill_liveness_timeout_s", "idle_stream_timeout_s"),
    *("ttft_timeout_s", "silent_work_timeout_s", "absolute_timeout_s"),
)


def judge(
    state: Progress, limit: str, *, liveness_at: float | None = None, neighbour_data_at: float | None = None
) -> Verdict | None:
    """The verdict after 10 s, with that limit at 5 s and every other off, or far away."""
    off = dict.fromkeys(LIMITS)
    profile = replace(TimeoutProfile(), **{**off, "headers_timeout_s": 1e6, limit: 5.0})  # type: ignore[arg-type]
    return verdict(state, liveness_at=liveness_at, neighbour_data_at=neighbour_data_at, profile=profile, now=10.0)
