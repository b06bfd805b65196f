"""Decides what restarts a server (stalled requests, how requests end, GPU errors), how soon and how
often, and when an idle one is recycled. Pure. Instants (`now`) are monotonic seconds.

| what happened | what follows |
| --- | --- |
| a verdict while no other request is served | a restart |
| the first verdict while another request is served | its request ends alone |
| the next verdict, if no request admitted since was served (`was_served`) | a restart |
| one for `absolute_timeout`, or a request lost before its headers | its request ends alone |
| `transport_failures_before_restart` failures in a row; each one before | a restart; a probe |
| `server_errors_before_restart` jobs with a 5xx, none served between | a restart |
| `degenerate_outputs_before_restart` jobs that ended in a loop or without output | a restart |
| an error after which a GPU computes nothing more; any other GPU error | a restart; a warning |

With `restart_on_stall=False` the first three only end their request.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from llama_worker.config.profiles import Recycle, RestartPolicy, TimeoutProfile
from llama_worker.request.table import RequestRecord
from llama_worker.types.request import RequestFailReason, RequestState

_TRANSPORT_FAILURES = frozenset(
    {
        RequestFailReason.CONNECT_FAILED,
        RequestFailReason.STREAM_DISCONNECTED,
        RequestFailReason.PROTOCOL_ERROR,
    }
)
_LOOPS = frozenset({RequestFailReason.REPEATED_LINE_LOOP, RequestFailReason.REPEATED_TEXT_LOOP})
_APPLICATION_ERRORS = frozenset({RequestFailReason.HTTP_ERROR, RequestFailReason.SERVER_ERROR})
# After these the server had replied: its connections work.
_REPLIES = (
    _APPLICATION_ERRORS
    | _LOOPS
    | {
        RequestFailReason.CONTEXT_EXCEEDED,
        RequestFailReason.TOOL_EXECUTION_ERROR,
        RequestFailReason.TOOL_PARSE_ERROR,
    }
)
# lower bound of the window in which another request's data proves that the server works
BUSY_WINDOW_MIN_S = 1.0


class Verdict(Struct, frozen=True, kw_only=True):
    """The decision to give up a request.

    `alone`: the server serves other requests, even if they received no data just now.
    `counts_against_server`: it may restart the server.
    """

    reason: RequestFailReason
    detail: str  # for a person: what was waited for, how long, and when anything was last heard
    alone: bool = False
    counts_against_server: bool = True


class ProbeNow(Struct, frozen=True):
    """Probe the server at once, because something looked wrong; one failure is enough for
    `HealthLost`."""

    cause: str


class RestartCause(Struct, frozen=True):
    """Reason to restart the server."""

    reason: str
    detail: str


# ---------------------------------------------------------------- verdicts


class VerdictHistory(Struct, frozen=True):
    """What is known from the verdicts of one launch; it begins as `VerdictHistory()`."""

    ended_alone_id: int | None = None  # the request that ended alone, until a new one is served
    newest_id: int = 0  # the last id admitted by then; a higher id is a new request

    def judge(
        self, request_id: int, verdict: Verdict, *, other_is_served: bool, newest_request_id: int
    ) -> tuple[VerdictHistory, bool]:
        """What is known after the verdict, and whether to restart the server.

        `newest_request_id` is the id admitted last. A repeated verdict on one request counts once.
        """
        if not verdict.counts_against_server or request_id == self.ended_alone_id:
            return self, False
        if self.ended_alone_id is None and (other_is_served or verdict.alone):
            return VerdictHistory(request_id, newest_request_id), False
        return VerdictHistory(), True

    def ended(self, record: RequestRecord) -> VerdictHistory:
        """What is known after a request ended; only one that was served, and admitted after the
        verdict, shows that the server takes new work."""
        is_new = record.request_id > self.newest_id
        return VerdictHistory() if is_new and was_served(record) else self


def is_busy(data_at: float | None, *, profile: TimeoutProfile, now: float) -> bool:
    """Whether the latest data is so recent that the server as a whole must be working."""
    window_s = max(BUSY_WINDOW_MIN_S, 2.0 * profile.liveness_probe_interval_s)
    return data_at is not None and now - data_at <= window_s


# ---------------------------------------------------------------- ends of requests


def is_degenerate(record: RequestRecord) -> bool:
    """Whether the request ended in a loop, or completed without any output."""
    result = record.result
    if record.is_leased:  # its output went to its client: only the token count is kept
        nothing = record.status.get("tokens_received") == 0
        return nothing and result["state"] is RequestState.COMPLETED
    if result["state"] is RequestState.COMPLETED:
        answer = (
            result["text"].strip()
            or result["reasoning"].strip()
            or result["signals"]
            or result["tool_trace"]
        )
        return not answer
    return result["fail_reason"] in _LOOPS


def was_served(record: RequestRecord, *, after: float = -math.inf) -> bool:
    """Whether the request completed, or was canceled and had received data later than `after`."""
    state, data_at = record.result["state"], record.last_data_at
    has_data = data_at is not None and data_at > after
    return state is RequestState.COMPLETED or (state is RequestState.CANCELED and has_data)


def succeeded(record: RequestRecord, policy: RestartPolicy) -> bool:
    """Whether the request completed, with output that does not count against the server."""
    is_counted = policy.degenerate_outputs_before_restart is not None and is_degenerate(record)
    return record.result["state"] is RequestState.COMPLETED and not is_counted


class FailureCounts(Struct, frozen=True):
    """Counts the failed requests of one launch since the last one that was served; degenerate ones
    since the last success.

    Most 500s before the stream are caused by the request (b11434): a job that retries counts once,
    and only several jobs together restart the server. The same holds for degenerate output.
    """

    transport_failures_count: int = 0  # in a row
    jobs_with_server_error: frozenset[str] = frozenset()
    degenerate_jobs: frozenset[str] = frozenset()
    failed_at: float = -math.inf  # when the newest of them was told

    def after(
        self, record: RequestRecord, policy: RestartPolicy, now: float
    ) -> tuple[FailureCounts, ProbeNow | RestartCause | None]:
        """The counts after one more request, and what follows for the server; None: nothing."""
        if succeeded(record, policy):
            return FailureCounts(), None
        reason = record.result["fail_reason"]
        if reason in _REPLIES or record.result["state"] is RequestState.COMPLETED:
            return replace(self, transport_failures_count=0)._after_reply(record, policy, now)
        if was_served(record, after=self.failed_at):
            # its output, cut short, says nothing about degenerate ones
            return FailureCounts(degenerate_jobs=self.degenerate_jobs), None
        if reason not in _TRANSPORT_FAILURES:
            return self, None
        count = self.transport_failures_count + 1
        limit = policy.transport_failures_before_restart
        counts = replace(self, transport_failures_count=count, failed_at=now)
        if count < limit:
            return counts, ProbeNow(f"a request failed with {reason}")
        limited = f"(limit: transport_failures_before_restart {limit})"
        detail = f"{count} transport failures in a row {limited}"
        return counts, RestartCause("transport_failures", detail)

    def _after_reply(
        self, record: RequestRecord, policy: RestartPolicy, now: float
    ) -> tuple[FailureCounts, RestartCause | None]:
        """The counts after a request that did not succeed although the server replied."""
        reason, code = record.result["fail_reason"], record.http_status
        limit = policy.degenerate_outputs_before_restart
        if limit is not None and is_degenerate(record):
            jobs = self.degenerate_jobs | {record.job}
            detail = f"{len(jobs)} jobs in a row ended in a loop or without output"
            restart = RestartCause(
                "degenerate_outputs", f"{detail} (limit: degenerate_outputs_before_restart {limit})"
            )
            return replace(self, degenerate_jobs=jobs), restart if len(jobs) >= limit else None
        if reason not in _APPLICATION_ERRORS or code is None or not 500 <= code <= 599:
            return self, None
        jobs = self.jobs_with_server_error | {record.job}
        limit = policy.server_errors_before_restart
        counts = replace(self, jobs_with_server_error=jobs, failed_at=now)
        if len(jobs) < limit:
            return counts, None
        detail = f"server errors in {len(jobs)} jobs, none served between"
        limited = f"(limit: server_errors_before_restart {limit})"
        return counts, RestartCause("server_errors", f"{detail} {limited}")


# ---------------------------------------------------------------- how often, and how soon


class RestartBudget(Struct, frozen=True, kw_only=True):
    """The restarts so far, and what the lockout and the backoff count of them."""

    restart_count: int = 0  # since construction; never cleared
    recent: tuple[float, ...] = ()  # restarts within the window, oldest first
    row_count: int = 0  # restarts in a row: no completed request or stable READY between
    ready_at: float | None = None  # READY since
    ready_for_s: float = -math.inf  # the longest READY since the last restart; -inf: there was none

    def next(self, now: float, policy: RestartPolicy) -> tuple[RestartBudget, float | str]:
        """The server is down or must be ended: the seconds to wait before the restart or, as a
        text, why there is no other (the lockout). Implies `left_ready`."""
        left = self.left_ready(now)
        recent = tuple(at for at in left.recent if now - at < policy.restart_window_s)
        row_count = 0 if left.ready_for_s >= policy.stable_after_s else left.row_count
        limit = policy.max_restarts_per_window
        if limit == 0:
            return left, "restarts are turned off (max_restarts_per_window 0)"
        if len(recent) >= limit:
            history = f"restarted {len(recent)} times within {now - recent[0]:.1f} s"
            allowed = (
                f"max_restarts_per_window {limit} in restart_window_s {policy.restart_window_s:g}"
            )
            return left, f"{history} (limit: {allowed})"
        if row_count >= limit:
            history = (
                f"restarted {row_count} times in a row (limit: max_restarts_per_window {limit})"
            )
            lacking = (
                f"no completed request and no {policy.stable_after_s:g} s of READY "
                "(stable_after_s) in between"
            )
            return left, f"{history} with {lacking}"
        next_budget = RestartBudget(
            restart_count=left.restart_count + 1, recent=(*recent, now), row_count=row_count + 1
        )
        return next_budget, backoff_s(row_count + 1, policy)

    def planned(self, now: float) -> RestartBudget:
        """A restart that no failure caused: only `restart_count` grows. Implies `left_ready`."""
        return replace(self.left_ready(now), restart_count=self.restart_count + 1)

    def became_ready(self, now: float) -> RestartBudget:
        return replace(self, ready_at=now)

    def left_ready(self, now: float) -> RestartBudget:
        """READY ended, for any cause; no effect if the server was not READY."""
        if self.ready_at is None:
            return self
        return replace(self, ready_at=None, ready_for_s=max(self.ready_for_s, now - self.ready_at))

    def request_completed(self) -> RestartBudget:
        """A request reached `completed`: the row ends. The window still counts."""
        return replace(self, row_count=0)

    def cleared(self) -> RestartBudget:
        """The budget of an explicit start: only `restart_count` is kept."""
        return RestartBudget(restart_count=self.restart_count)


def backoff_s(number: int, policy: RestartPolicy) -> float:
    """Seconds to wait before restart `number` (1, 2, ...) in a row."""
    try:
        raw = policy.restart_backoff_s * policy.backoff_factor ** (number - 1)
    except OverflowError:
        raw = policy.backoff_max_s if policy.restart_backoff_s else 0.0
    return float(min(raw, policy.backoff_max_s))


def recycle_due(
    policy: Recycle, *, ready_at: float, requests_count: int, anon_bytes: int | None, now: float
) -> str | None:
    """Why to replace a server that has been READY since `ready_at` and has ended `requests_count`
    requests; None: not yet.

    `anon_bytes`: its anonymous memory, swapped out or not; None: unknown. Memory of mapped files
    belongs to the kernel and does not count.
    """
    if policy.max_requests is not None and requests_count >= policy.max_requests:
        ended = f"{requests_count} requests ended"
        return f"{ended} (limit: max_requests {policy.max_requests})"
    if policy.max_age_s is not None and now >= ready_at + policy.max_age_s:
        ready = f"ready for {now - ready_at:.0f} s"
        return f"{ready} (limit: max_age_s {policy.max_age_s:g})"
    if (
        policy.max_anon_mib is not None
        and requests_count  # else it is no leak, and the next server would have no less
        and anon_bytes is not None
        and anon_bytes >> 20 >= policy.max_anon_mib
    ):
        return (
            f"{anon_bytes >> 20} MiB of anonymous memory (limit: max_anon_mib "
            f"{policy.max_anon_mib})"
        )
    return None


# ---------------------------------------------------------------- errors of GPUs

# NVIDIA's driver reports errors by number (Xid), without the process or the severity:
# https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html

# The catalog's remedy is to reset the GPU or to restart the machine: the GPU computes nothing more.
_FATAL_XIDS = {
    46: "the GPU stopped processing",
    48: "a double-bit ECC error",
    62: "an internal micro-controller halted",
    79: "the GPU has fallen off the bus",
    95: "an uncontained ECC error",
    110: "a security fault",
    119: "a timeout of the GPU's system processor",
    120: "an error of the GPU's system processor",
    140: "an unrecovered ECC error",
    143: "the GPU could not be initialised",
    158: "a fatal timeout",
}
# Errors of one process, which may be any. llama-server aborts if it is the one (b11434); load alone
# can also cause 109.
_PROCESS_XIDS = {
    8: "the GPU stopped processing",
    13: "an exception of the graphics engine",
    31: "a memory page fault",
    32: "a corrupted push buffer",
    94: "a contained ECC error",
    109: "a context switch timeout",
}
# The catalog says to ignore them; 43 and 45 also follow the kill of a process that was computing.
_HARMLESS_XIDS = frozenset(
    {14, 37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 154, 157, 160, 161}
)


class GpuFault(Struct, frozen=True, kw_only=True):
    """An error of a GPU that the server uses. `fatal`: the GPU computes nothing more, for any
    process."""

    fatal: bool
    detail: str


def fault_of_xid(gpu: str, xid: int) -> GpuFault | None:
    """The fault for an Xid; None if the Xid is harmless. An unknown one is a non-fatal fault."""
    if xid in _HARMLESS_XIDS:
        return None
    meaning = _FATAL_XIDS.get(xid) or _PROCESS_XIDS.get(xid) or "see NVIDIA's catalog"
    return GpuFault(fatal=xid in _FATAL_XIDS, detail=f"{gpu}: Xid {xid}, {meaning}")


def uncorrectable_memory_error(gpu: str) -> GpuFault:
    """The fault for NVML's event of a double-bit ECC error."""
    return GpuFault(fatal=True, detail=f"{gpu}: a double-bit ECC error")


def gpu_lost(gpu: str) -> GpuFault:
    """The fault of a GPU that the driver cannot reach any more."""
    return GpuFault(fatal=True, detail=f"{gpu}: the GPU is lost")
