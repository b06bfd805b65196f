"""What a worker says about itself and its server: state, restarts, totals. Pure.

Instants (`*_at`) are Unix seconds that never run backwards within a worker, durations (`*_s`) are
seconds.
"""

# No `from __future__ import annotations` here: with it Python 3.11 does not see `NotRequired`, and
# the classes' `__required_keys__` are wrong.

from enum import StrEnum
from typing import Any, NotRequired, TypedDict


class WorkerState(StrEnum):
    """The state of the worker's server."""

    STOPPED = "stopped"
    RUNNING = "running"
    """Its process is being started, restarted or ended; requests are refused."""
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
    """The state of a worker.

    Attributes:
        name: as configured.
        state: of its server.
        slots_total: as configured.
        slots_used: how many requests are in flight.
        active_request_ids: the ids of the requests in flight.
        active_jobs: their job names, by id.
        finished_request_ids: requests that have ended, and whose results were neither taken nor
            released; oldest first.
        draining: `drain` was called: no request is admitted any more.
        restart_count: restarts since it was constructed: automatic, planned and by `restart`.
        config_hash: SHA-256 of its config, without secrets and callables.
        warnings: lines for a person.
        pid: of the server's process.
        last_error: why it failed or was restarted the last time.
        last_ready_at: when the server last became READY.
        next_restart_at: when the backoff ends.
        n_ctx: tokens of context of a slot, as reported by the server.
        modalities: what the model takes besides text, as reported by the server: `{"vision": False,
            "audio": False}`.
        model: its name, as reported by the server.
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
    """One restart: automatic, planned, by `restart`, or the one that was refused and left the
    worker FAILED.

    Attributes:
        at: when it was decided.
        reason: the cause, as in `WorkerTotals`.
        detail: for a person.
    """

    at: float
    reason: str
    detail: str


class Durations(TypedDict):
    """A histogram: `counts[i]` durations were above `bounds_s[i - 1]` and at most `bounds_s[i]`.

    Attributes:
        bounds_s: upper bounds, ascending.
        counts: one per bound, and one for what is above the last; each duration is counted once.
        sum_s: the sum of all durations.
    """

    bounds_s: list[float]
    counts: list[int]
    sum_s: float


class WorkerTotals(TypedDict):
    """Monotonic counters since the worker was constructed.

    Attributes:
        requests: ended requests by terminal state, then by fail reason, or by finish reason where
            nothing failed.
        restarts: by reason.
        signals: calls of exit tools, by tool; counted when they are made.
        prompt_tokens: of ended requests whose usage the server reported; cached ones included.
        cached_tokens: of these, those taken from the server's prompt cache.
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
    """Recent logs, events, restarts and counters, for debugging.

    Attributes:
        recent_logs: the last lines that the server wrote, newest last.
        recent_restarts: the last 50, newest last.
        recent_events: the last 200, newest last; each has `at`, `event` and `worker`, and the
            event's facts.
        events_dropped_count: events that `on_event` did not get, since it was too slow.
        server_cmd: with secrets masked.
        evidence: what was seen of the server just before the last kill; empty if there was none.
        seconds_since_progress: the longest that a request in flight has been without progress, as
            the watchdog saw it last; None where none is.
        stuck_tool_threads_count: tool threads that still run although their call was given up.
        totals: counters since the worker was constructed.
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
