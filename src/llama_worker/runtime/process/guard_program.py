"""What Python runs as the guard: of this program's own version, even after an upgrade."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_worker.runtime.process import guard

_FILE = Path(guard.__file__)


def guard_program() -> tuple[str, ...]:
    """The words of Python's command: the guard's file, or its source if the file was replaced or
    removed since the import, or is part of an archive. Lists of processes show the file's name."""
    if _SOURCE is None or _in_file() == _SOURCE:
        return (str(_FILE),)
    return ("-c", _SOURCE)


def _imported() -> str | None:
    """The source; None if this program has none."""
    loader: Any = guard.__loader__
    try:
        source: str | None = loader.get_source(guard.__name__)
    except (AttributeError, ImportError):  # a loader of another program's
        return _in_file()
    return source


def _in_file() -> str | None:
    try:
        return _FILE.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


_SOURCE = _imported()
