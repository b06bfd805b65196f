"""What a person sees of a step that takes long: how far it is, what is done, the time gone."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

_WIDTH = 79
_EVERY_S = 10.0  # where the line cannot be written over


class Progress:
    """A context manager: a line of one step, which says how long it took."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._is_live = sys.stdout.isatty()
        self._shown_at = -_EVERY_S

    def __enter__(self) -> Self:
        self._began_at = time.monotonic()
        self._write(f"  {self._label} ...")
        return self

    def show(self, done: int, of: int, what: str) -> None:
        """So many of all parts are done; `what` is the one at hand."""
        now = time.monotonic()
        if not self._is_live and now - self._shown_at < _EVERY_S:
            return
        self._shown_at = now
        self._write(
            f"  {self._label} {100 * done // of:3} %  {clock(now - self._began_at)}  "
            f"{what.rpartition('/')[2]}"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._write(f"  {self._label}: done in {clock(time.monotonic() - self._began_at)}")
        if self._is_live:
            print(flush=True)

    def _write(self, line: str) -> None:
        if self._is_live:
            print(f"\r{line[:_WIDTH]:<{_WIDTH}}", end="", flush=True)
        else:
            print(line, flush=True)


def clock(seconds: float) -> str:
    """`0:07`, `3:05`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
