"""Kinds of wedge that the library does not find yet, or takes for one where there is none.

They are left out of random runs; `python -m tests.simulation --kind NAME` runs one. Empty is the aim.
"""

from __future__ import annotations

NOT_YET_FOUND: frozenset[str] = frozenset()
