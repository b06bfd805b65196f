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
    UNAUTHORIZED = "unauthorized"
    STOPPED = "stopped"
    CANARY_FAILED = "canary_failed"
    UNKILLABLE = "unkillable"


class WorkerStatus(TypedDict):
    """The state of a worker.

    Attributes:
        name: the worker's name, as configured.
        state: the state of the worker's server.
        slots_total: the number of slots, as configured.
        slots_used: the number of requests in flight.
        active_request_ids: the ids of the requests in flight.
        active_jobs: the job names of the requests in flight, by request id.
        finished_request_ids: the ids of the requests that have ended and whose results were not yet
            taken or released, oldest first.
        draining: whether `drain` was called, so that no request is admitted any more.
        restart_count: the number of restarts since the worker was constructed: automatic ones,
            planned ones, and those by `restart`.
        config_hash: the SHA-256 hash of the configuration, without secrets and callables.
        warnings: problems that a person should look at, one line each.
        pid: the process id of the server.
        last_error: why the server last failed, and was restarted if it was. READY does not clear
            it, nor does `stop`; a `start` that launches the server does. A planned restart, or one
            by `restart`, is no error, and changes nothing here.
        last_ready_at: when the server last became READY.
        next_restart_at: when the backoff ends and the server is started again.
        n_ctx: the context size of one slot in tokens, as reported by the server.
        modalities: which inputs besides text the model takes, as reported by the server, such as
            `{"vision": False, "audio": False}`.
        model: the name of the model, as reported by the server.
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
        at: when the restart was decided.
        reason: the reason for the restart; `WorkerTotals.restarts` counts by the same reasons.
        detail: the cause of the restart, as text for a person.
    """

    at: float
    reason: str
    detail: str


class Durations(TypedDict):
    """A histogram: `counts[i]` durations were above `bounds_s[i - 1]` and at most `bounds_s[i]`.

    Attributes:
        bounds_s: the upper bounds of the buckets in seconds, in ascending order.
        counts: the number of durations in each bucket; the last bucket holds those above all
            bounds. Each duration is counted once.
        sum_s: the sum of all durations, in seconds.
    """

    bounds_s: list[float]
    counts: list[int]
    sum_s: float


class WorkerTotals(TypedDict):
    """Monotonic counters since the worker was constructed.

    Attributes:
        requests: the number of ended requests, by terminal state, and then by fail reason, or by
            finish reason if they did not fail.
        restarts: the number of restarts, by reason.
        signals: the number of exit tool calls, by tool; each is counted as soon as it is made.
        prompt_tokens: the number of prompt tokens of all ended requests whose usage the server
            reported, including cached ones.
        cached_tokens: the number of those prompt tokens that came from the server's prompt cache.
        generated_tokens: the number of tokens that ended requests generated, however they ended.
        ttft: the times from admission to the first token.
        duration: the times from admission to the end, by terminal state.
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
        recent_restarts: the last 50 restarts, newest last.
        recent_events: the last 200 events, newest last; each has the keys `at`, `event` and
            `worker`, and more that depend on the event.
        events_dropped_count: the number of events that `on_event` did not get because it was too
            slow.
        server_cmd: the server's command line, with secrets masked.
        evidence: what was observed of the server just before the last kill; empty if there was
            none.
        seconds_since_progress: the longest time that a request in flight has been without progress,
            as far as the watchdog has heard: it may be too long by up to two
            `liveness_probe_interval_s`. None if no request is in flight.
        stuck_tool_threads_count: the number of tool threads that are still running although nobody
            waits for their calls any more.
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
