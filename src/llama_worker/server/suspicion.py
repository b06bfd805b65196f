"""What the ends of requests say of their server. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llama_worker.profiles import RestartPolicy
from llama_worker.request.record import RequestRecord
from llama_worker.server.restart_budget import ServerErrors, TransportFailures
from llama_worker.server.timeouts import Triage, Verdict
from llama_worker.types import RequestFailReason, RequestState

_TRANSPORT_FAILURES = frozenset(
    {RequestFailReason.CONNECT_FAILED, RequestFailReason.STREAM_DISCONNECTED, RequestFailReason.PROTOCOL_ERROR}
)
_APPLICATION_ERRORS = frozenset({RequestFailReason.HTTP_ERROR, RequestFailReason.SERVER_ERROR})


@dataclass(frozen=True, slots=True)
class Doubt:
    """Reason to probe the server out of turn."""

    cause: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Reason to restart it."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What there is against one launch of the server; it begins with none."""

    triage: Triage = field(default_factory=Triage)
    transport_failures: TransportFailures = field(default_factory=TransportFailures)
    server_errors: ServerErrors = field(default_factory=ServerErrors)

    def ended(self, record: RequestRecord, policy: RestartPolicy) -> tuple[Suspicion, Doubt | Trouble | None]:
        """A request reached its terminal state."""
        reason = record.result.get("fail_reason")
        if record.result["state"] is RequestState.COMPLETED:
            return Suspicion(triage=self.triage.request_completed(record.request_id)), None
        if reason in _TRANSPORT_FAILURES:
            failures, cause = self.transport_failures.failed(policy)
            found = Trouble("transport_failures", cause) if cause else Doubt(f"a request failed with {reason}")
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
        return replace(self, triage=triage), Trouble(str(verdict.reason), verdict.detail) if restart else None
