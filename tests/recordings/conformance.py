"""What two recordings of one situation must have in common, however fast their machines were.

- Each request: what it got, in order and number. How many tokens came before its client closed,
  or its server was told to end, depends on the machine: there any number is one.
  So does how many batches pass until a close is noticed: where a request was closed, any number of
  repeated reports is one.
- Each batch in which somebody read a prompt: what it gave to each request, as a multiset. Within a
  batch the order in which clients hear of it is open. Where all only generate nothing is compared
  across requests: their streams are independent.
- What `/slots` said, in order; whether the process worked, by its CPU time; the slots that the
  log names, in order; how the process ended.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby

from tests.recordings.records import Record, Recording

OTHERS = ("slots", "log", "proc", "server")  # who are no requests
# What of a situation the simulated server does not do as the real one, and why.
LEFT_OUT: Mapping[tuple[str, str], str] = {
    ("too long for the slot", "log"): "a request that is refused is never in a slot of the model: "
    "nobody sees that of the real one",
    ("SIGTERM with open streams", "log"): "the real server's log ends with its main loop, before "
    "the slots are free",
    ("SIGTERM, and the client closes", "log"): "the same",
}


def essence(recording: Recording) -> dict[str, list[str]]:
    """What is compared, by what it is about: a request, one of OTHERS, or "batches"."""
    records = recording.records
    names = sorted({each.who for each in records}.difference(OTHERS))
    is_any_closed = any(each.kind == "closed" for each in records)
    found = {
        name: _stream([each.what for each in records if each.who == name], is_any_closed)
        for name in names
    }
    for other in OTHERS:
        found[other] = [each.what for each in records if each.who == other]
    batches = list(_batches([each for each in records if each.who in names]))
    found["batches"] = [batch for batch, _ in groupby(batches)] if is_any_closed else batches
    return {about: lines for about, lines in found.items() if lines}


def _stream(records: list[str], is_any_closed: bool) -> list[str]:
    lines = []
    for what, run in groupby(records):
        count = len(list(run))
        if what == "token":
            lines.append("tokens" if records[-1] in ("closed", "cut") else f"{count} tokens")
        elif is_any_closed and what.endswith("again"):
            lines.append(what)
        else:
            lines += [what] * count
    return lines


def _batches(records: Iterable[Record]) -> Iterable[str]:
    """A batch gives a request one report, one token, or its last report and first token. What
    would be a second begins the next."""
    batch: dict[str, list[str]] = {}
    for record in records:
        if record.kind not in ("report", "token"):
            continue
        got = batch.setdefault(record.who, [])
        if got and (record.kind == "report" or got[-1] == "token"):
            yield from _shown(batch)
            batch = {record.who: []}
        batch[record.who].append(record.what)
    yield from _shown(batch)


def _shown(batch: Mapping[str, list[str]]) -> Iterable[str]:
    """Nothing of a batch without a report. A first report comes ahead of its batch: what else came
    then is a matter of time."""
    reports = [what for got in batch.values() for what in got if what.startswith("report")]
    if reports:
        yield "; ".join(f"{who}: {', '.join(got)}" for who, got in sorted(batch.items()) if got)


def differences(expected: dict[str, list[str]], found: dict[str, list[str]]) -> list[str]:
    """For a person: what is not the same, about what, from where on."""
    lines = []
    for about in sorted(expected.keys() | found.keys()):
        one, other = expected.get(about, []), found.get(about, [])
        if one != other:
            at = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)),
            )
            lines.append(f"{about}, line {at + 1}:")
            lines += [f"  - {line}" for line in one[at : at + 3] or ["(nothing more)"]]
            lines += [f"  + {line}" for line in other[at : at + 3] or ["(nothing more)"]]
    return lines
