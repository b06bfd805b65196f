"""What builds of llama-server do, as far as it matters for telling hung from slow: the table of
docs/servers.md.

    python -m tests.recordings.builds [BUILD...]

Measures these builds anew, each built where it is missing; then prints the table of all that were
ever measured (builds.jsonl, beside this file).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.ports import held_ports
from tests.recordings.on_server import probe
from tests.recordings.record import settled
from tests.recordings.records import Recording
from tests.recordings.situations import SITUATIONS
from tests.server.thin_model import write_thin_model
from tools.build_server import built_server, planned
from tools.found import find_model

FACTS = Path(__file__).with_name("builds.jsonl")
_SIDE_BY_SIDE = "two long prompts side by side"
_HALF_READ = "a prompt that comes while another is half read"
_STARVED = "a higher slot is free while a lower one reads"
_QUEUED = "more requests than slots"
_QUIET = "without progress reports"
_TOLD_TO_END = "SIGTERM with open streams"


def main() -> None:
    known = {int(facts["build"]): facts for facts in _stored()}
    with tempfile.TemporaryDirectory() as scratch, held_ports() as free_port:
        model = Path(scratch) / "thin.gguf"
        write_thin_model(Path(find_model()), model)
        for number in map(int, sys.argv[1:]):
            executable = built_server(planned(os.environ, number))
            recordings = {
                situation.name: settled(
                    situation, executable, str(model), free_port(), Path(scratch) / "log"
                )
                for situation in SITUATIONS
            }
            shown = probe(executable, str(model), free_port())
            known[number] = {"build": str(number), **_facts(executable, recordings, shown)}
            lines = [json.dumps(known[each]) for each in sorted(known)]
            FACTS.write_text("\n".join(lines) + "\n")
    print("\n".join(table()))


def table() -> list[str]:
    """In Markdown: a row for what is measured, a column for each build."""
    facts = _stored()
    rows = [["", *(f"b{each['build']}" for each in facts)]]
    rows.append(["---"] * len(rows[0]))
    for name in list(facts[-1])[1:]:
        rows.append([name, *(each.get(name, "") for each in facts)])
    return [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]


def _stored() -> list[dict[str, str]]:
    return [json.loads(line) for line in FACTS.read_text().splitlines()] if FACTS.exists() else []


def _facts(
    executable: str, recordings: Mapping[str, Recording], shown: Mapping[str, str]
) -> dict[str, str]:
    version = subprocess.run([executable, "--version"], capture_output=True, text=True, check=True)
    said = (version.stdout + version.stderr).splitlines()
    side_by_side, ended = recordings[_SIDE_BY_SIDE], recordings[_TOLD_TO_END]
    return {
        "`--version`": f"`{next(line for line in said if line.startswith('version'))}`",
        "headers come": _headers_when(recordings),
        "progress is repeated while a neighbour reads": _yes(
            any(what.endswith("again") for what in side_by_side.of("a"))
        ),
        "the higher slot starves": _yes(_starves(recordings[_STARVED])),
        "`/slots` answers in the middle of a batch": _yes(
            recordings[_QUEUED].of("slots") == ["0 reads, 512 processed"]
        ),
        "`/slots` shows how far a prompt is read": _yes(
            "None" not in " ".join(recordings[_HALF_READ].of("slots"))
        ),
        "fields of a slot in use": shown["slot"],
        "fields of `next_token`": shown["next_token"],
        "`n_decoded` of a slot that reads a prompt": shown["counted"],
        "a prompt that is too long": f"`{shown['overflow']}`",
        "a body that is wrong": f"`{shown['wrong']}`",
        "SIGTERM with open streams": _shown_end(ended),
    }


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _headers_when(recordings: Mapping[str, Recording]) -> str:
    """By a request that waits for a slot, and by one without progress reports."""
    heard = [(each.who, each.kind) for each in recordings[_QUEUED].records]
    if ("a", "report") in heard[heard.index(("b", "headers")) :]:  # while it waits for a slot
        return "at once"
    quiet = recordings[_QUIET].records
    headers, role = (next(r for r in quiet if r.kind == kind) for kind in ("headers", "role"))
    if headers.at < role.at / 2:
        return "with the slot's first turn in a batch"
    return "with the first progress report, else with the first token"


def _starves(recording: Recording) -> bool:
    """The higher slot's first report comes when the lower one is nearly through."""
    reports = [each for each in recording.records if each.kind == "report"]
    first = next(at for at, each in enumerate(reports) if each.who == "c")
    return sum(each.who == "b" for each in reports[:first]) >= 5


def _shown_end(recording: Recording) -> str:
    if recording.of("server")[-1].startswith("exit"):
        return f"computes no more; {recording.of('server')[-1]} behind the next keepalive"
    return "never ends"


if __name__ == "__main__":
    main()
