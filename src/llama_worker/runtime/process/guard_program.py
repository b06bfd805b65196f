"""What Python runs as the guard: of this program's own version, even after an upgrade."""

from __future__ import annotations

from pathlib import Path

from llama_worker.runtime.process import guard

_FILE = Path(guard.__file__)


def guard_program() -> tuple[str, ...]:
    """The words of Python's command: the guard's file, or its source if the file was replaced or
    removed since the import. Lists of processes show the file's name."""
    if _SOURCE is None or _source() == _SOURCE:
        return (str(_FILE),)
    return ("-c", _SOURCE)


def _source() -> str | None:
    """What the file holds; None if it cannot be read, or is not source."""
    try:
        return _FILE.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


_SOURCE = _source()
