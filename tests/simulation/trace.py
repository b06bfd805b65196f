"""What happened, step by step: a hash of all of it, and the last steps as a story."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

_SHOWN_FIELDS = (
    "epoch",
    "request_id",
    "turn_id",
    "failure",
    "verdict",
    "reason",
    "detail",
    "outcome",
)
_KEPT = 400
_BLOCK = 2000


class Trace:
    """The hash covers the instant, the receiver and the name of every message, and every fault.

    Nothing in it depends on the process: no address, no hash of a string, no order of a set.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._block: list[str] = []
        self._last: deque[tuple[float, str, Any]] = deque(maxlen=_KEPT)

    def message(self, now: float, actor: str, message: Any) -> None:
        self._block.append(f"{now!r} {actor} {type(message).__name__}")
        self._last.append((now, actor, message))
        if len(self._block) >= _BLOCK:
            self._flush()

    def event(self, now: float, what: str) -> None:
        """Something happens outside the actors; the messages that follow from it are in the
        hash."""
        self._last.append((now, "", what))

    def note(self, now: float, what: str) -> None:
        self._block.append(f"{now!r} {what}")
        self._last.append((now, "*", what))

    @property
    def digest(self) -> str:
        self._flush()
        return self._hash.hexdigest()[:16]

    def story(self, count: int) -> list[str]:
        """The last steps, oldest first, times relative to the last one."""
        steps = list(self._last)[-count:]
        end = steps[-1][0] if steps else 0.0
        return [f"{now - end:+12.4f} s  {_told(actor, step)}" for now, actor, step in steps]

    def _flush(self) -> None:
        self._hash.update("\n".join([*self._block, ""]).encode())
        self._block.clear()


def _told(actor: str, step: Any) -> str:
    if isinstance(step, str):
        return f"{actor} {step}".strip()
    shown = [
        f"{name}={getattr(step, name)!s:.150}"
        for name in _SHOWN_FIELDS
        if getattr(step, name, None) is not None
    ]
    return f"{actor} <- {type(step).__name__}({', '.join(shown)})"
