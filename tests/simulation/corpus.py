"""Runs that once broke an invariant, and what it was."""

from __future__ import annotations

from tests.simulation.world import Setting

CORPUS: tuple[Setting, ...] = (Setting(seed=6, hours=5.0, requests_per_hour=20.0, faults_per_hour=6.0),)
