"""`llama-worker top`: workers in a live table."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from llama_worker.cli import exits
from llama_worker.cli.exits import Problem
from llama_worker.cli.interrupts import Interrupts
from llama_worker.cli.screen import console_for
from llama_worker.cli.text import harmless
from llama_worker.cli.top_rows import HEADINGS, UNKNOWN, Row, plain_table
from llama_worker.cli.top_sources import Source

_STATE_STYLES = {
    "ready": "green",
    "running": "yellow",
    "loading": "yellow",
    "failed": "red",
    "down": "red",
}
_ALWAYS = (
    "worker",
    "state",
    "slots",
    "tok/s",
    "last reason",
)  # other columns only where somebody knows
_TEXT_COLUMNS = ("worker", "state", "last reason")
_QUIT = (b"q", b"Q")
_ENDS = "q or Ctrl-C ends"


def watch(source: Source, *, once: bool, interval_s: float) -> int:
    """Show the workers until somebody has seen enough; the exit code. For the main thread."""
    console = console_for(sys.stdout)
    with Interrupts() as interrupts, contextlib.suppress(KeyboardInterrupt), interrupts.raising():
        rows = source.rows()
        if not console.is_terminal or console.is_dumb_terminal:
            print(plain_table(rows))
        elif once:
            console.print(_table(rows, console.width, caption=""))
        else:
            _live(source, rows, console, interval_s)
    return exits.DONE if interrupts.ended_by is None else interrupts.exit_code


def _live(source: Source, rows: Sequence[Row], console: Console, interval_s: float) -> None:
    problem: Problem | None = None
    with _single_keys(), Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
        while True:
            caption = _ENDS if problem is None else f"{harmless(problem.what)} (old numbers)"
            live.update(_table(rows, console.width, caption), refresh=True)
            if _quits(interval_s):
                return
            try:
                rows, problem = source.rows(), None
            except Problem as trouble:  # the host may come back
                problem = trouble


def _quits(wait_s: float) -> bool:
    """Whether somebody presses q, or closes the terminal, within so long."""
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
    """Keys are heard without Enter, and not echoed."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _table(rows: Sequence[Row], width: int, caption: str) -> Table:
    below = Text(caption) if caption else None
    table = Table(box=None, padding=(0, 1, 0, 0), caption=below, caption_justify="left")
    cells = [row.cells() for row in rows]
    told = [
        index
        for index, heading in enumerate(HEADINGS)
        if heading in _ALWAYS or _is_told(cells, index)
    ]
    for heading in (HEADINGS[index] for index in told):
        is_text = heading in _TEXT_COLUMNS
        table.add_column(
            heading,
            justify="left" if is_text else "right",
            no_wrap=heading != "last reason",
            max_width=width // 4
            if heading == "worker"
            else None,  # a long name is cut, so that all columns fit
            overflow="fold" if heading == "last reason" else "ellipsis",
        )
    for row, texts in zip(rows, cells, strict=True):
        styles = {"state": _STATE_STYLES.get(row.state, "")}
        table.add_row(
            *(Text(texts[index], style=styles.get(HEADINGS[index], "")) for index in told)
        )
    return table


def _is_told(cells: Sequence[Sequence[str]], index: int) -> bool:
    return any(texts[index] != UNKNOWN for texts in cells)
