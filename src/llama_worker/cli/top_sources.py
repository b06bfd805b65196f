"""Whom `llama-worker top` asks: a host's metrics endpoint, or the servers of a fleet file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol
from urllib.parse import urlsplit

from llama_worker import LlamaWorkerError, WorkerConfig, load_config
from llama_worker.cli.exits import Problem
from llama_worker.cli.top_rows import Answers, MetricsHistory, Row, Sample, ServersHistory
from llama_worker.runtime.session import Endpoint, ask, json_of

_ANSWER_S = 2.0  # a server answers within 10 ms, also in the midst of a long batch (b11434)
_METRICS_S = 10.0  # a host asks its workers first
_MAX_ASKED = 16  # side by side


class Source(Protocol):
    """Where rows come from. Not thread-safe."""

    def rows(self) -> list[Row]:
        """Ask once more. Blocks for seconds at most; raises Problem where nobody answers at all."""
        ...


class MetricsSource:
    """The Prometheus endpoint of a running host."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._history = MetricsHistory()

    def rows(self) -> list[Row]:
        todo = "give the URL at which the host serves its metrics, such as http://127.0.0.1:8090/metrics"
        url = urlsplit(self._url)
        target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
        endpoint = Endpoint(base_url=f"{url.scheme}://{url.netloc}", connect_timeout_s=_METRICS_S)
        try:
            status, body = ask(endpoint, "GET", target, timeout_s=_METRICS_S)
        except (OSError, ValueError) as error:
            raise Problem(
                "no_metrics", f"{self._url} does not answer: {_why(error)}", todo
            ) from error
        if status != 200:
            raise Problem("no_metrics", f"{self._url} answers {status}", todo)
        text = body.decode(errors="replace")
        rows = self._history.rows(_samples(text, self._url), time.monotonic())
        if not rows:
            todo = (
                "the host has to register a WorkerCollector (docs/metrics.md), and to have a worker"
            )
            raise Problem("no_metrics", f"{self._url} tells of no worker", todo)
        return rows


def _samples(text: str, url: str) -> Iterator[Sample]:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        todo = "pip install 'llama-worker[metrics]'"
        raise Problem("no_extra", f"{error.name} is missing, which reads metrics", todo) from error
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
    except ValueError as error:
        todo = "give the URL of the metrics, mostly one that ends in /metrics"
        raise Problem("no_metrics", f"{url} answers something else than metrics", todo) from error


class FleetSource:
    """The servers of a fleet file, asked directly: their workers live in another process, which is
    left alone."""

    def __init__(self, path: str) -> None:
        """Raises Problem for a file that cannot be read or is no fleet."""
        try:
            self._fleet = load_config(path)
        except OSError as error:
            todo = "give a fleet file (docs/fleet.md), or --metrics URL"
            raise Problem("no_fleet", f"{path}: {error.strerror}", todo) from error
        except LlamaWorkerError as error:
            raise Problem(
                "no_fleet", str(error), "mend the file; docs/fleet.md describes it"
            ) from error
        self._history = ServersHistory()

    def rows(self) -> list[Row]:
        """See Source; a server that does not answer is a row, too."""
        with ThreadPoolExecutor(min(_MAX_ASKED, len(self._fleet))) as pool:
            answers = list(pool.map(_ask, self._fleet.values()))
        return self._history.rows(answers, time.monotonic())


def _ask(config: WorkerConfig) -> Answers:
    endpoint = Endpoint.of(config)
    slots, metrics = None, None
    try:
        health: int | str = ask(endpoint, "GET", "/health", timeout_s=_ANSWER_S)[0]
        if health == 200:
            slots = json_of(_body(endpoint, "/slots"))
            if not isinstance(slots, list):
                slots, metrics = None, _body(endpoint, "/metrics").decode(errors="replace") or None
    except (OSError, ValueError) as error:
        health = _why(error)
    return Answers(
        worker=config.name,
        slots_configured=config.slots,
        health=health,
        slots=slots,
        metrics=metrics,
    )


def _body(endpoint: Endpoint, target: str) -> bytes:
    """Empty where the server has none to give."""
    status, body = ask(endpoint, "GET", target, timeout_s=_ANSWER_S)
    return body if status == 200 else b""


def _why(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "no answer in time"
        case ConnectionRefusedError():
            return "connection refused"
        case OSError():
            return "no connection"
        case _:
            return str(error)
