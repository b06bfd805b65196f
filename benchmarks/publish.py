"""Runs every benchmark and writes what came of it into docs/performance.md and its plot.

    python -m benchmarks.publish [--render]

`--render` only draws anew what docs/performance.json holds.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
DATA, PAGE, PLOT = DOCS / "performance.json", DOCS / "performance.md", DOCS / "images" / "performance.svg"
NAMES = ("stream", "scale", "idle", "latency", "recovery")

Figures = dict[str, Any]


def _over(data: Figures, kind: str, peer: str) -> float:
    return float(data["stream"][kind]["worker"] / data["stream"][kind][peer])


GOALS: list[tuple[str, float, str, Callable[[Figures], float]]] = [
    ("CPU per event, worker / bare loop, bulk", 1.8, "", lambda d: _over(d, "bulk_us", "bare loop")),
    ("CPU per event, worker / bare loop, paced at 500 Hz", 2.5, "", lambda d: _over(d, "paced_us", "bare loop")),
    ("CPU per event, worker / `openai` client, bulk", 0.12, "", lambda d: _over(d, "bulk_us", "openai")),
    ("CPU per event, worker / `openai` client, paced", 0.4, "", lambda d: _over(d, "paced_us", "openai")),
    (
        "CPU per event, 64 streams / 1 stream",
        1.3,
        "",
        lambda d: d["stream"]["streams_us"]["64"] / d["stream"]["streams_us"]["1"],
    ),
    ("idle worker, CPU", 0.005, "% of a core", lambda d: d["idle"]["16"]["cpu_percent"]),
    ("idle worker, wake-ups beside the health probe", 0.1, "/s", lambda d: d["idle"]["16"]["wakeups_per_s"]),
    ("idle worker, wake-ups per health probe", 20, "", lambda d: d["idle"]["16"]["wakeups_per_probe"]),
    ("idle worker, threads that poll", 0, "", lambda d: d["idle"]["16"]["polling"]),
    ("idle worker of 4 slots, threads", 12, "", lambda d: d["idle"]["16"]["threads"]),
    ("idle worker of 4 slots, memory", 1.5, "MB", lambda d: d["idle"]["16"]["memory_mb"]),
    ("its guard process, memory", 6, "MB", lambda d: d["idle"]["16"]["guard_mb"]),
    ("time to first token, added to a `requests` call", 2, "ms", lambda d: d["latency"]["added_ms"]["in all"]),
    ("`get_status` while 64 streams run, p99", 20, "ms", lambda d: d["latency"]["status_ms"]["p99"]),
    ("death of the server to terminal status", 50, "ms", lambda d: d["recovery"]["death to terminal status"]),
    (
        "broken connection to terminal status",
        300,
        "ms",
        lambda d: d["recovery"]["broken connection to terminal status"],
    ),
]


def measure() -> Figures:
    """Every benchmark's table (`text`) and figures, one after the other."""
    figures: Figures = {"machine": _machine(), "text": {}}
    with tempfile.TemporaryDirectory() as directory:
        for name in NAMES:
            path = Path(directory) / f"{name}.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path)]
            print(" ".join(command[1:]), flush=True)
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            figures[name] = json.loads(path.read_text())
            figures["text"][name] = done.stdout.strip().partition("\n")[2]
    return figures


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, CPython {platform.python_version()}"


def render(figures: Figures, page: str) -> str:
    """The page with its measured parts, each between `<!-- name -->` and `<!-- end -->`, drawn anew."""
    parts = {name: f"```text\n{text}\n```" for name, text in figures["text"].items()}
    parts["goals"] = goals(figures)
    parts["machine"] = f"Measured on {figures['machine']}."
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(begin)
        if not found:
            raise SystemExit(f"docs/performance.md has no place for {name}")
        page = before + begin + text + "\n" + end + rest.partition(end)[2]
    return page


def goals(figures: Figures) -> str:
    """The table of what was aimed at and what is."""
    lines = ["| measure | goal | measured |", "| --- | --- | --- |"]
    for what, limit, unit, read in GOALS:
        value = read(figures)
        missed = "" if value <= limit else " (missed)"
        lines.append(f"| {what} | <= {limit:g} {unit}".rstrip() + f" | {value:.3g} {unit}".rstrip() + f"{missed} |")
    return "\n".join(lines)


def plot(figures: Figures) -> str:
    """CPU per event of each client as horizontal bars, in bulk and paced."""
    width, left, bar, gap = 720, 110, 18, 8
    panels = [("bulk_us", "CPU per event in bulk, µs"), ("paced_us", "CPU per event at 500 events/s, µs")]
    shapes, y = [], 0
    for kind, title in panels:
        values = sorted(figures["stream"][kind].items(), key=lambda item: item[1])
        longest = max(value for _, value in values)
        y += 30
        shapes.append(f'<text x="10" y="{y}" font-weight="bold">{title}</text>')
        y += gap
        for name, value in values:
            length = value / longest * (width - left - 70)
            colour = "#2f6f9f" if name == "worker" else "#b9c4cc"
            shapes.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar}" fill="{colour}"/>')
            shapes.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name}</text>')
            shapes.append(f'<text x="{left + length + 6:.1f}" y="{y + 14}">{value:.1f}</text>')
            y += bar + gap
    height = y + gap
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13" fill="#222">\n<rect width="{width}" height="{height}" fill="#fff"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def main() -> None:
    """Measure, unless told not to, and write."""
    if "--render" not in sys.argv[1:]:
        DATA.write_text(json.dumps(measure(), indent=1) + "\n")
    figures = json.loads(DATA.read_text())
    PAGE.write_text(render(figures, PAGE.read_text()))
    PLOT.write_text(plot(figures))
    print(goals(figures))


if __name__ == "__main__":
    main()
