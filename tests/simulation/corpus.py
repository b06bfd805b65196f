"""Runs that once broke an invariant of the library, and what it was."""

from __future__ import annotations

from tests.simulation.world import Setting

CORPUS: tuple[Setting, ...] = (
    # ask() resolved before its result was released: get_result() gave it once more.
    Setting(seed=7, hours=4.0, requests_per_hour=25.0, faults_per_hour=20.0),
)
