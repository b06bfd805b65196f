"""What a fleet's host sees when machines and links fail, as a table: `make test-two-machines`.

`--write` puts the table into docs/ray.md. Ends with 2, and says why, where network namespaces
cannot be made (root is needed).
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.two_machines.machines import CannotBeMade, Machines, seconds_until
from tests.two_machines.stories import GONE_WITHIN_S, SEATS, STORIES
from tools.pages import DOCS, write_part

ROOT = Path(__file__).parents[2]
_LONGEST_S = 1200.0
_HEADINGS = (
    "story",
    "what the host saw",
    "requests that ended meanwhile",
    "on the real server",
    "slowest submit",
)


def main() -> int:
    try:
        machines = Machines.make(4)
    except CannotBeMade as error:
        print(f"network namespaces cannot be made here: {error}", file=sys.stderr)
        return 2
    began_at = time.monotonic()
    try:
        for number in (1, 2, 3):
            machines.start_ray(number, **SEATS[number])
        lines, errors = told(machines)
        # The host program has ended: nothing of it is to be left, whatever became of the head.
        seconds_until(lambda: not any(machines.servers(number) for number in SEATS), GONE_WITHIN_S)
    finally:
        machines.remove()
    for text in errors:
        print(text, file=sys.stderr)
    if not errors and "--write" in sys.argv:
        write_part(DOCS / "ray.md", "stories", "\n".join(lines))
    print(f"{'FAILED' if errors else 'held'}, in {time.monotonic() - began_at:.0f} s")
    return 1 if errors else 0


def told(machines: Machines) -> tuple[list[str], list[str]]:
    """Run the host program on machine 1, and show what it tells: (the table's lines, errors)."""
    program = (sys.executable, "-m", "tests.two_machines.stories")
    command = machines.command(1, *program, str(machines.folder), machines.prefix)
    environment = {**os.environ, **machines.environment(1), "PYTHONPATH": str(ROOT)}
    lines = [f"| {' | '.join(_HEADINGS)} |", f"|{' --- |' * len(_HEADINGS)}"]
    print("\n".join(lines), flush=True)
    errors: list[str] = []
    stories_count = 0
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdout is not None
        killer = threading.Timer(_LONGEST_S, host.kill)
        killer.start()
        try:
            for line in host.stdout:
                if line.startswith("{"):
                    story = json.loads(line)
                    lines.append(f"| {' | '.join(story['row'])} |")
                    errors += story["errors"]
                    stories_count += 1
                    print(lines[-1], flush=True)
            host.wait()
        finally:
            killer.cancel()
            host.kill()
    if host.returncode != 0 or stories_count != len(STORIES) + 1:
        errors.append(f"the host program ended with {host.returncode}")
    return lines, errors


if __name__ == "__main__":
    sys.exit(main())
