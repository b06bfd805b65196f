"""What somebody may have meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """`did you mean 'slots'?`; None where nothing known is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else None
