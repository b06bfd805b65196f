"""What a worker counts over its whole life, for metrics. Pure; not thread-safe."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from llama_worker.request.table import RequestRecord
from llama_worker.types.request import RequestState
from llama_worker.types.worker import Durations, WorkerTotals

BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_OUTCOMES = (RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELED)


class Totals:
    """It belongs to the WorkerActor. Counters are monotonic."""

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
