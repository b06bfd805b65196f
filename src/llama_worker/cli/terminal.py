"""A command's terminal: `Screen` writes an answer's text to stdout and everything else to stderr;
`Interrupts` handles Ctrl-C, SIGTERM and SIGHUP."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from llama_worker.cli import exits
from llama_worker.cli.run_report import Activity
from llama_worker.cli.text import one_line, printable, wrapped

Channel = Literal["text", "reasoning"]
_BAR_CHARS = 16
_AROUND_CHARS = 14  # the spinner, the time, and the spaces between
_UNKNOWN_COLUMNS = 80
_LINE_EVERY_S = 10.0  # if no bar can be drawn
_SHOW_CURSOR = b"\x1b[?25h"
_STDIN = 0
# one cause may send a signal twice: `timeout` signals its command and then the command's group; a
# shell signals the jobs of a terminal once more
_ONCE_S = 1.0


class Screen:
    """The terminal, or the pipes, of one command. For one thread. `quiet`: show only problems and,
    if `shows_text`, the answer's text. Writes raise BrokenPipeError."""

    def __init__(self, *, quiet: bool = False, shows_text: bool = True) -> None:
        self._console = console_for(sys.stderr)
        self._quiet = quiet
        self._shows_text = shows_text
        # whether the text goes to a terminal, which may show the bar, or to stderr's pipe or file
        self._text_is_beside = shows_text and (sys.stdout.isatty() or _is_stderr(sys.stdout))
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._styled = is_styled(self._console)
        self._shown: _Bar | _Lines | None = None  # the current activity
        # of the answer that is being shown
        self._channel: Channel | None = None  # None: no output yet
        self._line_open = False

    @property
    def has_room(self) -> bool:
        """Whether an activity can be shown without interrupting the answer."""
        text_elsewhere = self._channel == "text" and not self._text_is_beside
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
        if self._text_is_beside:
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


def _is_stderr(stream: TextIO) -> bool:
    """Whether the stream and stderr are one terminal, pipe or file."""
    try:
        return os.path.sameopenfile(stream.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):  # replaced by something without a descriptor, or closed
        return False


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


class Interrupts:
    """Within its `with` block, records those of SIGINT, SIGTERM and SIGHUP that are not ignored.
    Within `raising` a signal raises KeyboardInterrupt; all other code polls `asked`. Main thread
    only.

    A second Ctrl-C, or any signal after SIGTERM or SIGHUP, ends the process at once: the guard
    process then ends the server. The terminal gets back the modes that it had before. The same
    SIGTERM or SIGHUP again within `_ONCE_S` is ignored.
    """

    def __init__(self) -> None:
        self.presses = 0  # of Ctrl-C; the owner resets it after handling them
        self.ended_by: int | None = None  # SIGTERM or SIGHUP
        self._ended_at = 0.0
        self._raises = False
        self._before: dict[int, Any] = {}
        self._signalled, self._signal_write = -1, -1  # a pipe: readable after a signal
        self._modes: list[Any] | None = None  # of the terminal, before the command

    def __enter__(self) -> Self:
        with contextlib.suppress(termios.error):  # stdin is not a terminal
            self._modes = termios.tcgetattr(_STDIN)
        self._signalled, self._signal_write = os.pipe()
        os.set_blocking(self._signal_write, False)
        signal.set_wakeup_fd(self._signal_write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup, or a background job of a script
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self._signalled)
        os.close(self._signal_write)

    @property
    def asked(self) -> bool:
        """Whether a signal asked the command to end."""
        return self.presses > 0 or self.ended_by is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends because of a signal."""
        return exits.CANCELED if self.ended_by is None else exits.BY_SIGNAL + self.ended_by

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """In this block a signal raises KeyboardInterrupt: for waits on a person or a program."""
        self._raises = True
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a signal comes, or for `timeout_s` at most; returns `asked`."""
        if not self.asked and select.select([self._signalled], [], [], timeout_s)[0]:
            os.read(self._signalled, 4096)
        return self.asked

    def wait_readable(self, fd: int) -> None:
        """Block until `fd` is readable; a signal that comes just before is not missed."""
        while fd not in select.select([fd, self._signalled], [], [])[0]:
            os.read(self._signalled, 4096)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == self.ended_by and now < self._ended_at + _ONCE_S:
            return
        if self.ended_by is not None or (number == signal.SIGINT and self.presses):
            self._restore_modes()
            with contextlib.suppress(OSError):
                os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + b"\nstopped at once\n")
            os._exit(exits.BY_SIGNAL + number)
        if number == signal.SIGINT:
            self.presses += 1
        else:
            self.ended_by, self._ended_at = number, now
        if self._raises:
            raise KeyboardInterrupt

    def _restore_modes(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal was closed
            # in the background the modes are another program's, and SIGTTOU would stop this one
            if self._modes is not None and os.tcgetpgrp(_STDIN) == os.getpgrp():
                termios.tcsetattr(_STDIN, termios.TCSANOW, self._modes)
