"""Handles Ctrl-C, SIGTERM and SIGHUP. Main thread only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

from llama_worker.cli import exits

_SHOW_CURSOR = b"\x1b[?25h"
_STDIN = 0
# one cause may send a signal twice: `timeout` signals its command and then the command's group; a
# shell signals the jobs of a terminal once more
_ONCE_S = 1.0


class Interrupts:
    """Within its `with` block, records those of SIGINT, SIGTERM and SIGHUP that are not ignored.
    Within `raising` a signal raises KeyboardInterrupt; all other code polls `asked`.

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
