"""Keeps what a worker records for a person to read: events, warnings, restarts, evidence of the
last kill, and counters. Pure; not thread-safe.

Instants (`now`) are monotonic seconds; those given to the host are Unix seconds.
"""

from __future__ import annotations

import copy
import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from llama_worker.clock import ToUnix
from llama_worker.request.progress import newest
from llama_worker.request.table import Admitted, RequestRecord
from llama_worker.server.messages import Observed
from llama_worker.server.timeouts import ages
from llama_worker.types.hooks import EventHandler
from llama_worker.types.request import RequestState
from llama_worker.types.worker import Durations, RestartRecord, WorkerDebugInfo, WorkerTotals

_MAX_EVENTS = 200
_MAX_RESTARTS = 50
_MAX_WARNINGS = 50
_MAX_QUEUED_EVENTS = 1000
BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_OUTCOMES = (RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELED)
Event = dict[str, Any]


class Journal:
    """The records of one worker, owned by its WorkerActor."""

    def __init__(
        self,
        worker: str,
        unix: ToUnix,
        write_log: Callable[[int, str], object],
        feed: EventFeed | None = None,
    ) -> None:
        self.totals = Totals()
        self.observed: Observed | None = None  # the latest from the watchdog
        self.unix = unix  # for instants that are not past
        self._worker = worker
        self._write_log = write_log
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._feed = feed
        self._warnings: list[str] = []
        self._restarts: deque[RestartRecord] = deque(maxlen=_MAX_RESTARTS)
        self._evidence: dict[str, Any] = {}
        self.stuck_tool_threads_count = 0  # still running, though their request no longer waits

    @property
    def warnings(self) -> list[str]:
        """A copy of the warnings, oldest first, each line once."""
        return list(self._warnings)

    def note(self, event: str, now: float, *, level: int = logging.INFO, **facts: Any) -> None:
        """Record the event, log it on one line, and tell the host. `facts` must hold no
        secrets, and no prompts or outputs of requests; None is left out, and an enum member becomes
        its value."""
        present = {
            name: value.value if isinstance(value, StrEnum) else value
            for name, value in facts.items()
            if value is not None
        }
        entry = {"at": self.unix(now), "event": event, "worker": self._worker, **present}
        self._events.append(entry)
        shown = " ".join(f"{name}={value!r}" for name, value in present.items())
        self._write_log(level, f"{event} worker={self._worker!r} {shown}")
        if self._feed is not None:
            self._feed.publish(dict(entry))

    def warn(self, line: str, now: float) -> None:
        """Record a line that the host should act on; no effect if it was recorded before."""
        if line not in self._warnings and len(self._warnings) < _MAX_WARNINGS:
            self._warnings.append(line)
            self.note("warning", now, level=logging.WARNING, line=line)

    def restart_decided(self, reason: str, detail: str, delay_s: float | None, now: float) -> None:
        """Record an automatic restart, or (`delay_s` None) that the worker is locked out."""
        self._restarts.append({"at": self.unix(now), "reason": reason, "detail": detail})
        if delay_s is not None:
            self.totals.restarted(reason)
        event = "restart" if delay_s is not None else "locked_out"
        self.note(event, now, level=logging.WARNING, reason=reason, detail=detail, delay_s=delay_s)

    def keep_evidence(
        self,
        now: float,
        *,
        epoch: int,
        pid: int | None,
        last_error: str | None,
        active: Iterable[Admitted],
    ) -> None:
        """Keep what is known just before launch `epoch` is killed, in place of the evidence of the
        kill before."""
        seen = self.observed if self.observed is not None and self.observed.epoch == epoch else None
        times = (
            {p.request_id: ages(p, liveness_at=seen.liveness_at, now=now) for p in seen.requests}
            if seen
            else {}
        )
        self._evidence = {
            "at": self.unix(now),
            "pid": pid,
            "last_error": last_error,
            "activity": seen.activity if seen else "",
            "observed_ago_s": round(now - seen.at, 3) if seen else None,
            "requests": [
                {
                    "request_id": admitted.request_id,
                    "job_name": admitted.job_name,
                    "slot": admitted.slot,
                    **times.get(admitted.request_id, {}),
                }
                for admitted in active
            ],
        }

    def add_processes(self, processes: Mapping[str, Any], log_tail: Iterable[str]) -> None:
        """Add to the evidence what was seen of the server's processes, and its last log lines."""
        self._evidence = {
            **self._evidence,
            "processes": dict(processes),
            "log_tail": list(log_tail),
        }

    def seconds_since_progress(self, active: Iterable[Admitted], now: float) -> float | None:
        """The longest time without progress of a request in flight; None: none is in flight."""
        seen = {p.request_id: p for p in self.observed.requests} if self.observed else {}
        liveness_at = self.observed.liveness_at if self.observed else None
        ages_s = []
        for admitted in active:
            progress = seen.get(admitted.request_id)
            at = admitted.created_at
            if progress is not None:  # a turn begins when a tool returns
                at = newest(progress.heard_at, liveness_at)
            ages_s.append(now - at)
        return max(ages_s, default=None)

    def debug_info(
        self,
        server_cmd: Sequence[str],
        recent_logs: list[str],
        active: Iterable[Admitted],
        now: float,
    ) -> WorkerDebugInfo:
        return {
            "recent_logs": recent_logs,
            "recent_restarts": [record.copy() for record in self._restarts],
            "recent_events": [event.copy() for event in self._events],
            "events_dropped_count": self._feed.dropped_count if self._feed is not None else 0,
            "server_cmd": list(server_cmd),
            "evidence": copy.deepcopy(self._evidence),
            "seconds_since_progress": self.seconds_since_progress(active, now),
            "stuck_tool_threads_count": self.stuck_tool_threads_count,
            "totals": self.totals.snapshot(),
        }


class EventFeed:
    """Passes events to the host's `on_event`, in order, on the callback thread.

    At most 1,000 wait for a slow handler; further ones are dropped. Before the next event that is
    kept, the handler gets `events_dropped` with their `count`.
    """

    def __init__(
        self, handler: EventHandler, call_host: Callable[[Callable[[], object], str], object]
    ) -> None:
        self.dropped_count = 0  # since construction
        self._handler = handler
        self._call_host = call_host
        self._waiting: deque[Event] = deque()  # the callback thread pops from the left
        self._unreported_count = 0

    def publish(self, event: Event) -> None:
        """Queue an event for the handler. Called on the WorkerActor's thread."""
        if len(self._waiting) >= _MAX_QUEUED_EVENTS:
            self.dropped_count += 1
            self._unreported_count += 1
            return
        if self._unreported_count:
            dropped = {"at": event["at"], "event": "events_dropped", "worker": event["worker"]}
            self._put({**dropped, "count": self._unreported_count})
            self._unreported_count = 0
        self._put(event)

    def _put(self, event: Event) -> None:
        self._waiting.append(event)
        self._call_host(self._deliver, f"on_event of worker {event['worker']!r}")

    def _deliver(self) -> None:
        self._handler(self._waiting.popleft())


class Totals:
    """A worker's counts over its whole life, for metrics. Counters are monotonic."""

    def __init__(self) -> None:
        self._requests: dict[str, Counter[str]] = {str(outcome): Counter() for outcome in _OUTCOMES}
        self._restarts: Counter[str] = Counter()
        self._signals: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._ttft = _Histogram()
        self._duration = {str(outcome): _Histogram() for outcome in _OUTCOMES}

    def request_ended(self, record: RequestRecord) -> None:
        result, status = record.result, record.status
        outcome = str(result["state"])
        self._requests[outcome][str(result["fail_reason"] or result["finish_reason"])] += 1
        if "timings" in result:
            self._duration[outcome].add(result["timings"]["total_s"])
            if "ttft_s" in result["timings"]:
                self._ttft.add(result["timings"]["ttft_s"])
        self._generated_tokens += status.get("tokens_received", 0)
        if "usage" in result:
            self._prompt_tokens += result["usage"]["prompt_tokens"]
            self._cached_tokens += result["usage"]["cached_tokens"]

    def restarted(self, cause: str) -> None:
        self._restarts[cause] += 1

    def signal_emitted(self, tool_name: str) -> None:
        self._signals[tool_name] += 1

    def snapshot(self) -> WorkerTotals:
        return {
            "requests": {outcome: dict(counter) for outcome, counter in self._requests.items()},
            "restarts": dict(self._restarts),
            "signals": dict(self._signals),
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "generated_tokens": self._generated_tokens,
            "ttft": self._ttft.snapshot(),
            "duration": {
                outcome: histogram.snapshot() for outcome, histogram in self._duration.items()
            },
        }


class _Histogram:
    """Durations, counted by range."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def snapshot(self) -> Durations:
        return {"bounds_s": list(BOUNDS_S), "counts": list(self._counts), "sum_s": self._sum_s}
