"""Why a stream broke. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from llama_worker.types import RequestFailReason


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFailure:
    """Why a stream broke: `connect_failed`, `stream_disconnected`, `protocol_error` or `http_error`."""

    reason: RequestFailReason
    detail: str
    http_status: int | None = None
