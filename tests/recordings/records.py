"""A recording: what every request got, in the order in which it came, and what `/slots`, /proc and
the log said. Read and written as JSON Lines, one record a line."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.recordings.situations import After, Situation, Step


@dataclass(frozen=True, slots=True)
class Record:
    """`who`: a request's name, "slots", "log", "proc" or "server"."""

    who: str
    what: str
    at: float = 0.0

    @property
    def kind(self) -> str:
        return self.what.partition(" ")[0]


class BodyReader:
    """The body of one request, as it comes: what its records are called."""

    def __init__(self) -> None:
        self._partial = b""
        self._processed = -1
        self.total = 0  # tokens of its prompt
        self.cached = 0

    def feed(self, data: bytes) -> Iterator[str]:
        *blocks, self._partial = (self._partial + data).split(b"\n\n")
        for block in blocks:
            yield from self._of(block.decode())

    def _of(self, block: str) -> Iterator[str]:
        field_name, _, value = block.partition(":")
        if not field_name:
            yield "ping"
        elif value.strip() == "[DONE]":
            yield "done"
        elif field_name == "error":
            yield f"error {json.loads(value).get('code')} in a field of its own"
        else:
            yield from self._of_chunk(json.loads(value))

    def _of_chunk(self, chunk: Mapping[str, Any]) -> Iterator[str]:
        if "error" in chunk:
            yield error_name(chunk["error"])
            return
        progress = chunk.get("prompt_progress")
        if progress is not None:
            self.total, self.cached = progress["total"], progress["cache"]
            again = " again" if progress["processed"] == self._processed else ""
            self._processed = progress["processed"]
            yield f"report {self._processed} of {self.total}{again}"
        for choice in chunk.get("choices", ()):
            yield from _of_delta(choice.get("delta", {}), has_progress=progress is not None)
            if choice.get("finish_reason"):
                yield f"finish {choice['finish_reason']}"
        if chunk.get("usage") and not chunk.get("choices"):
            yield "usage"


def _of_delta(delta: Mapping[str, Any], *, has_progress: bool) -> Iterator[str]:
    if "role" in delta and not delta.get("content") and not has_progress:
        yield "role"
    if delta.get("content") or delta.get("reasoning_content"):
        yield "token"
    for call in delta.get("tool_calls", ()):
        yield "call" if call.get("function", {}).get("name") else "arguments"


def error_name(error: Mapping[str, Any]) -> str:
    return f"error {error.get('code')} {error.get('type')}"


def slots_line(slots: Sequence[Mapping[str, Any]]) -> str:
    """What `/slots` shows of each slot."""
    return "; ".join(f"{slot['id']} {_slot_state(slot)}" for slot in slots)


def _slot_state(slot: Mapping[str, Any]) -> str:
    if not slot["is_processing"]:
        return "idle"
    next_token = slot.get("next_token") or {}
    decoded = (next_token[0] if isinstance(next_token, list) else next_token).get("n_decoded", 0)
    return "writes" if decoded else f"reads, {slot.get('n_prompt_tokens_processed')} processed"


def in_order_of_batches(records: Sequence[Record], within_s: float) -> list[Record]:
    """What the client saw, with a request's first report behind the results of the batch before.

    The server sends it right after those results, by another thread: the client may hear of it
    sooner, by much less than a batch takes.
    """
    ordered = list(records)
    for first in _first_reports(records):
        begin = end = ordered.index(first)
        while begin and (ordered[begin - 1].who, ordered[begin - 1].kind) == (first.who, "headers"):
            begin -= 1
        for at, later in enumerate(ordered[end + 1 :], end + 1):
            if later.who == first.who or later.at - first.at > within_s:
                break
            if later.kind in ("report", "token"):
                end = at
        moved = [each for each in ordered[begin : end + 1] if each.who == first.who]
        ordered[begin : end + 1] = [
            *(each for each in ordered[begin : end + 1] if each.who != first.who),
            *moved,
        ]
    return ordered


def _first_reports(records: Sequence[Record]) -> list[Record]:
    seen: dict[str, Record] = {}
    for record in records:
        if record.kind == "report":
            seen.setdefault(record.who, record)
    return list(seen.values())


@dataclass(slots=True)
class Recording:
    """Of one situation on one server."""

    situation: str
    prompts: dict[str, list[int]] = field(default_factory=dict)  # tokens, and how many were cached
    records: list[Record] = field(default_factory=list)

    def of(self, who: str) -> list[str]:
        return [record.what for record in self.records if record.who == who]

    def write(self, path: Path) -> None:
        """Runs of the same record of one request are one line; `at` is a share of the whole
        time."""
        whole = max((record.at for record in self.records), default=0.0) or 1.0
        lines = [json.dumps({"situation": self.situation, "prompts": self.prompts})]
        at = 0
        while at < len(self.records):
            first = self.records[at]
            count = 1
            while at + count < len(self.records) and _same(first, self.records[at + count]):
                count += 1
            line: dict[str, Any] = {"at": round(first.at / whole, 2), first.who: first.what}
            if count > 1:
                line["times"] = count
            lines.append(json.dumps(line))
            at += count
        path.write_text("\n".join(lines) + "\n")


def _same(one: Record, other: Record) -> bool:
    return (one.who, one.what) == (other.who, other.what)


def read(path: Path) -> Recording:
    head, *lines = map(json.loads, path.read_text().splitlines())
    recording = Recording(head["situation"], head["prompts"])
    for line in lines:
        at, times = line.pop("at"), line.pop("times", 1)
        ((who, what),) = line.items()
        recording.records += [Record(who, what, at)] * times
    return recording


def rate(ticks_per_s: float) -> str:
    """Whether the server's CPU time shows work."""
    return "works" if ticks_per_s >= 5.0 else "rests"


class Director:
    """Writes down what comes, and says which steps of the situation are due."""

    def __init__(self, situation: Situation) -> None:
        self.recording = Recording(situation.name)
        self._to_do = list(situation.steps)
        self._counts: dict[tuple[str, str], int] = {}

    def note(self, who: str, what: str, at: float) -> None:
        record = Record(who, what, at)
        self.recording.records.append(record)
        key = (who, record.kind)
        self._counts[key] = self._counts.get(key, 0) + 1

    def due(self) -> Iterator[Step]:
        """The next steps, as far as their moments have come."""
        while self._to_do and self._has_come(self._to_do[0].after):
            yield self._to_do.pop(0)

    def _has_come(self, moment: After | None) -> bool:
        if moment is None:
            return True
        return self._counts.get((moment.request, moment.kind), 0) >= moment.count


def path_of(folder: Path, situation: Situation) -> Path:
    name = "".join(letter for letter in situation.name if letter.isalnum() or letter == " ")
    return folder / f"{name.replace(' ', '-')}.jsonl"
