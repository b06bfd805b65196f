"""Lifecycle events: one log line each, and the last of them kept. Never prompts, outputs or secrets."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

_KEPT = 200


class EventLog:
    """Not thread-safe: it belongs to the WorkerActor."""

    def __init__(self, worker: str, write: Callable[[int, str], object]) -> None:
        self._worker = worker
        self._write = write  # a line, with its level
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def add(self, event: str, *, at: float, level: int = logging.INFO, **facts: Any) -> None:
        """Record the event; `at` is Unix seconds. Facts that are None are left out."""
        told = {name: value for name, value in facts.items() if value is not None}
        self._events.append({"at": at, "event": event, "worker": self._worker, **told})
        shown = " ".join(f"{name}={value!r}" for name, value in told.items())
        self._write(level, f"{event} worker={self._worker!r} {shown}")

    def recent(self) -> list[dict[str, Any]]:
        """The last events, newest last; copies."""
        return [dict(event) for event in self._events]
