"""Prometheus metrics over any number of workers; needs the extra `metrics`.

    collector = WorkerCollector([planner, coder])
    prometheus_client.REGISTRY.register(collector)

Nothing is counted here: each scrape asks the workers for what they have counted themselves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from itertools import accumulate

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is missing: pip install 'llama-worker[metrics]'", name=error.name
    ) from error

from llama_worker.errors import ConfigError, WorkerClosed
from llama_worker.types import Durations, WorkerDebugInfo, WorkerState, WorkerStatus
from llama_worker.worker import LlamaWorker

_ANSWER_S = 10.0  # workers answer within milliseconds; a scrape that gets no answer fails


class WorkerCollector(Collector):
    """Workers may come and go: add each new one; closed and lost ones vanish by themselves.
    Thread-safe."""

    def __init__(self, workers: Iterable[LlamaWorker] = ()) -> None:
        self._lock = threading.Lock()
        self._workers: dict[
            str, weakref.ref[LlamaWorker]
        ] = {}  # a worker that its host forgets must end
        for worker in workers:
            self.add(worker)

    def add(self, worker: LlamaWorker) -> None:
        """Include the worker from now on. Raises ConfigError where another open worker has its
        name."""
        name = worker.get_worker_status().get(timeout=_ANSWER_S)["name"]
        with self._lock:
            known = self._workers.get(name)
            other = known() if known is not None else None
            if other is not None and other is not worker and _is_open(other):
                raise ConfigError(
                    f"another worker is named {name!r}, too; metrics need a name of its own "
                    "for each"
                )
            self._workers[name] = weakref.ref(worker)

    def describe(self) -> Iterable[Metric]:
        """Every family, without samples; asks no worker."""
        return _Families()

    def collect(self) -> Iterable[Metric]:
        """Every family, with the samples of all open workers. Blocks for milliseconds."""
        families = _Families()
        for status, debug in self._answers():
            families.add(status, debug)
        return families

    def _answers(self) -> Iterator[tuple[WorkerStatus, WorkerDebugInfo]]:
        with self._lock:
            workers = [worker for ref in self._workers.values() if (worker := ref()) is not None]
        for worker in workers:
            try:
                status, debug = worker.get_worker_status(), worker.get_debug_info()
                yield status.get(timeout=_ANSWER_S), debug.get(timeout=_ANSWER_S)
            except WorkerClosed:
                self._forget(worker)

    def _forget(self, closed: LlamaWorker) -> None:
        with self._lock:
            self._workers = {
                name: ref for name, ref in self._workers.items() if ref() not in (None, closed)
            }


class _Families:
    """One scrape's families."""

    def __init__(self) -> None:
        self._state = GaugeMetricFamily(
            "llama_worker_state",
            "1 for the state that the worker is in, else 0.",
            labels=["worker", "state"],
        )
        self._slots = GaugeMetricFamily(
            "llama_worker_slots", "Slots of the worker.", labels=["worker"]
        )
        self._slots_used = GaugeMetricFamily(
            "llama_worker_slots_used",
            "Slots that hold a request which has not ended.",
            labels=["worker"],
        )
        self._requests = CounterMetricFamily(
            "llama_worker_requests",
            (
                "Ended requests; the reason is the fail reason, or the finish reason where "
                "nothing failed."
            ),
            labels=["worker", "outcome", "reason"],
        )
        self._signals = CounterMetricFamily(
            "llama_worker_exit_signals",
            "Calls of exit tools, as they come.",
            labels=["worker", "tool"],
        )
        self._prompt_tokens = CounterMetricFamily(
            "llama_worker_prompt_tokens",
            "Prompt tokens of requests whose server told its usage, cached ones included.",
            labels=["worker"],
        )
        self._cached_tokens = CounterMetricFamily(
            "llama_worker_prompt_cached_tokens",
            "Those of them that the server had in its cache.",
            labels=["worker"],
        )
        self._generated_tokens = CounterMetricFamily(
            "llama_worker_generated_tokens",
            "Tokens generated by requests that have ended.",
            labels=["worker"],
        )
        self._ttft = HistogramMetricFamily(
            "llama_worker_time_to_first_token_seconds",
            "From admission to the first token, of ended requests that got one.",
            labels=["worker"],
        )
        self._duration = HistogramMetricFamily(
            "llama_worker_request_duration_seconds",
            "From admission to the end.",
            labels=["worker", "outcome"],
        )
        self._since_progress = GaugeMetricFamily(
            "llama_worker_since_progress_seconds",
            "The longest that a request in flight has been without progress; 0 where none is.",
            labels=["worker"],
        )
        self._cache_ratio = GaugeMetricFamily(
            "llama_worker_prompt_cache_ratio",
            "Share of all prompt tokens so far that the server had in its cache.",
            labels=["worker"],
        )
        self._restarts = CounterMetricFamily(
            "llama_worker_restarts", "Restarts of the server.", labels=["worker", "reason"]
        )

    def __iter__(self) -> Iterator[Metric]:
        return (family for family in vars(self).values() if isinstance(family, Metric))

    def add(self, status: WorkerStatus, debug: WorkerDebugInfo) -> None:
        """One worker's samples."""
        name, totals = status["name"], debug["totals"]
        for state in WorkerState:
            self._state.add_metric([name, state], float(status["state"] is state))
        self._slots.add_metric([name], status["slots_total"])
        self._slots_used.add_metric([name], status["slots_used"])
        for outcome, reasons in totals["requests"].items():
            for reason, count in reasons.items():
                self._requests.add_metric([name, outcome, reason], count)
        for tool, count in totals["signals"].items():
            self._signals.add_metric([name, tool], count)
        self._prompt_tokens.add_metric([name], totals["prompt_tokens"])
        self._cached_tokens.add_metric([name], totals["cached_tokens"])
        prompt, cached = totals["prompt_tokens"], totals["cached_tokens"]
        self._cache_ratio.add_metric([name], cached / prompt if prompt else 0.0)
        self._since_progress.add_metric([name], debug["seconds_since_progress"] or 0.0)
        self._generated_tokens.add_metric([name], totals["generated_tokens"])
        self._ttft.add_metric([name], _buckets(totals["ttft"]), totals["ttft"]["sum_s"])
        for outcome, durations in totals["duration"].items():
            self._duration.add_metric([name, outcome], _buckets(durations), durations["sum_s"])
        for reason, count in totals["restarts"].items():
            self._restarts.add_metric([name, reason], count)


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    bounds = [*map(floatToGoString, durations["bounds_s"]), "+Inf"]
    return list(zip(bounds, accumulate(durations["counts"]), strict=True))


def _is_open(worker: LlamaWorker) -> bool:
    try:
        worker.get_worker_status()
    except WorkerClosed:
        return False
    return True
