"""What the clients sent, kept: small enough to read, true to what matters. One file for each
scenario."""

import json
import re
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from tests.responses.conftest import Json

FOLDER = Path(__file__).parents[1] / "recorded"
_KEPT = "input_items_kept"
_MAX_CHARS = 200  # of a text: instructions and descriptions are long, and change with every version
_NOTHING_NEW = (
    "survives_",
    "waits_",
    "lets_go_",
    "does_not_",
    "says_",
    "makes_room_",
    "is_told_",
)  # in their requests
_FOLDERS = re.compile(r"/tmp/[A-Za-z0-9_]+/(home|project)")


def record(client: str, scenario: str, bodies: list[Json]) -> None:
    """Keep the requests of a scenario."""
    if not bodies or scenario.startswith(_NOTHING_NEW):
        return
    FOLDER.mkdir(exist_ok=True)
    short = [_shortened(body) for body in bodies]
    differences = [short[0], *(_difference(before, after) for before, after in pairwise(short))]
    lines = [json.dumps(difference, ensure_ascii=False) for difference in differences]
    (FOLDER / f"{client}-{scenario}.jsonl").write_text("\n".join(lines) + "\n")


def recorded() -> dict[str, list[Json]]:
    """All of them, by file name without its ending."""
    found: dict[str, list[Json]] = {}
    for path in sorted(FOLDER.glob("*.jsonl")):
        bodies: list[Json] = []
        for line in path.read_text().splitlines():
            difference = json.loads(line)
            kept = difference.pop(_KEPT, None)
            before = bodies[-1] if kept is not None else {}
            items = [*before.get("input", [])[:kept], *difference["input"]]
            bodies.append({**before, **difference, "input": items})
        found[path.stem] = bodies
    return found


def _difference(before: Json, after: Json) -> Json:
    """As it differs from the one before: fields that changed, and the items after those that are
    the same."""
    if before.keys() - after.keys():
        return after
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    same = takewhile(
        lambda pair: pair[0] == pair[1], zip(before["input"], after["input"], strict=False)
    )
    kept = len(list(same))
    return {_KEPT: kept, **changed, "input": after["input"][kept:]}


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: item if key == "encrypted_content" else _shortened(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, str) and not value.startswith("data:"):
        text = _FOLDERS.sub(r"/\1", value)
        return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
    return value
