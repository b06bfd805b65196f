"""Makes the rows of `llama-worker top` from the answers of a metrics endpoint or servers. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct, field

from llama_worker.cli.text import one_line, printable
from llama_worker.server.slots import Slot

# a worker counts a request's tokens when it ends: in a shorter window the rate would flicker
_RATE_WINDOW_S = 60.0
UNKNOWN = "-"


class Row(Struct, frozen=True, kw_only=True):
    """One worker; a field is None if the source does not know its value."""

    worker: str
    state: str
    slots_used: int | None = None
    slots_total: int | None = None
    tokens_per_s: float | None = None
    completed: int | None = None
    failed: int | None = None
    canceled: int | None = None
    restarts: int | None = None
    last_reason: str = ""


class Column(Struct, frozen=True):
    """A column of the table. `is_text`: aligned left; `is_optional`: left out of a live table if no
    row has a value."""

    heading: str
    cell: Callable[[Row], str]
    is_text: bool = False
    is_optional: bool = False


COLUMNS = (
    Column("worker", lambda row: one_line(row.worker, 60) or UNKNOWN, is_text=True),
    Column("state", lambda row: printable(row.state), is_text=True),
    Column("slots", lambda row: f"{_number(row.slots_used)}/{_number(row.slots_total)}"),
    Column("tok/s", lambda row: _number(row.tokens_per_s, ".1f")),
    Column("done", lambda row: _number(row.completed), is_optional=True),
    Column("failed", lambda row: _number(row.failed), is_optional=True),
    Column("cancel", lambda row: _number(row.canceled), is_optional=True),
    Column("restart", lambda row: _number(row.restarts), is_optional=True),
    Column("last reason", lambda row: one_line(row.last_reason, 60) or UNKNOWN, is_text=True),
)


def plain_table(rows: Sequence[Row]) -> str:
    """All columns as text, for pipes."""
    columns = [[column.heading, *map(column.cell, rows)] for column in COLUMNS]
    padded = [[cell.ljust(max(map(len, cells))) for cell in cells] for cells in columns]
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def _number(value: float | None, form: str = "") -> str:
    return UNKNOWN if value is None else format(value, form)


# ---------------------------------------------------------------- a host's metrics endpoint


class _Scrape(Struct):
    """One worker's samples in one scrape."""

    state: str = UNKNOWN
    slots: int | None = None
    slots_used: int | None = None
    tokens: float = 0.0
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # (outcome, reason)
    restarts: Counter[str] = field(default_factory=Counter)

    def reasons(self) -> Counter[str]:
        """How often requests failed and servers were restarted, by reason."""
        why = Counter({f"restart: {reason}": count for reason, count in self.restarts.items()})
        for (outcome, reason), count in self.requests.items():
            why[reason] += count * (outcome == "failed")
        return +why


Sample = tuple[str, Mapping[str, str], float]
"""A sample of the Prometheus text format: name, labels, value."""


class MetricsHistory:
    """Makes rows from the scrapes of one endpoint, and keeps what it needs of earlier ones."""

    def __init__(self) -> None:
        self._workers: dict[str, _WorkerHistory] = {}

    def rows(self, samples: Iterable[Sample], at: float) -> list[Row]:
        """The workers after this scrape; `at` is monotonic seconds."""
        scrapes, known = _by_worker(samples), self._workers
        self._workers = {name: known.get(name, _WorkerHistory()) for name in sorted(scrapes)}
        return [each.row(name, scrapes[name], at) for name, each in self._workers.items()]


class _WorkerHistory:
    """One worker's earlier scrapes. Tokens per second are those of the last minute, or since the
    scrape before."""

    def __init__(self) -> None:
        self._before: _Scrape | None = None
        self._last_reason = ""
        self._tokens: deque[tuple[float, float]] = deque()

    def row(self, name: str, now: _Scrape, at: float) -> Row:
        self._last_reason = _new_reason(now, self._before) or self._last_reason
        self._before = now
        outcomes = Counter[str]()
        for (outcome, _), count in now.requests.items():
            outcomes[outcome] += count
        return Row(
            worker=name,
            state=now.state,
            slots_used=now.slots_used,
            slots_total=now.slots,
            tokens_per_s=self._tokens_per_s(now.tokens, at),
            completed=outcomes["completed"],
            failed=outcomes["failed"],
            canceled=outcomes["canceled"],
            restarts=now.restarts.total(),
            last_reason=self._last_reason,
        )

    def _tokens_per_s(self, count: float, at: float) -> float | None:
        if self._tokens and count < self._tokens[-1][1]:
            self._tokens.clear()  # the host was restarted: it counts from zero
        self._tokens.append((at, count))
        while len(self._tokens) > 2 and at - self._tokens[0][0] > _RATE_WINDOW_S:
            self._tokens.popleft()
        began_at, first = self._tokens[0]
        return (count - first) / (at - began_at) if at > began_at else None


def _by_worker(samples: Iterable[Sample]) -> dict[str, _Scrape]:
    found: dict[str, _Scrape] = {}
    for name, labels, value in samples:
        is_ours = name.startswith("llama_worker_") and "worker" in labels
        if not is_ours or not math.isfinite(value):
            continue
        worker = found.setdefault(labels["worker"], _Scrape())
        match name.removeprefix("llama_worker_"):
            case "state" if value:
                worker.state = labels.get("state", UNKNOWN)
            case "slots":
                worker.slots = int(value)
            case "slots_used":
                worker.slots_used = int(value)
            case "generated_tokens_total":
                worker.tokens = value
            case "requests_total":
                worker.requests[labels.get("outcome", ""), labels.get("reason", "")] = int(value)
            case "restarts_total":
                worker.restarts[labels.get("reason", "")] = int(value)
    return found


def _new_reason(now: _Scrape, before: _Scrape | None) -> str:
    """The most frequent new reason for a failure or a restart since the scrape before; on the first
    scrape, the reason if there is only one."""
    if before is None:
        reasons = now.reasons()
        return next(iter(reasons)) if len(reasons) == 1 else ""
    grown = now.reasons() - before.reasons()
    return max(grown, key=lambda reason: grown[reason], default="")


# ---------------------------------------------------------------- servers themselves


class Answers(Struct, frozen=True, kw_only=True):
    """What a server answered. `health`: the HTTP status of /health, or why there was none; `slots`:
    None if it does not tell."""

    worker: str
    slots_configured: int
    health: int | str
    slots: tuple[Slot, ...] | None = None


_Tokens = Mapping[tuple[int, int | None], int]  # generated, by slot and task


class ServersHistory:
    """Makes rows from the answers of the same servers, and keeps each server's last slots."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, _Tokens]] = {}

    def rows(self, answers: Iterable[Answers], at: float) -> list[Row]:
        """The workers after this round; `at` is monotonic seconds."""
        return [self._row(answer, at) for answer in answers]

    def _row(self, answer: Answers, at: float) -> Row:
        state, reason = _health(answer.health)
        used, total = None, answer.slots_configured
        tokens: _Tokens = {}
        if answer.slots is not None:
            used, total = sum(slot.is_processing for slot in answer.slots), len(answer.slots)
            tokens = {(slot.slot_id, slot.task): slot.decoded_tokens for slot in answer.slots}
            if total != answer.slots_configured:
                reason = f"configured slots: {answer.slots_configured}"
        return Row(
            worker=answer.worker,
            state=state,
            slots_used=used,
            slots_total=total,
            tokens_per_s=self._rate(answer.worker, tokens, at),
            last_reason=reason,
        )

    def _rate(self, worker: str, tokens: _Tokens, at: float) -> float | None:
        if not tokens:
            return None
        before = self._before.get(worker)
        self._before[worker] = (at, tokens)
        if before is None or at <= before[0]:
            return None
        # before b10453 a slot that reads a new task's prompt shows the tokens of the task before
        grown = sum(max(0, count - before[1].get(key, count)) for key, count in tokens.items())
        return grown / (at - before[0])


def _health(health: int | str) -> tuple[str, str]:
    """(state, last reason)."""
    match health:
        case 200:
            return "ready", ""
        case 503:
            return "loading", ""
        case int():
            return "unhealthy", f"/health: {health}"
        case _:
            return "down", health
