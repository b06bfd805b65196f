"""Runs every benchmark and writes what came of it into docs/performance.json, docs/performance.md
and its plot.

    python -m benchmarks.publish [--render] [NAME ...]

`--render` only draws anew what docs/performance.json holds. With names of benchmarks, only these
are measured anew, and of the machine and its load nothing is said anew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.pages import DOCS, with_part

DATA, PAGE, PLOT = (
    DOCS / "performance.json",
    DOCS / "performance.md",
    DOCS / "images" / "performance.svg",
)
NAMES = (
    "instructions",
    "parsers",
    "stream",
    "fleet",
    "latency",
    "recovery",
    "responses.cost",
    "responses.sweep",
    "idle",
)

Figures = dict[str, Any]


def _over(data: Figures, bench: str, kind: str, ours: str, peer: str) -> float:
    return float(data[bench][kind][ours] / data[bench][kind][peer])


def _over_litellm(data: Figures) -> float:
    """Added p50, of either way over the same of LiteLLM: the most at any concurrency."""
    sweep = data["responses.sweep"]
    return max(
        float(
            sweep[f"proxy, {way}"][concurrency]["added_p50_ms"]
            / sweep[f"LiteLLM, {way}"][concurrency]["added_p50_ms"]
        )
        for way in ("passed through", "/v1/responses")
        for concurrency in ("1", "16", "64")
    )


GOALS: list[tuple[str, float, str, Callable[[Figures], float]]] = [
    (
        "instructions per event in bulk, worker / bare loop",
        0.9,
        "",
        lambda d: float(d["instructions"]["worker"] / d["instructions"]["bare loop"]),
    ),
    (
        "CPU per event in bulk, worker / bare loop",
        0.5,
        "",
        lambda d: _over(d, "stream", "bulk_us", "worker", "bare loop"),
    ),
    (
        "CPU per event of one stream at 500 Hz, worker / bare loop",
        0.35,
        "",
        lambda d: _over(d, "stream", "paced_us", "worker", "bare loop"),
    ),
    (
        "CPU per event of 64 streams at 30 Hz, worker / 64 bare threads",
        0.5,
        "",
        lambda d: _over(d, "fleet", "us", "worker", "bare loop"),
    ),
    (
        "CPU per event of 64 streams at 30 Hz, worker / `openai` client",
        0.08,
        "",
        lambda d: _over(d, "fleet", "us", "worker", "openai"),
    ),
    (
        "from send to a waiting reader, 64 streams at 30 Hz, p50",
        3,
        "ms",
        lambda d: d["fleet"]["fresh_ms"]["p50"],
    ),
    (
        "from send to a waiting reader, 64 streams at 30 Hz, p99",
        30,
        "ms",
        lambda d: d["fleet"]["fresh_ms"]["p99"],
    ),
    (
        "threads of a worker with 64 slots and 64 open streams",
        136,
        "",
        lambda d: d["fleet"]["threads"],
    ),
    (
        "first token, added to a `requests` call",
        0.7,
        "ms",
        lambda d: d["latency"]["added_ms"]["in all"],
    ),
    (
        "`get_status` while 64 streams run, p99",
        20,
        "ms",
        lambda d: d["latency"]["status_ms"]["p99"],
    ),
    (
        "proxy: added to the first token, p50",
        1,
        "ms",
        lambda d: d["responses.cost"]["first_token_ms"]["p50"],
    ),
    (
        "proxy: added to the first token, p99",
        4,
        "ms",
        lambda d: d["responses.cost"]["first_token_ms"]["p99"],
    ),
    (
        "proxy: CPU per event in bulk, proxy / bare loop",
        2,
        "",
        lambda d: _over(d, "responses.cost", "bulk_us", "proxy", "bare loop"),
    ),
    (
        "proxy: CPU per event of 64 clients at 33 Hz, proxy / 64 bare threads",
        2,
        "",
        lambda d: _over(d, "responses.cost", "many_us", "proxy", "bare loop"),
    ),
    (
        (
            "proxy: first event of a new client beside 1000 connections that send no whole "
            "request / without"
        ),
        1.5,
        "",
        lambda d: max(d["responses.cost"]["crowded"].values()),
    ),
    (
        "proxy: memory of a full store / its limit",
        2,
        "",
        lambda d: d["responses.cost"]["full_store"],
    ),
    ("proxy: added to a reply, p50, with 1, 16 or 64 at once / LiteLLM", 0.2, "", _over_litellm),
    ("256 idle workers, CPU", 1, "% of a core", lambda d: d["idle"]["all_cpu_percent"]),
    ("256 idle workers, memory beside the guards", 64, "MB", lambda d: d["idle"]["all_memory_mb"]),
    (
        "idle worker, wake-ups beside the health probe",
        0.1,
        "/s",
        lambda d: d["idle"]["wakeups_per_s"],
    ),
    ("idle worker, wake-ups per health probe", 20, "", lambda d: d["idle"]["wakeups_per_probe"]),
    ("idle worker of 4 slots, threads", 12, "", lambda d: d["idle"]["threads"]),
    ("guard process of a worker, memory", 6, "MB", lambda d: d["idle"]["guard_mb"]),
    (
        "death of the server to terminal status",
        50,
        "ms",
        lambda d: d["recovery"]["death to terminal status"],
    ),
    (
        "broken connection to terminal status",
        250,
        "ms",
        lambda d: d["recovery"]["broken connection to terminal status"],
    ),
]


def measure(figures: Figures, names: Sequence[str]) -> None:
    """Put these benchmarks' tables (`text`) and figures in, one after the other."""
    began, loads = time.monotonic(), [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            path = Path(directory) / f"{name}.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path)]
            print(f"{time.monotonic() - began:4.0f} s  {' '.join(command[1:])}", flush=True)
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            figures[name] = json.loads(path.read_text())
            figures["text"][name] = done.stdout.strip().partition("\n")[2]
            loads.append(os.getloadavg()[0])
    if names == NAMES:
        figures["machine"] = _machine()
        figures["load"] = {"before": loads[0], "most": max(loads)}
        figures["minutes"] = (time.monotonic() - began) / 60


def _machine() -> str:
    python = f"CPython {platform.python_version()}"
    return (
        f"{os.cpu_count()} cores ({_cpu()}), {platform.system()} {platform.release()} "
        f"{platform.machine()}, {python}"
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown"


def render(figures: Figures, page: str) -> str:
    """The page with its measured parts drawn anew."""
    parts = {name: f"```text\n{text}\n```" for name, text in figures["text"].items()}
    load = figures["load"]
    parts["goals"] = goals(figures)
    parts["machine"] = (
        f"Measured on {figures['machine']}, in one run of {figures['minutes']:.0f} minutes. "
        "Load average before it: "
        f"{load['before']:.1f}; at most, with what it does itself: {load['most']:.1f}."
    )
    for name, text in parts.items():
        page = with_part(page, name, text)
    return page


def goals(figures: Figures) -> str:
    """The table of what was aimed at and what is."""
    lines = ["| measure | goal | measured | met |", "| --- | --- | --- | --- |"]
    for what, limit, unit, read in GOALS:
        value = read(figures)
        met = "yes" if value <= limit else "no"
        lines.append(
            f"| {what} | <= {limit:g} {unit}".rstrip()
            + f" | {value:.3g} {unit}".rstrip()
            + f" | {met} |"
        )
    return "\n".join(lines)


def plot(figures: Figures) -> str:
    """CPU per event of each client as horizontal bars: in bulk, paced, and many streams."""
    width, left, bar, gap = 720, 110, 18, 8
    panels = [
        (figures["stream"]["bulk_us"], "CPU per event in bulk, µs"),
        (figures["stream"]["paced_us"], "CPU per event of one stream at 500 Hz, µs"),
        (figures["fleet"]["us"], "CPU per event of 64 streams at 30 Hz, µs"),
    ]
    shapes, y = [], 0
    for measured, title in panels:
        values = sorted(measured.items(), key=lambda item: item[1])
        longest = max(value for _, value in values)
        y += 30
        shapes.append(f'<text x="10" y="{y}" font-weight="bold">{title}</text>')
        y += gap
        for name, value in values:
            length = value / longest * (width - left - 70)
            colour = "#2f6f9f" if name == "worker" else "#b9c4cc"
            shapes.append(
                f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar}" fill="{colour}"/>'
            )
            shapes.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name}</text>')
            shapes.append(f'<text x="{left + length + 6:.1f}" y="{y + 14}">{value:.1f}</text>')
            y += bar + gap
    height = y + gap
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" '
        f'font-size="13" fill="#222">\n<rect width="{width}" height="{height}" fill="#fff"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def main() -> None:
    """Measure, unless told not to, and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    options = parser.parse_args()
    figures = json.loads(DATA.read_text())
    if not options.render:
        measure(figures, tuple(options.names) or NAMES)
        DATA.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(render(figures, PAGE.read_text()))
    PLOT.write_text(plot(figures))
    print(goals(figures))


if __name__ == "__main__":
    main()
