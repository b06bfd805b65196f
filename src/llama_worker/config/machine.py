"""Reads how much memory this machine, or its container, has."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # the container's; the machine's outside of a container


def memory_bytes() -> int:
    """The memory of the machine, or of the container if that may use less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = read_number(CGROUP / "memory.max")
    return machine if limit is None else min(machine, limit)


def read_number(path: Path) -> int | None:
    """The number in the file; None if it holds none ("max"), or cannot be read."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
