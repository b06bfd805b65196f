"""`llama-worker top`: shows workers in a live table, from a host's metrics endpoint or from the
servers of a fleet file."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from llama_worker import LlamaWorkerError, WorkerConfig
from llama_worker.cli import exits, top_rows
from llama_worker.cli.exits import Problem
from llama_worker.cli.terminal import Interrupts, console_for
from llama_worker.cli.text import printable
from llama_worker.config.file import read_fleet
from llama_worker.config.settings import Endpoint
from llama_worker.config.validation import json_of
from llama_worker.runtime.http.session import ask
from llama_worker.server.slots import parse_slots

_STATE_STYLES = {
    "ready": "green",
    "running": "yellow",
    "loading": "yellow",
    "failed": "red",
    "down": "red",
}
_ANSWER_S = 2.0  # a server answers far sooner, even during a long batch (b11434)
_METRICS_S = 10.0  # for each answer the host asks its workers
_METRICS_BYTES = 64 * 1024 * 1024  # at most
_MAX_ASKED = 16  # servers, at the same time
_QUIT = (b"q", b"Q")
_ENDS = "q or Ctrl-C ends"


def watch(source: MetricsSource | FleetSource, *, once: bool, interval_s: float) -> int:
    """Show the workers until q, Ctrl-C or a signal; returns the exit code. Main thread only."""
    console = console_for(sys.stdout)
    with Interrupts() as interrupts, contextlib.suppress(KeyboardInterrupt), interrupts.raising():
        rows = source.rows()
        if not console.is_terminal or console.is_dumb_terminal:
            print(top_rows.plain_table(rows))
        elif once:
            console.print(_table(rows, console.width, caption=""))
        else:
            _live(source, rows, console, interval_s)
    return exits.DONE if interrupts.ended_by is None else interrupts.exit_code


def _live(
    source: MetricsSource | FleetSource,
    rows: Sequence[top_rows.Row],
    console: Console,
    interval_s: float,
) -> None:
    problem: Problem | None = None
    with _single_keys(), Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
        while True:
            caption = (
                _ENDS if problem is None else f"{printable(problem.what)} (showing old numbers)"
            )
            live.update(_table(rows, console.width, caption), refresh=True)
            if _quits(interval_s):
                return
            try:
                rows, problem = source.rows(), None
            except Problem as new_problem:  # the host may come back
                problem = new_problem


def _quits(wait_s: float) -> bool:
    """Whether q is pressed, or the terminal closed, within `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    keys = [sys.stdin] if sys.stdin.isatty() else []
    while (left_s := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(keys, (), (), left_s)
        if ready:
            pressed = os.read(sys.stdin.fileno(), 64)
            if not pressed or pressed[:1] in _QUIT:
                return True
    return False


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """In this block keys are read without Enter, and not echoed."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        # TCSADRAIN keeps the keys that were pressed during the first query
        tty.setcbreak(sys.stdin, termios.TCSADRAIN)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _table(rows: Sequence[top_rows.Row], width: int, caption: str) -> Table:
    below = Text(caption) if caption else None
    table = Table(box=None, padding=(0, 1, 0, 0), caption=below, caption_justify="left")
    columns = [
        column
        for column in top_rows.COLUMNS
        if not column.is_optional or any(column.cell(row) != top_rows.UNKNOWN for row in rows)
    ]
    for column in columns:
        is_reason = column.heading == "last reason"
        table.add_column(
            column.heading,
            justify="left" if column.is_text else "right",
            no_wrap=not is_reason,
            # a long name is cut, so that all columns fit
            max_width=width // 4 if column.heading == "worker" else None,
            overflow="fold" if is_reason else "ellipsis",
        )
    for row in rows:
        styles = {"state": _STATE_STYLES.get(row.state, "")}
        table.add_row(
            *(Text(column.cell(row), styles.get(column.heading, "")) for column in columns)
        )
    return table


# ---------------------------------------------------------------- sources


class MetricsSource:
    """The Prometheus endpoint of a running host. Not thread-safe."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._history = top_rows.MetricsHistory()

    def rows(self) -> list[top_rows.Row]:
        """Query the endpoint. Blocks for seconds at most. Raises Problem if there is no answer."""
        todo = "give the URL of the host's metrics, such as http://127.0.0.1:8090/metrics"
        try:
            url = urlsplit(self._url)
            base_url = f"{url.scheme}://{url.netloc}"
            target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
            endpoint = Endpoint(base_url=base_url, connect_timeout_s=_METRICS_S)
            status, body = ask(
                endpoint, "GET", target, timeout_s=_METRICS_S, max_bytes=_METRICS_BYTES
            )
        except (OSError, ValueError) as error:
            raise Problem(
                "no_metrics", f"{self._url} does not answer: {_why(error)}", todo
            ) from error
        if status != 200:
            raise Problem("no_metrics", f"{self._url} answers {status}", todo)
        text = body.decode(errors="replace")
        rows = self._history.rows(_samples(text, self._url), time.monotonic())
        if not rows:
            todo = "the host must register a WorkerCollector (docs/metrics.md) and have a worker"
            raise Problem("no_metrics", f"{self._url} has no worker", todo)
        return rows


def _samples(text: str, url: str) -> Iterator[top_rows.Sample]:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        todo = "pip install 'llama-worker[metrics]'"
        raise Problem("no_extra", f"{error.name}, which reads metrics, is missing", todo) from error
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
    except (ValueError, IndexError) as error:  # the parser's IndexError: a label without a name
        todo = "give the URL of the metrics; most end in /metrics"
        raise Problem("no_metrics", f"{url} does not serve metrics", todo) from error


class FleetSource:
    """The servers of a fleet file, asked directly: their workers live in another process, which is
    not contacted. Not thread-safe."""

    def __init__(self, path: str) -> None:
        """Raises Problem if the file cannot be read or is not a fleet file."""
        try:
            self._fleet = read_fleet(path)
        except OSError as error:
            todo = "give a fleet file (docs/fleet.md), or --metrics URL"
            raise Problem("no_fleet", f"{path}: {error.strerror}", todo) from error
        except LlamaWorkerError as error:
            raise Problem(
                "no_fleet", str(error), "correct the file; docs/fleet.md describes it"
            ) from error
        self._history = top_rows.ServersHistory()

    def rows(self) -> list[top_rows.Row]:
        """Query each server. Blocks for seconds at most. A server that does not answer has a row,
        too."""
        with ThreadPoolExecutor(min(_MAX_ASKED, len(self._fleet))) as pool:
            answers = list(pool.map(_ask, self._fleet.values()))
        return self._history.rows(answers, time.monotonic())


def _ask(config: WorkerConfig) -> top_rows.Answers:
    endpoint = Endpoint.of(config)
    slots = None
    try:
        health: int | str = ask(endpoint, "GET", "/health", timeout_s=_ANSWER_S)[0]
    except (OSError, ValueError) as error:
        health = _why(error)
    if health == 200:
        # builds before b10453 answer /slots only between two batches
        with contextlib.suppress(OSError, ValueError):
            status, body = ask(endpoint, "GET", "/slots", timeout_s=_ANSWER_S)
            slots = parse_slots(json_of(body)) if status == 200 else None
    return top_rows.Answers(
        worker=config.name, slots_configured=config.slots, health=health, slots=slots
    )


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
