"""What a worker says of itself and its server: state, restarts, totals. Pure.

Instants (`*_at`) are Unix seconds that never run backwards within a worker, durations (`*_s`) are
seconds.
"""

# No `from __future__ import annotations` here: with it Python 3.11 does not see `NotRequired`, and
# the classes' `__required_keys__` are wrong.

from enum import StrEnum
from typing import Any, NotRequired, TypedDict


class WorkerState(StrEnum):
    """Where the worker's server is."""

    STOPPED = "stopped"
    RUNNING = "running"
    """The process is started, or about to be again, and not ready yet."""
    READY = "ready"
    FAILED = "failed"


class StartFailReason(StrEnum):
    """Why a `start()` failed."""

    PORT_IN_USE = "port_in_use"
    SPAWN_FAILED = "spawn_failed"
    EXITED = "exited"
    STARTUP_TIMEOUT = "startup_timeout"
    STOPPED = "stopped"
    CANARY_FAILED = "canary_failed"
    UNKILLABLE = "unkillable"


class WorkerStatus(TypedDict):
    """How the worker is; `warnings` are lines for a person.

    Attributes:
        name: of its config.
        state: where its server is.
        slots_total: of its config.
        slots_used: requests that run.
        active_request_ids: those.
        active_jobs: their job names.
        finished_request_ids: ended, and neither taken nor released yet, oldest first.
        draining: no request is admitted any more.
        restart_count: automatic restarts since it was constructed.
        config_hash: SHA-256 of its config, without secrets and callables.
        warnings: lines for a person.
        pid: of the server.
        last_error: why it failed or was restarted, the last time.
        last_ready_at: when the server last became READY.
        next_restart_at: when the backoff ends.
        n_ctx: tokens of context of a slot, as the server says it.
        modalities: what the model takes beside text, as the server says it: `{"vision": False,
            "audio": False}`.
        model: as the server names it.
    """

    name: str
    state: WorkerState
    slots_total: int
    slots_used: int
    active_request_ids: list[int]
    active_jobs: dict[int, str]
    finished_request_ids: list[int]
    draining: bool
    restart_count: int
    config_hash: str
    warnings: list[str]
    pid: NotRequired[int]
    last_error: NotRequired[str]
    last_ready_at: NotRequired[float]
    next_restart_at: NotRequired[float]
    n_ctx: NotRequired[int]
    modalities: NotRequired[dict[str, bool]]
    model: NotRequired[str]


class RestartRecord(TypedDict):
    """One restart: automatic, planned or by hand.

    Attributes:
        at: when.
        reason: the cause, as in `WorkerTotals`.
        detail: for a person.
    """

    at: float
    reason: str
    detail: str


class Durations(TypedDict):
    """A histogram. Count number i is of what is above bound i-1 and not above bound i; the last is
    of the rest.

    Attributes:
        bounds_s: upper bounds, ascending.
        counts: one more than the bounds; each duration is counted once.
        sum_s: of all durations.
    """

    bounds_s: list[float]
    counts: list[int]
    sum_s: float


class WorkerTotals(TypedDict):
    """What was counted since the worker was constructed. Counters are monotonic.

    Attributes:
        requests: ended requests by terminal state, then by fail reason, or by finish reason where
            nothing failed.
        restarts: by reason.
        signals: calls of exit tools, by tool, as they come.
        prompt_tokens: of requests whose server told its usage; cached ones included.
        cached_tokens: of those, that the server had kept.
        generated_tokens: of ended requests, however they ended.
        ttft: until the first token.
        duration: from admission to the end, by terminal state.
    """

    requests: dict[str, dict[str, int]]
    restarts: dict[str, int]
    signals: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft: Durations
    duration: dict[str, Durations]


class WorkerDebugInfo(TypedDict):
    """What a person needs to see what happened.

    Attributes:
        recent_logs: the last lines that the server wrote, newest last.
        recent_restarts: newest last.
        recent_events: the last 200, newest last; each has `at`, `event` and `worker`, and the
            event's facts.
        events_dropped_count: those that `on_event` was not told of, since it took too long with
            others.
        server_cmd: with secrets masked.
        evidence: what was seen of the server just before the last kill; empty if there was none.
        seconds_since_progress: the longest that a request in flight has been without progress, as
            the watchdog saw it last; None where none is.
        stuck_tool_threads_count: tool threads that run on although nobody waits for them any more.
        totals: what was counted since the worker was constructed.
    """

    recent_logs: list[str]
    recent_restarts: list[RestartRecord]
    recent_events: list[dict[str, Any]]
    events_dropped_count: int
    server_cmd: list[str]
    evidence: dict[str, Any]
    seconds_since_progress: float | None
    stuck_tool_threads_count: int
    totals: WorkerTotals
