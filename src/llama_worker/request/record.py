"""What stays of a request that has ended. Data only; instants are monotonic seconds."""

from __future__ import annotations

import copy

from msgspec import Struct

from llama_worker.types import RequestResult, RequestStatus


class RequestRecord(Struct, frozen=True, kw_only=True):
    """A terminal request, as the worker keeps it until the host takes it."""

    request_id: int
    job_name: str
    status: RequestStatus
    result: RequestResult
    ended_at: float
    last_data_at: float | None = None  # of its last turn
    http_status: int | None = None  # of an `http_error` or a `server_error`

    def copy_of_status(self) -> RequestStatus:
        """For one host to keep: no two get the same dicts."""
        return copy.deepcopy(self.status)

    def copy_of_result(self) -> RequestResult:
        """Likewise; the strings are shared."""
        return copy.deepcopy(self.result)
