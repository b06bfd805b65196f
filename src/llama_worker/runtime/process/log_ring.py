"""The last lines of a server's output."""

from __future__ import annotations

import threading
from collections import deque

from llama_worker.errors import MASK

_MAX_LINE_BYTES = 8192  # an unfinished line is cut into pieces of this size


class LogRing:
    """Keeps the last lines, as `ports.ServerLog`, with the API key masked. Thread-safe."""

    def __init__(self, lines: int, *, api_key: str | None = None) -> None:
        self._key = (api_key or "").encode()
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=lines)
        self._partial = b""
        self.begin_launch()

    def begin_launch(self) -> None:
        """Call it before another server's output is fed."""
        with self._lock:
            if self._partial:
                self._lines.append(self._partial.decode(errors="replace"))
            self._partial = b""
            self._launch_lines = 0  # of the current launch, including those dropped already

    def feed(self, data: bytes) -> None:
        """Add output; bytes that are not UTF-8 are replaced."""
        output = self._partial + data
        if self._key:
            output = output.replace(self._key, MASK.encode())
            # with -v the server shows the end of its key (b11434)
            output = output.replace(b"****" + self._key[-4:], MASK.encode())
        *whole, partial = output.split(b"\n")
        while len(partial) > _MAX_LINE_BYTES + len(self._key):  # the cut goes through no key
            whole.append(partial[:_MAX_LINE_BYTES])
            partial = partial[_MAX_LINE_BYTES:]
        lines = [line.rstrip(b"\r").decode(errors="replace") for line in whole]
        with self._lock:
            self._partial = partial
            self._lines.extend(lines)
            self._launch_lines += len(lines)

    def lines(self) -> list[str]:
        return self._kept()[0]

    def tail(self, count: int) -> tuple[str, ...]:
        lines, of_launch = self._kept()
        return tuple(lines[max(0, len(lines) - min(count, of_launch)) :])

    def _kept(self) -> tuple[list[str], int]:
        """The lines, and how many of the newest belong to the current launch."""
        with self._lock:
            lines, of_launch = list(self._lines), self._launch_lines
            if self._partial:
                lines.append(self._partial.decode(errors="replace"))
                of_launch += 1
        return lines, of_launch
