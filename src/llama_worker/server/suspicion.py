"""What the ends of requests say of their server. Pure."""

from __future__ import annotations

from msgspec import Struct, field
from msgspec.structs import replace

from llama_worker.config.profiles import RestartPolicy
from llama_worker.request.table import RequestRecord
from llama_worker.server.restart_budget import ServerErrors, TransportFailures
from llama_worker.server.timeouts import Triage, Verdict
from llama_worker.types import RequestFailReason, RequestState

_TRANSPORT_FAILURES = frozenset(
    {
        RequestFailReason.CONNECT_FAILED,
        RequestFailReason.STREAM_DISCONNECTED,
        RequestFailReason.PROTOCOL_ERROR,
    }
)
_LOOPS = frozenset({RequestFailReason.REPEATED_LINE_LOOP, RequestFailReason.REPEATED_TEXT_LOOP})
_APPLICATION_ERRORS = frozenset({RequestFailReason.HTTP_ERROR, RequestFailReason.SERVER_ERROR})


class Doubt(Struct, frozen=True):
    """Reason to probe the server out of turn."""

    cause: str


class Trouble(Struct, frozen=True):
    """Reason to restart it."""

    reason: str
    detail: str


def is_degenerate(record: RequestRecord) -> bool:
    """Whether the request ended in a loop, or completed with nothing at all."""
    result = record.result
    if record.is_leased:  # what it said is its client's, and was counted
        nothing = record.status["tokens_received"] == 0
        return nothing and result["state"] is RequestState.COMPLETED
    if result["state"] is RequestState.COMPLETED:
        said = (
            result["text"].strip()
            or result["reasoning"].strip()
            or result["signals"]
            or result["tool_trace"]
        )
        return not said
    return result["fail_reason"] in _LOOPS


class Suspicion(Struct, frozen=True):
    """What there is against one launch of the server; it begins with none."""

    triage: Triage = field(default_factory=Triage)
    transport_failures: TransportFailures = field(default_factory=TransportFailures)
    server_errors: ServerErrors = field(default_factory=ServerErrors)
    degenerate_jobs: frozenset[str] = frozenset()  # that ended so since one ended well

    def ended(
        self, record: RequestRecord, policy: RestartPolicy
    ) -> tuple[Suspicion, Doubt | Trouble | None]:
        """A request reached its terminal state."""
        reason = record.result["fail_reason"]
        limit = policy.degenerate_outputs_before_restart
        if limit is not None and is_degenerate(record):
            jobs = self.degenerate_jobs | {record.job_name}
            detail = f"{len(jobs)} jobs in a row ended in a loop or in nothing"
            told = Trouble(
                "degenerate_outputs", f"{detail} (limit: degenerate_outputs_before_restart {limit})"
            )
            return replace(self, degenerate_jobs=jobs), told if len(jobs) >= limit else None
        if record.result["state"] is RequestState.COMPLETED:
            return Suspicion(triage=self.triage.request_completed(record.request_id)), None
        if reason in _TRANSPORT_FAILURES:
            failures, cause = self.transport_failures.failed(policy)
            found = (
                Trouble("transport_failures", cause)
                if cause
                else Doubt(f"a request failed with {reason}")
            )
            return replace(self, transport_failures=failures), found
        if reason in _APPLICATION_ERRORS:
            errors, cause = self.server_errors.failed(record.job_name, record.http_status, policy)
            spoken = replace(self, transport_failures=TransportFailures(), server_errors=errors)
            return spoken, Trouble("server_errors", cause) if cause else None
        return self, None

    def stalled(
        self,
        request_id: int,
        verdict: Verdict,
        *,
        busy_neighbour: bool,
        newest_request_id: int,
        policy: RestartPolicy,
    ) -> tuple[Suspicion, Trouble | None]:
        """A verdict fell on a request: does it cost the whole server?"""
        if not (verdict.restart and policy.restart_on_stall):
            return self, None
        triage, restart = self.triage.judge(
            request_id, busy_neighbour=busy_neighbour, newest_request_id=newest_request_id
        )
        return replace(self, triage=triage), Trouble(
            str(verdict.reason), verdict.detail
        ) if restart else None
