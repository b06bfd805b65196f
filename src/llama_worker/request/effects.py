"""What a request wants done, as data; its actor carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llama_worker.messages import BatchId, RequestRecord, StreamId
from llama_worker.stream.calls import ParsedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTurn:
    """Send this body to the server."""

    stream_id: StreamId
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseTurn:
    """Close the exchange's connection."""

    stream_id: StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTools:
    """Run these calls, in order."""

    batch_id: BatchId
    calls: tuple[ParsedCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetTools:
    """Nobody waits for the batch any more."""

    batch_id: BatchId


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Call `tick` at this instant; the request has one alarm, a later WakeAt replaces it."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportToolsRefused:
    """The server does not take tools: later requests need not try."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The terminal state."""

    record: RequestRecord


Effect = OpenTurn | CloseTurn | StartTools | ForgetTools | WakeAt | ReportToolsRefused | Finished
Effects = list[Effect]
