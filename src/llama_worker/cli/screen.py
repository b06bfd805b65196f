"""Writes for `llama-worker run`: an answer's text to stdout, everything else to stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from llama_worker.cli.run_report import Activity
from llama_worker.cli.text import one_line, printable, wrapped

Channel = Literal["text", "reasoning"]
_BAR_CHARS = 16
_AROUND_CHARS = 14  # the spinner, the time, and the spaces between
_UNKNOWN_COLUMNS = 80
_LINE_EVERY_S = 10.0  # if no bar can be drawn


class Screen:
    """The terminal, or the pipes, of one command. For one thread. `quiet`: show only problems and,
    if `shows_text`, the answer's text. Writes raise BrokenPipeError."""

    def __init__(self, *, quiet: bool = False, shows_text: bool = True) -> None:
        self._console = console_for(sys.stderr)
        self._quiet = quiet
        self._shows_text = shows_text
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._styled = is_styled(self._console)
        self._shown: _Bar | _Lines | None = None  # the current activity
        # of the answer that is being shown
        self._channel: Channel | None = None  # None: no output yet
        self._line_open = False

    @property
    def _text_is_on_terminal(self) -> bool:
        """Whether the answer's text goes to the terminal that the bar is drawn on."""
        return self._shows_text and sys.stdout.isatty()

    @property
    def has_room(self) -> bool:
        """Whether an activity can be shown without interrupting the answer."""
        text_elsewhere = self._channel == "text" and not self._text_is_on_terminal
        return self._channel is None or not self._shows_text or text_elsewhere

    def activity(self, activity: Activity) -> None:
        """Show what the command is waiting for, until something else is written."""
        if self._quiet:
            return
        if self._shown is None:
            self._shown = _Bar(self._console) if self._is_live else _Lines(self._write_err)
        self._shown.show(activity)

    def activity_over(self) -> None:
        if self._shown is not None:
            self._shown.end()
            self._shown = None

    def show(self, reasoning: str, text: str) -> None:
        """Show the next piece of the answer."""
        if piece := printable(reasoning):
            self._show("reasoning", piece)
        if piece := printable(text):
            self._show("text", piece)

    def end_answer(self) -> None:
        """Complete the last line, and get ready for the next answer."""
        if self._channel is not None and self._line_open:
            self._show(self._channel, "\n")
        self._channel = None
        self.activity_over()

    def _show(self, channel: Channel, piece: str) -> None:
        before, was_open = self._channel, self._line_open
        self._channel, self._line_open = channel, not piece.endswith("\n")
        if not self._shows_text:
            return
        if before not in (None, channel):
            self._write_aside("\n\n" if was_open else "\n")
        if channel == "reasoning":
            header = "[reasoning]\n" if before != channel and not self._styled else ""
            self._write_aside(header + piece)
            return
        if self._text_is_on_terminal:
            self.activity_over()
        sys.stdout.write(piece)
        sys.stdout.flush()

    def say(self, line: str) -> None:
        if not self._quiet:
            self._line(line, style="dim")

    def complain(self, line: str) -> None:
        """Show a line that the user must see, even if `quiet`."""
        self._line(line, style="yellow")

    def _line(self, line: str, style: str) -> None:
        self.activity_over()
        self._write_err(wrapped(line, width_of(sys.stderr)) + "\n", style)

    def _write_aside(self, text: str) -> None:
        self.activity_over()
        if not self._quiet:
            self._write_err(text, style="dim")

    def _write_err(self, text: str, style: str = "") -> None:
        if self._styled:
            self._console.print(Text(text, style=style), end="", soft_wrap=True)
        else:
            sys.stderr.write(text)
            sys.stderr.flush()


class _Bar:
    """A progress bar, erased at its end."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=_BAR_CHARS),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID = self._progress.add_task("", total=None, counts="")
        self._progress.start()

    def show(self, activity: Activity) -> None:
        counts = f"{activity.done}/{activity.total}" if activity.total is not None else ""
        room = self._progress.console.width - _BAR_CHARS - len(counts) - _AROUND_CHARS
        self._progress.update(
            self._task,
            description=one_line(activity.label, room),
            completed=activity.done,
            total=activity.total,
            counts=counts,
        )
        self._progress.refresh()

    def end(self) -> None:
        self._progress.stop()


class _Lines:
    """Progress as text: a line when something new begins, and every 10 s."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._began_at = time.monotonic()
        self._last: tuple[str, bool] | None = None  # the activity's kind, has it a token count
        self._written_at = 0.0

    def show(self, activity: Activity) -> None:
        now = time.monotonic()
        kind = activity.label.partition(":")[0], activity.total is not None
        if kind != self._last or now - self._written_at >= _LINE_EVERY_S:
            self._last, self._written_at = kind, now
            self._write(activity.line(now - self._began_at) + "\n")

    def end(self) -> None:
        """Nothing has to be erased."""


def console_for(stream: TextIO) -> Console:
    """A console that draws only on a terminal, whatever the environment says, and parses no markup
    in model text."""
    console = Console(
        file=stream, force_terminal=stream.isatty(), markup=False, emoji=False, highlight=False
    )
    if not console.width:  # shells without a terminal pass on COLUMNS=0
        console.width = _UNKNOWN_COLUMNS
    return console


def width_of(stream: TextIO) -> int | None:
    """The columns of the terminal; None if the stream is not a terminal."""
    return console_for(stream).width if stream.isatty() else None


def is_styled(console: Console) -> bool:
    """Whether bold, dim and colours may be used."""
    return console.is_terminal and not console.no_color and not console.is_dumb_terminal


def discard_output() -> None:
    """Call it after the reader of stdout or stderr is gone: drops what is still buffered without an
    error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
